"""The work of solving one piece, as data that can be sent to another process.

`options = solve_task(Task(...))`

Whatever a solver finds for a piece is put into default order first: the forward pass of an option runs all forward
operators of the piece, since the first pass through the whole graph does. So no option has an empty forward, and what
an operator reads that runs once is there when the piece has run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.graph.model import Ints
from rematch.solvers.base import Deadline, Problem, Solver, ignore_progress
from rematch.solvers.common.blocks import Block, BlockGraph, needed_for
from rematch.solvers.common.options import MOVES_PER_OP, Option, option_of, undominated
from rematch.solvers.common.pruning import in_default_order, pruned
from rematch.solvers.default.anneal import Anneal
from rematch.solvers.hiremate.combine import Gap, Solved, combined
from rematch.solvers.hiremate.level import Pass
from rematch.solvers.hiremate.options import limits, spread


@dataclass(frozen=True)
class Task:
    """A piece to be solved within so many seconds, by these solvers and by H-ILP if it has children.

    `options` is how many to keep, `most_options` how many H-ILP may choose from.
    """

    block: Block
    part: BlockGraph
    children: tuple[Solved, ...]
    solvers: tuple[Solver, ...]
    options: int
    most_options: int
    seconds: float


def solve_task(task: Task) -> tuple[Option, ...]:
    """Options of a piece, fastest first: to save everything, to save nothing, and what the solvers find in between."""
    part = task.part
    found = [option_of(part, baseline(part.graph)), _saving_nothing(task)]
    deadline = Deadline(task.seconds)
    under = list(limits(part)) if task.solvers or task.children else []
    for number, (graph, budget_bytes) in enumerate(under):
        if deadline.expired:
            break
        fair = deadline.within(deadline.remaining / (len(under) - number))
        found += [option_of(part, schedule) for schedule in _schedules(task, graph, budget_bytes, fair)]
    return tuple(spread(undominated(found, lambda option: option.figures), task.options))


def _saving_nothing(task: Task) -> Option:
    """Forward; and again what backward needs, right before it."""
    part = task.part
    read = {value for op in part.graph.ops[part.gap + 1 :] for value in op.inputs}
    again = needed_for(part.graph, range(part.gap), read)
    sequence = [*range(part.gap + 1), *again, *range(part.gap + 1, len(part.ops))]
    return option_of(part, Schedule.from_ops(part.graph, sequence))


def _schedules(task: Task, graph: Graph, budget_bytes: int, deadline: Deadline) -> Iterator[Schedule]:
    """What each solver that applies finds under a limit: `graph` is the small graph with its gap as wide as allowed."""
    problem = Problem(graph, budget_bytes)
    finders = [partial(_by_solver, solver) for solver in task.solvers]
    if task.children:
        finders.append(partial(_by_children, task))
    for number, find in enumerate(finders):
        if deadline.expired:
            return
        sequence = find(problem, deadline.within(deadline.remaining / (len(finders) - number)))
        if sequence is not None:
            ordered = pruned(graph, in_default_order(graph, sequence), budget_bytes, keep_first=True)
            schedule = Schedule.from_ops(graph, ordered)
            if simulate(graph, schedule).valid:
                yield schedule


def _by_solver(solver: Solver, problem: Problem, deadline: Deadline) -> Ints | None:
    if isinstance(solver, Anneal) and solver.iterations is None:
        solver = Anneal(seed=solver.seed, iterations=MOVES_PER_OP * len(problem.graph.ops))
    if not solver.applicable(problem):
        return None
    schedule = solver.solve(problem, deadline=deadline, on_progress=ignore_progress).schedule
    return None if schedule is None else schedule.ops


def _by_children(task: Task, problem: Problem, deadline: Deadline) -> Ints | None:
    """The children with the options that H-ILP chooses, as operators of the piece's small graph."""
    part = task.part
    around = Gap.of(task.block, part, problem.graph.ops[part.gap].workspace_bytes)
    runs = combined(
        task.children,
        around,
        problem.budget_bytes,
        most_options=task.most_options,
        deadline=deadline,
        corrections=False,
    )
    if runs is None:
        return None
    number = {op: index for index, op in enumerate(part.ops)}
    ops: list[int] = []
    for run in runs:
        if run.option is None:
            ops.append(part.gap)
        else:
            passes = run.option.ops_of(task.children[run.piece].part)
            ops += [number[op] for op in passes[run.of is Pass.BACKWARD]]
    return np.array(ops, dtype=np.int32)
