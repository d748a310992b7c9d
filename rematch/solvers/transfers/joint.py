"""The three choices together: local search with prices for moving, under the bound of the joint relaxation.

`search_jointly(incumbent, seed=0, threads=2)`

The joint relaxation (`joint_model`) is a linear program. It gives the lower bound, and the values that its optimum
moves, for the link as it is and for slower ones, are those that the search may move. In a graph where these come back
at a price (`fetchable`) the local search of recomputation then chooses among all three. Its schedules get places for
their copies (`placing`) and go to the oracle. Where computation waits for a copy, all copies that kept the link busy up
to then become dearer in the next round, and all become cheaper with time, so that rounds come to move what the link has
time for. A value that is dearer than computing it again is computed again instead. Rounds begin from
the best schedule, and now and then from nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from rematch.graph import Compute, Fetch, Free, Graph, Link, Offload, Schedule, simulate
from rematch.graph.schedule import Step
from rematch.graph.simulate import clock
from rematch.solvers.base import Problem
from rematch.solvers.common.highs import ABSENT, Minimum, minimise
from rematch.solvers.common.local_search import LocalSearch
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.default.epochs import first_moments
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.transfers.fetchable import Fetchable
from rematch.solvers.transfers.joint_model import JointModel
from rematch.solvers.transfers.placing import placed

_SLOWER = (0.8, 0.6)  # shares of the link's speed for which the relaxation says what to move, besides all of it
_MOMENTS = (1, 2, 3, 4, 6, 8)  # of the relaxation, round by round
_WORTH_MOVING = 0.01  # of a value, that the relaxation brings back
_LEAST_PRICE = 0.04  # of the time that a copy takes
_PRICE_STEP = 0.1  # of the time that is waited for copies, shared among them; it shrinks with the rounds
_STEP_ROUNDS = 30  # in which the step halves, and then to a third, and so on
_CHEAPER = 1.0  # times the step, of a price: by how much it falls in a round
_ANEW = 3  # every so many rounds begin from nothing
_MOVES_PER_OP = 40  # of local search in a round
_LEAST_MOVES = 20_000
_OTHER_SEED = 1_000_000  # added for the second search


def search_jointly(incumbent: Incumbent, *, seed: int = 0, threads: int = 2) -> None:
    """Raise the bound and look for schedules that move values, until the incumbent's search is over.

    With one thread the bound comes first. With two it comes beside a search, and is followed by another one.
    """
    movable = _first_round(incumbent)
    if incumbent.over or not movable:
        return
    search = _Search(incumbent, movable, seed)
    if threads == 1:
        _raise_bound(incumbent, _MOMENTS[1:3])
        search.run()
        return
    worker = _Worker(search.run)
    worker.start()
    _raise_bound(incumbent, _MOMENTS[1:])
    _Search(incumbent, movable, seed + _OTHER_SEED).run()
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


def _first_round(incumbent: Incumbent) -> list[int]:
    """The relaxation with one moment: a bound, and the values that it moves, with the link and with slower ones."""
    problem = incumbent.problem
    link = problem.graph.link
    assert link is not None, "only a link moves values"
    movable: set[int] = set()
    for share in (1.0, *_SLOWER):
        out_speed, in_speed = (max(1.0, share * speed) for speed in link.speeds)
        slower = Link(out_speed, in_speed, link.host_bytes)
        graph = problem.graph if share == 1.0 else replace(problem.graph, link=slower)
        found, model = _relaxed(incumbent, graph, _MOMENTS[0])
        if share == 1.0:
            _tell_bound(incumbent, found, _MOMENTS[0])
        if found is not None and found.point is not None:
            movable |= _moved_by(model, found)
        if incumbent.over:
            break
    return sorted(movable)


def _raise_bound(incumbent: Incumbent, moments: tuple[int, ...]) -> None:
    for count in moments:
        if incumbent.over or len(first_moments(incumbent.problem, count)) < count:
            return
        found, _ = _relaxed(incumbent, incumbent.problem.graph, count)
        if not _tell_bound(incumbent, found, count):
            return


def _relaxed(incumbent: Incumbent, graph: Graph, moments: int) -> tuple[Minimum | None, JointModel]:
    """The relaxation at its optimum; None if there was no time for it."""
    problem = incumbent.problem
    model = JointModel(Precedence.of(graph), problem.budget_bytes, first_moments(problem, moments))
    found = minimise(model.program, deadline=incumbent.deadline, relaxed=True, interrupt=lambda: incumbent.over)
    return (found if found.finished else None), model


def _tell_bound(incumbent: Incumbent, found: Minimum | None, moments: int) -> bool:
    """Tell the incumbent what was proved; returns whether there is more to prove."""
    if found is None:
        return False
    if found.infeasible:
        incumbent.prove_infeasible("joint")
        return False
    incumbent.tell("joint", f"linear relaxation with the link, {moments} moments: +{found.bound:.3f} %")
    incumbent.raise_bound(found.bound, "joint")
    return True


def _moved_by(model: JointModel, found: Minimum) -> set[int]:
    """The values that a point of the relaxation brings back, but for those that the loss makes."""
    assert found.point is not None
    a = model.precedence.graph.arrays
    share = np.zeros(model.bring.shape[1])
    for row in model.bring:
        there = row != ABSENT
        share[there] = np.maximum(share[there], found.point[row[there]])
    return set(np.flatnonzero((share > _WORTH_MOVING) & (a.producer != a.loss)).tolist())


class _Search:
    """Rounds of local search in which moving has a price, and the prices."""

    def __init__(self, incumbent: Incumbent, movable: list[int], seed: int) -> None:
        graph = incumbent.problem.graph
        assert graph.link is not None, "only a link moves values"
        self._incumbent, self._seed = incumbent, seed
        size, host_bytes = graph.arrays.size, graph.link.host_bytes
        self._copying = {
            value: int(size[value]) / graph.link.in_bytes_per_second for value in movable if size[value] <= host_bytes
        }
        self._price = {value: _LEAST_PRICE * seconds for value, seconds in self._copying.items()}
        self._rounds = 0
        self._best_seconds = incumbent.seconds
        self._best: list[int] = [] if incumbent.schedule is None else incumbent.schedule.ops.tolist()  # runs
        a = graph.arrays
        repeatable = a.last_stage >= a.first_stage
        self._recomputing = {
            value: float(a.seconds[a.producer[value]]) if repeatable[a.producer[value]] else math.inf
            for value in self._copying
        }

    def run(self) -> None:
        """Rounds until the incumbent's search is over."""
        while self._copying and not self._incumbent.over:
            self._round()

    def _round(self) -> None:
        problem = self._incumbent.problem
        worth = {value: price for value, price in self._price.items() if price <= self._recomputing[value]}
        fetchable = Fetchable.of(problem.graph, worth)
        start = fetchable.start_from(self._best) if self._best and self._rounds % _ANEW else None
        search = LocalSearch(
            Problem(fetchable.reduced, problem.budget_bytes), seed=self._seed + self._rounds, start=start
        )
        search.run(max(_LEAST_MOVES, _MOVES_PER_OP * len(problem.graph.ops)))
        self._rounds += 1
        step = _PRICE_STEP / (1.0 + self._rounds / _STEP_ROUNDS)
        if search.best is None:
            return
        steps = fetchable.steps_of(search.best)
        if not self._fits_host_memory(steps):
            return
        self._make_cheaper(_CHEAPER * step)
        schedule = placed(problem, steps)
        self._incumbent.offer(schedule, "joint")
        seconds = simulate(problem.graph, schedule).checked().seconds
        if seconds < self._best_seconds:
            self._best_seconds, self._best = seconds, fetchable.runs_of(search.best)
        for waited, values in waits(problem.graph, schedule):
            busy = sum(self._copying[value] for value in values)
            for value in values:
                self._price[value] += step * waited * self._copying[value] / busy

    def _fits_host_memory(self, steps: list[Step]) -> bool:
        """Whether there is host memory for what the steps move; if not, all of it becomes dearer."""
        graph = self._incumbent.problem.graph
        assert graph.link is not None, "only a link moves values"
        moved = [step.value for step in steps if isinstance(step, Offload)]
        if graph.arrays.size[moved].sum() <= graph.link.host_bytes:
            return True
        for value in moved:
            self._price[value] += _PRICE_STEP * self._copying[value]
        return False

    def _make_cheaper(self, share: float) -> None:
        for value, seconds in self._copying.items():
            self._price[value] = max(_LEAST_PRICE * seconds, (1.0 - share) * self._price[value])


def waits(graph: Graph, schedule: Schedule) -> Iterator[tuple[float, list[int]]]:
    """Each time that computation waits for copies: how long, and the values whose copies kept the link busy until then.

    A copy that begins where the one before it ended was kept from beginning earlier.
    """
    times = clock(graph, schedule)
    begins, ends = times.begins.tolist(), times.ends.tolist()
    last: dict[type, tuple[float, list[int]]] = {Offload: (-1.0, []), Fetch: (-1.0, [])}
    copies: dict[float, list[int]] = {}  # by when they ended
    now = 0.0
    for step, begin, end in zip(schedule, begins, ends, strict=True):
        if isinstance(step, Compute | Free):
            if begin > now and begin in copies:
                yield begin - now, copies[begin]
            now = end
            continue
        until, busy = last[type(step)]
        busy = [*busy, step.value] if begin == until else [step.value]
        last[type(step)] = end, busy
        copies[end] = busy
