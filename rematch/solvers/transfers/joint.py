"""The three choices together: local search around what the joint relaxation does, under its bound.

`search_jointly(incumbent, seed=0, threads=2)`

The joint relaxation (`joint_model`) is a linear program. It gives the lower bound and says which values to move and
what to compute again (`choosing`). In a graph where moved values come back for nearly nothing (`fetchable`) the local
search of recomputation then chooses among all three. It begins in turn from the relaxation's own choices, lifted to a
schedule, and from the best schedule known: local search alone does not leave a schedule that keeps one large value
where many small ones in its place are better, and the relaxation knows nothing of what its other rounds found. Its
schedules get places for their copies (`placing`) and go to the oracle. Where computation waits for copies, the next
choice moves less there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rematch.graph import Schedule, simulate
from rematch.solvers.base import Problem
from rematch.solvers.common.highs import Minimum, minimise
from rematch.solvers.common.local_search import LocalSearch
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.default.epochs import first_moments
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.transfers.choosing import Choice, Chosen
from rematch.solvers.transfers.fetchable import Fetchable
from rematch.solvers.transfers.joint_model import JointModel
from rematch.solvers.transfers.placing import placed

_MOMENTS = (2, 4, 6, 8)  # of the relaxation, after the one with a single moment
_WORTH_A_RISE = 0.002  # points of the bound; after two counts of moments that bring less, more of them are not tried
_WHOLE_SHARE = 0.3  # of the time left, for the relaxation in whole numbers
_WHOLE_COLUMNS = 6_000  # of the relaxation, up to which that is tried
_PRICE = 0.005  # of the time that a copy takes: enough that nothing is fetched for nothing
_MOVES_PER_OP = 40  # of local search in a round
_LEAST_MOVES = 20_000
_OTHER_SEED = 1_000_000  # added for the second search


def search_jointly(incumbent: Incumbent, *, seed: int = 0, threads: int = 2) -> None:
    """Raise the bound and look for schedules that move values, until the incumbent's search is over.

    With one thread the bound comes first. With two it comes beside a search, and is followed by another one.
    """
    if not _tell_bound(incumbent, *_relaxed(incumbent, 1), 1) or incumbent.over:
        return
    search = _Search(incumbent, seed)
    if threads == 1:
        _raise_bound(incumbent, _MOMENTS[:1])
        search.run()
        return
    worker = _Worker(search.run)
    worker.start()
    _raise_bound(incumbent, _MOMENTS)
    _raise_bound_in_whole_numbers(incumbent)
    _Search(incumbent, seed + _OTHER_SEED).run()
    while worker.is_alive():
        worker.join(0.05)
    if worker.error is not None:
        raise worker.error


class _Worker(threading.Thread):
    """A thread that keeps its error."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="rematch joint search", daemon=True)  # it may be compiling when the deadline comes
        self.error: Exception | None = None
        self._work = work

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.error = error


def _raise_bound(incumbent: Incumbent, moments: tuple[int, ...]) -> None:
    """The relaxation with more and more moments, as long as that brings something."""
    idle = 0
    for count in moments:
        if incumbent.over or idle == 2 or len(first_moments(incumbent.problem, count)) < count:
            return
        before = incumbent.bound_percent
        if not _tell_bound(incumbent, *_relaxed(incumbent, count), count):
            return
        idle = idle + 1 if incumbent.bound_percent - before < _WORTH_A_RISE else 0


def _relaxed(incumbent: Incumbent, moments: int) -> tuple[Minimum | None, JointModel]:
    """The relaxation at its optimum; None if there was no time for it."""
    model = _model(incumbent.problem, moments)
    found = minimise(model.program, deadline=incumbent.deadline, relaxed=True, interrupt=lambda: incumbent.over)
    return (found if found.finished else None), model


def _model(problem: Problem, moments: int) -> JointModel:
    return JointModel(Precedence.of(problem.graph), problem.budget_bytes, first_moments(problem, moments))


def _raise_bound_in_whole_numbers(incumbent: Incumbent) -> None:
    """The relaxation with one moment, in which every value is kept, computed again or moved as a whole or not."""
    model = _model(incumbent.problem, 1)
    if incumbent.over or model.program.column_count > _WHOLE_COLUMNS:
        return
    deadline = incumbent.deadline.within(_WHOLE_SHARE * incumbent.deadline.remaining)

    def raise_to(bound: float) -> None:
        if bound > incumbent.bound_percent:
            incumbent.raise_bound(bound, "joint")

    found = minimise(model.program, deadline=deadline, interrupt=lambda: incumbent.over, on_bound=raise_to)
    if found.infeasible:
        incumbent.prove_infeasible("joint")
    else:
        raise_to(found.bound)


def _tell_bound(incumbent: Incumbent, found: Minimum | None, model: JointModel, moments: int) -> bool:
    """Tell the incumbent what was proved; returns whether there is more to prove."""
    if found is None:
        return False
    if found.infeasible:
        incumbent.prove_infeasible("joint")
        return False
    incumbent.tell("joint", f"linear relaxation with the link, {moments} moments: +{found.bound:.3f} %")
    incumbent.raise_bound(found.bound, "joint")
    return True


class _Search:
    """Rounds of local search, each with what the relaxation chooses to move and to compute again."""

    def __init__(self, incumbent: Incumbent, seed: int) -> None:
        self._incumbent, self._seed = incumbent, seed
        self._choice = Choice(incumbent.problem, seed)
        self._rounds = 0
        self._best_seconds = incumbent.seconds
        self._best: list[int] = [] if incumbent.schedule is None else incumbent.schedule.ops.tolist()  # runs

    def run(self) -> None:
        """Rounds until the incumbent's search is over, or nothing is worth moving."""
        while not self._incumbent.over:
            chosen = self._choice.next(self._incumbent.deadline)
            if not chosen.moved and self._rounds == 0:
                return
            self._round(chosen)

    def _round(self, chosen: Chosen) -> None:
        problem = self._incumbent.problem
        graph = problem.graph
        assert graph.link is not None, "only a link moves values"
        speed = graph.link.in_bytes_per_second
        prices = {value: _PRICE * int(graph.arrays.size[value]) / speed for value in chosen.moved}
        fetchable = Fetchable.of(graph, prices)
        start = fetchable.start_from(self._best) if self._best and self._rounds % 2 else None
        if start is None:
            start = fetchable.lifted(chosen.again, self._choice.moment)
        search = LocalSearch(
            Problem(fetchable.reduced, problem.budget_bytes), seed=self._seed + self._rounds, start=start
        )
        self._rounds += 1
        search.run(max(_LEAST_MOVES, _MOVES_PER_OP * len(graph.ops)))
        if search.best is None:
            return
        schedule = placed(problem, fetchable.steps_of(search.best))
        self._offer(schedule, fetchable.runs_of(search.best))
        self._choice.learn(schedule, chosen.moved)

    def _offer(self, schedule: Schedule, runs: list[int]) -> None:
        self._incumbent.offer(schedule, "joint")
        seconds = simulate(self._incumbent.problem.graph, schedule).checked().seconds
        if seconds < self._best_seconds:
            self._best_seconds, self._best = seconds, runs
