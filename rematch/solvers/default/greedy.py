"""XLA's greedy rematerialization, as Kumar et al. describe it.

R. Kumar, M. Purohit, Z. Svitkina, E. Vee, J. Wang, "Efficient Rematerialization for Deep Networks" (NeurIPS 2019),
section 4, GreedyRemat: walk through the operators in order; while memory is over the limit, rematerialize the already
scheduled operator that reduces it most; where nothing reduces it, move on.

To rematerialize an operator is to compute it again right before the next use of one of its values, so that the value
need not be held until then. That saves the value, and costs whatever inputs the operator must then keep alive for it.

Where the paper is silent: the saving is net of the inputs held longer; equal savings go to the faster operator; a
recomputation may itself be rematerialized again later; the result is returned only if its peak keeps the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematch.graph import Graph, Op, Schedule, Value, simulate
from rematch.graph.model import Ints, Longs
from rematch.solvers.base import BoundScope, Deadline, OnProgress, Problem, Progress, Solution, Solver, Status


@dataclass(frozen=True)
class Greedy(Solver):
    """Rematerialize what frees most memory, wherever the budget is exceeded, from the first operator to the last."""

    name = "greedy"
    paper = "Kumar et al., Efficient Rematerialization for Deep Networks, NeurIPS 2019 (GreedyRemat, XLA's heuristic)"

    def prepare(self) -> None:
        tiny = Graph((Op("make", 0.0, (), (0,)), Op("use", 0.0, (0,), ())), (Value("made", 1),))
        greedy_schedule(Problem(tiny, 0), Deadline())

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        schedule = greedy_schedule(problem, deadline)
        seen = simulate(problem.graph, schedule)
        if seen.peak_bytes > problem.budget_bytes:
            return Solution(None, Status.NOT_FOUND, self.name)
        bound = problem.graph.baseline_seconds
        on_progress(Progress(deadline.elapsed, self.name, best_seconds=seen.seconds, bound_seconds=bound))
        return Solution(schedule, Status.FEASIBLE, self.name, bound, BoundScope.ANY_ORDER)


def greedy_schedule(problem: Problem, deadline: Deadline) -> Schedule:
    """What the walk ends with, within the budget or not."""
    graph, at = problem.graph, 0
    sequence = graph.arrays.order.copy()  # writable like what replaces it: compiled code tells the two apart
    while not deadline.expired:
        over = np.flatnonzero(_memory_while_running(graph, sequence)[at:] > problem.budget_bytes)
        if not over.size:
            break
        at += int(over[0])
        op, before = _largest_saving(graph, sequence, at)
        if op < 0:
            at += 1
        else:
            sequence = np.insert(sequence, before, op)
    return Schedule.from_ops(graph, sequence)


def _memory_while_running(graph: Graph, sequence: Ints) -> Longs:
    """Memory during each operator of the sequence, frees implied."""
    schedule = Schedule.from_ops(graph, sequence)
    return simulate(graph, schedule).checked().timeline_bytes[schedule.steps >= 0]


def _largest_saving(graph: Graph, sequence: Ints, at: int) -> tuple[int, int]:
    """The operator whose recomputation saves most while `sequence[at]` runs, and the index to insert it before."""
    from rematch.graph.kernels import Values
    from rematch.solvers.default import greedy_kernels

    a = graph.arrays
    stages = a.pick(greedy_kernels.Stages)
    notes = greedy_kernels.Notes.new(len(sequence), len(stages.seconds), len(stages.size))
    op, before = greedy_kernels.largest_saving(sequence, at, a.pick(Values), stages, notes)
    return int(op), int(before)
