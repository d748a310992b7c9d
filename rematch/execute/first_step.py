"""What only a first step shows: what the user's loss takes, whether the outputs are held, and the peak on a card.

`before_first_step(route)` and, after the first forward of a route, `watch_first_step(runner, route, outputs)`
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from rematch.capture.structures import tensors_in
from rematch.execute.loss_meter import LossMeter
from rematch.execute.routes import Route


class Listener(Protocol):
    """Who is told."""

    def loss_measured(self, route: Route, peak_bytes: int, end_bytes: int) -> None: ...

    def outputs_held(self) -> None: ...

    def backward_ended(self) -> None: ...

    def peak_measured(self, peak_bytes: int) -> None: ...


def before_first_step(route: Route) -> None:
    """Have the allocator of a card look for the peak of this step alone."""
    if route.step is not None and route.step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(route.step.device)


def watch_first_step(listener: Listener, route: Route, outputs: Any) -> None:
    """Measure the user's loss and the peak, and see whether the user holds the outputs when backward has ended.

    Replay measures the loss itself, and counts the outputs as held whether they are or not.
    """
    leaves = tensors_in(outputs)
    nodes = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    if route.step is None or not nodes:
        return
    if route.meter is None and not route.step.has_loss and not route.replays:
        route.meter = LossMeter(route.step.device)
    watch = _FirstBackward(weakref.ref(listener), route, [weakref.ref(leaf) for leaf in leaves if not route.replays])
    watch.handles = [node.register_prehook(watch.starts) for node in nodes]
    if route.meter is not None and route.meter.waiting:
        route.meter.forward_ended()


class _FirstBackward:
    """Watches the backward that follows a first forward."""

    def __init__(
        self,
        listener: weakref.ref[Listener],
        route: Route,
        outputs: list[weakref.ref[torch.Tensor]],
    ) -> None:
        self.listener = listener
        self.route = route
        self.outputs = outputs
        self.handles: list[Any] = []

    def starts(self, _: Any) -> None:
        if not self.handles:
            return
        for handle in self.handles:
            handle.remove()
        self.handles = []
        listener = self.listener()
        if listener is None:
            return
        self.route.watched = True
        meter = self.route.meter
        if meter is not None and meter.running:
            meter.backward_starts(self.loss_measured)
        torch.autograd.Variable._execution_engine.queue_callback(self.ended)

    def loss_measured(self, peak_bytes: int, end_bytes: int) -> None:
        listener = self.listener()
        if listener is not None:
            listener.loss_measured(self.route, peak_bytes, end_bytes)

    def ended(self) -> None:
        listener = self.listener()
        large = [output() for output in self.outputs]
        if listener is not None and any(output is not None and output.numel() > 1 for output in large):
            listener.outputs_held()
        if listener is not None:
            listener.backward_ended()
        device = None if self.route.step is None else self.route.step.device
        if listener is not None and device is not None and device.type == "cuda":
            listener.peak_measured(torch.cuda.max_memory_allocated(device))
