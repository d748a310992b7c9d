"""Schedules as Checkmate's matrices R and S, and back.

`from_matrices(graph, to_matrices(graph, schedule)) == schedule` for a schedule made by `Schedule.from_ops`.

After Jain et al., "Checkmate" (MLSys 2020), section 4: a schedule whose first computations follow the default order is
cut into stages. Stage t begins after the first computation of order[t-1] and ends with that of order[t]. R[t, i] says
that operator i is computed in stage t, S[t, v] that value v is in memory when the stage begins. Within a stage
operators run in default order, each at most once.

Deviations. S has a column for each value instead of each operator, because an operator may have several outputs. If
anything is computed after the last first computation (a target made again), there is one more stage for it. What is
in memory at the very end is not part of S: it is the targets and held values. Values are freed as algorithm 1 does,
right after their last use in a stage unless S keeps them for the next; one that S has at the beginning of a stage that
does not use it is freed after the stage's first operator. `Schedule.from_ops(graph, schedule.ops)` frees that earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematch.errors import ScheduleError
from rematch.graph.model import Bools, Graph, Ints, Longs
from rematch.graph.schedule import Schedule
from rematch.graph.simulate import simulate


@dataclass(frozen=True, eq=False)
class Matrices:
    """R[stage, operator]: computed in that stage; S[stage, value]: in memory when it begins. Same number of stages."""

    R: Bools
    S: Bools

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Matrices) and np.array_equal(self.R, other.R) and np.array_equal(self.S, other.S)

    def __hash__(self) -> int:
        return hash((self.R.tobytes(), self.S.tobytes()))


def to_matrices(graph: Graph, schedule: Schedule) -> Matrices:
    """The stages of a valid schedule; `ScheduleError` says why one cannot be written as stages."""
    simulate(graph, schedule.without_moves()).checked()
    stages = stage_of_each_compute(graph, schedule)
    ops = schedule.ops
    _check_order_within_stages(graph, ops, stages)
    count = max(len(graph.ops), int(stages[-1]) + 1 if len(stages) else 0)
    R = np.zeros((count, len(graph.ops)), dtype=np.bool_)
    R[stages, ops] = True
    S = np.zeros((count, len(graph.values)), dtype=np.bool_)
    alive = np.zeros(len(graph.values), dtype=np.bool_)
    begun = computed = 0
    for step in schedule.steps.tolist():
        if step < 0:
            alive[~step] = False
            continue
        stage = int(stages[computed])
        if stage == begun:  # the first computation of its stage: what is alive now was there when the stage began
            S[stage] = alive
            begun += 1
        alive[list(graph.ops[step].outputs)] = True
        computed += 1
    return Matrices(R, S)


def stage_of_each_compute(graph: Graph, schedule: Schedule) -> Longs:
    """For each computation, the stage it belongs to; `ScheduleError` if first computations leave the default order."""
    ops = schedule.ops
    _, first = np.unique(ops, return_index=True)
    is_first = np.zeros(len(ops), dtype=np.bool_)
    is_first[first] = True
    for expected, found in zip(graph.order, ops[is_first].tolist(), strict=True):
        if expected != found:
            raise ScheduleError(
                f"operator {graph.ops[found].name!r} is first computed before {graph.ops[expected].name!r}; "
                "stages need first computations in default order"
            )
    first_computations: Longs = np.cumsum(is_first, dtype=np.int64)
    return first_computations - is_first


def _check_order_within_stages(graph: Graph, ops: Ints, stages: Longs) -> None:
    position = graph.arrays.position[ops]
    broken = np.flatnonzero((np.diff(stages) == 0) & (np.diff(position) <= 0))
    if len(broken) == 0:
        return
    index = int(broken[0])
    stage, name = int(stages[index]), graph.ops[ops[index + 1]].name
    here = ops[stages == stage]
    if np.count_nonzero(here == ops[index + 1]) > 1:
        raise ScheduleError(f"operator {name!r} is computed twice in stage {stage}; R has room for once")
    before = graph.ops[ops[index]].name
    raise ScheduleError(
        f"stage {stage} computes {before!r} before {name!r}; R and S can only say that operators run in default order"
    )


def from_matrices(graph: Graph, matrices: Matrices) -> Schedule:
    """The schedule that R and S describe (algorithm 1); `ScheduleError` says why they describe none."""
    R, S = matrices.R, matrices.S
    _check_matrices(graph, matrices)
    a = graph.arrays
    steps: list[int] = []
    for stage in range(len(R)):
        kept = S[stage + 1] if stage + 1 < len(S) else a.target | a.held
        ops = a.order[R[stage, a.order]].tolist()
        freed_after = _last_uses(graph, np.flatnonzero(S[stage]).tolist(), ops)
        for index, op in enumerate(ops):
            steps.append(op)
            steps += [~value for value in sorted(freed_after[index]) if not kept[value]]
    schedule = Schedule(np.array(steps, dtype=np.int32))
    simulate(graph, schedule).checked()
    return schedule


def _last_uses(graph: Graph, alive: list[int], ops: list[int]) -> list[list[int]]:
    """For each operator of a stage, the values that no later one of the stage reads or makes."""
    last = dict.fromkeys(alive, 0)
    for index, op in enumerate(ops):
        for value in (*graph.ops[op].inputs, *graph.ops[op].outputs):
            if not graph.values[value].resident:
                last[value] = index
    by_operator: list[list[int]] = [[] for _ in ops]
    for value, index in last.items():
        by_operator[index].append(value)
    return by_operator


def _check_matrices(graph: Graph, matrices: Matrices) -> None:
    R, S = matrices.R, matrices.S
    count = len(graph.ops)
    if R.shape not in ((count, count), (count + 1, count)) or S.shape != (len(R), len(graph.values)):
        raise ScheduleError(
            f"R has shape {R.shape} and S {S.shape}; {count} operators and {len(graph.values)} values need "
            f"{(count, count)} and {(count, len(graph.values))}, or both with one more row"
        )
    a = graph.arrays
    in_order = R[:count, a.order]
    if count and not in_order.diagonal().all():
        stage = int(np.argmin(in_order.diagonal()))
        raise ScheduleError(f"R does not compute {graph.ops[a.order[stage]].name!r} in stage {stage}, which it ends")
    early = np.argwhere(np.triu(in_order, k=1))
    if len(early):
        stage, position = early[0].tolist()
        raise ScheduleError(f"R computes {graph.ops[a.order[position]].name!r} in stage {stage}, before its own stage")
    _check_kept(graph, R, S)


def _check_kept(graph: Graph, R: Bools, S: Bools) -> None:
    """What S has in memory was there in the stage before, or made in it."""
    a = graph.arrays
    produced = np.flatnonzero(a.producer >= 0)
    there = np.zeros_like(S)
    there[1:] = S[:-1]
    there[1:, produced] |= R[:-1, a.producer[produced]]
    missing = np.argwhere(S & ~there)
    if len(missing):
        stage, value = missing[0].tolist()
        raise ScheduleError(
            f"S has {graph.values[value].name!r} in memory at the beginning of stage {stage}, "
            "but it is neither there nor made in the stage before"
        )
