"""Simulated annealing alone: local search from no recomputation at all, until the deadline.

`solve(Problem(graph, budget_bytes), Anneal(seed=1, iterations=200_000)).schedule`

`rematch.solvers.common.local_search` has the search and says how it works. The result depends on the problem, the seed
and the number of moves alone, not on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rematch.errors import SolverError
from rematch.graph import baseline, simulate
from rematch.graph.generators import chain
from rematch.solvers.base import (
    BoundScope,
    Deadline,
    OnProgress,
    Problem,
    Progress,
    Solution,
    Solver,
    Status,
    ignore_progress,
)
from rematch.solvers.common.local_search import LocalSearch

_MOVES_AT_ONCE = 1000  # between two looks at the clock
_REPORT_EVERY_SECONDS = 0.25


@dataclass(frozen=True)
class Anneal(Solver):
    """`iterations` is the number of moves; None goes on until the deadline."""

    seed: int = 0
    iterations: int | None = None

    name: ClassVar[str] = "anneal"
    paper: ClassVar[str] = "Kirkpatrick, Gelatt and Vecchi, Optimization by Simulated Annealing, Science 1983"

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise SolverError(f"solver 'anneal' has no seed {self.seed}; seeds are 0 or more")
        if self.iterations is not None and self.iterations < 0:
            raise SolverError(f"solver 'anneal' cannot make {self.iterations} iterations; give 0 or more, or None")

    def prepare(self) -> None:
        small = chain(layers=3)
        problem = Problem(small, simulate(small, baseline(small)).peak_bytes - 1)
        Anneal(iterations=1).solve(problem, deadline=Deadline(), on_progress=ignore_progress)

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        graph = problem.graph
        if problem.budget_bytes < graph.largest_op_bytes:
            return Solution(
                None,
                Status.INFEASIBLE,
                self.name,
                bound_scope=BoundScope.ANY_ORDER,
                infeasible_up_to_bytes=graph.largest_op_bytes - 1,
            )
        search = LocalSearch(problem, seed=self.seed)
        left = self.iterations
        reported_at = -_REPORT_EVERY_SECONDS
        while not (search.finished or deadline.expired or left == 0):
            moves = _MOVES_AT_ONCE if left is None else min(_MOVES_AT_ONCE, left)
            improved = search.run(moves)
            left = None if left is None else left - moves
            if improved and deadline.elapsed >= reported_at + _REPORT_EVERY_SECONDS:
                reported_at = deadline.elapsed
                message = f"{search.moves} moves"
                on_progress(Progress(deadline.elapsed, self.name, message, best_seconds=search.best_seconds))
        search.tidy()
        optimal = search.finished and search.best is not None  # nothing that takes time is recomputed
        return Solution(
            schedule=search.best,
            status=Status.NOT_FOUND if search.best is None else Status.OPTIMAL if optimal else Status.FEASIBLE,
            solver=self.name,
            lower_bound_seconds=graph.baseline_seconds,
            bound_scope=BoundScope.ANY_ORDER,
        )
