"""The oracle: what a schedule costs, or the first step at which it breaks, in words.

`simulate(graph, schedule).peak_bytes`

Every schedule passes through it before anyone sees it. Kernels that search (local search, pruning) keep running totals
of their own for speed; tests hold them to this one.

Memory while an operator runs is what is resident, what is alive (its inputs among it), all its outputs, and its
workspace; an output that was alive already counts twice until the operator ends. A value that moves is alive from its
fetch on and until it is freed. Memory therefore depends on the order of the steps alone, and no delay of the link can
break a budget. Host memory is taken by `Offload` and stays taken.

The time of a schedule is that of its computations, or what `clock` says where it moves values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematch.errors import ScheduleError
from rematch.graph.model import Floats, Graph, Longs
from rematch.graph.schedule import Compute, Fetch, Free, Offload, Schedule, step_of


@dataclass(frozen=True, eq=False)
class Simulation:
    """What the oracle saw. For a broken schedule the figures cover the steps before `broken_step`."""

    error: str | None  # None for a valid schedule, else why the first broken step breaks
    broken_step: int | None
    seconds: float
    peak_bytes: int
    peak_step: int | None  # where the peak first occurs, a computation or a fetch; None if nothing was computed
    timeline_bytes: Longs  # memory during each compute step and after each free step
    counts: Longs  # how often each operator ran
    stall_seconds: float = 0.0  # of `seconds`, in which no operator runs
    host_bytes: int = 0  # of host memory in use at the end, the most there is

    @property
    def valid(self) -> bool:
        return self.error is None

    def checked(self) -> Simulation:
        """Itself, or `ScheduleError` for a broken schedule."""
        if self.error is not None:
            raise ScheduleError(self.error)
        return self


def simulate(graph: Graph, schedule: Schedule) -> Simulation:
    """Judge `schedule`: validity, time, peak, timeline and how often each operator runs."""
    from rematch.graph import kernels

    a = graph.arrays
    timeline = np.zeros(len(schedule), dtype=np.int64)
    counts = np.zeros(len(graph.ops), dtype=np.int64)
    alive, hosted = np.zeros((2, len(graph.values)), dtype=np.bool_)
    values, rules, needs = a.pick(kernels.Values), a.pick(kernels.Rules), a.pick(kernels.Bytes)
    host_room = -1 if graph.link is None else graph.link.host_bytes
    code, step, culprit, peak, peak_step = kernels.simulate_steps(
        schedule.steps, values, rules, needs, host_room, timeline, counts, alive, hosted
    )
    broken = code != kernels.OK
    computing = seconds = float(np.dot(counts, a.seconds))
    if graph.link is not None and hosted.any():
        seconds = clock(graph, Schedule(schedule.steps[:step]) if broken else schedule).seconds
    return Simulation(
        error=_in_words(graph, schedule, code, step, culprit, counts) if broken else None,
        broken_step=step if broken else None,
        seconds=seconds,
        peak_bytes=peak,
        peak_step=peak_step if peak_step >= 0 else None,
        timeline_bytes=timeline[:step] if broken else timeline,
        counts=counts,
        stall_seconds=max(0.0, seconds - computing),
        host_bytes=int(a.size[hosted].sum()),
    )


@dataclass(frozen=True, eq=False)
class Clock:
    """When each step of a schedule begins and ends, and when all has ended."""

    begins: Floats
    ends: Floats
    seconds: float


def clock(graph: Graph, schedule: Schedule) -> Clock:
    """Time a valid schedule, or the steps before its first broken one.

    Operators run one after the other, and beside them one copy in each direction, in the order of the steps. A copy out
    begins when the computations before its step have ended; a copy in also waits for the copy out of its value. An
    operator waits for the copies of what it reads to arrive, the loss for held values too. Freeing a value, or
    computing it anew, waits until it has left or arrived. The last copy may end after the last operator.
    """
    from rematch.graph import kernels

    a = graph.arrays
    begins, ends = np.zeros((2, len(schedule)))
    out_speed, in_speed = (np.inf, np.inf) if graph.link is None else graph.link.speeds
    values = a.pick(kernels.Values)
    seconds = kernels.run_clock(schedule.steps, values, a.seconds, a.size / out_speed, a.size / in_speed, begins, ends)
    return Clock(begins, ends, seconds)


def computation_edges(graph: Graph, schedule: Schedule) -> Floats:
    """When each computation of a valid schedule begins, and last when all has ended."""
    if not schedule.moves:
        return np.concatenate(([0.0], np.cumsum(graph.arrays.seconds[schedule.ops])))
    times = clock(graph, schedule)
    return np.append(times.begins[schedule.steps >= 0], times.seconds)


def alive_during(graph: Graph, schedule: Schedule, step: int) -> dict[int, int]:
    """Values without a resident one that are in memory during a step, with how many copies.

    An output that was alive already counts twice until the operator that makes it ends.
    """
    alive: dict[int, int] = {}
    for earlier in map(step_of, schedule.steps[:step].tolist()):
        match earlier:
            case Free(value):
                alive.pop(value, None)
            case Fetch(value):
                alive[value] = 1
            case Compute(op):
                alive.update(dict.fromkeys(graph.ops[op].outputs, 1))
    match step_of(int(schedule.steps[step])):
        case Fetch(value):
            alive[value] = 1
        case Compute(op):
            for output in graph.ops[op].outputs:
                alive[output] = alive.get(output, 0) + 1
    return alive


def _in_words(graph: Graph, schedule: Schedule, code: int, step: int, culprit: int, counts: Longs) -> str:
    from rematch.graph import kernels

    if code == kernels.NEVER_RUN:
        return f"operator {graph.ops[culprit].name!r} never runs"
    if code == kernels.TARGET_MISSING:
        role = "target" if graph.arrays.target[culprit] else "held value"
        return f"{role} {graph.values[culprit].name!r} is not alive at the end"
    where = f"step {step} of {len(schedule)}"
    if code == kernels.UNKNOWN_STEP:
        unknown = step_of(int(schedule.steps[step]))
        named = f"operator {unknown.op}" if isinstance(unknown, Compute) else f"value {unknown.value}"
        return f"{where}: {named} does not exist"
    moving = step_of(int(schedule.steps[step]))
    if isinstance(moving, Offload | Fetch):
        return f"{where}: {_why_not_moved(graph, code, moving)}"
    if code == kernels.FREED_NOT_ALIVE:
        return f"{where}: frees {graph.values[culprit].name!r}, which is {_why_dead(graph, culprit)}"
    if code == kernels.FREED_HELD:
        return f"{where}: frees {graph.values[culprit].name!r}, which is held from the loss on"
    running = f"{where}: {graph.ops[schedule.steps[step]].name!r}"
    if code == kernels.INPUT_NOT_ALIVE:
        return f"{running} reads {graph.values[culprit].name!r}, which is not alive"
    if code == kernels.HELD_MISSING_AT_LOSS:
        return f"{running} is the loss, but held value {graph.values[culprit].name!r} is not alive"
    if code == kernels.REPEATED_BEFORE_LOSS:
        return f"{running} is computed again before the loss, and this graph's engine can recompute only after it"
    if code == kernels.OUT_OF_TURN:
        return f"{running} {_out_of_turn(graph, culprit)}"
    return f"{running} {_out_of_window(graph, int(schedule.steps[step]), culprit, counts)}"


def _why_not_moved(graph: Graph, code: int, step: Offload | Fetch) -> str:
    from rematch.graph import kernels

    name = repr(graph.values[step.value].name)
    verb = "offloads" if isinstance(step, Offload) else "fetches"
    if code == kernels.HOST_FULL:
        assert graph.link is not None, "only a link leads to host memory"
        return f"offloads {name}, which is more than is left of {graph.link.host_bytes} bytes of host memory"
    reasons = {
        kernels.NO_LINK: "but the graph has no link to host memory",
        kernels.OFFLOADED_NOT_ALIVE: "which is not alive",
        kernels.OFFLOADED_NOT_MOVABLE: "which must stay on the device",
        kernels.OFFLOADED_AGAIN: "which is in host memory already",
        kernels.FETCHED_NOT_THERE: "which is not in host memory",
        kernels.FETCHED_ALIVE: "which is on the device already",
        kernels.FETCHED_BEFORE_LOSS: "but this graph's engine can fetch only after the loss",
    }
    return f"{verb} {name}, {reasons[code]}"


def _why_dead(graph: Graph, value: int) -> str:
    return "resident" if graph.values[value].resident else "not alive (freed twice, or never computed)"


def _out_of_turn(graph: Graph, turn_count: int) -> str:
    """Why an operator may not run for the first time after `turn_count` of those that keep the default order have."""
    due = graph.ops[int(np.flatnonzero(graph.arrays.turn == turn_count)[0])].name
    if graph.recompute_after_loss:
        return f"first runs before {due!r}; this graph's engine runs all operators first in default order"
    return f"first runs before {due!r}; operators that are random or run once keep the default order"


def _out_of_window(graph: Graph, op: int, once_count: int, counts: Longs) -> str:
    """Why `op` may not run after `once_count` of the operators marked once have."""
    a = graph.arrays
    sequence = [graph.ops[index].name for index in graph.order if a.once[index]]
    if a.once[op]:
        if counts[op] > 0:
            return "runs twice, but it may run only once"
        return f"runs before {sequence[once_count]!r}; operators that run once keep the default order"
    if once_count < a.once_from[op]:
        return f"reads what {sequence[a.once_from[op] - 1]!r} is to change, which has not run yet"
    return f"reads the old contents of what {sequence[a.once_until[op]]!r} has changed"
