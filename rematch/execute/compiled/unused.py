"""Outputs whose gradient never comes, such as the logits that a model returns beside its loss.

`detach_outputs(module, places)` before compiling; `outputs = watch(outputs, places, args, late)` after each forward

AOTAutograd makes a tensor of zeros for the gradient of each output that the loss does not use, and backward adds it up.
For the logits of a language model that is as much memory as the logits themselves. Where a graph returns its loss, what
the loss was computed from seldom has a gradient of its own, so the graph is compiled without one from the start; so is
one whose first steps show that an output has no gradient. Should a gradient come after all, what it needs was not kept:
forward runs again, with the same arguments and random numbers, and this time all outputs have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

Gradients = list[torch.Tensor | None]
Late = Callable[[Sequence[Any], Gradients], Gradients]  # arguments, gradients of results -> of arguments


def likely_unused(module: GraphModule) -> tuple[int, ...]:
    """Places of the outputs that the loss is computed from, in a graph that returns one number to differentiate."""
    returned: Any = module.graph.output_node().args[0]
    wanted = {place: node for place, node in enumerate(returned) if _is_differentiable(node)}
    numbers = {node for node in wanted.values() if _value(node).numel() == 1}
    if len(numbers) != 1 or next(module.parameters(), None) is not None:  # parameters should be arguments
        return ()
    behind: set[Node] = set()
    waiting = [*numbers]
    while waiting:
        node = waiting.pop()
        if node not in behind:
            behind.add(node)
            waiting += node.all_input_nodes
    behind = {node for node in behind - numbers if node.op != "placeholder"}
    return tuple(place for place, node in wanted.items() if node in behind)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None


def _is_differentiable(node: Any) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


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


@dataclass(frozen=True)
class Moment:
    """What a forward depends on besides its arguments: the random state and autocast."""

    device: torch.device
    random: torch.Tensor
    autocast: tuple[bool, torch.dtype, bool]

    @classmethod
    def now(cls, device: torch.device) -> Moment:
        """As things are before forward."""
        kind = device.type
        random = torch.cuda.get_rng_state(device) if kind == "cuda" else torch.get_rng_state()
        cached = torch.is_autocast_cache_enabled()
        return cls(device, random, (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Things are as they were then, for a forward with gradients."""
        cuda = self.device.type == "cuda"
        enabled, dtype, cached = self.autocast
        autocast = torch.autocast(self.device.type, dtype, enabled, cached)
        with torch.random.fork_rng([self.device] if cuda else []), autocast, torch.enable_grad():
            if cuda:
                torch.cuda.set_rng_state(self.random, self.device)
            else:
                torch.set_rng_state(self.random)
            yield


def watch(outputs: Any, places: Sequence[int], args: Sequence[Any], late: Late) -> Any:
    """The same outputs, those at `places` as part of the autograd graph again: `late` knows their gradients."""
    watched = list(outputs)
    found = _Watched.apply(late, len(places), *(outputs[place] for place in places), *args)  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, found, strict=True):
        watched[place] = tensor
    return type(outputs)(watched)


class _Watched(torch.autograd.Function):
    """Hands on tensors that should get no gradient, as results of the arguments of a graph."""

    @staticmethod
    def forward(ctx: Any, late: Late, count: int, *given: Any) -> tuple[torch.Tensor, ...]:
        results, args = given[:count], given[count:]
        ctx.set_materialize_grads(False)
        ctx.late, ctx.count = late, count
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        ctx.others = {place: arg for place, arg in enumerate(args) if not isinstance(arg, torch.Tensor)}
        ctx.arguments = len(args)
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        args = [ctx.others[place] if place in ctx.others else next(tensors) for place in range(ctx.arguments)]
        return (None, None, *(None for _ in range(ctx.count)), *ctx.late(args, list(gradients)))
