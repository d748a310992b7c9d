"""The calls of one step through several graphs, or several times through one, and how they share a budget.

`ledger.begin(call)` after a forward; `ledger.complete()` after a backward: the calls of the step, if it was the last

Forward can be in several graphs: after a graph break, where DistributedDataParallel cuts it into buckets, or where each
block of a model is compiled by itself. What all of them save is alive at once. If a step takes more than the budget,
every call has to save less, by its share of what can be saved at all. A plan is told so in its own terms: what others
hold before it runs, and what is taken between its forward and its backward.

Between two graphs the model may run operators in eager mode. CUDA's allocator counts what they take; on the CPU one
more step is measured as a whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from rematch.execute.compiled.meter import StepMeter, Storages, storages_of
from rematch.execute.loss_meter import LossMeter, give_up_measuring
from rematch.planning.compiled import Around

if TYPE_CHECKING:
    from rematch.execute.compiled.backend import CompiledGraph


class Call:
    """One forward of a graph with gradients, and its backward, which calls `on_end`."""

    def __init__(
        self, graph: CompiledGraph, args: tuple[Any, ...], held_bytes: int, on_end: Callable[[Call], None]
    ) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        # What another graph has computed is among what it holds.
        own = [tensor for tensor in tensors if not held_bytes or tensor.is_leaf]
        self._leaves: list[tuple[weakref.ref[torch.Tensor], int]] = []  # where no allocator tells
        if graph.device.type != "cuda":
            self._leaves = [(weakref.ref(tensor), tensor.nbytes) for tensor in own if tensor.is_leaf]
        self.graph = graph
        self.given = storages_of(tensors)
        self.own = storages_of(own)
        self.gradients = storages_of([tensor for tensor in own if tensor.is_leaf and tensor.requires_grad])
        self.meter = StepMeter(graph.device, held_bytes, self.own, self._end, graph.outside)
        self.ended = False
        self._on_end = on_end

    def _end(self) -> None:
        self.ended = True
        self._on_end(self)

    @property
    def pending(self) -> bool:
        """Whether backward can still come."""
        return not self.ended and self.meter.pending

    @property
    def saved_bytes(self) -> int:
        """What forward left: its results, and what backward reads."""
        return self.meter.saved_bytes

    @property
    def gathered_bytes(self) -> int:
        """On the CPU, of parameters that FSDP gathers around the call: they are without memory after the step."""
        there = ((leaf, size) for reference, size in self._leaves if (leaf := reference()) is not None)
        return sum(size for leaf, size in there if not leaf.untyped_storage().nbytes())


class Ledger:
    """The calls of the step under way, in the order of their forwards."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.whole = WholeStep()

    @property
    def pending(self) -> list[Call]:
        """Those whose backward has not come yet."""
        return [call for call in self.calls if call.pending]

    @property
    def held_bytes(self) -> int:
        """What calls have saved whose backward has not come yet."""
        return sum(call.saved_bytes for call in self.pending)

    def begin(self, call: Call) -> None:
        """Its forward has run."""
        if not self.pending:
            self.calls = []
        self.calls.append(call)

    def drop(self, graph: CompiledGraph) -> None:
        """Forget the calls of a graph that is compiled anew."""
        self.calls = [call for call in self.calls if call.graph is not graph]

    def complete(self) -> list[Call]:
        """The calls of a step in which every backward has come; none as long as one has not."""
        if self.pending:
            return []
        calls, self.calls = self.calls, []
        return [call for call in calls if call.ended]


class WholeStep:
    """The peak of a step on the CPU, from its first call to the end of backward, with all that runs between calls."""

    def __init__(self) -> None:
        self._meter = LossMeter(torch.device("cpu"))
        self._told: Callable[[int, Storages], None] | None = None
        self._calls = 0  # of the step
        self._to_come = 0

    @property
    def running(self) -> bool:
        """Whether a step is under way that is measured as a whole."""
        return self._meter.running

    def measure_next(self, calls: int, told: Callable[[int, Storages], None]) -> None:
        """Measure the next step, which is to have so many calls.

        `told` gets what it takes, and the parameters that it is for; 0 where nothing can be measured.
        """
        self._calls, self._told = calls, told

    def includes_next_call(self) -> bool:
        """Whether the call that is about to run is part of what is measured, and cannot be measured by itself."""
        if self._told is None:
            return False
        if not self.running:
            self._to_come = self._calls
            if not self._meter.watch_until_backward_ends(lambda most_bytes, _: self._end(most_bytes)):
                self._end(0)
                return False
        self._to_come -= 1
        if self._to_come < 0:  # no backward came, or this is another kind of step
            give_up_measuring()
            self._told = None
        return self._to_come >= 0

    def _end(self, peak_bytes: int) -> None:
        told, self._told = self._told, None
        if told is not None:
            told(peak_bytes, storages_of(self._meter.leaves))


@dataclass(frozen=True)
class SharedStep:
    """What a complete step of several calls took, measured: call by call, and perhaps as a whole since it began."""

    calls: Sequence[Call]
    whole_bytes: int = 0
    leaves: Storages = field(default_factory=dict)  # parameters, where it was measured as a whole

    @property
    def peak_bytes(self) -> int:
        """Of the whole step.

        What FSDP gathers before the step's first call and lets go inside would be missing from the whole.
        """
        gathered_bytes = max(call.gathered_bytes for call in self.calls)
        if self.whole_bytes and not gathered_bytes:
            return self.whole_bytes + sum({**self.leaves, **self._given}.values())
        parts = (self._around_bytes(place) + call.meter.own_peak_bytes for place, call in enumerate(self.calls))
        return gathered_bytes + max(parts)

    def corrected(self, less_bytes: int) -> dict[CompiledGraph, Around]:
        """What each graph has to plan with, so that all calls together save so many bytes less."""
        reducible = [max(1, call.saved_bytes - call.meter.returned_bytes) for call in self.calls]
        share = min(1.0, less_bytes / sum(reducible))
        saved = [call.saved_bytes - int(share * most) for call, most in zip(self.calls, reducible, strict=True)]
        unused: dict[CompiledGraph, set[int]] = {}
        for call in self.calls:
            unused.setdefault(call.graph, set(call.meter.unused)).intersection_update(call.meter.unused)
        found: dict[CompiledGraph, Around] = {}
        for place, call in enumerate(self.calls):  # of several calls of a graph, the last has the most around it
            planner, given_bytes = call.graph.planner, sum(call.given.values())
            assert planner.asked_bytes is not None
            gone_bytes = sum(earlier.saved_bytes for earlier in self.calls[:place]) - sum(saved[:place])
            before_bytes = max(0, self._around_bytes(place) - gone_bytes - given_bytes)
            at_loss_bytes = before_bytes + given_bytes + saved[place] + call.meter.tangent_bytes
            found[call.graph] = replace(
                planner.around,
                shares=True,
                before_bytes=before_bytes,
                between_bytes=max(0, planner.asked_bytes - at_loss_bytes),
                correction_bytes=planner.missed_bytes(call.saved_bytes),
                unused=tuple(sorted({*planner.around.unused, *unused[call.graph]})),
            )
        return found

    def _around_bytes(self, place: int) -> int:
        """What is there beside what a call allocates itself, gradients of later calls as in its backward."""
        call = self.calls[place]
        if call.meter.device.type == "cuda":
            return call.meter.around_bytes
        gradients: Storages = {}
        for later in self.calls[place + 1 :]:
            gradients.update(later.gradients)
        for counted in call.gradients:
            gradients.pop(counted, None)
        return sum(self._given.values()) + sum(gradients.values()) + call.meter.held_bytes

    @property
    def _given(self) -> Storages:
        """To all calls, beside what other calls have computed."""
        return {storage: size for call in self.calls for storage, size in call.own.items()}
