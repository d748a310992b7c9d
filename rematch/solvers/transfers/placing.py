"""Where copies go in a schedule: values leave as late, and come back as early, as the memory allows.

`placed(problem, steps)`

The steps have each copy where a value is made and read, so that computation would wait for all of them. Three things
change that, none of which takes more memory than the budget:

1. A moved value is freed when its copy has ended, or earlier where the memory is needed, oldest first. Where it is not
   needed before the value is read again, it is neither freed nor fetched.
2. A copy to host memory that nobody fetches is left out.
3. A fetch begins earlier, so that the copy has arrived when it is read and the copies after it have too, as far back as
   there is memory for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rematch.graph import Compute, Fetch, Free, Graph, Offload, Schedule, simulate
from rematch.graph.model import Floats, Longs
from rematch.graph.schedule import Step
from rematch.solvers.base import Problem


def placed(problem: Problem, steps: Sequence[Step]) -> Schedule:
    """The schedule with its copies in better places; `steps` are valid, within the budget or not."""
    delayed = _without_needless_copies(_freed_late(problem, steps))
    return _fetched_early(problem, delayed)


def _freed_late(problem: Problem, steps: Sequence[Step]) -> list[Step]:
    """Free what has left as late as the budget, or the copy out, asks for it."""
    graph = problem.graph
    assert graph.link is not None, "only a link moves values"
    room = problem.budget_bytes - graph.resident_bytes
    size = [value.size_bytes for value in graph.values]
    leaving: set[int] = set()
    waiting: dict[int, None] = {}  # to be freed, the first to leave first
    departs: dict[int, float] = {}
    alive: set[int] = set()
    used, now, out_until = 0, 0.0, 0.0
    out: list[Step] = []

    def free(value: int) -> None:
        nonlocal used
        out.append(Free(value))
        alive.discard(value)
        used -= size[value]

    def make_room(needed: int) -> None:
        nonlocal now
        while waiting and (used + needed > room or departs[next(iter(waiting))] <= now):
            value = next(iter(waiting))
            now = max(now, departs[value])
            del waiting[value]
            free(value)

    for step in steps:
        match step:
            case Offload(value):
                leaving.add(value)
                out_until = departs[value] = max(now, out_until) + size[value] / graph.link.out_bytes_per_second
                out.append(step)
            case Free(value) if value in leaving:
                waiting[value] = None
            case Free(value):
                free(value)
            case Fetch(value):
                if value in waiting:  # it is still there
                    del waiting[value]
                    continue
                make_room(size[value])
                out.append(step)
                alive.add(value)
                used += size[value]
            case Compute(op):
                for value in graph.ops[op].outputs:
                    if value in waiting:  # made anew
                        del waiting[value]
                        free(value)
                made = graph.ops[op].outputs
                make_room(sum(size[value] for value in made) + graph.ops[op].workspace_bytes)
                out.append(step)
                used += sum(size[value] for value in made if value not in alive)
                alive.update(made)
                now += graph.ops[op].seconds
    out += [Free(value) for value in waiting]
    return out


def _without_needless_copies(steps: list[Step]) -> list[Step]:
    fetched = {step.value for step in steps if isinstance(step, Fetch)}
    return [step for step in steps if not isinstance(step, Offload) or step.value in fetched]


def _fetched_early(problem: Problem, steps: list[Step]) -> Schedule:
    """Begin each fetch so early that it, and those after it, arrive in time, as far as there is memory."""
    graph = problem.graph
    assert graph.link is not None, "only a link moves values"
    schedule = Schedule.of(steps)
    if not schedule.moves:
        return schedule
    level = simulate(graph, schedule).checked().timeline_bytes
    begins = _begins_without_waiting(graph, schedule)
    computes = np.flatnonzero(schedule.steps >= 0)
    earliest = _earliest(graph, steps)
    moved_to: dict[int, list[int]] = {}  # step -> fetches that begin right before it
    upcoming = math.inf  # when the link must be free for the copies after
    for at in range(len(steps) - 1, -1, -1):
        step = steps[at]
        if not isinstance(step, Fetch):
            continue
        size = graph.values[step.value].size_bytes
        following = int(np.searchsorted(computes, at))
        read = int(computes[min(following, len(computes) - 1)])
        upcoming = min(upcoming, float(begins[read])) - size / graph.link.in_bytes_per_second
        place = _hoisted(at, earliest[at], upcoming, begins, level, problem.budget_bytes - size, steps)
        level[place:at] += size
        moved_to.setdefault(place, []).append(at)
    hoisted: list[Step] = []
    for at, step in enumerate(steps):
        hoisted += [steps[other] for other in reversed(moved_to.get(at, []))]
        if not isinstance(step, Fetch):
            hoisted.append(step)
    return Schedule.of(hoisted)


def _begins_without_waiting(graph: Graph, schedule: Schedule) -> Floats:
    """When each step would begin if copies arrived at once."""
    from rematch.graph import kernels

    a = graph.arrays
    assert graph.link is not None, "only a link moves values"
    out_seconds, in_seconds = a.size / graph.link.out_bytes_per_second, np.zeros(len(a.size))
    begins, ends = np.zeros((2, len(schedule)))
    kernels.run_clock(schedule.steps, a.pick(kernels.Values), a.seconds, out_seconds, in_seconds, begins, ends)
    return begins


def _hoisted(at: int, earliest: int, wanted: float, begins: Floats, level: Longs, room: int, steps: list[Step]) -> int:
    """The computation before which a fetch at step `at` goes: the last that begins as early as `wanted`, with room.

    Right before a computation all has been freed that can be.
    """
    place = at
    for step in range(at - 1, earliest - 1, -1):
        if level[step] > room or (place < at and begins[place] <= wanted):
            break
        if isinstance(steps[step], Compute):
            place = step
    return place


def _earliest(graph: Graph, steps: list[Step]) -> dict[int, int]:
    """For each fetch the step after which it may come: where its value was freed, or the loss."""
    gone: dict[int, int] = {}
    loss = 0
    earliest: dict[int, int] = {}
    for at, step in enumerate(steps):
        match step:
            case Free(value):
                gone[value] = at + 1
            case Compute(op) if graph.recompute_after_loss and op == graph.loss:
                loss = at + 1
            case Fetch(value):
                earliest[at] = max(gone[value], loss)
    return earliest
