"""Which values to move, and what to compute again: the relaxation's choice, rounded to what the link has time for.

`choice = Choice(problem, seed=0); chosen = choice.next(deadline); choice.learn(schedule, chosen.moved)`

The joint relaxation with one moment says how much of each value to move. Its shares are nearly all 0 or 1. We round
them, larger ones first, as long as the copies out can end before the moment in the order in which values are made. Then
the relaxation in which only these values move says what to compute again.

To the relaxation it makes no difference which of several equal blocks moves a value. To a schedule it does: a value has
all its memory from the fetch on, and one of several gigabytes is on its way while whole blocks run. So moving has a
price, too small to change anything else. It is lower for what is made early, which leaves early and comes back late,
when what was kept of later blocks is gone. A random part, new in every round, keeps large values from always coming
back one right after the other.

What the relaxation cannot see is learned from schedules: where one waits for a stretch of copies, all values that are
made (or read) in that stretch get a *cap*, the time that their copies may take together: what they took, less the wait.
Caps are rows of the next relaxation, so that another value moves in the place of one that the link has no time for.
They hold for this search alone and say nothing about the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

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
_PREFERENCE = 0.001  # of the time that a copy takes: it settles what is as good as equal, and little else
_NOISES = (0.1, 0.3, 1.0)  # in the order of rounding, until it gives values that were not tried


@dataclass(frozen=True, eq=False)
class _Cap:
    """A limit of the time that moving some values takes, in percent of the graph's baseline."""

    members: Bools  # by value
    outwards: bool
    percent: float


class Chosen(NamedTuple):
    """What the relaxation does where only some values may move."""

    moved: list[int]  # values
    again: list[int]  # operators, computed again after the moment


class Choice:
    """Sets of values to move, each learning from the schedules that moved the ones before."""

    def __init__(self, problem: Problem, seed: int) -> None:
        graph = problem.graph
        a = graph.arrays
        assert graph.link is not None, "only a link moves values"
        self._problem = problem
        self._precedence = Precedence.of(graph)
        (self.moment,) = first_moments(problem, 1)
        self._random = np.random.default_rng(seed)
        self._caps: list[_Cap] = []
        self._tried: set[tuple[int, ...]] = set()
        to_percent = 100.0 / (graph.baseline_seconds or 1.0)
        self._out_cost: Floats = a.size / graph.link.out_bytes_per_second * to_percent
        self._in_cost: Floats = a.size / graph.link.in_bytes_per_second * to_percent
        self._passed: Floats = np.concatenate(([0.0], np.cumsum(a.seconds[a.order]))) * to_percent  # by position
        self._read_at = np.full(len(graph.values), len(graph.ops))  # first read after the moment
        at = a.position[self._precedence.reader]
        later = at > self.moment
        np.minimum.at(self._read_at, self._precedence.read[later], at[later])

    def next(self, deadline: Deadline) -> Chosen:
        """What to move, and what to compute again; nothing if the relaxation moves none or has not ended in time."""
        model = self._model()
        bring = model.bring[0]
        for cap in self._caps[-_MOST_CAPS:]:
            members = np.flatnonzero(cap.members & (bring != ABSENT))
            model.program.rows(bring[members][None, :], self._cost(cap)[members], upper=cap.percent)
        self._prefer(model)
        found = minimise(model.program, deadline=deadline, relaxed=True)
        if found.point is None or not found.finished:
            return Chosen([], [])
        a = self._problem.graph.arrays
        share = np.where(bring != ABSENT, found.point[bring], 0.0)
        share[(a.producer == a.loss) | (share < _WORTH_MOVING)] = 0.0
        for level in (0.0, *_NOISES):
            rank = share + self._random.uniform(0.0, level, len(share))
            chosen = self._rounded(sorted(np.flatnonzero(share).tolist(), key=lambda value: (-rank[value], value)))
            if tuple(chosen) not in self._tried:
                break
        self._tried.add(tuple(chosen))
        return self._with_recomputation(chosen, deadline)

    def _model(self) -> JointModel:
        return JointModel(self._precedence, self._problem.budget_bytes, (self.moment,))

    def _prefer(self, model: JointModel) -> None:
        """Add a small price of moving, lower for what is made early, and different in every round."""
        values = np.flatnonzero(model.bring[0] != ABSENT)
        made_at = self._precedence.made_at[values] / max(self.moment, 1)
        price = _PREFERENCE * self._in_cost[values] * (made_at + self._random.uniform(0.0, 1.0, len(values)))
        total = model.program.columns(np.ones(1), upper=np.inf, integer=False)
        columns = np.concatenate((model.bring[0, values], total))
        model.program.rows(columns[None, :], np.append(price, -1.0), upper=0.0)

    def _with_recomputation(self, chosen: list[int], deadline: Deadline) -> Chosen:
        """The relaxation's choices where no other values move, each rounded to the nearest whole number."""
        model = self._model()
        bring, again = model.bring[0], model.again[0]
        others = np.setdiff1d(np.flatnonzero(bring != ABSENT), chosen)
        model.program.rows(bring[others][:, None], 1.0, upper=0.0)
        found = minimise(model.program, deadline=deadline, relaxed=True)
        if found.point is None or not found.finished:
            return Chosen(chosen, [])
        point = found.point
        ops = np.flatnonzero(again != ABSENT)
        return Chosen([value for value in chosen if point[bring[value]] > 0.5], ops[point[again[ops]] > 0.5].tolist())

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
        if ends > self._passed[self.moment]:
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
