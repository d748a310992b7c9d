"""Schedules that CUDA's allocator has places for, among those near what solvers find.

`Hunt(problem, found, searched, judged, time_limit=60.0).run()`

What is lost between tensors differs by a few percent of the budget from one schedule to the next, and only placing the
tensors tells. It is easier to come by a schedule that loses little among many than by asking a solver for less and
less. So a solver is asked for a few smaller budgets, each time with a part of the time it had, and around every
schedule that it finds local search makes more. The room that each of these leaves is filled: without some of its
recomputations it takes a little more. They are judged from the fastest on, until one has a place. At last single
recomputations of the best are left out, dearest first, where the allocator has room for that too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from rematch.graph import Graph, Schedule, simulate
from rematch.graph.model import Ints
from rematch.planning.places import Places
from rematch.solvers.base import Deadline, Problem, Solution, Status

_SEARCHES = 3  # for smaller budgets,
_MORE_SEARCHES = 2  # and so many more as long as nothing has a place
_SEARCHING, _EXPLORING, _DROPPING = 0.4, 0.12, 0.15  # of the time limit: each search, around each schedule, at last
TOGETHER = 2.9  # of the time limit: all of it, whatever takes long in between
_EXCESS = 0.015, 0.147  # of the budget: the least and the most that a schedule is taken to need beyond it
_LEAST_SHARE = 0.85  # of the budget: more is not left to the allocator
_ROUNDS = 8  # of local search around each schedule that a solver finds
_LEANER = 0.4, 1.2  # times the excess of the first schedule: by how much the budget of a round is smaller,
_AROUND = 0.985, 1.015  # or times the peak of the best that has a place: the budget of a round once there is one
_MOVES = 30_000, 100_000  # of a round: one of these
_FILLING = 0.004  # of a peak: how far the budgets lie apart that schedules are filled up to
_FILLINGS = 40  # at most
_MOST_DROPPED = 100  # recomputations that are tried without, one by one
_CLOSE = 0.001  # of a step: one that has a place and takes so little longer than the first schedule is good enough
_NEARLY_SMALLEST = (1.0, 1.002, 1.004, 1.006, 1.008, 1.01)  # times the smallest peak: schedules that may need less
_NEARBY = ", then a search for places"  # what found a schedule near one that a solver found

Searched = Callable[[Problem, float], Solution | None]
Judged = Callable[[Schedule], float | None]


class Hunt:
    """Looks for the fastest schedule that has a place, from a solution on that has none.

    `searched` finds a solution for another budget in so many seconds, None if there is none. `judged` tells how many
    seconds a step takes by a schedule as it is run, None if there is no room for it. Without `near`, only solutions
    that were searched for are judged. `best` is what was found, and `searches` are all that solvers found.
    """

    def __init__(
        self,
        problem: Problem,
        found: Solution,
        searched: Searched,
        judged: Judged,
        *,
        time_limit: float,
        excess: float = 0.0,  # of the budget: how much more `found` needs
        near: bool = True,
        seed: int = 0,
    ) -> None:
        self.best: Solution | None = None
        self.searches = [found]
        self.at_the_end = False  # whether smaller budgets were asked for than can be kept, or may be left
        self.interrupted = found.interrupted
        self._problem, self._searched, self._judged, self._near = problem, searched, judged, near
        self._time_limit = time_limit
        self._deadline = Deadline(TOGETHER * time_limit)
        low, high = _EXCESS
        self._excess = min(high, max(low, excess))
        self._step = self._excess / _SEARCHES
        self._best_seconds = math.inf
        self._enough_seconds = _seconds(problem.graph, found) + _CLOSE * problem.graph.baseline_seconds
        self._random = random.Random(seed)
        self._known: set[bytes] = set()  # schedules that were judged

    def run(self) -> None:
        """Until the time is over, or what was found is hardly slower than what has no place."""
        for solution in self._solutions():
            assert solution.schedule is not None
            self._consider([solution])
            if self._near and not solution.schedule.moves:  # which go by times that would change
                self._consider(self._filled(solution))
                self._explore()
            if self._close_enough:
                break
        self._drop()

    def look_near(self, solution: Solution) -> None:
        """Judge one that was found elsewhere, and what fills its room."""
        self._consider([solution])
        if self._near:
            self._consider(self._filled(solution))
            self._drop()

    def interrupt(self) -> None:
        """A signal has come: whoever runs the hunt gets what there is."""
        self.interrupted = True
        self._deadline.stop()

    @property
    def _close_enough(self) -> bool:
        return self._best_seconds <= self._enough_seconds

    def _solutions(self) -> Iterator[Solution]:
        """The first one, then those for smaller budgets; where one is too small, the next is halfway back."""
        yield self.searches[0]
        share = 1.0
        for number in range(_SEARCHES + _MORE_SEARCHES):
            enough = number >= _SEARCHES and self.best is not None
            if enough or self.interrupted or self._deadline.expired:
                return
            if share - self._step < _LEAST_SHARE:
                self.at_the_end = True
                return
            tighter = replace(self._problem, budget_bytes=int((share - self._step) * self._problem.budget_bytes))
            solution = self._searched(tighter, _SEARCHING * self._time_limit)
            if solution is None:
                self.at_the_end = True
                self._step /= 2
                continue
            share -= self._step
            self.interrupted |= solution.interrupted
            self.searches.append(solution)
            yield solution

    def _explore(self) -> None:
        """Search near what is known for schedules that take about as much memory, or a little less."""
        from rematch.solvers.common.local_search import LocalSearch

        deadline = self._deadline.within(_EXPLORING * self._time_limit)
        graph = self._problem.graph
        for _ in range(_ROUNDS):
            if deadline.expired or self.interrupted or self._close_enough:
                return
            origins = self.searches if self.best is None else [*self.searches, self.best]
            origin = self._random.choice(origins)
            assert origin.schedule is not None
            search = LocalSearch(
                Problem(graph, self._leaner_bytes()),
                seed=self._random.getrandbits(32),
                start=_in_default_order(graph, origin.schedule),
            )
            search.run(self._random.choice(_MOVES), deadline)
            if search.best is not None:
                near = self._near_one(origin, search.best)
                self._consider([near, *self._filled(near)])

    def _leaner_bytes(self) -> int:
        """The budget of a round."""
        budget_bytes = self._problem.budget_bytes
        if self.best is None or self.best.schedule is None:
            return int(budget_bytes * (1 - self._excess * self._random.uniform(*_LEANER)))
        peak_bytes = simulate(self._problem.graph, self.best.schedule).peak_bytes
        return min(budget_bytes, int(peak_bytes * self._random.uniform(*_AROUND)))

    def _filled(self, solution: Solution) -> list[Solution]:
        """The solution without recomputations that the budget has room for, or a part of it."""
        graph, schedule = self._problem.graph, solution.schedule
        assert schedule is not None
        peak_bytes, budget_bytes = simulate(graph, schedule).peak_bytes, self._problem.budget_bytes
        fullest = with_what_fits(self._problem, schedule)
        if simulate(graph, fullest).seconds >= self._best_seconds:
            return []
        filled = [fullest]
        apart_bytes = max(_FILLING * peak_bytes, (budget_bytes - peak_bytes) / _FILLINGS)
        for number in range(int((budget_bytes - peak_bytes) / apart_bytes), 0, -1):
            if self._deadline.expired:
                break
            filled.append(with_what_fits(Problem(graph, peak_bytes + int(number * apart_bytes)), schedule))
        return [self._near_one(solution, one) for one in filled]

    def _consider(self, solutions: list[Solution]) -> None:
        """Take the fastest of these that has a place, if it is faster than what was found so far."""
        graph = self._problem.graph
        for solution in sorted(solutions, key=lambda one: _seconds(graph, one)):
            assert solution.schedule is not None
            known = solution.schedule.steps.tobytes()
            if _seconds(graph, solution) >= self._best_seconds or self._deadline.expired:
                return
            if known in self._known:
                continue
            self._known.add(known)
            seconds = self._judged(solution.schedule)
            if seconds is not None and seconds < self._best_seconds:
                self.best, self._best_seconds = solution, seconds

    def _drop(self) -> None:
        """Leave out single recomputations of the best, dearest first, where there is room without."""
        if not self._near or self.best is None or self.best.schedule is None or self.best.schedule.moves:
            return
        deadline = self._deadline.within(_DROPPING * self._time_limit)
        graph, ops = self._problem.graph, self.best.schedule.ops
        staying = np.ones(len(ops), dtype=np.bool_)
        for run in _recomputations(graph, ops)[:_MOST_DROPPED]:
            if deadline.expired or self._close_enough:
                return
            staying[run] = False
            shorter = self._near_one(self.best, Schedule.from_ops(graph, ops[staying]))
            self._consider([shorter])
            staying[run] = self.best is not shorter

    def _near_one(self, origin: Solution, schedule: Schedule) -> Solution:
        """A solution that is made of another one."""
        by = origin.solver if origin.solver.endswith(_NEARBY) else origin.solver + _NEARBY
        return replace(origin, schedule=schedule, status=Status.FEASIBLE, solver=by)


def instead_of(found: Solution, best: Solution, seconds: float) -> Solution:
    """The `best` of a search for places, which took so long, for the problem that `found` is a solution of."""
    return replace(
        best,
        status=Status.FEASIBLE,
        lower_bound_seconds=found.lower_bound_seconds,
        bound_scope=found.bound_scope,
        solve_seconds=seconds,
    )


def keeps(schedule: Schedule, problem: Problem) -> bool:
    """Whether a schedule is valid and within the budget."""
    seen = simulate(problem.graph, schedule)
    return seen.valid and seen.peak_bytes <= problem.budget_bytes


def with_what_fits(problem: Problem, schedule: Schedule) -> Schedule:
    """A schedule within the budget, without those of its recomputations that the budget has room to do without."""
    from rematch.solvers.common.pruning import pruned

    graph = problem.graph
    shorter = Schedule.from_ops(graph, pruned(graph, schedule.ops, problem.budget_bytes))
    return shorter if keeps(shorter, problem) else schedule


def most_compact(graph: Graph, schedule: Schedule, places: Places) -> Schedule:
    """Of a schedule and those that a little more memory makes of it, the one that needs least of CUDA's allocator.

    What is lost between tensors differs by a few percent from one schedule to the next, and only trying them tells.
    """
    peak_bytes = simulate(graph, schedule).peak_bytes
    others = (with_what_fits(Problem(graph, int(share * peak_bytes)), schedule) for share in _NEARLY_SMALLEST)
    return min((schedule, *others), key=lambda tried: places.needed_bytes(graph, tried))


def _seconds(graph: Graph, found: Solution) -> float:
    assert found.schedule is not None
    return simulate(graph, found.schedule).seconds


def _in_default_order(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule as local search can begin with it; within its peak or not."""
    from rematch.solvers.common.pruning import in_default_order, in_turn

    return Schedule.from_ops(graph, in_turn(graph, in_default_order(graph, schedule.ops)))


def _recomputations(graph: Graph, ops: Ints) -> list[int]:
    """Where operators run again, dearest first."""
    firsts = set(np.unique(ops, return_index=True)[1].tolist())
    again = [run for run in range(len(ops)) if run not in firsts]
    return sorted(again, key=lambda run: (-graph.ops[ops[run]].seconds, run))
