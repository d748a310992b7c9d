"""From segments of the forward pass to a schedule: each is computed again when the backward pass first needs it.

`Reforward(graph).schedule(reading.segment_of_ops(graph, checkpoints))`

All values of a segment are dropped when the forward pass is done with them. Before the first operator of the backward
pass that reads one of them the segment runs again, as far as something is wanted of it. The segment that the backward
pass comes to first stays: it would be wanted again at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rematch.graph import Graph, Phase, Schedule
from rematch.graph.model import Ints
from rematch.solvers.feng_huang.forward import KEPT, may_leave


class Reforward:
    """Schedules of one graph."""

    def __init__(self, graph: Graph) -> None:
        a = graph.arrays
        leaving = may_leave(graph)
        self._graph = graph
        self._order = a.order.tolist()
        self._last_stage = np.where(a.once, -1, a.last_stage).tolist()
        makers = [
            sorted({int(a.producer[value]) for value in a.inputs[start:end].tolist() if leaving[value]})
            for start, end in zip(a.inputs_ptr[:-1].tolist(), a.inputs_ptr[1:].tolist(), strict=True)
        ]
        self._makers = makers  # of each operator: those of what it reads and what is not in memory anyhow
        self._is_backward = [op.phase is Phase.BACKWARD for op in graph.ops]
        self._first_read = {  # by the backward pass: the stage, of each operator of which it reads something
            maker: stage
            for stage, op in reversed(list(enumerate(self._order)))
            if self._is_backward[op]
            for maker in makers[op]
        }

    def schedule(self, segment: Ints) -> Schedule:
        """Forward operators of the same `segment` are computed again together, those `KEPT` never."""
        return Schedule.from_ops(self._graph, list(self._ops(segment.tolist())))

    def reads_of(self, value: int) -> tuple[int, int]:
        """The stage of a value's last use before the backward pass, and of its first one there, or beyond the end."""
        a = self._graph.arrays
        readers = a.users_of(value).tolist()
        stages = [(int(a.position[op]), self._is_backward[op]) for op in readers]
        made = int(a.position[a.producer[value]])
        first = min((stage for stage, backward in stages if backward), default=len(self._order))
        return max((stage for stage, backward in stages if not backward), default=made), first

    def seconds_of(self, ops: Sequence[int]) -> float:
        """What it takes to compute `ops`, a segment, again."""
        a = self._graph.arrays
        stage = min((self._first_read[op] for op in ops if op in self._first_read), default=None)
        in_order = sorted(ops, key=a.position.__getitem__)
        return 0.0 if stage is None else float(sum(a.seconds[op] for op in self._again(in_order, stage)))

    def _ops(self, segment: list[int]) -> Iterator[int]:
        done: dict[int, list[int]] = {}  # of each segment that the backward pass has not come to
        stays = True
        for stage, op in enumerate(self._order):
            if self._is_backward[op]:
                for maker in self._makers[op]:
                    reached = done.pop(segment[maker], None)
                    if reached is not None and not stays:
                        yield from self._again(reached, stage)
                    stays &= reached is None
            elif segment[op] != KEPT:
                done.setdefault(segment[op], []).append(op)
            yield op

    def _again(self, ops: Sequence[int], stage: int) -> list[int]:
        """Those of `ops` that must run just before `stage` for what the backward pass wants of them."""
        wanted: set[int] = set()
        again = []
        for op in reversed(ops):
            if stage <= self._last_stage[op] and (op in self._first_read or op in wanted):
                again.append(op)
                wanted.update(self._makers[op])
        return again[::-1]
