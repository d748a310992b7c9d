"""Local search for budgets that fall step by step, from the peak without recomputation to the problem's.

`descent = Descent(problem); descent.run(100_000); descent.found`

At a tight budget a search that starts from no recomputation wanders among states that are far over the budget. Here
each step has a budget between the peak of the last schedule and the problem's, and begins from that schedule, so that
the search is never far from what it looks for. After a step that fails the next one is smaller. Stages have two passes,
as some budgets can only be kept by recomputing an operator twice between two first computations. Where several steps
fail one after the other, the descent begins anew with four passes, whose moves are slower, and other random numbers.
After that it goes on from the leanest schedule so far, with other random numbers each time.
"""

from __future__ import annotations

from rematch.graph import Schedule, baseline, simulate
from rematch.solvers.base import Problem
from rematch.solvers.common.local_search import LocalSearch

_FIRST_STEP = 0.5  # of the way to the problem's budget, and the largest step
_LEAST_STEP = 0.02
_SMALLER, _LARGER = 0.5, 1.5  # the next step, after one that failed and one that did not
_LAST_STEP = 0.01  # of the budget: from so near above, the next step goes all the way
_PATIENCE = 40_000  # moves of a step
_MOVES_AT_ONCE = 2_000  # between two looks at whether the step is done
# Passes of the first descent, of the second and of later ones, and how many steps may fail in a row before the next one
# begins: what two passes can reach they reach soon, while four often go on after many failures.
_PASSES, _FAILURES = (2, 4, 4), (3, 10, 4)
_MOST_IN_VAIN = 10  # descents, one after the other, that find nothing leaner


class Descent:
    """A search for any schedule within the budget, which can be stopped and continued."""

    def __init__(self, problem: Problem, *, seed: int = 0) -> None:
        self._problem, self._seed, self._steps = problem, seed, 0
        self._leanest = baseline(problem.graph)
        self._least_peak = simulate(problem.graph, self._leanest).peak_bytes
        self._descents = 0
        self._least_before, self._in_vain = self._least_peak, 0  # descents begun since one found something leaner
        self._begin()

    def _begin(self) -> None:
        """The next descent, from the peak without recomputation or, after the first ones, from the leanest schedule."""
        kind = min(self._descents, len(_PASSES) - 1)
        self._passes, self._failures = _PASSES[kind], _FAILURES[kind]
        self._descents += 1
        self._schedule = self._leanest if self._descents >= len(_PASSES) else baseline(self._problem.graph)
        self._peak = simulate(self._problem.graph, self._schedule).peak_bytes
        leaner = self._least_peak < self._least_before
        self._least_before, self._in_vain = self._least_peak, 0 if leaner else self._in_vain + 1
        self._step, self._failed = _FIRST_STEP, 0
        self._search = self._next_search()

    @property
    def leanest(self) -> Schedule:
        """The schedule with the smallest peak so far."""
        return self._leanest

    @property
    def peak_bytes(self) -> int:
        """The peak of the leanest schedule."""
        return self._least_peak

    @property
    def found(self) -> Schedule | None:
        """A schedule within the budget."""
        return self._leanest if self._least_peak <= self._problem.budget_bytes else None

    @property
    def finished(self) -> bool:
        """Whether more moves cannot help: there is a schedule, or nothing can be recomputed."""
        return self.found is not None or self._search.finished

    @property
    def stuck(self) -> bool:
        """Whether descents have ended above the budget, also with as many passes as there may be, and for long."""
        return self._in_vain > _MOST_IN_VAIN

    def search(self) -> LocalSearch:
        """A local search that goes on from what was found."""
        return LocalSearch(self._problem, seed=self._seed, start=self.found, passes=self._passes)

    def adopt(self, schedule: Schedule) -> None:
        """Go on from `schedule`, whose first computations follow the default order, if it holds less memory."""
        peak = simulate(self._problem.graph, schedule).checked().peak_bytes
        if peak < self._least_peak:
            self._leanest, self._least_peak = schedule, peak
        if peak < self._peak:
            self._schedule, self._peak = schedule, peak
            self._search = self._next_search()

    def run(self, moves: int) -> None:
        """Make about that many moves, unless a schedule is found before."""
        while moves > 0 and not self.finished:
            self._search.run(_MOVES_AT_ONCE)
            moves -= _MOVES_AT_ONCE
            if self._search.best is not None:
                self._step, self._failed = min(_LARGER * self._step, _FIRST_STEP), 0
                self.adopt(self._search.best)
            elif self._search.moves >= _PATIENCE:
                self._step, self._failed = max(_SMALLER * self._step, _LEAST_STEP), self._failed + 1
                if self._failed == self._failures:
                    self._begin()
                else:
                    self._search = self._next_search()

    def _next_search(self) -> LocalSearch:
        target = self._problem.budget_bytes
        missing = self._peak - target
        budget = (
            max(target, self._peak - max(1, int(self._step * missing))) if missing > _LAST_STEP * target else target
        )
        self._steps += 1
        return LocalSearch(
            Problem(self._problem.graph, budget),
            seed=self._seed + self._steps,
            start=self._schedule,
            passes=self._passes,
        )
