"""The best options for a given sequence of runs, by integer programming.

`ShapeModel(judge, shape, budget_bytes).solve(deadline)`

H-ILP decides two things: which node of a level runs in which phase, and with which option. With the first given, the
second is a small program that HiGHS solves within seconds for levels on which H-ILP as a whole takes minutes. A *shape*
is a sequence of nodes in which some forwards may come several times. Each has a *slot*: runs of one slot take the same
option, as a forward and its backward must. The columns are

    x[s,o]   slot s takes option o
    A[r]     some slot takes an option that reads a datum; only where several reads, all of them optional, keep it

and the rows limit memory after each run and in each moment of each run. What is in memory then is linear in x and A,
since the shape says between which runs a datum or a phantom waits for which reader. Corrections are those of
`hilp_model`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rematch.solvers.base import Deadline
from rematch.solvers.common.highs import LinearModel, minimise
from rematch.solvers.hiremate.level import Pass, Run
from rematch.solvers.hiremate.pricing import Judge, lift_bytes

_TOLERANCE = 1e-6  # of the room, for the tolerance of the solver

ShapeStep = tuple[int, int]  # a node and the slot whose option it takes
Terms = dict[int, float]  # coefficients by column
Need = frozenset[tuple[int, int]]  # slots and their options of which any needs a datum


class ShapeModel:
    """The program for one shape and one budget; costs are in percent of the level's least seconds."""

    def __init__(self, judge: Judge, shape: Sequence[ShapeStep], budget_bytes: int) -> None:
        self._judge, self._shape = judge, shape
        self._program = LinearModel()
        self._one = self._fixed_column()
        self._places: dict[int, list[int]] = defaultdict(list)
        for place, (_, slot) in enumerate(shape):
            self._places[slot].append(place)
        self._percent = 100.0 / (judge.least_seconds or 1.0)
        self._room_bytes = budget_bytes - judge.given_bytes
        self._unit_bytes = max(self._room_bytes, 1)
        self._columns = {slot: self._add_slot(slot) for slot in self._places}
        self._any_of: dict[Need, Terms] = {}
        self._data = self._data_after()
        self._phantoms = self._phantoms_after()
        for place in range(len(shape)):
            self._limit_memory(place)

    def solve(self, deadline: Deadline, known: Mapping[int, int] | None = None) -> dict[int, int] | None:
        """The fastest option of each slot within the budget, or None; `known` are options to improve on."""
        if self._room_bytes < 0:
            return None
        start, cutoff = None, math.inf
        if known is not None:
            chosen = {self._columns[slot][option] for slot, option in known.items()}
            start = {
                column: float(column in chosen) for columns in self._columns.values() for column in columns.values()
            }
            cutoff = sum(self._seconds(slot)[option] for slot, option in known.items()) * self._percent - _TOLERANCE
        found = minimise(self._program, deadline=deadline, cutoff=cutoff, start=start)
        point = found.point
        if point is None:
            return None
        return {
            slot: max(columns, key=lambda option, columns=columns: point[columns[option]])  # type: ignore[misc]
            for slot, columns in self._columns.items()
        }

    def runs(self, choice: Mapping[int, int]) -> tuple[Run, ...]:
        """The shape with the chosen options."""
        nodes = self._judge.nodes
        return tuple(
            Run(nodes[number].of, nodes[number].layer, choice[slot] if slot >= 0 else -1)
            for number, slot in self._shape
        )

    # Columns

    def _fixed_column(self) -> int:
        return int(self._program.columns(np.zeros(1), 1.0, integer=False)[0])

    def _seconds(self, slot: int) -> list[float]:
        """Per option of a slot, what all its runs take."""
        ways = zip(*(self._judge.nodes[self._shape[place][0]].ways for place in self._places[slot]), strict=True)
        return [math.fsum(way.seconds for way in of_option) for of_option in ways]

    def _add_slot(self, slot: int) -> dict[int, int]:
        """A column for each option that all runs of the slot can take."""
        seconds = self._seconds(slot)
        possible = [option for option, time in enumerate(seconds) if math.isfinite(time)]
        columns = self._program.columns(np.array([seconds[option] * self._percent for option in possible])).tolist()
        self._row(dict.fromkeys(columns, 1.0), 1.0, 1.0)
        return dict(zip(possible, columns, strict=True))

    def _any(self, need: Need) -> Terms:
        """1 if any slot takes one of its options that `need` names."""
        if need not in self._any_of:
            by_slot: dict[int, list[int]] = defaultdict(list)
            for slot, option in need:
                by_slot[slot].append(self._columns[slot][option])
            sums = [dict.fromkeys(columns, 1.0) for columns in by_slot.values()]
            if any(len(columns) == len(self._columns[slot]) for slot, columns in by_slot.items()):
                self._any_of[need] = {self._one: 1.0}
            elif len(sums) == 1:
                self._any_of[need] = sums[0]
            else:
                column = int(self._program.columns(np.zeros(1), integer=False)[0])
                for terms in sums:
                    self._row(terms | {column: -1.0}, upper=0.0)
                self._any_of[need] = {column: 1.0}
        return self._any_of[need]

    # What is in memory after each run

    def _data_after(self) -> list[dict[int, Terms]]:
        """Per run and datum that waits after it, when it does."""
        needs: list[dict[int, set[tuple[int, int]]]] = [defaultdict(set) for _ in self._shape]
        latest: dict[int, int] = {}
        for place, (number, slot) in enumerate(self._shape):
            ways = self._judge.nodes[number].ways
            for datum in self._judge.nodes[number].reads:
                readers = {(slot, option) for option in self._columns[slot] if datum in ways[option].reads}
                for between in range(self._made_at(datum, latest), place):
                    needs[between][datum] |= readers
            latest[number] = place
        everyone = {(self._shape[0][1], option) for option in self._columns[self._shape[0][1]]}
        for datum in self._judge.level.final:
            for between in range(self._made_at(datum, latest), len(self._shape)):
                needs[between][datum] |= everyone
        return [{datum: self._any(frozenset(need)) for datum, need in sorted(row.items()) if need} for row in needs]

    def _made_at(self, datum: int, latest: Mapping[int, int]) -> int:
        """The run of its oldest contribution; data without a maker are given and count elsewhere."""
        makers = self._judge.makers[datum]
        return min((latest[maker] for maker in makers), default=len(self._shape))

    def _phantoms_after(self) -> list[Terms]:
        """Per run, the weight of phantoms that wait for their backward after it."""
        waiting: list[Terms] = [{} for _ in self._shape]
        made_at: dict[int, int] = {}
        for place, (number, slot) in enumerate(self._shape):
            node = self._judge.nodes[number]
            if node.of is Pass.BACKWARD:
                options = self._judge.level.layers[node.layer].options
                weights = {c: self._weight(options[o].phantom_bytes) for o, c in self._columns[slot].items()}
                for between in range(made_at[node.layer], place):
                    waiting[between] |= weights
            if node.of is not Pass.LOSS:
                made_at[node.layer] = place
        return waiting

    # Memory

    def _limit_memory(self, place: int) -> None:
        number, slot = self._shape[place]
        node, sizes = self._judge.nodes[number], self._judge.level.data_bytes
        after = self._data[place]
        self._limit([*self._held(after), (1.0, self._phantoms[place])])
        before = self._data[place - 1] if place else {}
        fresh = [(self._weight(sizes[d]), self._absent(d, before)) for d in node.makes]
        at_first = [*self._held(before), *([(1.0, self._phantoms[place - 1])] if place else []), *fresh]
        columns = self._columns[slot]
        left = {columns[option]: self._weight(node.ways[option].left_bytes) for option in columns}
        for option in columns:
            for moment in node.ways[option].moments:
                spared = [
                    *((-self._weight(sizes[d]), self._absent(d, after)) for d in moment.finished),
                    *((-self._weight(sizes[d]), self._absent(d, before)) for d in moment.unmade),
                ]
                others = {
                    columns[other]: -self._weight(lift_bytes(moment, node.ways[other], sizes))
                    for other in columns
                    if other != option
                }
                own = {columns[option]: self._weight(moment.overhead_bytes)}
                self._limit([*at_first, (1.0, left), (1.0, own), (1.0, others), *spared])

    def _held(self, data: Mapping[int, Terms]) -> list[tuple[float, Terms]]:
        sizes = self._judge.level.data_bytes
        return [(self._weight(sizes[datum]), terms) for datum, terms in data.items()]

    def _absent(self, datum: int, data: Mapping[int, Terms]) -> Terms:
        """1 less whether the datum is among the data in memory; 0 for given data."""
        if not self._judge.makers[datum]:
            return {}
        return _sum([(1.0, {self._one: 1.0}), (-1.0, data.get(datum, {}))])

    def _limit(self, parts: Iterable[tuple[float, Terms]]) -> None:
        """The sum is at most the room; bytes are whole, so half of one is no excess."""
        self._row(_sum(parts), upper=(self._room_bytes + 0.5) / self._unit_bytes - _TOLERANCE)

    def _weight(self, size_bytes: int) -> float:
        return size_bytes / self._unit_bytes

    def _row(self, terms: Terms, lower: float = -math.inf, upper: float = math.inf) -> None:
        columns = np.array([list(terms)], dtype=np.int32)
        self._program.rows(columns, np.array([list(terms.values())]), lower, upper)


def _sum(parts: Iterable[tuple[float, Terms]]) -> Terms:
    total: Terms = defaultdict(float)
    for factor, terms in parts:
        for column, coefficient in terms.items():
            total[column] += factor * coefficient
    return {column: coefficient for column, coefficient in total.items() if coefficient != 0.0}
