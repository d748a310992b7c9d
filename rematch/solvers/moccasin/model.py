"""Retention intervals as a CP-SAT model: variables, constraints (2)-(8), hints, and the schedule of a solution.

`RetentionModel(graph, StagedEvents(graph), limits=[2] * len(graph.ops))`

The words are those of Bartan et al., "Moccasin" (ICML 2023), section 2; `solver` says where we differ and why. Time
is a line of *events*, at each of which at most one operator runs. Computation i of operator v happens at event
start[v,i] if active[v,i]; each output of it is in memory from there through event end[v,i]. What is in memory at the
event after the last one, the *horizon*, is there at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from rematch.graph import Graph, Schedule
from rematch.graph.intervals import to_intervals
from rematch.graph.matrices import stage_of_each_compute

Precedences = Literal["literals", "reservoir"]


class Events(Protocol):
    """The line on which computations lie: one is at event `spacing * slot + offset(op)`, and its slot is variable."""

    horizon: int
    spacing: int
    ordered: bool  # whether first computations follow the default order, and no two computations can collide

    def offset(self, op: int) -> int: ...

    def slots(self, op: int, computation: int) -> range:
        """Where a computation of `op`, 0 the first, may be."""

    def place(self, schedule: Schedule) -> list[int] | None:
        """The event of each computation of `schedule`; None if there is no room for it on this line."""


class FreeEvents:
    """Domain (9): as many events as there are computations, in any order."""

    ordered = False
    spacing = 1

    def __init__(self, graph: Graph, computations: Sequence[int]) -> None:
        self.horizon = sum(computations)
        self._before = _ancestor_counts(graph)

    def offset(self, op: int) -> int:
        return 0

    def slots(self, op: int, computation: int) -> range:
        return range(self._before[op] + computation, self.horizon)

    def place(self, schedule: Schedule) -> list[int] | None:
        count = len(schedule.ops)
        return list(range(count)) if count <= self.horizon else None


class StagedEvents:
    """Domain (11): a slot is a run through all operators in default order, and a stage is `passes` such runs.

    Stage t has order[t] for the first time in its last run, and before that only operators computed before. The paper
    has one pass. One more stage, after the last operator, has room to make targets again.
    """

    ordered = True

    def __init__(self, graph: Graph, passes: int = 1) -> None:
        self._graph, self._passes = graph, passes
        self._position: list[int] = graph.arrays.position.tolist()
        self._first_stage: list[int] = graph.arrays.first_stage.tolist()
        self._last_stage: list[int] = graph.arrays.last_stage.tolist()
        self.spacing = len(graph.ops)
        self.horizon = (len(graph.ops) + 1) * passes * self.spacing

    def offset(self, op: int) -> int:
        return self._position[op]

    def slots(self, op: int, computation: int) -> range:
        if computation == 0:
            after_first = (self._position[op] + 1) * self._passes
            return range(after_first - 1, after_first)
        return range(self._first_stage[op] * self._passes, (self._last_stage[op] + 1) * self._passes)

    def place(self, schedule: Schedule) -> list[int] | None:
        events: list[int] = []
        stage_before, run, position_before = -1, 0, -1
        stages = stage_of_each_compute(self._graph, schedule).tolist()
        for op, stage in zip(schedule.ops.tolist(), stages, strict=True):
            position = self._position[op]
            if stage != stage_before:
                run = 0
            elif position <= position_before:
                run += 1
            if position == stage:
                run = self._passes - 1
            elif run >= self._passes:
                return None
            events.append((stage * self._passes + run) * self.spacing + position)
            stage_before, position_before = stage, position
        return events


def _ancestor_counts(graph: Graph) -> list[int]:
    """Per operator, how many must have run before it can."""
    a = graph.arrays
    before = [0] * len(graph.ops)  # as bit sets
    for op in graph.order:
        for value in a.inputs_of(op).tolist():
            producer = int(a.producer[value])
            before[op] |= before[producer] | 1 << producer
    return [ancestors.bit_count() for ancestors in before]


@dataclass(frozen=True, eq=False)
class Computation:
    """One possible computation of an operator; variables of the model."""

    op: int
    earliest: int  # event
    slot: Any
    start: Any  # event
    active: Any
    ends: dict[int, Any]  # by output; what weighs nothing is never freed and has an end for the first computation only
    lengths: dict[int, Any]  # by output


@dataclass(frozen=True)
class _Cover:
    """A literal: the use lies in the source's interval of the value."""

    literal: Any
    source: Computation
    value: int
    use: Computation


@dataclass(frozen=True)
class Peak:
    """Memory beside the residents, in units of its own."""

    variable: Any
    floor: int


_Placed = dict[Computation, tuple[int, dict[int, int]]]  # the event of each active computation, and of its ends


class RetentionModel:
    """All but budget and objective: `limit_memory` and what to minimise come after."""

    def __init__(
        self, graph: Graph, events: Events, limits: Sequence[int], precedences: Precedences = "literals"
    ) -> None:
        from ortools.sat.python import cp_model

        self.graph, self.events = graph, events
        self.program = cp_model.CpModel()
        self._peak: tuple[Any, int] | None = None  # and the value it starts from
        self._count: Any = None  # of computations, where their order is free
        self._covers: list[_Cover] = []
        self._late: list[tuple[Any, Computation]] = []  # literal: the computation comes after the loss
        self._always = self.program.new_constant(1)
        end = self.program.new_constant(events.horizon)
        self._end = Computation(-1, events.horizon, end, end, self._always, {}, {})  # in place of a reader
        self.of_op = [[self._computation(op, i) for i in range(limits[op])] for op in range(len(graph.ops))]
        for several in self.of_op:
            self._in_turn(several)
        require = self._require_literals if precedences == "literals" else self._require_reservoir
        for value, uses in self._uses():
            require(value, uses)
        if precedences == "literals":
            self._nothing_in_vain()
        self._hold()
        if not events.ordered:
            self._one_at_a_time()
            self._first_after_first()
            self._once_windows()
            self._keep_turns()

    @property
    def computations(self) -> Iterator[Computation]:
        for several in self.of_op:
            yield from several

    # (2), (7), (8)

    def _computation(self, op: int, index: int) -> Computation:
        slots, horizon = self.events.slots(op, index), self.events.horizon
        slot = self.program.new_int_var(slots[0], slots[-1], f"slot {op}.{index}")
        start = self.events.spacing * slot + self.events.offset(op)
        earliest = self.events.spacing * slots[0] + self.events.offset(op)
        active = self._always if index == 0 else self.program.new_bool_var(f"active {op}.{index}")
        ends, lengths = {}, {}
        for value in self.graph.ops[op].outputs:
            if self.graph.arrays.size[value]:
                ends[value] = self.program.new_int_var(earliest, horizon, f"end {value}.{index}")
                lengths[value] = self.program.new_int_var(1, horizon + 1 - earliest, "")
            elif index == 0:
                ends[value] = self._end.start
        return Computation(op, earliest, slot, start, active, ends, lengths)

    # (3)

    def _in_turn(self, computations: list[Computation]) -> None:
        for this, following in pairwise(computations):
            self.program.add_implication(following.active, this.active)
            self.program.add(this.start < following.start).only_enforce_if(following.active)
            for value in following.ends:
                self.program.add(this.ends[value] <= following.start).only_enforce_if(following.active)

    # (5)

    def _uses(self) -> Iterator[tuple[int, list[Computation]]]:
        """Each produced value with each reader of it; the loss reads what is held, the end what must be there then."""
        a = self.graph.arrays
        for value in np.flatnonzero(a.producer >= 0).tolist():
            readers = a.users_of(value).tolist()
            for reader in [*readers, a.loss] if a.held[value] else readers:
                yield value, self.of_op[reader]
            if a.held[value] or a.target[value]:
                yield value, [self._end]

    def _sources(self, value: int) -> list[Computation]:
        return [c for c in self.of_op[self.graph.arrays.producer[value]] if value in c.ends]

    def _require_literals(self, value: int, uses: list[Computation]) -> None:
        """Each active use lies in an interval of the value."""
        for use in uses:
            covers = [_Cover(self.program.new_bool_var(""), source, value, use) for source in self._sources(value)]
            for cover in covers:
                source, literal = cover.source, cover.literal
                self.program.add(source.start < use.start).only_enforce_if(literal)
                self.program.add(source.ends[value] >= use.start).only_enforce_if(literal)
                self.program.add_implication(literal, source.active)
            self.program.add_bool_or([cover.literal for cover in covers]).only_enforce_if(use.active)
            self._covers += covers

    def _require_reservoir(self, value: int, uses: list[Computation]) -> None:
        """(10): an interval fills the reservoir by one as long as it lasts, a use takes one out for its event."""
        sources = self._sources(value)
        fills = [(c.start, 1, c.active) for c in sources] + [(c.ends[value] + 1, -1, c.active) for c in sources]
        takes = [(use.start + after, change, use.active) for use in uses for after, change in ((0, -1), (1, 1))]
        times, changes, actives = zip(*fills, *takes, strict=True)
        self.program.add_reservoir_constraint_with_active(times, changes, actives, 0, len(sources) + len(uses))

    def _nothing_in_vain(self) -> None:
        """A computation after the first serves some use; of no loss, and it spares the search of what does not."""
        served: dict[Computation, list[Any]] = {c: [] for several in self.of_op for c in several[1:]}
        for cover in self._covers:
            if cover.source in served:
                served[cover.source].append(cover.literal)
        for c, literals in served.items():
            self.program.add_bool_or(literals).only_enforce_if(c.active)

    def _hold(self) -> None:
        """Held values are not freed after the loss: one that is made again is there twice at that event."""
        a = self.graph.arrays
        for value in np.flatnonzero(a.held & (a.size > 0)).tolist():
            sources = self._sources(value)
            for this, following in pairwise(sources):
                late = self.program.new_bool_var("")
                self._late.append((late, following))
                before = self.program.add(following.start < self.of_op[a.loss][0].start)
                before.only_enforce_if(late.negated(), following.active)
                self.program.add(this.ends[value] >= following.start).only_enforce_if(late, following.active)

    # (6), and the turns of operators that run once

    def _one_at_a_time(self) -> None:
        """No two computations at one event, and none after an event without one: shifted schedules are the same."""
        self.program.add_no_overlap([self._event_of(c) for c in self.computations])
        self._count = self.program.new_int_var(len(self.of_op), self.events.horizon, "count")
        self.program.add(self._count == sum(c.active for c in self.computations))
        for c in self.computations:
            self.program.add(c.start < self._count).only_enforce_if(c.active)

    def _first_after_first(self) -> None:
        """What (5) implies for first computations."""
        a = self.graph.arrays
        for op, several in enumerate(self.of_op):
            for value in a.inputs_of(op).tolist():
                self.program.add(self.of_op[a.producer[value]][0].start < several[0].start)

    def _once_windows(self) -> None:
        a = self.graph.arrays
        turns = [self.of_op[op][0].start for op in self.graph.order if a.once[op]]
        for c in self.computations:
            after, until = int(a.once_from[c.op]), int(a.once_until[c.op])
            if after > 0:
                self.program.add(c.start > turns[after - 1]).only_enforce_if(c.active)
            if until < len(turns) and not a.once[c.op]:
                self.program.add(c.start < turns[until]).only_enforce_if(c.active)

    def _keep_turns(self) -> None:
        a = self.graph.arrays
        turns = [self.of_op[op][0].start for op in self.graph.order if a.turn[op] >= 0]
        for earlier, later in pairwise(turns):
            self.program.add(earlier < later)
        if self.graph.recompute_after_loss:
            for c in (c for several in self.of_op for c in several[1:]):
                self.program.add(c.start > self.of_op[a.loss][0].start).only_enforce_if(c.active)

    def _event_of(self, c: Computation) -> Any:
        return self.program.new_optional_fixed_size_interval_var(c.start, 1, c.active, "")

    # (4), (13)

    def limit_memory(self, least_bytes: int, most_bytes: int) -> Peak:
        """Outputs, workspaces and residents take no more than a variable between two limits."""
        users = list(self._memory_users())
        unit = math.gcd(*(size for _, size in users)) or 1
        floor, ceiling = ((limit - self.graph.resident_bytes) // unit for limit in (least_bytes, most_bytes))
        peak = self.program.new_int_var(floor, ceiling, "peak")
        self._peak = (peak, ceiling)
        self.program.add_cumulative([user for user, _ in users], [size // unit for _, size in users], peak)
        return Peak(peak, floor)

    def _memory_users(self) -> Iterator[tuple[Any, int]]:
        a = self.graph.arrays
        for c in self.computations:
            for value, length in c.lengths.items():
                retained = self.program.new_optional_interval_var(c.start, length, c.ends[value] + 1, c.active, "")
                yield retained, int(a.size[value])
            if a.workspace[c.op]:
                yield self._event_of(c), int(a.workspace[c.op])

    # schedules in and out

    def hint(self, schedule: Schedule) -> bool:
        """Start the search from `schedule`, with a value for every variable; False if the model has no room for it."""
        placed = self._placed(schedule)
        if placed is None:
            return False
        self.program.clear_hints()  # type: ignore[no-untyped-call]
        if self._peak is not None:
            self.program.add_hint(*self._peak)
        if self._count is not None:
            self.program.add_hint(self._count, len(schedule.ops))
        for c in self.computations:
            active = c in placed
            event, ends = placed[c] if active else (c.earliest, dict.fromkeys(c.ends, c.earliest))
            self.program.add_hint(c.slot, event // self.events.spacing)
            if c.active is not self._always:
                self.program.add_hint(c.active, active)
            for value, length in c.lengths.items():
                self.program.add_hint(c.ends[value], ends[value])
                self.program.add_hint(length, ends[value] + 1 - event)
        for cover in self._covers:
            self.program.add_hint(cover.literal, _is_covered(cover, placed))
        for literal, c in self._late:
            self.program.add_hint(
                literal, c in placed and placed[c][0] > placed[self.of_op[self.graph.arrays.loss][0]][0]
            )
        return True

    def _placed(self, schedule: Schedule) -> _Placed | None:
        """Where the schedule's computations are on the line of events; None if there is no room for them."""
        events = self.events.place(schedule)
        if events is None:
            return None
        events.append(self.events.horizon)
        placed: _Placed = {self._end: (self.events.horizon, {})}
        waiting = [iter(several) for several in self.of_op]
        for interval in to_intervals(self.graph, schedule):
            c = next(waiting[interval.op], None)
            if c is None:
                return None
            ends = dict(zip(self.graph.ops[c.op].outputs, (events[end] for end in interval.ends), strict=True))
            placed[c] = (events[interval.start], ends | {v: self.events.horizon for v in c.ends if v not in c.lengths})
        return placed

    def sequence(self, value_of: Callable[[Any], int]) -> list[int]:
        """The operators of a solution in the order they run."""
        active = [(value_of(c.start), c.op) for c in self.computations if value_of(c.active)]
        return [op for _, op in sorted(active)]


def _is_covered(cover: _Cover, placed: _Placed) -> bool:
    if cover.source not in placed or cover.use not in placed:
        return False
    start, ends = placed[cover.source]
    return start < placed[cover.use][0] <= ends[cover.value]


def without_vain(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule less the computations after the first of which nothing that weighs is used."""
    a = graph.arrays
    ops = schedule.ops.tolist()
    first = {op: event for event, op in reversed(list(enumerate(ops)))}
    needed = set(np.flatnonzero((a.target | a.held) & (a.size > 0)).tolist())  # after the present event
    kept: list[int] = []
    for event, op in reversed(list(enumerate(ops))):
        if event > first[op] and needed.isdisjoint(graph.ops[op].outputs):
            continue
        kept.append(op)
        needed.difference_update(graph.ops[op].outputs)
        reads = a.inputs_of(op).tolist()
        reads += np.flatnonzero(a.held).tolist() if op == a.loss else []
        needed.update(value for value in reads if a.size[value])
    return Schedule.from_ops(graph, kept[::-1])
