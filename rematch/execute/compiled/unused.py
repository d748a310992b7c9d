"""Outputs whose gradient never comes, such as the logits that a model returns beside its loss.

`detach_outputs(module, places)` before compiling; `outputs = watch(outputs, places, on_use)` after each forward

AOTAutograd makes a tensor of zeros for the gradient of each output that the loss does not use, and backward adds it up.
For the logits of a language model that is as much memory as the logits themselves. Once a step has shown that an output
has no gradient, the graph is compiled without one. Should a gradient come after all, backward raises: what it needs was
not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rematch.errors import CaptureError


def detach_outputs(module: GraphModule, places: Sequence[int]) -> None:
    """Have the outputs at `places` of a graph that Dynamo traced leave it without a gradient."""
    output = module.graph.output_node()
    (returned,) = output.args
    assert isinstance(returned, (tuple, list))
    changed = list(returned)
    for place in places:
        node = changed[place]
        assert isinstance(node, Node)
        with module.graph.inserting_before(output):
            changed[place] = module.graph.call_method("detach", (node,))
            changed[place].meta = dict(node.meta)
    output.args = (type(returned)(changed),)
    module.recompile()


def watch(outputs: Any, places: Sequence[int], on_use: Callable[[], None]) -> Any:
    """The same outputs, those at `places` as part of the autograd graph again: `on_use` is told of a gradient."""
    anchor = next((o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad), None)
    if anchor is None:
        return outputs
    watched = list(outputs)
    for place in places:
        watched[place] = _Watched.apply(watched[place], anchor, on_use)  # type: ignore[no-untyped-call]
    return type(outputs)(watched)


class _Watched(torch.autograd.Function):
    """Hands on a tensor that must get no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor, on_use: Callable[[], None]) -> torch.Tensor:
        ctx.on_use = on_use
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.on_use()
        raise CaptureError(
            "an output of a graph of torch.compile has a gradient. It had none in the first steps, so the graph was "
            "compiled without what that gradient needs. Run this step again: from now on all outputs have gradients"
        )
