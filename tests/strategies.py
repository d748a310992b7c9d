"""Random graphs, sequences of operators and schedules, shared by all tests.

`@given(graphs())`; `data.draw(schedules(graph))`. Sizes and times are small whole numbers, so that ties and exact fits
occur and sums of seconds are exact.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from rematch.graph import Compute, Fetch, Free, Graph, Link, Offload, Op, Phase, Schedule, Value
from rematch.graph.schedule import Step


@st.composite
def graphs(draw: st.DrawFn, max_ops: int = 7, max_bytes: int = 8) -> Graph:
    """Graphs with all the model knows: several outputs or none, workspace, residents, mutations, loss, held, targets,
    random operators, and recomputation only after the loss.

    The default order is a random permutation of the operators' numbers.
    """
    residents = draw(st.integers(0, 2))
    values = [Value(f"r{i}", draw(st.integers(0, max_bytes)), resident=True) for i in range(residents)]
    count = draw(st.integers(1, max_ops))
    loss = draw(st.none() | st.integers(0, count - 1))
    ops: list[Op] = []
    before_loss: list[int] = []
    for position in range(count):
        inputs = draw(_some_of(range(len(values))))
        made = range(len(values), len(values) + draw(st.sampled_from((0, 1, 1, 1, 2, 3))))
        values += [Value(f"v{v}", draw(st.integers(0, max_bytes))) for v in made]
        once = draw(st.sampled_from((False, False, False, True)))
        mutates = draw(_some_of(range(residents))) if once else ()
        seconds, workspace = float(draw(st.integers(0, 5))), draw(st.sampled_from((0, 0, 1, 3)))
        random, phase = draw(st.sampled_from((False, False, False, True))), _phase(position, loss)
        ops.append(Op(f"o{position}", seconds, inputs, tuple(made), workspace, phase, once, mutates, random=random))
        if loss is not None and position < loss:
            before_loss += made
    graph = Graph(
        ops=tuple(ops),
        values=tuple(values),
        targets=frozenset(draw(_some_of(range(len(values))))),
        held=frozenset(draw(_some_of([*range(residents), *before_loss]))) if loss is not None else frozenset(),
        recompute_after_loss=loss is not None and draw(st.sampled_from((False, False, True))),
    )
    return renumbered(graph, draw(st.permutations(range(count))))


@st.composite
def plain_graphs(draw: st.DrawFn, max_ops: int = 7, max_bytes: int = 8) -> Graph:
    """Graphs as the papers have them: one output each, nothing else; every operator but the last has a reader."""
    count = draw(st.integers(1, max_ops))
    inputs: list[set[int]] = [set(draw(_some_of(range(i)))) for i in range(count)]
    for i in range(count - 1):
        if not any(i in read for read in inputs):
            inputs[draw(st.integers(i + 1, count - 1))].add(i)
    return Graph(
        ops=tuple(Op(f"o{i}", float(draw(st.integers(0, 5))), tuple(sorted(inputs[i])), (i,)) for i in range(count)),
        values=tuple(Value(f"v{i}", draw(st.integers(0, max_bytes))) for i in range(count)),
    )


def renumbered(graph: Graph, numbers: list[int]) -> Graph:
    """The same graph with operator i called `numbers[i]`."""
    by_number = dict(zip(numbers, graph.ops, strict=True))
    ops = tuple(by_number[number] for number in range(len(graph.ops)))
    return replace(graph, ops=ops, order=tuple(numbers[op] for op in graph.order))


def side_by_side(graph: Graph, copies: int) -> Graph:
    """Disjoint copies, each a module; operators in the default order."""
    count = len(graph.values)
    ops: list[Op] = []
    for i in range(copies):
        for op in (graph.ops[index] for index in graph.order):
            moved = {role: tuple(v + i * count for v in getattr(op, role)) for role in ("inputs", "outputs", "mutates")}
            ops.append(replace(op, name=f"copy.{i}.{op.name}", module_path=f"copy.{i}", class_key=op.name, **moved))
    targets = frozenset(target + i * count for target in graph.targets for i in range(copies))
    return Graph(tuple(ops), graph.values * copies, targets=targets)


@st.composite
def sequences(draw: st.DrawFn, graph: Graph, max_extra: int = 8) -> list[int]:
    """Operators in an order that `Schedule.from_ops` makes valid: any order, any recomputation the graph allows."""
    extra = draw(st.integers(0, max_extra))
    done: list[int] = []
    sequence: list[int] = []
    while len(done) < len(graph.ops) or extra > 0:
        fresh = [op for op in graph.order if op not in done and _may_start(graph, op, done)]
        repeating = extra > 0 and (graph.loss in done or not graph.recompute_after_loss)
        again = [op for op in done if _in_window(graph, op, done)] if repeating else []
        if not fresh and not again:
            break
        op = draw(st.sampled_from(fresh + again))
        if op in done:
            extra -= 1
        else:
            done.append(op)
        sequence.append(op)
    return sequence


@st.composite
def staged_sequences(draw: st.DrawFn, graph: Graph) -> list[int]:
    """As `sequences`, in Checkmate's form: first computations and, before each, recomputations in default order."""
    first_stage, last_stage = graph.arrays.first_stage, graph.arrays.last_stage
    sequence: list[int] = []
    for stage in range(len(graph.ops) + 1):
        may_run_again = [op for op in graph.order[:stage] if first_stage[op] <= stage <= last_stage[op]]
        chosen = set(draw(_some_of(may_run_again)))
        sequence += [op for op in may_run_again if op in chosen]
        sequence += graph.order[stage : stage + 1]
    return sequence


@st.composite
def schedules(draw: st.DrawFn, graph: Graph) -> Schedule:
    """Schedules, valid and broken: made by `Schedule.from_ops`, then changed at random in up to three places."""
    steps = Schedule.from_ops(graph, draw(sequences(graph))).steps.tolist()
    for _ in range(draw(st.integers(0, 3))):
        steps = draw(_edited(steps, graph))
    return Schedule(np.array(steps, dtype=np.int32))


@st.composite
def linked(draw: st.DrawFn, graph: Graph) -> Graph:
    """The graph with a link of speeds that divide times and sizes well; some values may have to stay on the device."""
    speeds = st.sampled_from((1.0, 2.0, 4.0))
    values = tuple(replace(value, movable=draw(st.sampled_from((True, True, False)))) for value in graph.values)
    link = Link(draw(speeds), draw(speeds), host_bytes=draw(st.sampled_from((0, 5, 40))))
    return replace(graph, values=values, link=link)


@st.composite
def moving_schedules(draw: st.DrawFn, graph: Graph) -> Schedule:
    """Schedules, valid and broken, of a graph with a link: values leave, are freed and come back."""
    steps = Schedule.from_ops(graph, draw(sequences(graph))).steps.tolist()
    alive: set[int] = set()
    hosted: set[int] = set()
    moving: list[Step] = []
    for step in Schedule(np.array(steps, dtype=np.int32)):
        for value in sorted(hosted - alive):
            if draw(st.booleans()):
                moving.append(Fetch(value))
                alive.add(value)
        for value in sorted(alive - hosted):
            if draw(st.sampled_from((False, False, True))):
                moving.append(Offload(value))
                hosted.add(value)
        for value in sorted(alive & hosted):
            used = isinstance(step, Compute) and value in graph.ops[step.op].inputs
            if not used and draw(st.booleans()):
                moving.append(Free(value))
                alive.discard(value)
        if isinstance(step, Compute):
            moving += [Fetch(value) for value in graph.ops[step.op].inputs if value in hosted - alive]
            alive |= {value for value in graph.ops[step.op].inputs if value in hosted}
            alive |= {*graph.ops[step.op].outputs}
        elif step.value not in alive:
            continue
        else:
            alive.discard(step.value)
        moving.append(step)
    missing = (graph.targets | graph.held) & hosted - alive
    numbers = Schedule.of([*moving, *map(Fetch, sorted(missing))]).steps.tolist()
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        numbers = draw(_edited(numbers, graph))
    return Schedule(np.array(numbers, dtype=np.int32))


@st.composite
def _edited(draw: st.DrawFn, steps: list[int], graph: Graph) -> list[int]:
    edited = list(steps)
    at = draw(st.integers(0, max(0, len(steps) - 1)))
    edit = draw(st.sampled_from(("delete", "delay", "repeat", "insert"))) if steps else "insert"
    if edit in ("delete", "delay"):
        removed = edited.pop(at)
        if edit == "delay":
            edited.insert(draw(st.integers(at, len(edited))), removed)
    elif edit == "repeat":
        edited.insert(draw(st.integers(0, len(edited))), steps[at])
    else:
        edited.insert(at, draw(st.integers(~len(graph.values), len(graph.ops))))  # one beyond what exists on both sides
    return edited


def _some_of(candidates: range | list[int]) -> st.SearchStrategy[tuple[int, ...]]:
    if not candidates:
        return st.just(())
    return st.lists(st.sampled_from(candidates), unique=True, max_size=min(4, len(candidates))).map(tuple)


def _phase(position: int, loss: int | None) -> Phase:
    if loss is None or position < loss:
        return Phase.FORWARD
    return Phase.LOSS if position == loss else Phase.BACKWARD


def _may_start(graph: Graph, op: int, done: list[int]) -> bool:
    """Whether `op` may run for the first time without shutting another out of its window."""
    made = {value for index in done for value in graph.ops[index].outputs}
    ready = all(value in made or graph.values[value].resident for value in graph.ops[op].inputs)
    closing = int(graph.arrays.once_until[op])
    shut_out = graph.arrays.once[op] and any(
        graph.arrays.once_until[other] == closing and other not in done for other in graph.order if other != op
    )
    held_made = all(value in made or graph.values[value].resident for value in graph.held)
    in_turn = graph.arrays.turn[op] < 0 or all(
        other in done for other in graph.order if 0 <= graph.arrays.turn[other] < graph.arrays.turn[op]
    )
    return ready and in_turn and not shut_out and _in_window(graph, op, done) and (op != graph.loss or held_made)


def _in_window(graph: Graph, op: int, done: list[int]) -> bool:
    once_count = sum(bool(graph.arrays.once[index]) for index in done)
    return bool(graph.arrays.once_from[op] <= once_count <= graph.arrays.once_until[op])
