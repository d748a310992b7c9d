"""Schedules as Moccasin's retention intervals, and back.

`from_intervals(graph, to_intervals(graph, schedule)) == schedule` for a schedule made by `Schedule.from_ops`.

After Bartan et al., "Moccasin" (2023), section 2: each computation of an operator starts an interval in which its
result is retained, and the end of the interval is the last event at which it is in memory. Events are the computations
of the schedule, numbered from 0.

Deviations. An operator with several outputs has an end for each. A value that is never freed ends at the number of
computations, one past the last event. A value that is computed anew while alive ends where its next interval
starts: both copies are in memory during that event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rematch.errors import ScheduleError
from rematch.graph.model import Graph
from rematch.graph.schedule import Schedule
from rematch.graph.simulate import simulate


@dataclass(frozen=True, slots=True)
class Retention:
    """One computation of `op` at event `start`; `ends[i]` is the last event at which its i-th output is in memory."""

    op: int
    start: int
    ends: tuple[int, ...]


def to_intervals(graph: Graph, schedule: Schedule) -> tuple[Retention, ...]:
    """The retention intervals of a valid schedule, by start."""
    simulate(graph, schedule.without_moves()).checked()
    ops = schedule.ops.tolist()
    ends: list[dict[int, int]] = []  # per event, output -> end
    event_of: dict[int, int] = {}  # value alive -> event that made it
    for step in schedule.steps.tolist():
        if step < 0:
            ends[event_of.pop(~step)][~step] = len(ends) - 1
            continue
        event = len(ends)
        for value in graph.ops[step].outputs:
            if value in event_of:
                ends[event_of[value]][value] = event
            event_of[value] = event
        ends.append({})
    return tuple(
        Retention(op, event, tuple(ends[event].get(value, len(ops)) for value in graph.ops[op].outputs))
        for event, op in enumerate(ops)
    )


def from_intervals(graph: Graph, intervals: Iterable[Retention]) -> Schedule:
    """The schedule that computes and frees as the intervals say; `ScheduleError` says why there is none."""
    by_start = sorted(intervals, key=lambda interval: interval.start)
    _check_intervals(graph, by_start)
    freed_at: list[list[int]] = [[] for _ in range(len(by_start) + 1)]
    start_of: dict[int, int] = {}  # value -> start of its next interval
    for interval in reversed(by_start):
        for value, end in zip(graph.ops[interval.op].outputs, interval.ends, strict=True):
            following = start_of.get(value)
            if following is not None and end > following:
                raise ScheduleError(
                    f"value {graph.values[value].name!r} is retained from {interval.start} to {end}, "
                    f"beyond {following} where its next interval starts"
                )
            if end != following:
                freed_at[end].append(value)
            start_of[value] = interval.start
    steps: list[int] = []
    for interval in by_start:
        steps.append(interval.op)
        steps += [~value for value in sorted(freed_at[interval.start])]
    schedule = Schedule(np.array(steps, dtype=np.int32))
    simulate(graph, schedule).checked()
    return schedule


def _check_intervals(graph: Graph, by_start: list[Retention]) -> None:
    for event, interval in enumerate(by_start):
        if interval.start != event:
            raise ScheduleError(f"no interval, or more than one, starts at event {min(event, interval.start)}")
        if not 0 <= interval.op < len(graph.ops):
            raise ScheduleError(f"the interval at event {event} is of operator {interval.op}, which does not exist")
        op = graph.ops[interval.op]
        if len(interval.ends) != len(op.outputs):
            raise ScheduleError(
                f"the interval of {op.name!r} at event {event} has {len(interval.ends)} ends "
                f"for {len(op.outputs)} outputs"
            )
        for end in interval.ends:
            if not event <= end <= len(by_start):
                raise ScheduleError(
                    f"the interval of {op.name!r} at event {event} ends at {end}, not from {event} to {len(by_start)}"
                )
