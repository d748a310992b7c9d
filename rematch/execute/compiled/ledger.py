"""The calls of one step through several graphs, or several times through one, and how they share a budget.

`ledger.begin(call)` after a forward; `ledger.complete()` after a backward: the calls of the step, if it was the last

Forward can be in several graphs: after a graph break, where DistributedDataParallel cuts it into buckets, or where each
block of a model is compiled by itself. What all of them save is alive at once. If a step takes more than the budget,
every call has to save less, by its share of what can be saved at all. A plan is told so in its own terms: what others
hold before it runs, and what is taken between its forward and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from rematch.execute.compiled.meter import StepMeter
from rematch.planning.compiled import Around

if TYPE_CHECKING:
    from rematch.execute.compiled.backend import CompiledGraph

_Storages = dict[int, int]  # bytes of each


class Call:
    """One forward of a graph with gradients, and its backward, which calls `on_end`."""

    def __init__(
        self, graph: CompiledGraph, args: tuple[Any, ...], held_bytes: int, on_end: Callable[[Call], None]
    ) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        # What another graph has computed is among what it holds.
        own = [tensor for tensor in tensors if not held_bytes or tensor.is_leaf]
        self.graph = graph
        self.given = _storages_of(tensors)
        self.own = _storages_of(own)
        self.gradients = _storages_of([tensor for tensor in own if tensor.is_leaf and tensor.requires_grad])
        self.meter = StepMeter(graph.device, held_bytes, sum(self.own.values()), self._end, graph.loss)
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


class Ledger:
    """The calls of the step under way, in the order of their forwards."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

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


@dataclass(frozen=True)
class SharedStep:
    """What a complete step of several calls took, measured."""

    calls: Sequence[Call]

    @property
    def peak_bytes(self) -> int:
        """Of the whole step."""
        return max(self._around_bytes(place) + call.meter.own_peak_bytes for place, call in enumerate(self.calls))

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
        own: _Storages = {}
        gradients: _Storages = {}
        for other in self.calls:
            own.update(other.own)
        for later in self.calls[place + 1 :]:
            gradients.update(later.gradients)
        for counted in call.gradients:
            gradients.pop(counted, None)
        return sum(own.values()) + sum(gradients.values()) + call.meter.held_bytes


def _storages_of(tensors: Sequence[torch.Tensor]) -> _Storages:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}
