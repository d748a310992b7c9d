"""A schedule for a recorded graph as what a tape does: which calls to note, what to drop, what to bring back when.

`tape_plan(recorded, schedule)`
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator
from dataclasses import dataclass

from rematch.capture.recorded_graph import RecordedGraph
from rematch.capture.recording import RecordedCall
from rematch.execute.tape.operators import operator_of
from rematch.execute.tape.plan import FETCH, EventStep, TapePlan, UnpackEvent
from rematch.graph import Compute, Fetch, Free, Offload, Phase, Schedule, simulate
from rematch.graph.schedule import Step

Content = tuple[int, int]  # a call of forward, and which of its results


def tape_plan(recorded: RecordedGraph, schedule: Schedule) -> TapePlan:
    """The plan by which a tape runs `schedule`."""
    recording = recorded.recording
    places = [place for place in range(recording.forward_until) if not _passes_through(recording.calls[place])]
    number_of = {place: number for number, place in enumerate(places)}
    calls_of = [tuple(number_of[place] for place in made_of if place in number_of) for made_of in recorded.calls]
    contents = _contents(recorded, number_of)
    does = _Does.of(recorded, schedule, contents)
    dropped = frozenset(content for value in does.dropped for content in contents[value])
    noted = frozenset(call for op in does.again for call in calls_of[op])
    events = _events(recorded, calls_of, schedule, does.dropped | does.moved, contents)
    forward = [recording.calls[place] for place in places]
    moved = frozenset(contents[value][-1] for value in does.moved)
    keeps_everything = not dropped and not noted and not moved
    return TapePlan(
        tuple(call.target for call in forward),
        noted,
        dropped | moved,
        events,
        dropped_later=frozenset(contents[value][-1] for value in does.dropped_later),
        rewritten=_rewritten(forward),
        moved=moved,
        leaving=_leaving(recorded, calls_of, schedule, {value: contents[value][-1] for value in does.moved}),
        readings=recording.readings if keeps_everything else None,
        splits_products=recorded.splits_products,
    )


def at_unpackings(recorded: RecordedGraph, schedule: Schedule) -> Schedule:
    """The schedule as a tape runs it: something is done only when autograd asks for something that is not there."""
    return _fetched_at_unpackings(recorded, _recomputed_at_unpackings(recorded, schedule))


def _recomputed_at_unpackings(recorded: RecordedGraph, schedule: Schedule) -> Schedule:
    """Recomputations wait until backward asks next, and so do values that they read or make and that are freed."""
    does = _Does.of(recorded, schedule, recorded.storage_of)
    asking = _unpacked_before(recorded, does.dropped | does.moved)
    steps: list[Step] = []
    waiting: list[Step] = []
    touched: set[int] = set()
    in_backward = False
    for step in schedule:
        match step:
            case Compute(number):
                op = recorded.graph.ops[number]
                in_backward |= op.phase is Phase.LOSS
                if in_backward and op.phase is Phase.FORWARD:
                    waiting.append(step)
                    touched.update((*op.inputs, *op.outputs))
                    continue
                comes_first = bool(waiting) and (number in asking or not touched.isdisjoint(op.inputs))
            case Free(value) if value in touched:
                waiting.append(step)
                continue
            case Free():
                comes_first = False
            case _:
                comes_first = bool(waiting)
        if comes_first:
            steps += waiting
            waiting, touched = [], set()
        steps.append(step)
    return Schedule.of([*steps, *waiting])


def _fetched_at_unpackings(recorded: RecordedGraph, schedule: Schedule) -> Schedule:
    """Fetches where a tape can begin them: at such a moment before their place if there is memory, else after it."""
    if not schedule.moves:
        return schedule
    does = _Does.of(recorded, schedule, recorded.storage_of)
    asking = _unpacked_before(recorded, does.dropped | does.moved)
    graph, steps = recorded.graph, list(schedule)
    seen = simulate(graph, schedule).checked()
    level, peak_bytes = seen.timeline_bytes.copy(), seen.peak_bytes
    places: dict[int, list[Step]] = {}
    for at, step in enumerate(steps):
        if isinstance(step, Fetch):
            size_bytes = graph.values[step.value].size_bytes
            place = _asked_before(recorded, steps, at, asking)
            if place is not None and level[place:at].max() + size_bytes <= peak_bytes:
                level[place:at] += size_bytes
            else:
                place = _asked_after(recorded, steps, at, asking)
                level[at:place] -= size_bytes
            places.setdefault(place, []).append(step)
    moved: list[Step] = []
    for at, step in enumerate(steps):
        moved += places.get(at, ())
        if not isinstance(step, Fetch):
            moved.append(step)
    return Schedule.of(moved)


def _asked_before(recorded: RecordedGraph, steps: list[Step], at: int, asking: Container[int]) -> int | None:
    """The last step before a fetch at which backward asks for something, if its value is gone by then."""
    fetched = steps[at]
    assert isinstance(fetched, Fetch)
    for place in range(at - 1, -1, -1):
        match steps[place]:
            case Free(value) if value == fetched.value:
                return None
            case Compute(op) if recorded.graph.ops[op].phase is Phase.LOSS:
                return None
            case Compute(op) if op in asking:
                return place
    return None


def _asked_after(recorded: RecordedGraph, steps: list[Step], at: int, asking: Container[int]) -> int:
    """The next step after a fetch at which backward asks for something, or forward's calls run again, or it is read."""
    fetched = steps[at]
    assert isinstance(fetched, Fetch)
    for place in range(at + 1, len(steps)):
        match steps[place]:
            case Compute(number):
                op = recorded.graph.ops[number]
                if number in asking or op.phase is Phase.FORWARD or fetched.value in op.inputs:
                    return place
    return at


@dataclass(frozen=True)
class _Does:
    """What a schedule does with operators and with the values that forward makes."""

    again: set[int]  # operators that run more than once
    dropped: set[int]  # values that are computed again when backward needs them
    dropped_later: set[int]  # those of them that are there until a while after the loss
    moved: set[int]  # values that go to host memory

    @staticmethod
    def of(recorded: RecordedGraph, schedule: Schedule, known: Container[int]) -> _Does:
        again = _repeated(schedule)
        made_again = {value for op in again for value in recorded.graph.ops[op].outputs if value in known}
        kept = made_again & _alive_after_loss(recorded, schedule)
        dropped_later = kept & _made_anew_in_backward(recorded, schedule)
        moved = {step.value for step in schedule if isinstance(step, Offload)}
        return _Does(again, (made_again - kept) | dropped_later, dropped_later, moved)


def _leaving(
    recorded: RecordedGraph, calls_of: list[tuple[int, ...]], schedule: Schedule, moved: dict[int, Content]
) -> dict[int, tuple[Content, ...]]:
    """Per call of forward: what has left when it comes. After the last call it is what leaves before the loss runs."""
    leaving: dict[int, list[Content]] = {}
    position = 0
    for step in schedule:
        match step:
            case Compute(op):
                if recorded.graph.ops[op].phase is Phase.LOSS:
                    break
                position = max(position, calls_of[op][0] + 1 if calls_of[op] else 0)
            case Free(value) if value in moved:
                leaving.setdefault(position, []).append(moved[value])
    return {position: tuple(contents) for position, contents in leaving.items()}


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
        elif what == _RUN:
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
    steps: list[EventStep] = []
    done: list[int] = []
    for number, (what, which) in enumerate(happenings):
        if what == _RUN:
            steps.extend(calls_of[which])
            if last_run[which] == number:
                done.extend(calls_of[which])
        elif what == _FREE and which in dropped:
            steps.append(contents[which][-1])
        elif what == _FETCH:
            steps.append((FETCH, *contents[which][-1]))
        elif what == _UNPACK:
            events.append(UnpackEvent(contents[which][-1], tuple(steps), number in last, tuple(done)))
            steps, done = [], []
    return tuple(events)


_RUN, _FREE, _FETCH, _UNPACK = "run", "free", "fetch", "unpack"


def _happenings(
    recorded: RecordedGraph, schedule: Schedule, unpacked: dict[int, list[int]]
) -> Iterator[tuple[str, int]]:
    """After the loss, in turn: operators of forward that run again, values that are freed, fetched or unpacked."""
    in_backward = False
    for step in schedule:
        match step:
            case Free(value) if in_backward:
                yield _FREE, value
            case Fetch(value):
                yield _FETCH, value
            case Compute(op):
                phase = recorded.graph.ops[op].phase
                if phase is Phase.LOSS:
                    in_backward = True
                elif in_backward and phase is Phase.FORWARD:
                    yield _RUN, op
                elif in_backward:
                    for value in unpacked.get(op, ()):
                        yield _UNPACK, value


def _last_uses(recorded: RecordedGraph, happenings: list[tuple[str, int]]) -> set[int]:
    """The unpackings after which nothing uses the value until it is freed or computed again."""
    last: set[int] = set()
    needed: set[int] = set()
    for number in range(len(happenings) - 1, -1, -1):
        what, which = happenings[number]
        if what in (_FREE, _FETCH):
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
