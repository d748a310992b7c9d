"""Say what is missing when gradients of gradients are asked for.

`refuse_double_backward(outputs)` after each forward that can be differentiated

A schedule has no backward of its backward. `create_graph=True` alone is no reason to refuse, for whoever sets it may
never differentiate the gradients, so the error comes when they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from rematch.errors import CaptureError


def refuse_double_backward(outputs: Iterable[Any]) -> None:
    """Watch the backward of what returned `outputs`, at the cost of one hook."""
    node = next((leaf.grad_fn for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None), None)
    if node is not None:
        node.register_prehook(_watch_gradients)  # not a closure over the node, which would hold itself until collected


def _watch_gradients(_: Any) -> None:
    """Called as backward starts. Only with `create_graph=True`, for a hook after it keeps the tangents alive."""
    node = torch._C._current_autograd_node()
    if node is not None and torch.is_grad_enabled():
        node.register_hook(lambda gradients, _: _refuse_backward_of(gradients))


def _refuse_backward_of(gradients: Iterable[Any]) -> None:
    for gradient in gradients:
        if isinstance(gradient, torch.Tensor) and gradient.grad_fn is not None:
            gradient.grad_fn.register_prehook(_refuse)
            return


def _refuse(_: Any) -> NoReturn:
    raise CaptureError(
        "gradients of gradients (create_graph=True, then backward) cannot be computed through a module made by "
        "rematch: its schedule has no backward of its backward. Use the plain module for that step, or apply rematch "
        "to the submodules that are not differentiated twice"
    )
