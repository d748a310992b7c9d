"""A schedule for budgets near the least: minimum cuts say what stays at each stage, all else goes when room is needed.

`frugal_schedule(Problem(graph, budget_bytes), Deadline(10))` is a schedule within the budget, or None.

Stage s is what runs after the first computation at position s - 1 through that at position s. The *essential* values of
a stage are the fewest bytes from which what it has to deliver can be made: the inputs of its first computation, and
what is essential for the next stage. They are a minimum cut in the network of `least_memory`, found from the last stage
to the first, where only operators may run again whose inputs and outputs have room beside the essential values.

Then the stages run in turn. Everything stays in memory until there is no room for the next computation. Then values go,
those first that are cheap to make again, large and not read soon, but neither essential ones nor inputs of what is
being made. Values that are gone are made again from what is there, as deep as it takes. Where room for some operator
is missing it does not run again in this stage: essential values are found anew and the stages before are repeated.

In a cut, running operators again has a price too, which is lowered until a cut leaves enough room. The highest price
to begin with makes the fastest schedules, and the lowest the leanest, but for some budgets only one in between works.

Local search cannot reach such schedules: on a chain they recompute each operator as often as the chain is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from rematch.graph import Schedule
from rematch.graph.model import Bools, Floats, Ints, Longs
from rematch.solvers.base import Deadline, Problem
from rematch.solvers.common.least_memory import essential_values
from rematch.solvers.common.precedence import Precedence

MOST_RUNS = 200  # computations per operator: longer schedules are of no use to anyone
_MOST_RETREATS = 20  # in a stage, before an operator is forbidden there
_MOST_FORBIDDEN = 1  # per stage on average
_WEIGHTS = (3.0, 0.3, 0.03, 0.0)  # of running everything again, in budgets, when cuts are compared
_ALIVE_ANYWAY = (0.01, 0.0, 1.0)  # of its bytes: the price of a value that the first computation before touches
_MOST_OPERATORS = 3_000  # of a graph: tables of stages by operators and by values grow with the square
STYLES = tuple(product(range(len(_WEIGHTS)), _ALIVE_ANYWAY))  # ways to price cuts, each best for some budgets


def frugal_schedule(
    problem: Problem,
    deadline: Deadline,
    precedence: Precedence | None = None,
    styles: Sequence[tuple[int, float]] = STYLES,
) -> Schedule | None:
    """A schedule within the budget whose first computations follow the default order, or None."""
    if len(problem.graph.ops) > _MOST_OPERATORS:
        return None
    precedence = precedence or Precedence.of(problem.graph)
    for first, alive_anyway in styles:
        stages = _Stages(precedence, problem.budget_bytes, _WEIGHTS[first:], alive_anyway)
        schedule = _schedule(problem, stages, deadline)
        if schedule is not None or deadline.expired:
            return schedule
    return None


def _schedule(problem: Problem, stages: _Stages, deadline: Deadline) -> Schedule | None:
    """All stages in turn; where one is stuck, from an earlier one again, with an operator less to run."""
    if not stages.plan(deadline):
        return None
    run = _Run(stages)
    position, forbidden = 0, 0
    while position <= stages.count:
        stuck = run.stage(position, deadline)
        if stuck is None:
            position += 1
            continue
        forbidden += 1
        again_from = stages.forbid(stuck, position) if stuck >= 0 else None
        if again_from is None or forbidden > _MOST_FORBIDDEN * stages.count:
            return None
        position = again_from
        run.restore(run.before[position])
    return Schedule.from_ops(problem.graph, run.sequence)


class _Stages:
    """What each stage needs, delivers and may run again."""

    def __init__(
        self, precedence: Precedence, budget_bytes: int, weights: tuple[float, ...], alive_anyway: float
    ) -> None:
        p, a = precedence, precedence.graph.arrays
        self.precedence, self.arrays, self._weights, self._alive_anyway = p, a, weights, alive_anyway
        self.count, values = len(p.graph.ops), len(p.graph.values)
        self.room = budget_bytes - a.resident_bytes
        self.seconds_price: Floats = a.seconds / (p.graph.baseline_seconds or 1.0) * max(self.room, 0)
        self.made: Bools = a.producer >= 0
        order = np.argsort(p.reader, kind="stable")
        starts = np.searchsorted(p.reader[order], np.arange(self.count + 1))
        self.inputs: list[Ints] = []
        for op in range(self.count):
            read = p.read[order[starts[op] : starts[op + 1]]]
            self.inputs.append(np.unique(read[self.made[read]]))
        self.outputs: list[Ints] = [a.outputs_of(op) for op in range(self.count)]
        self.touched: list[Ints] = [
            np.union1d(self.inputs[op], self.outputs[op]).astype(np.int32) for op in range(self.count)
        ]
        self.inputs_list, self.outputs_list = [x.tolist() for x in self.inputs], [x.tolist() for x in self.outputs]
        self.op_bytes = [int(a.size[t].sum() + w) for t, w in zip(self.touched, a.workspace.tolist(), strict=True)]
        self.targets: Ints = np.flatnonzero((a.target | a.held) & self.made).astype(np.int32)
        stage = np.arange(self.count + 1)[:, None]
        self.may_run: Bools = (a.first_stage <= stage) & (stage <= a.last_stage) & (a.position < stage)
        self.runs: Bools = self.may_run.copy()  # those of them that have room beside what is essential
        self.essential: Bools = np.zeros((self.count + 2, values), dtype=np.bool_)  # per stage

    def plan(self, deadline: Deadline) -> bool:
        """Find what is essential for each stage; False if there is no time or no room."""
        for position in range(self.count, -1, -1):
            if deadline.expired or not self._find_essential(position):
                return False
        return True

    def forbid(self, op: int, position: int) -> int | None:
        """Never run `op` again in a stage; returns the stage from which all must be repeated, None if none can be."""
        self.may_run[position, op] = False
        while position > 0:
            before = self.essential[position].copy()
            if not self._find_essential(position):
                return None
            if np.array_equal(before, self.essential[position]):
                return position
            position -= 1
        return 0

    def delivers(self, position: int) -> Ints:
        """What must be alive when the first computation of a stage begins."""
        if position == self.count:
            return self.targets
        op = self.arrays.order[position]
        later = self.essential[position + 1].copy()
        later[self.outputs[op]] = False
        later[self.inputs[op]] = True
        return np.flatnonzero(later).astype(np.int32)

    def enough(self, position: int, wanted: Ints, alive: Bools, price: Longs) -> Bools:
        """The fewest bytes of what is alive from which a stage can make all that is wanted."""
        return self._cut(position, wanted, alive, price, self.runs[position], 0.0)[0]

    def _cut(
        self, position: int, wanted: Ints, alive: Bools, price: Longs, may_run: Bools, weight: float
    ) -> tuple[Bools, Bools]:
        made = self.made & (self.precedence.made_at < position)
        demand = np.zeros(len(made), dtype=np.bool_)
        demand[wanted] = True
        again_price = (weight * self.seconds_price).astype(np.int64)
        return essential_values(self.precedence, made, demand, alive, price, again_price, may_run)

    def _find_essential(self, position: int) -> bool:
        """The essential values of a stage that leave least to recompute and have room; False if none have."""
        price = self.arrays.size.copy()
        before: Ints = self.touched[self.arrays.order[position - 1]] if position > 0 else self.targets[:0]
        price[before] = np.ceil(self._alive_anyway * price[before])
        workspace = int(self.arrays.workspace[self.arrays.order[position - 1]]) if position > 0 else 0
        wanted = self.delivers(position)
        may_run = self.may_run[position] & ~self._no_room_at_the_end(position)
        for weight in self._weights:
            allowed = may_run
            while True:
                essential, again = self._cut(position, wanted, self.made, price, allowed, weight)
                essential = essential | self.held(position)
                self.essential[position] = essential
                if self._bytes_with(essential, before) + workspace > self.room:
                    break
                too_large = [
                    op
                    for op in np.flatnonzero(again).tolist()
                    if self._bytes_with(essential, self.touched[op]) + int(self.arrays.workspace[op]) > self.room
                ]
                if not too_large:
                    self.runs[position] = allowed
                    return True
                allowed = allowed.copy()
                allowed[too_large] = False
        return False

    def _no_room_at_the_end(self, position: int) -> Bools:
        """Makers of what lasts to the end that could not be the last of them to run in a stage: no room beside it."""
        lasting = np.zeros(len(self.made), dtype=np.bool_)
        lasting[self.targets] = True
        if position < self.count:
            lasting &= self.essential[position + 1]
            lasting[self.outputs[self.arrays.order[position]]] = False
        blocked = np.zeros(self.count, dtype=np.bool_)
        for op in np.unique(self.arrays.producer[lasting]).tolist():
            blocked[op] = self._bytes_with(lasting, self.touched[op]) + int(self.arrays.workspace[op]) > self.room
        return blocked

    def _bytes_with(self, values: Bools, others: Ints) -> int:
        size = self.arrays.size
        return int(size[values].sum() + size[others[~values[others]]].sum())

    def held(self, position: int) -> Bools:
        """What is alive all through a stage because the loss came before it."""
        a = self.arrays
        return np.asarray(a.held & self.made & (a.loss >= 0 and position > a.position[a.loss]))


class _Goal:
    """An operator to compute, and the order in which its inputs are seen to; op -1 only wants its inputs."""

    def __init__(self, op: int, inputs: Ints, run: _Run) -> None:
        self.op, self.inputs = op, inputs
        self._before = run.snapshot()
        self.secured: list[int] = inputs[run.alive[inputs]].tolist()
        self._order: list[int] = inputs[~run.alive[inputs]].tolist()
        if len(self._order) > 1:
            weight = run.heaviest()
            self._order.sort(key=lambda value: (-weight[value], run.stages.precedence.made_at[value]))
        self._others = [self._order[i:] + self._order[:i] for i in range(len(self._order))] if len(inputs) > 1 else []

    def next_missing(self, alive: Bools) -> int | None:
        """The next input that has to be made; those that are there are secured."""
        while True:
            for value in self._order:
                if not alive[value]:
                    return value
                self.secured.append(value)
            self._order = [value for value in self.inputs.tolist() if value not in self.secured]
            if not self._order:
                return None

    def try_another_order(self, run: _Run) -> bool:
        """Go back to where the goal was set and begin with another input, with none secured; False: none is left."""
        if not self._others:
            return False
        run.restore(self._before)
        self.secured, self._order = [], self._others.pop(0)
        return True


_Snapshot = tuple[Bools, int, int]


class _Run:
    """What is alive while a schedule is made, and the schedule so far."""

    def __init__(self, stages: _Stages) -> None:
        a = stages.arrays
        self.stages = stages
        self.sequence: list[int] = []
        self.before: list[_Snapshot] = []  # per stage that was begun
        self.alive: Bools = np.zeros(len(stages.made), dtype=np.bool_)
        self._used = 0
        self._price: Floats = np.append(a.seconds, 0.0)[a.producer] / np.maximum(a.size, 1)

    def heaviest(self) -> list[int]:
        """Per value, the bytes of the largest operator that has to run to make it from what is alive."""
        weight, alive = [0] * len(self.alive), self.alive.tolist()
        for op in self.stages.arrays.order[: self._position].tolist():
            made = [value for value in self.stages.outputs_list[op] if not alive[value]]
            if made:
                most = max([self.stages.op_bytes[op], *(weight[value] for value in self.stages.inputs_list[op])])
                for value in made:
                    weight[value] = most
        return weight

    def snapshot(self) -> _Snapshot:
        return self.alive.copy(), self._used, len(self.sequence)

    def restore(self, snapshot: _Snapshot) -> None:
        alive, self._used, length = snapshot
        self.alive = alive.copy()
        del self.sequence[length:]

    def stage(self, position: int, deadline: Deadline) -> int | None:
        """Run a stage; returns None, or the operator that should not run again in it, or -1 if it cannot be done."""
        del self.before[position:]
        self.before.append(self.snapshot())
        self._position = position
        self._essential = self.stages.essential[position]
        self._next_use = self._next_uses(position)
        first = int(self.stages.arrays.order[position]) if position < self.stages.count else -1
        goals = [_Goal(first, self.stages.delivers(position), self)]
        retreats, stuck = 0, -1
        while goals:
            if deadline.expired or len(self.sequence) > MOST_RUNS * self.stages.count:
                return -1
            if self._advance(goals):
                continue
            if retreats == 0:
                stuck = goals[-1].op if len(goals) > 1 else -1
            retreats += 1
            while goals and not goals[-1].try_another_order(self):
                goals.pop()
            if not goals or retreats > _MOST_RETREATS:
                return stuck
        return None

    def _next_uses(self, position: int) -> Longs:
        p = self.stages.precedence
        at = p.graph.arrays.position[p.reader]
        later = at >= position
        uses = np.full(len(self.alive), self.stages.count + 1, dtype=np.int64)
        np.minimum.at(uses, p.read[later], at[later])
        return uses

    def _advance(self, goals: list[_Goal]) -> bool:
        """Compute the last goal's operator, or make a goal of one that makes an input it lacks."""
        goal = goals[-1]
        missing = goal.next_missing(self.alive)
        if missing is not None:
            maker = int(self.stages.arrays.producer[missing])
            if not self.stages.runs[self._position, maker] or any(other.op == maker for other in goals):
                return False
            goals.append(_Goal(maker, self.stages.inputs[maker], self))
            return True
        if goal.op >= 0:
            if not self._make_room(goal.op, goals):
                return False
            self.sequence.append(goal.op)
            made = self.stages.outputs[goal.op]
            self._used += int(self.stages.arrays.size[made[~self.alive[made]]].sum())
            self.alive[made] = True
        goals.pop()
        return True

    def _make_room(self, op: int, goals: list[_Goal]) -> bool:
        """Let values go until `op` can run."""
        a, touched = self.stages.arrays, self.stages.touched[op]
        missing = (
            self._used + int(a.size[touched[~self.alive[touched]]].sum()) + int(a.workspace[op]) - self.stages.room
        )
        if missing <= 0:
            return True
        pinned = np.zeros(len(self.alive), dtype=np.bool_)
        pinned[touched] = True
        pinned |= self.stages.held(self._position)
        for goal in goals:
            pinned[goal.secured] = True
        if len(goals) == 1:  # the first computation, behind which only the next stage's essential values matter
            return self._evict(missing, ~pinned) <= 0
        missing = self._evict(missing, ~pinned & ~self._essential)
        if missing > 0:
            wanted = np.unique(np.concatenate([goal.inputs for goal in goals]))
            price = a.size.copy()
            price[pinned] = 0
            enough = self.stages.enough(self._position, wanted, self.alive, price)
            missing = self._evict(missing, ~pinned & ~enough)
        return missing <= 0

    def _evict(self, missing: int, may_go: Bools) -> int:
        """Let go of some of the values that may go, until none are missing; returns the bytes that still are."""
        size = self.stages.arrays.size
        values = np.flatnonzero(may_go & self.alive & (size > 0))
        score = self._price[values] / (self._next_use[values] - self._position + 1)
        for value in values[np.argsort(score, kind="stable")].tolist():
            if missing <= 0:
                break
            self.alive[value] = False
            self._used -= int(size[value])
            missing -= int(size[value])
        return missing
