"""Gradients that leave a replayed backward while it runs, as they leave eager's.

`call = Call(stretches); outputs = run(*call.handed(args)); call.watch(outputs)`, and in backward `first_stretch(...)`

A traced module is one node of autograd, whose gradients would all leave at its end: too late for data parallel training
to send some while others are computed, and for an optimizer that steps in a hook to free them. So the node's backward
stops after a first *stretch*, and each later stretch has a node of its own, which runs the stretch when autograd comes
to it and has its gradients. What makes autograd come to them in turn is one parameter, which has passed through the
first of these nodes, and tensors without elements from each to the next. The other parameters need not pass through
their node: the traced module's own node has no gradient for them, and autograd waits for both.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch

Places = tuple[int, ...]  # among a traced graph's inputs, and so among its gradients
Running = Generator[list[Any], None, None]


class _Thread(threading.local):
    call: Call | None = None  # whose backward starts


_thread = _Thread()


class Call:
    """One call of a module whose gradients leave in `stretches`, given by the arguments that they belong to."""

    def __init__(self, stretches: Sequence[Places]) -> None:
        self.stretches = stretches
        self._running: Running | None = None
        self._left = 0  # stretches that are still to come

    def handed(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, where one of the second stretch has passed through the node that runs it."""
        handed = list(args)
        following = None
        for places in reversed(self.stretches[2:]):
            following = _Stretch.apply(self, following, False, *(args[place] for place in places))
        for places in self.stretches[1:2]:
            handed[places[0]] = _Stretch.apply(self, following, True, *(args[place] for place in places))
        return handed

    def watch(self, outputs: Iterable[Any]) -> None:
        """Know when the backward of what returned `outputs` starts."""
        for leaf in outputs:
            node: Any = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
            if hasattr(node, "set_materialize_grads"):  # of a function in Python, such as the traced module's
                node.register_prehook(self._starts)
                return

    def _starts(self, _: Any) -> None:
        # With `create_graph`, the gradients of gradients are refused where they leave the traced module's own node.
        _thread.call = None if torch.is_grad_enabled() else self

    def began(self, running: Running) -> list[Any]:
        """Gradients of the first stretch."""
        self._running, self._left = running, len(self.stretches)
        gradients = self.next_stretch()
        assert gradients is not None
        return gradients

    def next_stretch(self) -> list[Any] | None:
        """Gradients of the next stretch; None where all of them left together."""
        if self._running is None:
            return None
        gradients = _taken(self._running)
        self._left -= 1
        if not self._left:
            self._running = None
        return gradients


def first_stretch(running: Running, stretches: Sequence[Places], count: int) -> list[Any]:
    """What the traced module's own node returns for its `count` arguments.

    These are the gradients of the first stretch, or of all where no call waits for the others.
    """
    call, _thread.call = _thread.call, None
    found = [call.began(running)] if call is not None else [_taken(running) for _ in stretches]
    gradients = [None] * count
    for places, left in zip(stretches, found, strict=False):
        for place, gradient in zip(places, left, strict=True):
            gradients[place] = gradient
    return gradients


def _taken(running: Running) -> list[Any]:
    """What comes next, held by the caller alone: autograd keeps as `.grad` only what nobody else has."""
    left = next(running)
    gradients = list(left)
    left.clear()
    return gradients


class _Stretch(torch.autograd.Function):
    """In backward, runs a stretch and returns the gradients of `tensors`.

    Hands on the first of them, or a tensor without elements, to whatever autograd comes from.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, following: torch.Tensor | None, hands_on: bool, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.hands_on, ctx.others = call, hands_on, len(tensors) - 1
        return tensors[0] if hands_on else tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        left = ctx.call.next_stretch()
        if left is None:  # it comes from the traced module's own node
            left = [gradient if ctx.hands_on else None, *[None] * ctx.others]
        return None, None, None, *left
