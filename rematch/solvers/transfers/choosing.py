"""Which values to move: the relaxation's choice, rounded to what the link has time for.

`choice = Choice(problem, seed=0); values = choice.next(deadline); choice.learn(schedule, values)`

The joint relaxation with one moment says how much of each value to move. Its shares are nearly all 0 or 1. We round
them, larger ones first, as long as the copies out can end before the moment in the order in which values are made. What
the relaxation cannot see is learned from schedules: where one waits for a stretch of copies, all values that are made
(or read) in that stretch get a *cap*, the time that their copies may take together: what they took, less the wait. Caps
are rows of the next relaxation, so that another value moves in the place of one that the link has no time for. They
hold for this search alone and say nothing about the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from rematch.graph import Offload, Schedule
from rematch.graph.model import Bools, Floats
from rematch.solvers.base import Deadline, Problem
from rematch.solvers.common.highs import ABSENT, minimise
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.default.epochs import first_moments
from rematch.solvers.transfers.joint_model import JointModel
from rematch.solvers.transfers.waiting import waits

_WORTH_MOVING = 0.01  # of a value, that the relaxation moves
_MOST_CAPS = 60  # the latest ones count
_WAITS_LEARNED = 4  # of a schedule: each is in part a consequence of those before
_FORGOTTEN = 0.3  # of the caps, when a schedule waits for nothing: some are stricter than they need to be
_NOISES = (0.1, 0.3, 1.0)  # in the order of rounding, until it gives values that were not tried


@dataclass(frozen=True, eq=False)
class _Cap:
    """A limit of the time that moving some values takes, in percent of the graph's baseline."""

    members: Bools  # by value
    outwards: bool
    percent: float


class Choice:
    """Sets of values to move, each learning from the schedules that moved the ones before."""

    def __init__(self, problem: Problem, seed: int) -> None:
        graph = problem.graph
        a = graph.arrays
        assert graph.link is not None, "only a link moves values"
        self._problem = problem
        self._precedence = Precedence.of(graph)
        self._moments = first_moments(problem, 1)
        self._random = np.random.default_rng(seed)
        self._caps: list[_Cap] = []
        self._tried: set[tuple[int, ...]] = set()
        to_percent = 100.0 / (graph.baseline_seconds or 1.0)
        self._out_cost: Floats = a.size / graph.link.out_bytes_per_second * to_percent
        self._in_cost: Floats = a.size / graph.link.in_bytes_per_second * to_percent
        self._passed: Floats = np.concatenate(([0.0], np.cumsum(a.seconds[a.order]))) * to_percent  # by position
        self._read_at = np.full(len(graph.values), len(graph.ops))  # first read after the moment
        at = a.position[self._precedence.reader]
        later = at > self._moments[0]
        np.minimum.at(self._read_at, self._precedence.read[later], at[later])

    def next(self, deadline: Deadline) -> list[int]:
        """The values to move; none if the relaxation moves none or has not ended in time."""
        model = JointModel(self._precedence, self._problem.budget_bytes, self._moments)
        bring = model.bring[0]
        for cap in self._caps[-_MOST_CAPS:]:
            members = np.flatnonzero(cap.members & (bring != ABSENT))
            model.program.rows(bring[members][None, :], self._cost(cap)[members], upper=cap.percent)
        found = minimise(model.program, deadline=deadline, relaxed=True)
        if found.point is None or not found.finished:
            return []
        a = self._problem.graph.arrays
        share = np.where(bring != ABSENT, found.point[bring], 0.0)
        share[(a.producer == a.loss) | (share < _WORTH_MOVING)] = 0.0
        for level in (0.0, *_NOISES):
            rank = share + self._random.uniform(0.0, level, len(share))
            chosen = self._rounded(sorted(np.flatnonzero(share).tolist(), key=lambda value: (-rank[value], value)))
            if tuple(chosen) not in self._tried:
                break
        self._tried.add(tuple(chosen))
        return chosen

    def _cost(self, cap: _Cap) -> Floats:
        return self._out_cost if cap.outwards else self._in_cost

    def _rounded(self, wanted: list[int]) -> list[int]:
        """As many of the wanted values, in their order, as there is time and host memory for."""
        link = self._problem.graph.link
        assert link is not None, "only a link moves values"
        size = self._problem.graph.arrays.size
        chosen: list[int] = []
        host_bytes = 0
        for value in wanted:
            tried = [*chosen, value]
            if host_bytes + int(size[value]) <= link.host_bytes and self._has_time(tried):
                chosen = tried
                host_bytes += int(size[value])
        return sorted(chosen)

    def _has_time(self, values: list[int]) -> bool:
        """Whether the copies out end before the moment begins, and no cap is exceeded."""
        made_at = self._precedence.made_at
        ends = 0.0
        for value in sorted(values, key=lambda value: int(made_at[value])):
            ends = max(ends, float(self._passed[made_at[value] + 1])) + float(self._out_cost[value])
        if ends > self._passed[self._moments[0]]:
            return False
        chosen = np.array(values)
        caps = self._caps[-_MOST_CAPS:]
        return all(self._cost(cap)[chosen[cap.members[chosen]]].sum() <= cap.percent + 1e-9 for cap in caps)

    def learn(self, schedule: Schedule, moved: list[int]) -> None:
        """Note what a schedule that moves these values had to wait for."""
        graph = self._problem.graph
        to_percent = 100.0 / (graph.baseline_seconds or 1.0)
        chosen = np.zeros(len(graph.values), dtype=np.bool_)
        chosen[moved] = True
        waited = list(islice(waits(graph, schedule), _WAITS_LEARNED))
        if not waited:
            self._caps = [cap for cap in self._caps if self._random.random() > _FORGOTTEN]
        for wait in waited:
            outwards = wait.kind is Offload
            at = self._precedence.made_at if outwards else self._read_at
            values = np.array(wait.values)
            members: Bools = (at >= at[values].min()) & (at <= at[values].max())
            cost = self._out_cost if outwards else self._in_cost
            taken = float(cost[members & chosen].sum())
            self._caps.append(_Cap(members, outwards, max(0.0, taken - wait.seconds * to_percent)))
