"""Feng and Huang's checkpoints for a budget: the fastest of the solutions for all max terms.

J. Feng, D. Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs" (CVPR 2021), and its
supplementary material. The paper minimises memory alone, objective (1); `memory_alone` takes that one solution. For a
budget, the cheapest checkpoints for each max term C are turned into a schedule each, from keeping everything (C = 0) to
one single segment, and the oracle tells which of those within the budget is fastest.

The rooms of this package say what differs from the paper and why: `segments` and `linear` find the same in less time,
`checkpoints` breaks ties by time, `forward` makes the paper's graph out of a captured step, `reforward` drops nothing
of the segment that the backward pass begins with. The paper's bytes are those of forward values only; the schedule's
peak, with gradients and workspace, is the oracle's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rematch.graph import baseline
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.feng_huang.checkpoints import CheckpointSearch, best_checkpoints
from rematch.solvers.feng_huang.division_tree import DivisionTree, divide
from rematch.solvers.feng_huang.forward import readings
from rematch.solvers.feng_huang.reforward import Reforward
from rematch.solvers.feng_huang.segments import Dag
from rematch.solvers.incumbent import Incumbent


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
            for checkpoints in self._choices(divide(reading.dag, deadline)):
                incumbent.offer(again.schedule(reading.segment_of_ops(graph, checkpoints)), self.name)
                if incumbent.over:
                    break
        return incumbent.solution(self.name)

    def _choices(self, tree: DivisionTree) -> Iterator[tuple[int, ...]]:
        if self.memory_alone:
            yield best_checkpoints(tree).vertices
        else:
            yield from CheckpointSearch(tree).curve()
