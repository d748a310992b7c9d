"""The best schedule and the best bound known, shared by searches that run side by side.

`Incumbent(problem, deadline, on_progress).offer(schedule, "anneal")`
"""

from __future__ import annotations

import math
import threading

from rematch.graph import Schedule, simulate
from rematch.solvers.base import BoundScope, Deadline, OnProgress, Problem, Progress, Solution, Status

_SAME = 1e-7  # of the time without recomputation: times closer than this are equal
_WORTH_TELLING = 1e-5  # of the time without recomputation: smaller rises of the bound are not reported
_STEPS = (
    10_000  # that a plan is taken to serve, when what is left to gain is weighed against the wait: a short training
)
_HOPE = 0.1  # of what the bound leaves to gain, that a search is taken to gain after finding nothing for half its time
_LEAST_WAIT_SECONDS = 1.0  # before a search that finds nothing better is ended


class Incumbent:
    """Every schedule offered goes through the oracle; only better ones within the budget stay. Safe between threads."""

    def __init__(
        self,
        problem: Problem,
        deadline: Deadline,
        on_progress: OnProgress,
        *,
        gap: float = 0.0,  # points of extra time at which schedule and bound are close enough; 0 searches for the proof
        give_up_seconds: float = math.inf,  # without a schedule by then, the search is over
        scope: BoundScope = BoundScope.DEFAULT_ORDER,  # of bounds and of a proof of infeasibility
        patient: bool = False,  # search until the deadline, however little there may be to gain
    ) -> None:
        self.problem = problem
        self.deadline = deadline
        self.schedule: Schedule | None = None
        self.seconds = float("inf")
        self.bound_seconds = self._told_bound = problem.graph.baseline_seconds
        self.infeasible, self._scope, self._infeasible_scope = False, scope, scope
        self._give_up_seconds = give_up_seconds
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._scale = problem.graph.baseline_seconds
        self._close_enough = max(_SAME, gap / 100.0) * self._scale
        self._weighs_the_wait, self._improved_at = gap > 0.0 and not patient, 0.0

    @property
    def overhead_percent(self) -> float:
        """Extra time of the best schedule, in percent of no recomputation; infinite without one."""
        return self._percent(self.seconds)

    @property
    def bound_percent(self) -> float:
        return self._percent(self.bound_seconds)

    def _percent(self, seconds: float) -> float:
        return (seconds / (self._scale or 1.0) - 1.0) * 100.0

    @property
    def closed(self) -> bool:
        """Whether there is nothing left to search for."""
        return self.infeasible or self.seconds - self.bound_seconds <= self._close_enough

    @property
    def over(self) -> bool:
        """Whether it is time to stop searching."""
        given_up = self.schedule is None and self.deadline.elapsed > self._give_up_seconds
        return self.closed or self.deadline.expired or given_up or self._not_worth_the_wait

    @property
    def _not_worth_the_wait(self) -> bool:
        """Whether the seconds that a better schedule may save in many steps are fewer than those spent on the search.

        All that the bound leaves may be gained while the search makes progress, a part of it when it has not for long.
        """
        if self.schedule is None or not self._weighs_the_wait:
            return False
        elapsed = self.deadline.elapsed
        left_seconds = (self.seconds - self.bound_seconds) * _STEPS
        stuck = elapsed > max(_LEAST_WAIT_SECONDS, 2.0 * self._improved_at)
        return elapsed > (_HOPE * left_seconds if stuck else left_seconds)

    @property
    def reason(self) -> str:
        """Why the search is over, in words; "" if it is not."""
        left = f"{self.overhead_percent - self.bound_percent:.2f} points"
        if self.infeasible:
            return "no schedule keeps the budget"
        if self.closed:
            proved = self.seconds - self.bound_seconds <= _SAME * self._scale
            return "proved optimal" if proved else f"good enough: within {left} of the bound"
        if self.deadline.expired:
            return "out of time" if self.schedule is None else f"out of time, with at most {left} left to gain"
        if self._not_worth_the_wait:
            return f"good enough: the {left} that may be left to gain are not worth the wait in {_STEPS:,} steps"
        return "out of time" if self.over else ""

    def offer(self, schedule: Schedule, by: str) -> bool:
        """Take `schedule` if it is valid, within the budget and faster than what is known."""
        seen = simulate(self.problem.graph, schedule)
        if not seen.valid or seen.peak_bytes > self.problem.budget_bytes:
            return False
        with self._lock:
            if seen.seconds >= self.seconds:
                return False
            self.schedule, self.seconds = schedule, seen.seconds
            self._improved_at = self.deadline.elapsed
            self._report(by, f"+{self.overhead_percent:.3f} %")
        return True

    def raise_bound(self, percent: float, by: str) -> None:
        """No schedule of the incumbent's scope has less than `percent` extra time."""
        seconds = (1.0 + percent / 100.0) * self._scale
        with self._lock:
            if seconds > self.bound_seconds:
                self.bound_seconds = min(seconds, self.seconds)
            if self.closed or self.bound_seconds - self._told_bound > _WORTH_TELLING * self._scale:
                self._told_bound = self.bound_seconds
                self._report(by, f"at least +{self.bound_percent:.3f} %")

    def prove_infeasible(self, by: str, scope: BoundScope | None = None) -> None:
        with self._lock:
            self.infeasible, self._infeasible_scope = True, scope or self._scope
            self._report(by, "no schedule keeps the budget")

    def tell(self, by: str, message: str) -> None:
        with self._lock:
            self._report(by, message)

    def _report(self, by: str, message: str) -> None:
        best = self.seconds if self.schedule is not None else None
        self._on_progress(Progress(self.deadline.elapsed, by, message, best, self.bound_seconds))

    def solution(self, solver: str) -> Solution:
        if self.schedule is None:
            status = Status.INFEASIBLE if self.infeasible else Status.NOT_FOUND
        else:
            proved = self.seconds - self.bound_seconds <= _SAME * self._scale
            status = Status.OPTIMAL if proved else Status.FEASIBLE
        bound_scope = BoundScope.ANY_ORDER if self.bound_seconds <= self._scale else self._scope
        return Solution(
            schedule=self.schedule,
            status=status,
            solver=solver,
            lower_bound_seconds=None if self.infeasible else self.bound_seconds,
            bound_scope=self._infeasible_scope if self.infeasible else bound_scope,
        )
