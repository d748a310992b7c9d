"""H-ILP's program for one level and one budget; `hilp` solves it.

`HilpModel(Judge(level), budget_bytes).program`

Gusak et al., HiRemate, ICML 2025, appendix B. In phase t node t runs for the first time, after any of the nodes before
it, each at most once and in topological order. The columns are, with the paper's names,

    R[t,k,o]   node k runs with option o in phase t
    P[t,d]     datum d is in memory before phase t
    S[t,k,d]   the contribution of node k is in datum d before phase t; only where d has several makers
    Sp[t,j,o]  the phantom of layer j with option o is in memory before phase t
    A[t,k,d]   datum d is in memory after node k, which makes or reads it, in phase t
    U[t,k]     memory before node k in phase t

and the rows are those for options (5)-(9), validity, data dependencies, liveness, and memory (10) with its correction
terms. What differs:

- A is a column, not an alias of P, C and D. Where d has one maker, C is R, and D is A before less A after. Given R, the
  least A is what later readers and P of the next phase ask for, so that D needs no rows that say when it is 1.
- The paper deletes a phantom in its backward only (8), so that no forward could run again before. Here a forward that
  runs again replaces the phantom. To keep one until then would be useless: sum_o Sp[t,j,o] + sum_o R[t,F_j,o] <= 1,
  which contains (6). For the same reason P[t,d] + R[t,k] <= 1 where k alone makes d. From forward to backward in phase
  t the phantom is W[t,j,o], with Sp[t+1] <= W, R[t,B_j] <= W, and W <= Sp[t] + R[t,F_j], for (7) and (9).
- The row of a correction term for option o must hold when another option runs. The paper finds it weaker than (10), but
  (10) is too strict for that option if it never has all inputs and outputs in memory at once; so the row is lifted by
  what that option spares.
- A node has columns only in phases in which someone could still want what it makes, and data accordingly. Backward
  nodes run once unless `repeat_backward`. What they make then stays until its last reader, which presolve finds out.
- With `ahead`, a forward runs again only in the phases of the last backward passes up to the last one that could want
  it: a smaller program, for a good schedule to begin with.
- Memory is in units of the budget, less a millionth for the tolerance of the solver.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rematch.graph.model import Floats
from rematch.solvers.common.highs import LinearModel
from rematch.solvers.hiremate.level import Moment, Pass, Run
from rematch.solvers.hiremate.pricing import Judge, lift_bytes

_TOLERANCE = 1e-6

Terms = dict[int, float]  # coefficients by column


@dataclass(eq=False)
class HilpModel:
    """The program. Costs are in percent of the level's least seconds: 100 is everything once, as fast as possible."""

    judge: Judge
    budget_bytes: int
    corrections: bool = True
    repeat_backward: bool = False
    ahead: int | None = None  # how many backward passes before its own a forward may run again; None: at any time
    program: LinearModel = field(default_factory=LinearModel, init=False)

    def __post_init__(self) -> None:
        level, judge = self.judge.level, self.judge
        self.nodes = judge.nodes
        self.phases = len(self.nodes)
        room_bytes = self.budget_bytes - judge.given_bytes
        self.unit_bytes = max(room_bytes, 1)
        self.limit = (room_bytes + 0.5) / self.unit_bytes - _TOLERANCE  # bytes are whole: half of one is no excess
        self.percent = 100.0 / (judge.least_seconds or 1.0)
        self.run: dict[tuple[int, int, int], int] = {}  # R
        self.there: dict[tuple[int, int], int] = {}  # P
        self.phantom: dict[tuple[int, int, int], int] = {}  # Sp
        self._during: dict[tuple[int, int], list[_Touch]] = defaultdict(list)  # per phase and node
        self._change: dict[tuple[int, int], list[tuple[float, Terms]]] = defaultdict(list)  # of phantoms after a node
        self.wanted, self.useful = _useful_phases(judge, repeat_backward=self.repeat_backward, ahead=self.ahead)
        self._readers: list[list[int]] = [[] for _ in level.data_bytes]
        for number, node in enumerate(self.nodes):
            for datum in node.reads:
                self._readers[datum].append(number)
        self._add_runs()
        for datum in range(len(level.data_bytes)):
            if judge.makers[datum]:
                self._add_datum(datum)
        for layer in level.backward_order:
            self._add_phantom(layer)
        for phase in range(self.phases):
            self._limit_memory(phase)

    # What a point says

    def runs_at(self, point: Floats) -> list[Run]:
        """In turn."""
        chosen = sorted(key for key, column in self.run.items() if point[column] > 0.5)
        return [self._as_run(node, option) for _, node, option in chosen]

    def point_of(self, runs: Iterable[Run]) -> dict[int, float] | None:
        """All R of runs in phases; HiGHS finds the other columns. None if they are not of the program's kind."""
        point = dict.fromkeys(self.run.values(), 0.0)
        phase, before = 0, -1
        for run in runs:
            number = self.judge.node_of(run)
            column = self.run.get((phase, number, max(run.option, 0)))
            if column is None or number <= before:
                return None
            point[column] = 1.0
            phase, before = (phase + 1, -1) if number == phase else (phase, number)
        return point

    def _as_run(self, number: int, option: int) -> Run:
        node = self.nodes[number]
        return Run(node.of, node.layer, -1 if node.of is Pass.LOSS else option)

    # Runs: (5) and validity

    def _add_runs(self) -> None:
        for number, node in enumerate(self.nodes):
            options = [option for option, way in enumerate(node.ways) if way.possible]
            cost = np.array([node.ways[option].seconds * self.percent for option in options])
            for phase in self.useful[number]:
                columns = self.program.columns(cost).tolist()
                self.run.update({(phase, number, option): c for option, c in zip(options, columns, strict=True)})
                self._row(dict.fromkeys(columns, 1.0), lower=float(phase == number), upper=1.0)

    def _runs(self, phase: int, number: int, options: Iterable[int] | None = None) -> Terms:
        """The sum of R over some options, all by default."""
        chosen = range(len(self.nodes[number].ways)) if options is None else options
        columns = (self.run.get((phase, number, option)) for option in chosen)
        return {column: 1.0 for column in columns if column is not None}

    def _reading(self, phase: int, number: int, datum: int) -> Terms:
        ways = self.nodes[number].ways
        return self._runs(phase, number, [option for option, way in enumerate(ways) if datum in way.reads])

    # Data: dependencies and liveness

    def _add_datum(self, datum: int) -> None:
        makers = self.judge.makers[datum]
        for phase in range(makers[0] + 1, self.wanted[datum] + 1):
            self.there[phase, datum] = self._column(lower=self._is_final(phase, datum))
        contributions = self._add_contributions(datum) if len(makers) > 1 else {}
        for phase in range(makers[0], self.phases):
            self._follow(phase, datum, contributions)

    def _is_final(self, phase: int, datum: int) -> bool:
        """Whether it must be there before this phase because nothing runs any more."""
        return phase == self.phases and datum in self.judge.level.final

    def _add_contributions(self, datum: int) -> dict[tuple[int, int], int]:
        """S of a datum with several makers, by phase and maker."""
        columns: dict[tuple[int, int], int] = {}
        for maker in self.judge.makers[datum]:
            for phase in range(maker + 1, self.wanted[datum] + 1):
                columns[phase, maker] = self._column(lower=self._is_final(phase, datum))
                self._at_most({columns[phase, maker]: 1.0}, {self.there[phase, datum]: 1.0})
                before = _terms(columns.get((phase - 1, maker)))
                self._at_most({columns[phase, maker]: 1.0}, before | self._runs(phase - 1, maker))
        return columns

    def _follow(self, phase: int, datum: int, contributions: Mapping[tuple[int, int], int]) -> None:
        """Where the datum is in memory in a phase, from node to node that makes or reads it."""
        makers = [maker for maker in self.judge.makers[datum] if phase in self.useful[maker]]
        readers = [
            k for k in self._readers[datum] if k <= phase and phase in self.useful[k] and self._reading(phase, k, datum)
        ]
        now = _terms(self.there.get((phase, datum)))
        at_end = _terms(self.there.get((phase + 1, datum)))
        if not makers and not readers:
            self._at_most(at_end, now)
            return
        after = [*(self._some() for _ in range(len(makers) + len(readers) - 1)), at_end]
        wanted = after[len(makers) - 1] if makers else {}
        for maker in makers:
            now = self._make(phase, maker, datum, now, after.pop(0), wanted)
        for reader in readers:
            reading = self._reading(phase, reader, datum)
            self._at_most(reading, now)
            for maker in self.judge.makers[datum] if contributions else ():
                self._at_most(reading, _terms(contributions.get((phase, maker))) | self._runs(phase, maker))
            self._at_most(after[0], now)
            self._during[phase, reader].append(_Touch(datum, now, now, after[0]))
            now = after.pop(0)

    def _make(self, phase: int, maker: int, datum: int, before: Terms, after: Terms, wanted: Terms) -> Terms:
        """A maker's turn. `wanted` is what is in memory after the last maker: until there nothing may be lost."""
        running = self._runs(phase, maker)
        if len(self.judge.makers[datum]) == 1:
            meanwhile = before | running
            if before:
                self._row(meanwhile, upper=1.0)
        else:
            meanwhile = self._some()
            for part in (before, running):
                self._at_most(part, meanwhile)
                if after is not wanted:
                    self._row(_sum((1.0, part), (1.0, wanted), (-1.0, after)), upper=1.0)
            self._at_most(meanwhile, before | running)
        self._at_most(after, meanwhile)
        self._during[phase, maker].append(_Touch(datum, before, meanwhile, after))
        return after

    # Phantoms: (6)-(9)

    def _add_phantom(self, layer: int) -> None:
        forward, backward = self.judge.number[Pass.FORWARD, layer], self.judge.number[Pass.BACKWARD, layer]
        options = [option for option, way in enumerate(self.nodes[backward].ways) if way.possible]
        last = max(self.useful[backward])
        for phase in range(forward + 1, last + 1):
            self.phantom.update({(phase, layer, option): self._column() for option in options})
        for phase in range(forward, last + 1):
            waiting = dict.fromkeys((self.phantom[phase, layer, o] for o in options if phase > forward), 1.0)
            if waiting:
                self._row(waiting | self._runs(phase, forward), upper=1.0)
            for option in options:
                self._pass_phantom(phase, layer, option)

    def _pass_phantom(self, phase: int, layer: int, option: int) -> None:
        forward, backward = self.judge.number[Pass.FORWARD, layer], self.judge.number[Pass.BACKWARD, layer]
        before = _terms(self.phantom.get((phase, layer, option)))
        at_end = _terms(self.phantom.get((phase + 1, layer, option)))
        using = self._runs(phase, backward, [option])
        between = self._some() if using and at_end else using or at_end
        for part in (using, at_end):
            if part is not between:
                self._at_most(part, between)
        self._at_most(between, before | self._runs(phase, forward, [option]))
        weight = self._weight(self.nodes[forward].ways[option].left_bytes)
        self._change[phase, forward].append((weight, _sum((1.0, between), (-1.0, before))))
        self._change[phase, backward].append((weight, _sum((1.0, at_end), (-1.0, between))))

    # Memory: (10) and corrections

    def _limit_memory(self, phase: int) -> None:
        in_use = self._in_use_before(phase)
        for number in range(self.phases):
            touches = self._during[phase, number]
            if phase in self.useful[number]:
                at_start = self._some(upper=self.limit)
                self._at_most(in_use, at_start)
                in_use = at_start
                self._limit_run(phase, number, in_use)
            sizes = ((self._datum_weight(t.datum), _sum((1.0, t.after), (-1.0, t.before))) for t in touches)
            in_use = _sum((1.0, in_use), *sizes, *self._change[phase, number])
        self._row(in_use, upper=self.limit)

    def _in_use_before(self, phase: int) -> Terms:
        data = {c: self._datum_weight(d) for (t, d), c in self.there.items() if t == phase}
        phantoms = {
            column: self._weight(self.judge.level.layers[layer].options[option].phantom_bytes)
            for (t, layer, option), column in self.phantom.items()
            if t == phase
        }
        return data | phantoms

    def _limit_run(self, phase: int, number: int, in_use: Terms) -> None:
        """Memory while a node runs, if it does."""
        node, touches, data_bytes = self.nodes[number], self._during[phase, number], self.judge.level.data_bytes
        options = [option for option in range(len(node.ways)) if (phase, number, option) in self.run]
        held = _sum(
            (1.0, in_use),
            *((self._datum_weight(t.datum), _sum((1.0, t.meanwhile), (-1.0, t.before))) for t in touches),
            *((self._weight(node.ways[o].left_bytes), self._runs(phase, number, [o])) for o in options),
        )
        if not self.corrections:
            overheads = ((self._weight(node.ways[o].overhead_bytes), self._runs(phase, number, [o])) for o in options)
            self._row(_sum((1.0, held), *overheads), upper=self.limit)
            return
        for option in options:
            others = [other for other in options if other != option]
            for moment in node.ways[option].moments:
                spared = (
                    (-self._datum_weight(t.datum), _sum((1.0, t.meanwhile), (-1.0, kept)))
                    for t in touches
                    if (kept := t.kept_in(moment)) is not None
                )
                lifted = (
                    (-self._weight(lift_bytes(moment, node.ways[o], data_bytes)), self._runs(phase, number, [o]))
                    for o in others
                )
                overhead = (self._weight(moment.overhead_bytes), self._runs(phase, number, [option]))
                self._row(_sum((1.0, held), overhead, *spared, *lifted), upper=self.limit)

    # Columns and rows

    def _weight(self, size_bytes: int) -> float:
        return size_bytes / self.unit_bytes

    def _datum_weight(self, datum: int) -> float:
        return self._weight(self.judge.level.data_bytes[datum])

    def _column(self, lower: float = 0.0) -> int:
        """0 or 1. It would be whole wherever R is, but to branch on it halves HiGHS's time."""
        return int(self.program.columns(np.zeros(1), lower)[0])

    def _some(self, upper: float = 1.0) -> Terms:
        """A column within phases, whole wherever R and those between phases are."""
        return {int(self.program.columns(np.zeros(1), upper=upper, integer=False)[0]): 1.0}

    def _at_most(self, left: Terms, right: Terms) -> None:
        """left <= right"""
        if left:
            self._row(_sum((1.0, left), (-1.0, right)), upper=0.0)

    def _row(self, terms: Terms, lower: float = -math.inf, upper: float = math.inf) -> None:
        columns = np.array([list(terms)], dtype=np.int32)
        self.program.rows(columns, np.array([list(terms.values())]), lower, upper)


@dataclass(frozen=True)
class _Touch:
    """A datum in the run of a node that makes or reads it: in memory before, meanwhile and after."""

    datum: int
    before: Terms
    meanwhile: Terms
    after: Terms

    def kept_in(self, moment: Moment) -> Terms | None:
        """When the datum takes memory in a moment, if not meanwhile whatever its surroundings want."""
        if self.datum in moment.finished:
            return self.after
        return self.before if self.datum in moment.unmade else None


def _terms(column: int | None) -> Terms:
    return {} if column is None else {column: 1.0}


def _sum(*parts: tuple[float, Terms]) -> Terms:
    total: Terms = defaultdict(float)
    for factor, terms in parts:
        for column, coefficient in terms.items():
            total[column] += factor * coefficient
    return {column: coefficient for column, coefficient in total.items() if coefficient != 0.0}


def _useful_phases(judge: Judge, *, repeat_backward: bool, ahead: int | None) -> tuple[list[int], list[Sequence[int]]]:
    """Per datum the last phase before which it may be wanted, and per node the phases in which it may run."""
    nodes, end = judge.nodes, len(judge.nodes)
    wanted = [end if datum in judge.level.final else -1 for datum in range(len(judge.makers))]
    useful: list[Sequence[int]] = [range(0)] * end
    for number in range(end - 1, -1, -1):
        node = nodes[number]
        until = min(end - 1, max([number, *(wanted[datum] for datum in node.makes)]))
        if node.of is Pass.FORWARD and (Pass.BACKWARD, node.layer) in judge.number:
            until = max(until, max(useful[judge.number[Pass.BACKWARD, node.layer]]))
        repeats = node.of is Pass.FORWARD or (node.of is Pass.BACKWARD and repeat_backward)
        if not repeats:
            useful[number] = range(number, number + 1)
        elif ahead is None:
            useful[number] = range(number, until + 1)
        else:
            useful[number] = (number, *range(max(number + 1, until - ahead), until + 1))
        for datum in node.reads:
            wanted[datum] = max(wanted[datum], max(useful[number]))
    return wanted, useful
