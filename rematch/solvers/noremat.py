"""No rematerialization: every operator once, in default order.

The first baseline of Kumar, Purohit, Svitkina, Vee and Wang, "Efficient Rematerialization for Deep Networks"
(NeurIPS 2019), section 4. No schedule is faster, so when it fits the budget it is optimal over any order.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematch.graph import baseline, simulate
from rematch.solvers.base import BoundScope, Deadline, OnProgress, Problem, Solution, Solver, Status


@dataclass(frozen=True)
class NoRemat(Solver):
    """Compute everything once and free each value after its last use."""

    name = "noremat"
    paper = "Kumar et al., Efficient Rematerialization for Deep Networks, NeurIPS 2019 (baseline, section 4)"

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        schedule = baseline(problem.graph)
        fits = simulate(problem.graph, schedule).peak_bytes <= problem.budget_bytes
        return Solution(
            schedule=schedule if fits else None,
            status=Status.OPTIMAL if fits else Status.NOT_FOUND,
            solver=self.name,
            lower_bound_seconds=problem.graph.baseline_seconds,
            bound_scope=BoundScope.ANY_ORDER,
        )
