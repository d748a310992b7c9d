"""A schedule for a recorded graph as what a tape does: which calls to note, what to drop, what to bring back when.

`tape_plan(recorded, schedule)`
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from rematch.capture.recorded_graph import RecordedGraph
from rematch.capture.recording import RecordedCall
from rematch.execute.tape.operators import operator_of
from rematch.execute.tape.plan import TapePlan, UnpackEvent
from rematch.graph import Phase, Schedule

Content = tuple[int, int]  # a call of forward, and which of its results


def tape_plan(recorded: RecordedGraph, schedule: Schedule) -> TapePlan:
    """The plan by which a tape runs `schedule`."""
    recording = recorded.recording
    places = [place for place in range(recording.forward_until) if not _passes_through(recording.calls[place])]
    number_of = {place: number for number, place in enumerate(places)}
    calls_of = [tuple(number_of[place] for place in made_of if place in number_of) for made_of in recorded.calls]
    again = _repeated(schedule)
    contents = _contents(recorded, number_of)
    made_again = {value for op in again for value in recorded.graph.ops[op].outputs if value in contents}
    kept = made_again & _alive_after_loss(recorded, schedule)
    dropped_later = kept & _made_anew_in_backward(recorded, schedule)
    dropped_values = (made_again - kept) | dropped_later
    dropped = frozenset(content for value in dropped_values for content in contents[value])
    noted = frozenset(call for op in again for call in calls_of[op])
    events = _events(recorded, calls_of, schedule, dropped_values, contents)
    forward = [recording.calls[place] for place in places]
    return TapePlan(
        tuple(call.target for call in forward),
        noted,
        dropped,
        events,
        dropped_later=frozenset(contents[value][-1] for value in dropped_later),
        rewritten=_rewritten(forward),
    )


def _passes_through(call: RecordedCall) -> bool:
    return operator_of(call.target).passes_through


def _rewritten(forward: list[RecordedCall]) -> frozenset[int]:
    """Calls of forward that make memory which forward writes over later."""
    written = {storage for call in forward for storage in call.writes}
    return frozenset(number for number, call in enumerate(forward) if written.intersection(call.makes))


def _repeated(schedule: Schedule) -> set[int]:
    seen: set[int] = set()
    again: set[int] = set()
    for op in schedule.ops.tolist():
        (again if op in seen else seen).add(op)
    return again


def _contents(recorded: RecordedGraph, number_of: dict[int, int]) -> dict[int, list[Content]]:
    """Per value that forward computes: its contents, the last of them what is there in the end."""
    found: dict[int, list[Content]] = {}
    value_of = {storage: value for value, storage in recorded.storage_of.items()}
    for op, places in enumerate(recorded.calls):
        made = set(recorded.graph.ops[op].outputs)
        for place in (place for place in places if place in number_of):
            for position, ref in enumerate(recorded.recording.calls[place].outputs):
                if ref is not None and value_of.get(ref.storage) in made:
                    found.setdefault(value_of[ref.storage], []).append((number_of[place], position))
    return found


def _alive_after_loss(recorded: RecordedGraph, schedule: Schedule) -> set[int]:
    alive: set[int] = set()
    for step in schedule.steps.tolist():
        if step < 0:
            alive.discard(~step)
            continue
        op = recorded.graph.ops[step]
        alive.update(op.outputs)
        if op.phase is Phase.LOSS:
            break
    return alive


def _made_anew_in_backward(recorded: RecordedGraph, schedule: Schedule) -> set[int]:
    """Values that are freed after the loss and computed again later."""
    freed: set[int] = set()
    anew: set[int] = set()
    for what, which in _happenings(recorded, schedule, {}):
        if what == _FREE:
            freed.add(which)
        else:
            anew.update(freed.intersection(recorded.graph.ops[which].outputs))
    return anew


def _events(
    recorded: RecordedGraph,
    calls_of: list[tuple[int, ...]],
    schedule: Schedule,
    dropped: set[int],
    contents: dict[int, list[Content]],
) -> tuple[UnpackEvent, ...]:
    """What happens at each unpacking of a dropped value, in the order of the recording."""
    unpacked = _unpacked_before(recorded, dropped)
    happenings = list(_happenings(recorded, schedule, unpacked))
    last = _last_uses(recorded, happenings)
    last_run = {which: number for number, (what, which) in enumerate(happenings) if what == _RUN}
    events: list[UnpackEvent] = []
    steps: list[int | Content] = []
    done: list[int] = []
    for number, (what, which) in enumerate(happenings):
        if what == _RUN:
            steps.extend(calls_of[which])
            if last_run[which] == number:
                done.extend(calls_of[which])
        elif what == _FREE and which in dropped:
            steps.append(contents[which][-1])
        elif what == _UNPACK:
            events.append(UnpackEvent(contents[which][-1], tuple(steps), number in last, tuple(done)))
            steps, done = [], []
    return tuple(events)


_RUN, _FREE, _UNPACK = "run", "free", "unpack"


def _happenings(
    recorded: RecordedGraph, schedule: Schedule, unpacked: dict[int, list[int]]
) -> Iterator[tuple[str, int]]:
    """After the loss, in turn: operators of forward that run again, values that are freed or unpacked."""
    in_backward = False
    for step in schedule.steps.tolist():
        if step < 0:
            if in_backward:
                yield _FREE, ~step
            continue
        op = recorded.graph.ops[step]
        if op.phase is Phase.LOSS:
            in_backward = True
        elif in_backward and op.phase is Phase.FORWARD:
            yield _RUN, step
        elif in_backward:
            for value in unpacked.get(step, ()):
                yield _UNPACK, value


def _last_uses(recorded: RecordedGraph, happenings: list[tuple[str, int]]) -> set[int]:
    """The unpackings after which nothing uses the value until it is freed or computed again."""
    last: set[int] = set()
    needed: set[int] = set()
    for number in range(len(happenings) - 1, -1, -1):
        what, which = happenings[number]
        if what == _FREE:
            needed.discard(which)
        elif what == _RUN:
            needed.difference_update(recorded.graph.ops[which].outputs)
            needed.update(recorded.graph.ops[which].inputs)
        else:
            if which not in needed:
                last.add(number)
            needed.add(which)
    return last


def _unpacked_before(recorded: RecordedGraph, dropped: set[int]) -> dict[int, list[int]]:
    """Per operator of backward: the dropped values that autograd asks for before it, in turn."""
    starts = [(places[0], op) for op, places in enumerate(recorded.calls) if places]
    starts.sort()
    positions = [start for start, _ in starts]
    asked = [
        (time, number, value)
        for value in dropped
        for saved in recorded.recording.storages[recorded.storage_of[value]].saved
        for time, number in saved.unpacked
    ]
    asked.sort()
    found: dict[int, list[int]] = {}
    for time, _, value in asked:
        place = bisect_left(positions, time)
        if place < len(starts):
            found.setdefault(starts[place][1], []).append(value)
    return found
