"""A solver of your own in one file: `rematch solve GRAPH --budget 60% --plugin own_solver.py --solver keep-every`.

It keeps the output of every k-th forward operator, forgets the others when the loss runs, and computes them again when
the backward pass asks for them. It tries k = 1, 2, 3, ... and returns the fastest schedule within the budget. Whatever
a solver returns goes through the oracle, so that a mistake here is an error and never a plan over budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematch.graph import Graph, Schedule, simulate
from rematch.solvers import Deadline, OnProgress, Problem, Progress, Solution, Solver, Status, register


@register
@dataclass(frozen=True)
class KeepEvery(Solver):
    """Checkpoints at equal distances. The fields of the dataclass are its options: `--option most=10`."""

    name = "keep-every"
    paper = "Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016 (in its simplest form)"
    requires = "a graph with a loss"

    most: int = 50

    def applicable(self, problem: Problem) -> bool:
        return problem.graph.loss is not None

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        best, best_seconds = None, float("inf")
        for distance in range(1, self.most + 1):
            if deadline.expired:
                break
            schedule = keep_every(problem.graph, distance)
            seen = simulate(problem.graph, schedule)
            if seen.valid and seen.peak_bytes <= problem.budget_bytes and seen.seconds < best_seconds:
                best, best_seconds = schedule, seen.seconds
                on_progress(Progress(deadline.elapsed, self.name, f"k = {distance}", best_seconds))
        return Solution(best, Status.NOT_FOUND if best is None else Status.FEASIBLE, self.name)


def keep_every(graph: Graph, distance: int) -> Schedule:
    """Default order, with what was forgotten at the loss computed again just before its first use after it."""
    position = graph.arrays.position
    producer = graph.arrays.producer
    forgotten: set[int] = set()
    sequence: list[int] = []

    def compute(op: int) -> None:
        for value in graph.ops[op].inputs:
            if value in forgotten:
                compute(int(producer[value]))
        sequence.append(op)
        forgotten.difference_update(graph.ops[op].outputs)

    for op in graph.order:
        compute(op)
        if op == graph.loss:
            for earlier in graph.order[: position[op]]:
                if position[earlier] % distance and not graph.ops[earlier].once:
                    forgotten.update(graph.ops[earlier].outputs)
    return Schedule.from_ops(graph, sequence)
