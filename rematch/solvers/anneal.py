"""Local search over sets of recomputations, compiled, by simulated annealing.

`solve(problem, Anneal(seed=1, iterations=100_000)).schedule`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rematch.errors import ScheduleError
from rematch.graph import Graph, Schedule, simulate
from rematch.graph.model import Ints, compressed_rows
from rematch.solvers.base import BoundScope, Deadline, OnProgress, Problem, Progress, Solution, Solver, Status

if TYPE_CHECKING:
    from rematch.solvers.anneal_kernels import Model, State

_CHUNK = 1000  # moves between two looks at the controls
_COST_UNITS = 2**44  # of the time of running every operator once


def stages_of(graph: Graph, schedule: Schedule) -> Ints:
    """The recomputations of `schedule` as rows of (stage, position of the operator), repeats inside a stage once."""
    a = graph.arrays
    positions = a.position[schedule.ops]
    seen = np.zeros(len(graph.ops), dtype=np.bool_)
    chosen: dict[tuple[int, int], None] = {}
    stage = 0
    for position in positions.tolist():
        if position == stage:
            stage += 1
        elif position > stage:
            raise ScheduleError(f"operator {graph.ops[a.order[position]].name!r} first runs before {graph.ops[a.order[stage]].name!r}")
        else:
            chosen[stage, position] = None
    return np.array(list(chosen), dtype=np.int32).reshape(-1, 2)


def schedule_of(graph: Graph, chosen: Ints) -> Schedule:
    """The schedule that runs each (stage, position) of `chosen` again in that stage, operators of a stage in default order."""
    count = len(graph.ops)
    first = np.arange(count, dtype=np.int32)
    stages = np.concatenate((chosen[:, 0], first))
    positions = np.concatenate((chosen[:, 1], first))
    return Schedule.from_ops(graph, graph.arrays.order[positions[np.lexsort((positions, stages))]])


def make_model(problem: Problem) -> Model:
    from rematch.solvers.anneal_kernels import Model

    graph = problem.graph
    a = graph.arrays
    count = len(graph.ops)
    lasting = np.flatnonzero(a.target | a.held)

    def rows(pointer: Ints, entries: Ints) -> list[list[int]]:
        return [entries[pointer[op] : pointer[op + 1]].tolist() for op in a.order]

    outputs = [*rows(a.outputs_ptr, a.outputs), []]
    inputs = [*rows(a.inputs_ptr, a.inputs), lasting.tolist()]
    users: list[list[int]] = [[] for _ in graph.values]
    for position, row in enumerate(inputs):
        for value in row:
            users[value].append(position)
    slot = np.zeros(len(graph.values), dtype=np.int32)
    for row in outputs:
        slot[row] = np.arange(len(row))
    inputs_ptr, inputs_flat = compressed_rows(inputs)
    outputs_ptr, outputs_flat = compressed_rows(outputs)
    users_ptr, users_flat = compressed_rows(users)
    total = graph.baseline_seconds or 1.0
    loss_stage = a.position[a.loss] if a.loss >= 0 else count
    return Model(
        inputs_ptr=inputs_ptr, inputs=inputs_flat, outputs_ptr=outputs_ptr, outputs=outputs_flat,
        users_ptr=users_ptr, users=users_flat,
        producer=np.where(a.producer >= 0, a.position[a.producer], -1).astype(np.int32),
        slot=slot, size=a.size.copy(),
        held_from=np.where(a.held, loss_stage, count).astype(np.int32),
        workspace=np.append(a.workspace[a.order], 0),
        cost=np.append(np.rint(a.seconds[a.order] / total * _COST_UNITS), 0).astype(np.int64),
        last_stage=np.append(a.last_stage[a.order], count).astype(np.int32),
        budget=np.array([problem.budget_bytes - a.resident_bytes], dtype=np.int64),
    )  # fmt: skip


def make_state(model: Model, seed: int) -> State:
    from rematch.solvers import anneal_kernels as k

    stages = len(model.workspace)
    values = len(model.size)
    room = 16 * stages + 64
    nodes = np.full((stages + room, k.NODE_COLUMNS), -1, dtype=np.int32)
    nodes[:stages, k.STAGE] = nodes[:stages, k.OP] = np.arange(stages)
    slots = max(1, int(np.diff(model.outputs_ptr).max()))
    until = np.full((stages + room, slots), -1, dtype=np.int32)
    change = np.zeros(stages + 1, dtype=np.int64)
    for value in model.outputs:
        readers = model.users[model.users_ptr[value] : model.users_ptr[value + 1]]
        if len(readers):
            born, last = model.producer[value], readers[-1]
            until[born, model.slot[value]] = last
            change[born + 1] += model.size[value]
            change[last + 1] -= model.size[value]
    counters = np.zeros(k.COUNTERS, dtype=np.int64)
    counters[k.BEST_COST] = k.NO_BEST
    alive = np.cumsum(change)[:stages]
    counters[k.EXCESS] = np.maximum(alive - model.budget[0], 0).sum()
    counters[k.DIRTY] = stages
    state = k.State(
        nodes=nodes, until=until,
        pool=np.arange(stages, stages + room, dtype=np.int32),
        peak=alive, inside=np.zeros(stages, dtype=np.int64),
        dirty=np.arange(stages, dtype=np.int32), is_dirty=np.zeros(stages, dtype=np.bool_),
        mark=np.zeros(values, dtype=np.int64),
        journal=np.zeros((k.JOURNAL_ROWS, 3), dtype=np.int32), stack=np.zeros(1024, dtype=np.int32),
        best=np.zeros((room, 2), dtype=np.int32),
        counters=counters, levels=np.ones(k.LEVELS),
        random=np.array([np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] | np.uint64(1)]),
    )  # fmt: skip
    k.settle(model, state)
    return state
