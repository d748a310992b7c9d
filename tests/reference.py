"""The rules of schedules once more, slow and obvious: what the compiled oracle and the solvers are compared with.

`judge(graph, schedule)`. Nothing here uses a graph's arrays: only its operators, values, targets, held values, order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from rematch.graph import Compute, Fetch, Free, Graph, Offload, Phase, Schedule
from rematch.graph.schedule import Step


class Broken(Exception):
    """A step that is not allowed."""


@dataclass(frozen=True)
class State:
    """What matters for the rest of a schedule: values alive (residents left out), operators that have run,
    and values in host memory."""

    alive: frozenset[int] = frozenset()
    run: frozenset[int] = frozenset()
    hosted: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Verdict:
    broken_step: int | None
    seconds: float
    peak_bytes: int
    peak_step: int | None
    timeline_bytes: list[int]
    counts: list[int]
    host_bytes: int


def judge(graph: Graph, schedule: Schedule) -> Verdict:
    state, broken_step, timeline = State(), None, []
    counts = [0] * len(graph.ops)
    rising = []  # steps that can be the peak
    for index, step in enumerate(schedule):
        try:
            state, memory = advance(graph, state, step)
        except Broken:
            broken_step = index
            break
        timeline.append(memory)
        if isinstance(step, Compute):
            counts[step.op] += 1
        if isinstance(step, (Compute, Fetch)):
            rising.append(index)
    if broken_step is None and not finished(graph, state):
        broken_step = len(schedule)
    peak_step = max(rising, key=lambda index: timeline[index], default=None)
    return Verdict(
        broken_step=broken_step,
        seconds=makespan(graph, list(schedule)[:broken_step]),
        peak_bytes=resident_bytes(graph) if peak_step is None else timeline[peak_step],
        peak_step=peak_step,
        timeline_bytes=timeline,
        counts=counts,
        host_bytes=bytes_of(graph, state.hosted),
    )


def makespan(graph: Graph, steps: list[Step]) -> float:
    """When the last of the steps, all valid, has ended: each ends its own time after the last of those it waits for."""
    ends: list[float] = []
    for index, step in enumerate(steps):
        waited = [ends[other] for other in range(index) if _waits_for(graph, step, steps[other])]
        ends.append(max(waited, default=0.0) + _duration(graph, step))
    return max(ends, default=0.0)


def _duration(graph: Graph, step: Step) -> float:
    match step:
        case Compute(op):
            return graph.ops[op].seconds
        case Offload(value):
            return graph.values[value].size_bytes / graph.link.out_bytes_per_second
        case Fetch(value):
            return graph.values[value].size_bytes / graph.link.in_bytes_per_second
    return 0.0


def _waits_for(graph: Graph, step: Step, earlier: Step) -> bool:
    """Whether a step cannot begin before an `earlier` one has ended. Nothing overtakes a computation or a free."""
    if isinstance(earlier, (Compute, Free)) or type(step) is type(earlier):
        return True
    if isinstance(step, Compute):
        touched = {*graph.ops[step.op].outputs}
        if isinstance(earlier, Fetch):
            touched |= {*graph.ops[step.op].inputs, *(graph.held if graph.ops[step.op].phase is Phase.LOSS else ())}
        return earlier.value in touched
    return step.value == earlier.value


def advance(graph: Graph, state: State, step: Step) -> tuple[State, int]:
    """The state after a step, and the memory during a computation or after any other."""
    if isinstance(step, (Offload, Fetch)):
        return _moved(graph, state, step)
    if isinstance(step, Free):
        if step.value not in state.alive:
            raise Broken("not alive")
        if step.value in graph.held and loss_of(graph) in state.run:
            raise Broken("held")
        alive = state.alive - {step.value}
        return State(alive, state.run, state.hosted), resident_bytes(graph) + bytes_of(graph, alive)
    if step.op >= len(graph.ops):
        raise Broken("unknown operator")
    op = graph.ops[step.op]
    for value in op.inputs:
        if not graph.values[value].resident and value not in state.alive:
            raise Broken("input not alive")
        if mutations(graph, value, state.run) != mutations(graph, value, before(graph, step.op)):
            raise Broken("input has other contents")
    if step.op in state.run:
        if graph.recompute_after_loss and loss_of(graph) not in state.run:
            raise Broken("computed again before the loss")
    elif any(keeps_order(graph, step.op) and keeps_order(graph, other) for other in before(graph, step.op) - state.run):
        raise Broken("first run out of turn")
    if is_once(graph, step.op):
        expected = {other for other in before(graph, step.op) if is_once(graph, other)}
        if expected != {other for other in state.run if is_once(graph, other)}:
            raise Broken("out of turn")
    if op.phase is Phase.LOSS and any(not graph.values[v].resident and v not in state.alive for v in graph.held):
        raise Broken("held value missing")
    during = resident_bytes(graph) + bytes_of(graph, state.alive) + bytes_of(graph, op.outputs) + op.workspace_bytes
    return State(state.alive | set(op.outputs), state.run | {step.op}, state.hosted), during


def _moved(graph: Graph, state: State, step: Offload | Fetch) -> tuple[State, int]:
    if graph.link is None or step.value >= len(graph.values):
        raise Broken("no link, or no such value")
    alive, hosted = state.alive, state.hosted
    if isinstance(step, Offload):
        hosted = hosted | {step.value}
        if step.value not in alive or step.value in state.hosted:
            raise Broken("not alive, or there already")
        if not graph.values[step.value].movable:
            raise Broken("must stay")
        if bytes_of(graph, hosted) > graph.link.host_bytes:
            raise Broken("too much")
    else:
        alive = alive | {step.value}
        if step.value in state.alive or step.value not in hosted:
            raise Broken("alive already, or not in host memory")
        if graph.recompute_after_loss and loss_of(graph) not in state.run:
            raise Broken("fetched before the loss")
    return State(alive, state.run, hosted), resident_bytes(graph) + bytes_of(graph, alive)


def finished(graph: Graph, state: State) -> bool:
    wanted = {value for value in graph.targets | graph.held if not graph.values[value].resident}
    return len(state.run) == len(graph.ops) and wanted <= state.alive


def least_seconds(graph: Graph, budget_bytes: int, default_order: bool = False) -> float | None:
    """Time of the fastest schedule within the budget by trying every step in every state; None if there is none."""

    def longer(seconds: float, step: Compute | Free, memory: int) -> float | None:
        if memory > budget_bytes:
            return None
        return seconds + graph.ops[step.op].seconds if isinstance(step, Compute) else seconds

    return _best(graph, 0.0, longer, default_order)


def least_budget(graph: Graph, default_order: bool = False) -> float | None:
    """The smallest peak of any schedule by trying every step in every state."""
    return _best(graph, resident_bytes(graph), lambda peak, step, memory: max(peak, memory), default_order)


def _best(
    graph: Graph, start: float, extend: Callable[[float, Compute | Free, int], float | None], default_order: bool
) -> float | None:
    """The smallest label of a finished state; a label never gets smaller by another step."""
    ties = count()
    queue = [(start, next(ties), State())]
    settled = set()
    while queue:
        label, _, state = heappop(queue)
        if state in settled:
            continue
        settled.add(state)
        if finished(graph, state):
            return label
        for step in _steps(graph, state, default_order):
            try:
                following, memory = advance(graph, state, step)
            except Broken:
                continue
            extended = extend(label, step, memory)
            if extended is not None:
                heappush(queue, (extended, next(ties), following))
    return None


def _steps(graph: Graph, state: State, default_order: bool) -> Iterator[Compute | Free]:
    yield from map(Free, state.alive)
    for op in range(len(graph.ops)):
        if op in state.run or not default_order or op == graph.order[len(state.run)]:
            yield Compute(op)


def loss_of(graph: Graph) -> int | None:
    return next((index for index, op in enumerate(graph.ops) if op.phase is Phase.LOSS), None)


def is_once(graph: Graph, op: int) -> bool:
    return graph.ops[op].once or graph.ops[op].phase is Phase.LOSS


def keeps_order(graph: Graph, op: int) -> bool:
    """Whether its first run keeps the default order among those of its kind."""
    return graph.recompute_after_loss or is_once(graph, op) or graph.ops[op].random


def before(graph: Graph, op: int) -> set[int]:
    return set(graph.order[: graph.order.index(op)])


def mutations(graph: Graph, value: int, run: set[int] | frozenset[int]) -> int:
    return sum(value in graph.ops[op].mutates for op in run)


def bytes_of(graph: Graph, values: frozenset[int] | tuple[int, ...]) -> int:
    return sum(graph.values[value].size_bytes for value in values)


def resident_bytes(graph: Graph) -> int:
    return sum(value.size_bytes for value in graph.values if value.resident)
