"""Checkmate's approximation: the linear relaxation, rounded in two phases.

P. Jain et al., "Checkmate" (MLSys 2020), section 5 and appendix D. Phase one rounds the relaxation's S, what is in
memory when a stage begins; phase two (algorithm 2) takes the optimal R for it, which `policy` makes. The result is a
schedule, but may break the budget, so the relaxation is solved for (1 - epsilon) of the budget.

The paper fixes epsilon = 0.1 and rounds at 0.5. Here both are searched, as its appendix D suggests: every relaxation is
rounded at many thresholds, and epsilon grows from 0 until the relaxation alone costs more than the best schedule found,
then the smallest epsilons that helped are looked at more closely. `randomized` also rounds every entry up with its own
probability (appendix D), `samples` times. The fastest schedule within the budget is returned, never another one.

Rounding drops a value in one stage that the next stages keep by a hair, and recomputes what the budget did not ask for.
So a schedule within the budget is *pruned*: recomputations are left out, the most expensive first, as long as the peak
allows. This third phase is ours; `prune=False` leaves it out.

The relaxation is that of program (9) in the tighter form of `model`, with the memory recurrence only in
stages that turn out to break it by a hundredth of the budget. Solved for the whole budget, it is a lower bound for
schedules of such stages; for smaller ones, HiGHS goes on from where it ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rematch.errors import SolverError
from rematch.graph import Schedule, baseline, simulate
from rematch.graph.model import Bools, Floats
from rematch.solvers.base import BoundScope, Deadline, OnProgress, Problem, Solution, Solver, ignore_progress
from rematch.solvers.checkmate.model import MOST_OPERATORS, CheckmateModel
from rematch.solvers.common.highs import Relaxation
from rematch.solvers.common.policy import schedule_keeping
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.minimum import surely_needed_bytes

# To round at, beginning with the paper's and going outwards.
_THRESHOLDS = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9, 0.05, 0.95, 0.01, 0.99, 0.001)
# Shares of the budget left free, 0.1 in the paper; finer near 0: the less is left free, the faster the schedule.
_EPSILONS = (0.0, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)
_TOLERANCE = 0.01  # of the budget, by which the relaxation may break the memory recurrence: rounding breaks it by more
_HALVINGS = 3  # of the step between the best epsilon and the one before


@dataclass(frozen=True)
class Rounding(Solver):
    """Two-phase rounding of Checkmate's linear relaxation, for the best allowance and threshold."""

    name = "rounding"
    paper = "Jain et al., Checkmate, MLSys 2020 (section 5)"
    requires = f"at most {MOST_OPERATORS:,} operators"

    epsilon: float | None = None  # share of the budget left free; None to search for the best one
    randomized: bool = False
    samples: int = 50
    seed: int = 0
    prune: bool = True

    def __post_init__(self) -> None:
        if self.epsilon is not None and not 0.0 <= self.epsilon < 1.0:
            raise SolverError(f"epsilon={self.epsilon} is not in [0, 1); the paper takes 0.1")

    def applicable(self, problem: Problem) -> bool:
        return len(problem.graph.ops) <= MOST_OPERATORS

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        incumbent = Incumbent(problem, deadline, on_progress, scope=BoundScope.STAGES)
        if problem.budget_bytes < surely_needed_bytes(problem.graph):
            incumbent.prove_infeasible(self.name, BoundScope.ANY_ORDER)
        else:
            incumbent.offer(baseline(problem.graph), "noremat")
            search = _Search(incumbent, self)
            if self.epsilon is None:
                search.all_epsilons()
            elif not incumbent.over:
                search.at(self.epsilon)
        return incumbent.solution(self.name)


def two_phase_roundings(
    problem: Problem, *, epsilon: float = 0.1, samples: int = 50, seed: int = 0, deadline: Deadline
) -> tuple[Schedule, list[Schedule]] | None:
    """The relaxation for (1 - epsilon) of the budget, rounded at 0.5 and `samples` times at random; nothing is pruned.

    This is the comparison of appendix D. Schedules may break the budget. None if the relaxation has no solution, or
    none in time.
    """
    incumbent = Incumbent(problem, deadline, ignore_progress, scope=BoundScope.STAGES)
    search = _Search(incumbent, Rounding(randomized=True, samples=samples, seed=seed))
    shares = search.shares_at(epsilon)
    if shares is None:
        return None
    at_half, *others = search.rounded(shares, thresholds=(0.5,))
    return schedule_keeping(problem.graph, at_half), [schedule_keeping(problem.graph, kept) for kept in others]


def without_spare_runs(problem: Problem, schedule: Schedule, deadline: Deadline) -> Schedule:
    """`schedule` without the recomputations that its budget does not need; itself if it breaks the budget."""
    graph = problem.graph
    if simulate(graph, schedule).peak_bytes > problem.budget_bytes:
        return schedule
    sequence = schedule.ops
    first = np.zeros(len(sequence), dtype=np.bool_)
    first[np.unique(sequence, return_index=True)[1]] = True
    needed = np.ones(len(sequence), dtype=np.bool_)
    again = np.flatnonzero(~first)
    for index in again[np.argsort(-graph.arrays.seconds[sequence[again]], kind="stable")].tolist():
        if deadline.expired:
            break
        needed[index] = False
        shorter = Schedule.from_ops(graph, sequence[needed])
        seen = simulate(graph, shorter)
        if seen.valid and seen.peak_bytes <= problem.budget_bytes:
            schedule = shorter
        else:
            needed[index] = True
    return schedule


class _Search:
    """Relaxations for several budgets of one problem, and their roundings offered to the incumbent."""

    def __init__(self, incumbent: Incumbent, options: Rounding) -> None:
        self.incumbent, self.options = incumbent, options
        self._load(frozenset())
        self._random = np.random.default_rng(options.seed)

    def all_epsilons(self) -> None:
        best, step = 0.0, 0.0
        for before, epsilon in zip((0.0, *_EPSILONS), _EPSILONS, strict=False):
            seconds = self.incumbent.seconds
            if self.incumbent.over or not self.at(epsilon):
                break
            if self.incumbent.seconds < seconds:
                best, step = epsilon, epsilon - before
        for _ in range(_HALVINGS):
            step /= 2.0
            if step > 0.0 and not self.incumbent.over:
                seconds = self.incumbent.seconds
                self.at(best - step)
                if self.incumbent.seconds < seconds:
                    best -= step

    def at(self, epsilon: float) -> bool:
        """Round the relaxation for (1 - epsilon) of the budget; whether a larger epsilon may lead to something."""
        incumbent, graph = self.incumbent, self.incumbent.problem.graph
        point, percent = self._solved(epsilon)
        if point is None or incumbent.overhead_percent <= percent:
            return False
        incumbent.tell(self.options.name, f"epsilon {epsilon:.3f}: relaxation +{percent:.3f} %")
        for kept in self.rounded(self._model.kept(point)):
            schedule = schedule_keeping(graph, kept)
            if self.options.prune:
                schedule = without_spare_runs(incumbent.problem, schedule, incumbent.deadline)
            incumbent.offer(schedule, self.options.name)
            if incumbent.over:
                return False
        return True

    def shares_at(self, epsilon: float) -> Floats | None:
        """The relaxation's S for (1 - epsilon) of the budget; None if it is not found."""
        point, _ = self._solved(epsilon)
        return None if point is None else self._model.kept(point)

    def _load(self, accounted: frozenset[int]) -> None:
        problem = self.incumbent.problem
        self._model = CheckmateModel(problem.graph, problem.budget_bytes, accounted=accounted)
        self._relaxation = Relaxation(self._model.program)

    def _solved(self, epsilon: float) -> tuple[Floats | None, float]:
        """The optimal point and its extra time in percent; stages get the memory recurrence until none needs it."""
        incumbent = self.incumbent
        budget_bytes = incumbent.problem.budget_bytes - int(epsilon * incumbent.problem.budget_bytes)
        while True:
            self._relaxation.limit(*self._model.limits(budget_bytes))
            found = self._relaxation.minimise(incumbent.deadline)
            if epsilon == 0.0:
                self._learn_bound(found.infeasible, found.bound - 100.0)
            if not found.finished or found.point is None or incumbent.over:
                return None, found.objective - 100.0
            broken = self._model.unaccounted(found.point, budget_bytes, _TOLERANCE)
            if not broken:
                return found.point, found.objective - 100.0
            self._load((self._model.accounted or frozenset()) | broken)

    def _learn_bound(self, infeasible: bool, percent: float) -> None:
        if infeasible and self.incumbent.schedule is None:
            self.incumbent.prove_infeasible(self.options.name)
        elif not infeasible:
            self.incumbent.raise_bound(percent, self.options.name)

    def rounded(self, shares: Floats, thresholds: Sequence[float] = _THRESHOLDS) -> Iterator[Bools]:
        """S at each threshold, then `samples` times with each entry rounded up with its own probability."""
        for threshold in thresholds:
            yield shares > threshold
        if self.options.randomized:
            for _ in range(self.options.samples):
                yield self._random.random(shares.shape) < shares
