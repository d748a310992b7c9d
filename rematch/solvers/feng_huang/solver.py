"""Feng and Huang's checkpoints for a budget: the fastest of the solutions for all max terms.

J. Feng, D. Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs" (CVPR 2021), and its
supplementary material. The paper minimises memory alone, objective (1); `memory_alone` takes that one solution. For a
budget, the cheapest checkpoints for each max term C are turned into a schedule each, from keeping everything (C = 0) to
one single segment, and the oracle tells which of those within the budget is fastest. The cheapest set for a C need not
be the fastest within a budget, so that the search goes on from there (ours, not the paper's): through all sets where
the graph has few vertices, else by adding and moving single checkpoints as long as that is faster.

The rooms of this package say what differs from the paper and why: `segments` and `linear` find the same in less time,
`checkpoints` breaks ties by time, `forward` makes the paper's graph out of a captured step, `reforward` drops nothing
of the segment that the backward pass begins with. The paper's bytes are those of forward values only; the schedule's
peak, with gradients and workspace, is the oracle's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from rematch.errors import GraphError
from rematch.graph import baseline
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.feng_huang.checkpoints import CheckpointSearch, best_checkpoints
from rematch.solvers.feng_huang.division_tree import DivisionTree, divide
from rematch.solvers.feng_huang.forward import Reading, readings
from rematch.solvers.feng_huang.reforward import Reforward
from rematch.solvers.feng_huang.segments import Dag
from rematch.solvers.incumbent import Incumbent

_MOST_TO_ENUMERATE = 10  # inner vertices: a thousand sets, about a second


@dataclass(frozen=True)
class FengHuang(Solver):
    """Keep the values that cut the forward pass into independent segments, and compute those again one by one."""

    name = "feng_huang"
    paper = "Feng & Huang, Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs, CVPR 2021"

    memory_alone: bool = False  # only the checkpoints that need the least memory, as published

    def prepare(self) -> None:
        bridge = Dag.of([0] * 4, [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)])  # the smallest complicated graph
        best_checkpoints(divide(bridge))

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        graph = problem.graph
        incumbent = Incumbent(problem, deadline, on_progress)
        incumbent.offer(baseline(graph), self.name)
        again = Reforward(graph)
        for reading in readings(graph):
            if incumbent.over:
                break
            self._try(incumbent, again, reading, divide(reading.dag, deadline))
        return incumbent.solution(self.name)

    def _try(self, incumbent: Incumbent, again: Reforward, reading: Reading, tree: DivisionTree) -> None:
        """Offer the schedules of the paper's checkpoints, and of better sets near them."""
        best: tuple[int, ...] | None = None
        for checkpoints in self._choices(tree, incumbent.deadline) if not incumbent.over else ():
            if _offer(incumbent, again, reading, checkpoints, self.name):
                best = checkpoints
            if incumbent.over:
                return
        if self.memory_alone:
            return
        if len(reading.dag) - 2 <= _MOST_TO_ENUMERATE:
            for checkpoints in _all_sets(len(reading.dag)):
                if incumbent.over:
                    return
                _offer(incumbent, again, reading, checkpoints, self.name)
        while best is not None and not incumbent.over:
            best = next(
                (s for s in _neighbours(best, len(reading.dag)) if _offer(incumbent, again, reading, s, self.name)),
                None,
            )

    def _choices(self, tree: DivisionTree, deadline: Deadline) -> Iterator[tuple[int, ...]]:
        if self.memory_alone:
            yield best_checkpoints(tree).vertices
        else:
            yield from CheckpointSearch(tree, deadline).curve()


def _offer(incumbent: Incumbent, again: Reforward, reading: Reading, checkpoints: tuple[int, ...], by: str) -> bool:
    """Whether these checkpoints leave independent segments and are the fastest so far within the budget."""
    if incumbent.over:
        return False
    try:
        segments = reading.segment_of_ops(incumbent.problem.graph, checkpoints)
    except GraphError:
        return False
    return incumbent.offer(again.schedule(segments), by)


def _all_sets(count: int) -> Iterator[tuple[int, ...]]:
    """All sets of checkpoints of a graph of so many vertices; the first and last are always among them."""
    inner = range(1, count - 1)
    return ((0, *chosen, count - 1) for size in range(count - 1) for chosen in combinations(inner, size))


def _neighbours(checkpoints: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """One checkpoint more, one moved to a vertex beside it, or one moved anywhere between its neighbours."""
    kept = set(checkpoints)
    for vertex in range(1, count - 1):
        if vertex not in kept:
            yield tuple(sorted((*checkpoints, vertex)))
    for at in range(1, len(checkpoints) - 1):
        for vertex in range(checkpoints[at - 1] + 1, checkpoints[at + 1]):
            if vertex != checkpoints[at]:
                yield (*checkpoints[:at], vertex, *checkpoints[at + 1 :])
