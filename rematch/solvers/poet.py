"""POET: keep, recompute or page, stage by stage, by mixed-integer programming.

S. G. Patil, P. Jain, P. Dutta, I. Stoica, J. E. Gonzalez, "POET: Training Neural Networks on Tiny Devices with
Integrated Rematerialization and Paging" (ICML 2022). The program is Checkmate's with paging: R[t,k] computes operator k
in stage t, S_ram[t,v] and S_sd[t,v] say where value v is when stage t begins, and M_out[t,v] and M_in[t,v] copy it out
and back. What a stage reads is in memory, computed in it or copied in; what is copied in was copied out before. The
objective adds up the costs of computing and of copying.

What we changed, and why:

- The paper minimises energy under a limit of time. Our graphs have times, so R, M_in and M_out cost seconds. They are
  added up as in the paper, which does not let copies run beside operators. `copy_weight` is the share of a copy's time
  that counts: with less than 1 the program takes some of it to be hidden.
- A value is copied out when it is made, at most once. S_sd and M_out are then one column for each value, and rows about
  where a value is in the meantime fall away.
- A copy in is there from the beginning of its stage on, where the paper has it from the next stage on.
- Stages, memory and everything that our graphs have beyond the paper's are those of `checkmate`.

The schedule then gets better places for its copies (`placing`) and is timed by the oracle, beside operators. The
program's optimum is therefore no bound of ours, and that it is infeasible is no proof: the bound is the time of
computing everything once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematch.errors import SolverError
from rematch.graph import Schedule, baseline, simulate
from rematch.graph.model import Floats, Ints
from rematch.solvers.base import BoundScope, Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.checkmate.model import CheckmateModel
from rematch.solvers.common.highs import ABSENT, minimise
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.minimum import surely_needed_bytes
from rematch.solvers.transfers.fetchable import Fetchable
from rematch.solvers.transfers.placing import placed

MOST_OPERATORS = 400  # columns and rows grow with the square, and there are half as many again as in Checkmate's
_MARGIN = 1e-5  # of the budget, left free where a point breaks it by no more than the program's accuracy


@dataclass(frozen=True)
class Poet(Solver):
    """A baseline for planning with host memory; exact for its own costs, slow beyond a few dozen operators."""

    name = "poet"
    paper = "Patil et al., POET: Training Neural Networks on Tiny Devices with Integrated Remat. and Paging, ICML 2022"
    requires = f"at most {MOST_OPERATORS:,} operators"
    moves_values = True

    copy_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.copy_weight <= 1.0:
            raise SolverError(f"solver 'poet' takes a copy_weight of 0 to 1, not {self.copy_weight}")

    def applicable(self, problem: Problem) -> bool:
        return len(problem.graph.ops) <= MOST_OPERATORS

    def prepare(self) -> None:
        import highspy  # noqa: F401  # loading it takes a while

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        incumbent = Incumbent(problem, deadline, on_progress, scope=BoundScope.ANY_ORDER)
        if problem.budget_bytes < surely_needed_bytes(problem.graph):
            incumbent.prove_infeasible(self.name)
            return incumbent.solution(self.name)
        incumbent.offer(baseline(problem.graph), "noremat")
        for margin in (0.0, _MARGIN):
            if not incumbent.over and self._search(incumbent, margin):
                break
        return incumbent.solution(self.name)

    def _search(self, incumbent: Incumbent, margin: float) -> bool:
        """Solve the program once; whether there is nothing to gain from solving it with a margin."""
        problem = incumbent.problem
        budget_bytes = problem.budget_bytes - int(margin * problem.budget_bytes)
        model = PoetModel(problem.graph, budget_bytes, copy_weight=self.copy_weight)
        incumbent.tell(self.name, f"{model.program.column_count} columns, {model.program.row_count} rows")
        found = minimise(model.program, deadline=incumbent.deadline, interrupt=lambda: incumbent.over)
        if found.point is None:
            known = "the program has no point" if found.infeasible else "no point of the program found"
            incumbent.tell(self.name, f"{known} within the budget")
            return True
        return self._offer(incumbent, model, found.point)

    def _offer(self, incumbent: Incumbent, model: PoetModel, point: Floats) -> bool:
        """Offer the schedule of a point; whether it keeps the budget."""
        problem = incumbent.problem
        schedule = _schedule(problem, model, point)
        incumbent.offer(schedule, self.name)
        return simulate(problem.graph, schedule).peak_bytes <= problem.budget_bytes


def _schedule(problem: Problem, model: PoetModel, point: Floats) -> Schedule:
    moved = model.moved(point)
    if not moved:
        return model.schedule(point)
    fetchable = Fetchable.of(problem.graph, dict.fromkeys(moved, 0.0))
    reduced = fetchable.start_from(model.runs(point))
    assert reduced is not None, "stages run operators first in default order, and again only where they may"
    return placed(problem, fetchable.steps_of(reduced))


@dataclass(eq=False)
class PoetModel(CheckmateModel):
    """Checkmate's program with paging, for one budget. `M[t,v]` copies v in when stage t begins."""

    copy_weight: float = 1.0

    def _add_columns(self) -> None:
        super()._add_columns()
        self.out: Ints = np.full(len(self.graph.values), ABSENT, dtype=np.int32)  # per value: it is copied out
        link, a = self.graph.link, self.graph.arrays
        if link is None:
            return
        to_percent = self.copy_weight * 100.0 / (self.graph.baseline_seconds or 1.0)
        out_cost, in_cost = (a.size / speed * to_percent for speed in link.speeds)
        movable = a.movable & (a.size > 0) & (a.size <= link.host_bytes) & (a.producer != a.loss)
        values = np.flatnonzero(movable & (self.S != ABSENT).any(axis=0))
        self.out[values] = self.program.columns(out_cost[values])
        for stage in range(self._first_stage_of_copies(), self.stage_count):
            back = values[self.S[stage, values] != ABSENT]
            self.M[stage, back] = self.program.columns(in_cost[back])
            columns = np.stack((self.out[back], self.M[stage, back]), axis=1)
            self.program.rows(columns, [1.0, -1.0], lower=0.0)
        share = a.size[values] / max(link.host_bytes, 1)
        self.program.rows(self.out[values][None, :], share, upper=1.0)

    def _first_stage_of_copies(self) -> int:
        """Copies come back after the loss only where an engine runs forward as it is."""
        a = self.graph.arrays
        return int(a.position[a.loss]) + 1 if self.graph.recompute_after_loss else 0

    def moved(self, point: Floats) -> list[int]:
        """The values that a point copies back."""
        back = (self.M != ABSENT) & (point[self.M] > 0.5)
        return np.flatnonzero(back.any(axis=0)).tolist()

    def runs(self, point: Floats) -> list[int]:
        """What a point does, stage by stage: `~value` copies it in, an operator's number computes it."""
        order = self.graph.arrays.order
        runs: list[int] = []
        for stage in range(self.stage_count):
            back = np.flatnonzero((self.M[stage] != ABSENT) & (point[self.M[stage]] > 0.5))
            columns = self.R[stage, order]
            runs += (~back).tolist()
            runs += order[(columns != ABSENT) & (point[columns] > 0.5)].tolist()
        return runs
