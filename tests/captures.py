"""Captures of small modules, and solvers whose schedules a test knows beforehand.

`capture_of(nn.Linear(3, 4), torch.rand(2, 3)).graph`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import rematch
from rematch.api import as_arguments
from rematch.capture.joint.read import Capture
from rematch.capture.measure import measuring
from rematch.capture.record import record
from rematch.capture.recording import Recording
from rematch.execute.module import twin_of
from rematch.execute.replay.engine import Replay
from rematch.graph import Compute, Fetch, Free, Graph, Offload, Op, Phase, Schedule, baseline
from rematch.graph.schedule import Step
from rematch.planning.joint import JointPlanner
from rematch.planning.planner import Planner
from rematch.planning.settings import Settings
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver, Status

UNLIMITED_BYTES = 2**50


class _Keeper(JointPlanner):
    """A planner that keeps what it captured."""

    captures: list[Capture]

    def plan(self, captured: Capture) -> rematch.Plan:
        self.captures.append(captured)
        return super().plan(captured)


def capture_of(module: nn.Module, sample: Any, **settings: Any) -> Capture:
    """What the replay engine plans when `module` is called with `sample`."""
    twin = twin_of(module)
    planner = Planner(Settings(**{"budget": UNLIMITED_BYTES, "solver": "noremat", **settings}))
    keeper = _Keeper(twin, planner)
    keeper.captures = []
    args, kwargs = as_arguments(sample)
    Replay(twin, twin.forward, keeper).prepare(args, kwargs, referee=lambda joint: None)
    return keeper.captures[-1]


def recording_of(module: nn.Module, sample: Any, loss: Any = None, **options: Any) -> Recording:
    """What eager runs in a training step of `module` with `sample`."""
    args, kwargs = as_arguments(sample)
    with measuring(torch.device("cpu")) as measurer:
        return record(module, module.forward, args, kwargs, loss=loss, profile=measurer.profile, **options)


@contextmanager
def planned_graphs() -> Iterator[list[Graph]]:
    """What planners inside the block plan, in turn."""
    graphs: list[Graph] = []
    plan = Planner.plan

    def plan_and_note(planner: Planner, graph: Graph, *args: Any, **options: Any) -> rematch.Plan:
        graphs.append(graph)
        return plan(planner, graph, *args, **options)

    Planner.plan = plan_and_note  # type: ignore[method-assign]
    try:
        yield graphs
    finally:
        Planner.plan = plan  # type: ignore[method-assign]


@dataclass(frozen=True)
class Given(Solver):
    """The schedule that a function makes of the graph, whatever it costs."""

    schedule_of: Callable[[Graph], Schedule] = field(repr=False)
    name = "given"
    paper = ""
    moves_values = True

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        return Solution(self.schedule_of(problem.graph), Status.FEASIBLE, self.name)


def everything_twice(graph: Graph) -> Schedule:
    """Forward once more before backward, and each backward operator two times in a row, as far as it is allowed."""
    return recomputing(graph, lambda _: True)


def recomputing(graph: Graph, chosen: Callable[[Op], bool]) -> Schedule:
    """Every operator once, and the chosen ones again: those of forward together before backward, others at once."""
    again = [op for op in graph.order if may_run_again(graph, op) and chosen(graph.ops[op])]
    sequence: list[int] = []
    for op in graph.order:
        sequence.append(op)
        if graph.ops[op].phase is Phase.LOSS:
            sequence += [other for other in again if graph.ops[other].phase is Phase.FORWARD]
        elif graph.ops[op].phase is Phase.BACKWARD and op in again:
            sequence.append(op)
    return Schedule.from_ops(graph, sequence)


def shuttling(graph: Graph) -> Schedule:
    """All that can move leaves once it is made, and comes back for each operator that reads it.

    Where nothing comes back before the loss, it leaves after its last use there.
    """
    loss_at = int(graph.arrays.position[graph.arrays.loss])
    needed_until = {
        value: max((int(at) for at in graph.arrays.position[graph.arrays.users_of(value)] if at <= loss_at), default=-1)
        for value in range(len(graph.values))
        if graph.values[value].movable and not graph.values[value].resident
    }
    alive: set[int] = set()
    steps: list[Step] = []
    for step in baseline(graph):
        if isinstance(step, Free):
            steps += [step] if step.value not in needed_until or step.value in alive else []
            alive.discard(step.value)
        elif isinstance(step, Compute):
            op, at = graph.ops[step.op], int(graph.arrays.position[step.op])
            steps += [Fetch(value) for value in dict.fromkeys(op.inputs) if value in needed_until.keys() - alive]
            steps.append(step)
            steps += [Offload(value) for value in op.outputs if value in needed_until]
            alive |= needed_until.keys() & {*op.inputs, *op.outputs}
            leaving = {value for value in alive if not graph.recompute_after_loss or at >= needed_until[value]}
            steps += [Free(value) for value in sorted(leaving)]
            alive -= leaving
    return Schedule.of(steps)


def may_run_again(graph: Graph, op: int) -> bool:
    """Whether the schedule may repeat it: what stays alive is never computed again."""
    stays = graph.targets | graph.held
    return not graph.ops[op].once and not stays.intersection(graph.ops[op].outputs)


class Computed(nn.Module):
    """A module whose forward is a function of its one linear layer's output."""

    def __init__(self, function: Callable[[torch.Tensor], Any], width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(5, width)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


class ReadsItsStatistics(nn.Module):
    """Reads running statistics before and after batch norm updates them; the latter by overwriting a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        before = y * self.norm.running_mean
        normalized = self.norm(y).exp()
        overwritten = y.sin() - self.norm.running_var
        return normalized * before.cos() + overwritten
