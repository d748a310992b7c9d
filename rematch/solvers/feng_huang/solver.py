"""Feng and Huang's checkpoints for a budget: the fastest set that fits.

J. Feng, D. Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs" (CVPR 2021), and its
supplementary material. The paper minimises memory alone, objective (1); `memory_alone` takes that one solution. For a
budget, the cheapest checkpoints for each max term C are turned into a schedule each, from keeping everything (C = 0) to
one single segment, and the oracle tells which of those within the budget is fastest. The cheapest set for a C need not
be the fastest within a budget. Two searches of ours follow, over the same sets of checkpoints: for each C, points on
the convex hull of bytes and seconds, by a price for each byte kept; and branch and bound (`within_budget`), which on
small graphs ends with the fastest set of all.

The rooms of this package say what differs from the paper and why: `segments` and `linear` find the same in less time,
`checkpoints` breaks ties by time, `forward` makes the paper's graph out of a captured step, `reforward` drops nothing
of the segment that the backward pass begins with. The paper's bytes are those of forward values only; the schedule's
peak, with gradients and workspace, is the oracle's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rematch.graph import baseline, simulate
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.feng_huang.checkpoints import CheckpointSearch, best_checkpoints
from rematch.solvers.feng_huang.division_tree import DivisionTree, divide
from rematch.solvers.feng_huang.forward import Reading, readings
from rematch.solvers.feng_huang.reforward import Reforward
from rematch.solvers.feng_huang.segments import Dag
from rematch.solvers.feng_huang.within_budget import FastestCheckpoints
from rematch.solvers.incumbent import Incumbent

_TERMS = 40  # max terms for which bytes are priced
_HALVINGS = 12  # of the range of prices
_PRICE_RANGE = 1e4  # around what all vertices take on average, in seconds a byte


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
        """Offer the schedules of the paper's checkpoints, then of the fastest that fit."""
        if self.memory_alone:
            _offer(incumbent, again, reading, best_checkpoints(tree).vertices, self.name)
            return
        search = CheckpointSearch(tree, incumbent.deadline)
        for checkpoints in search.curve():
            if incumbent.over:
                return
            _offer(incumbent, again, reading, checkpoints, self.name)
        for term in search.spread_terms(_TERMS):
            self._price_bytes(incumbent, again, reading, search, term)
        FastestCheckpoints(incumbent, reading, tree, again).search()

    def _price_bytes(
        self, incumbent: Incumbent, again: Reforward, reading: Reading, search: CheckpointSearch, term: int
    ) -> None:
        """For one C, the lowest price of a kept byte at which the schedule fits, by bisection."""
        dag = reading.dag
        usual = float(dag.seconds.sum()) / max(1, int(dag.size_bytes.sum()))
        low, high = usual / _PRICE_RANGE, usual * _PRICE_RANGE
        for _ in range(_HALVINGS):
            if incumbent.over or usual == 0.0:
                return
            price = math.sqrt(low * high)
            segments = reading.segment_of_ops(incumbent.problem.graph, search.checkpoints(term, price))
            schedule = again.schedule(segments)
            incumbent.offer(schedule, f"{self.name}, bytes priced")
            if simulate(incumbent.problem.graph, schedule).peak_bytes <= incumbent.problem.budget_bytes:
                high = price
            else:
                low = price


def _offer(incumbent: Incumbent, again: Reforward, reading: Reading, checkpoints: tuple[int, ...], by: str) -> None:
    segments = reading.segment_of_ops(incumbent.problem.graph, checkpoints)
    incumbent.offer(again.schedule(segments), by)
