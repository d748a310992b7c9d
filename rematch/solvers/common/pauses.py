"""Operators that do nothing, so that schedules of stages become schedules of any shape.

`PausedGraph.of(graph, 1).schedule(solve(Problem(paused, budget_bytes)).schedule)`

In a stage, operators run in default order, each at most once (Jain et al., "Checkmate", MLSys 2020). Some budgets can
only be kept by a schedule that recomputes in another order, or twice between two first computations. A pause is an
operator without inputs, outputs, time or memory. With a pause before each first computation there are two stages where
there was one, hence two passes through the operators before it. So methods that know only stages find such schedules
too, on a graph of twice the size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from rematch.graph import Graph, Op, Schedule
from rematch.graph.matrices import stage_of_each_compute


@dataclass(frozen=True, eq=False)
class PausedGraph:
    """A graph and the same with `count` pauses before each first computation and at the end."""

    graph: Graph
    paused: Graph
    count: int

    @staticmethod
    def of(graph: Graph, count: int) -> PausedGraph:
        size = len(graph.ops)
        pauses = tuple(Op("pause", 0.0, (), ()) for _ in range(count * (size + 1)))
        order = chain.from_iterable((*_pauses(size, count, stage), op) for stage, op in enumerate(graph.order))
        whole = (*order, *_pauses(size, count, size))
        return PausedGraph(graph, replace(graph, ops=(*graph.ops, *pauses), order=whole), count)

    def schedule(self, schedule: Schedule) -> Schedule:
        """A schedule of the paused graph as one of the graph."""
        return Schedule.from_ops(self.graph, schedule.ops[schedule.ops < len(self.graph.ops)])

    def paused_schedule(self, schedule: Schedule) -> Schedule:
        """A schedule of the graph as one of the paused graph: each pass of a stage ends with a pause.

        The last pass of a stage takes what is too much for the pauses there are.
        """
        size, position = len(self.graph.ops), self.graph.arrays.position
        passes: list[list[list[int]]] = [[[]] for _ in range(size + 1)]  # per stage
        for op, stage in zip(schedule.ops.tolist(), stage_of_each_compute(self.graph, schedule).tolist(), strict=True):
            of_stage = passes[stage]
            if of_stage[-1] and position[of_stage[-1][-1]] >= position[op] and len(of_stage) <= self.count:
                of_stage.append([])
            of_stage[-1].append(op)
        sequence: list[int] = []
        for stage, of_stage in enumerate(passes):
            pauses = _pauses(size, self.count, stage)
            spare = len(pauses) + 1 - len(of_stage)
            sequence += pauses[:spare]
            for ops, pause in zip(of_stage, [*pauses[spare:], None], strict=True):
                sequence += ops if pause is None else [*ops, pause]
        return Schedule.from_ops(self.paused, np.array(sequence, dtype=np.int32))


def _pauses(size: int, count: int, stage: int) -> list[int]:
    """The pauses of a stage of a graph of that size."""
    return list(range(size + count * stage, size + count * (stage + 1)))
