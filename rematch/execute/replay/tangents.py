"""Tangents that autograd does not hand over, because the loss does not use the output.

`expect_absent_tangents(outputs)` after forward; `TangentArguments(capture).complete(args)` before backward
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rematch.capture.joint.read import Capture
from rematch.capture.joint.traced import is_tangent
from rematch.errors import CaptureError


def expect_absent_tangents(outputs: Iterable[Any]) -> None:
    """Have autograd give None for outputs that were not used, where it would make a tensor of zeros."""
    for leaf in outputs:
        node: Any = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
        if hasattr(node, "set_materialize_grads"):
            node.set_materialize_grads(False)
            return


class TangentArguments:
    """The tangents among the arguments of a compiled backward: they come last."""

    def __init__(self, capture: Capture) -> None:
        nodes = [node for node in capture.joint.graph.nodes if is_tangent(node)]
        self._absent = [node in capture.dropped for node in nodes]
        self._like = [node.meta["val"] for node in nodes]
        self.may_be_absent = any(self._absent)

    def complete(self, args: list[Any]) -> None:
        """Zeros for tangents that the plan reads and autograd left out; an error for one that it does not expect."""
        first = len(args) - len(self._absent)
        for place, (absent, like) in enumerate(zip(self._absent, self._like, strict=True), start=first):
            if absent and args[place] is not None:
                raise CaptureError(
                    "an output has a gradient that the loss given to rematch did not use, so that it is not in the "
                    "plan; give remat the loss that you train with, or none"
                )
            if not absent and args[place] is None:
                shape, stride = tuple(like.shape), like.stride()
                args[place] = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device).zero_()
