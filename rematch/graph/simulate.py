"""The oracle: what a schedule costs, or the first step at which it breaks, in words.

`simulate(graph, schedule).peak_bytes`

Every schedule passes through it before anyone sees it. Kernels that search (local search, pruning) keep running totals
of their own for speed; tests hold them to this one.

Memory while an operator runs is what is resident, what is alive (its inputs among it), all its outputs, and its
workspace; an output that was alive already counts twice until the operator ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematch.errors import ScheduleError
from rematch.graph.model import Graph, Longs
from rematch.graph.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Simulation:
    """What the oracle saw. For a broken schedule the figures cover the steps before `broken_step`."""

    error: str | None  # None for a valid schedule, else why the first broken step breaks
    broken_step: int | None
    seconds: float
    peak_bytes: int
    peak_step: int | None  # where the peak first occurs; None if nothing was computed
    timeline_bytes: Longs  # memory during each compute step and after each free step
    counts: Longs  # how often each operator ran

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
    alive = np.zeros(len(graph.values), dtype=np.bool_)
    code, step, culprit, peak, peak_step = kernels.simulate_steps(
        schedule.steps, a.pick(kernels.Values), a.pick(kernels.Rules), a.pick(kernels.Bytes), timeline, counts, alive
    )
    broken = code != kernels.OK
    return Simulation(
        error=_in_words(graph, schedule, code, step, culprit, counts) if broken else None,
        broken_step=step if broken else None,
        seconds=float(np.dot(counts, a.seconds)),
        peak_bytes=peak,
        peak_step=peak_step if peak_step >= 0 else None,
        timeline_bytes=timeline[:step] if broken else timeline,
        counts=counts,
    )


def alive_during(graph: Graph, schedule: Schedule, step: int) -> dict[int, int]:
    """Values without a resident one that are in memory while the operator at `step` runs, with how many copies.

    An output that was alive already counts twice until the operator ends.
    """
    alive: dict[int, int] = {}
    for earlier in schedule.steps[:step].tolist():
        if earlier < 0:
            alive.pop(~earlier, None)
        else:
            alive.update(dict.fromkeys(graph.ops[earlier].outputs, 1))
    for output in graph.ops[int(schedule.steps[step])].outputs:
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
        named = f"operator {culprit}" if culprit >= 0 else f"value {~culprit}"
        return f"{where}: {named} does not exist"
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
