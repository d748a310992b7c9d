"""From a traced graph to a plan: cost, budget, solve, and what to say when it does not fit.

`Planner(module, Settings(budget="8GiB"))` is what a runner asks for its schedules.

Plans are kept, one for each graph. A graph that was planned before gets its plan again; a new one is first tried with
the schedules there are, for another batch size often allows the same schedule, and is solved only if none fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from rematch.capture.corrections import Corrections
from rematch.capture.estimate import Estimator, estimating
from rematch.capture.joint import Capture, Input, Layout, LossCost, read_joint, with_outside
from rematch.capture.measure import Measurer, measuring
from rematch.capture.memory import allocated_bytes
from rematch.capture.traced import device_of
from rematch.errors import BudgetInfeasible
from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.graph.model import ALREADY_ALLOCATED
from rematch.planning.budget import parse_budget
from rematch.planning.plan import Plan
from rematch.report.progress import measuring_progress, solving_progress
from rematch.solvers.base import (
    DEFAULT_SOLVER,
    DEFAULT_TIME_LIMIT,
    Deadline,
    Problem,
    Solution,
    Solver,
    Status,
    solve,
)
from rematch.units import format_bytes

_ASSUMED_LOSS = 2.0  # times the differentiable outputs, until the loss is measured
_MARGIN = 0.05  # of the device's memory that budget="auto" leaves free, for fragmentation and what is not counted
_ALLOCATOR_SHARE = 0.005  # of a budget: CUDA's allocator gives a tensor a block that may be larger than asked for
_MINIMUM_SECONDS = 10.0  # to look for the smallest budget when the one asked for does not work
_TIGHTEST: dict[str, Schedule] = {}  # by the fingerprint of the graph; see `_tightest`


@dataclass(frozen=True)
class Settings:
    """What the user asked for; `api.remat` describes each."""

    budget: str | int | float
    solver: str | Solver = DEFAULT_SOLVER
    options: dict[str, Any] = field(default_factory=dict)
    time_limit: float = DEFAULT_TIME_LIMIT
    reserve_bytes: int = 0
    accumulate: bool = False
    device: str | None = None  # the name of one in the table of devices, to plan for it without having it
    progress: bool | None = None


class Planner:
    """Captures graphs of one module and plans them; remembers its plans."""

    def __init__(self, module: nn.Module, settings: Settings, required: Plan | None = None) -> None:
        self.module = module
        self.settings = settings
        self.plans: list[Plan] = [] if required is None else [required]
        self.required = required  # the plan that the next training graph must be the one of
        self.loss: LossCost | None = None  # of a given loss, measured on the sample
        self._loss_output_bytes: int | None = None  # differentiable outputs of the sample
        # Of workspace and of what is retained, to the outputs. A plan that is given has counted its loss already.
        self._loss_ratios = (_ASSUMED_LOSS if required is None else 0.0, 0.0)
        self._largest_peak_bytes = 0  # of the training graphs so far, without recomputation
        self.corrections = Corrections()
        self.graph: Graph | None = None  # the last one that was planned

    def capture(self, joint: GraphModule, *, forward_outputs: int, inputs: list[Input]) -> Capture:
        device = device_of(joint)
        with measuring_progress(self.settings.progress) as shown, self._profiler(device, shown) as profiler:
            captured = read_joint(
                joint,
                forward_outputs=forward_outputs,
                inputs=inputs,
                profile=profiler.profile,
                corrections=self.corrections,
                unused=self.loss.unused if self.loss is not None else frozenset(),
                accumulate=frozenset(name for name, _ in self._accumulated()),
                name=type(self.module).__name__,
            )
            captured = replace(captured, notes=profiler.notes)
        return self.with_outside(captured)

    @property
    def tangent_layouts(self) -> tuple[Layout, ...]:
        """Of a given loss, as seen on the sample; another shape has others."""
        return self.loss.tangents if self.loss is not None else ()

    def _profiler(
        self, device: torch.device, on_call: Callable[[str], None]
    ) -> AbstractContextManager[Measurer | Estimator]:
        if self.settings.device is None:
            return measuring(device, on_call)
        return estimating(self.settings.device)

    def with_outside(self, captured: Capture) -> Capture:
        """The capture with the loss and what is allocated already, as far as they are known now."""
        loss = self._loss_of(captured.differentiable_output_bytes)
        device = device_of(captured.joint)
        # At least the loss itself, its gradient and what else is that small; where it was measured they are in it.
        retained_bytes = max(loss.retained_bytes, 4 * allocated_bytes(16, device))
        outside = self._allocated_outside(captured.graph, device) + self.settings.reserve_bytes
        outside += sum(allocated_bytes(p.nbytes, device) for _, p in self._accumulated() if p.grad is None)
        return with_outside(captured, replace(loss, retained_bytes=retained_bytes), outside)

    def _accumulated(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters whose gradients the schedule adds up itself: those that nobody watches."""
        if not self.settings.accumulate:
            return []
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
        ]

    def _loss_of(self, output_bytes: int) -> LossCost:
        """What the loss takes of outputs of this size, in proportion to those it was measured on."""
        if self.loss is None:
            workspace, retained = (int(ratio * output_bytes) for ratio in self._loss_ratios)
            return LossCost(workspace, retained)
        if self._loss_output_bytes is None:
            self._loss_output_bytes = output_bytes  # a given loss is measured on the sample, which is captured first
        ratio = output_bytes / self._loss_output_bytes if self._loss_output_bytes else 1.0
        return LossCost(
            int(ratio * self.loss.workspace_bytes), int(ratio * self.loss.retained_bytes), ratio * self.loss.seconds
        )

    def _allocated_outside(self, graph: Graph, device: torch.device) -> int:
        """Memory in use that the graph does not have among its residents: `.grad`, optimizer state, the rest."""
        counted = sum(value.size_bytes for value in graph.values if value.resident and value.role != ALREADY_ALLOCATED)
        if device.type == "cuda" and self.settings.device is None:
            _load_libraries(device)
            return max(0, torch.cuda.memory_allocated(device) - counted)
        own = _bytes_of(self.module)
        of_module = sum(v.size_bytes for v in graph.values if v.resident and v.role in ("parameters", "buffers"))
        return max(0, own - of_module)

    def schedule(self, captured: Capture) -> Schedule:
        return self.plan(captured).schedule

    def plan(self, captured: Capture) -> Plan:
        """The plan for a captured graph: a known one, an old schedule that still fits, or a new solution."""
        graph = self.graph = captured.graph
        if self.required is not None and graph.loss is not None:
            self.required.check(graph)
            self.required = None
        budget_bytes = self.budget_bytes(captured)
        problem = Problem(graph, budget_bytes)
        for known in reversed(self.plans):
            if _still_fits(known, problem):
                if known.graph_fingerprint != graph.fingerprint:
                    kept = Solution(known.schedule, Status.FEASIBLE, f"{known.figures.solver}, for another shape")
                    return self._remember(Plan.from_solution(problem, kept, captured.notes))
                return known
        return self._remember(self._solve(problem, captured))

    def _remember(self, plan: Plan) -> Plan:
        self.plans = [known for known in self.plans if known.graph_fingerprint != plan.graph_fingerprint]
        self.plans.append(plan)
        return plan

    def budget_bytes(self, captured: Capture) -> int:
        graph = captured.graph
        if self.settings.budget == "auto":
            return graph.resident_bytes + available_bytes(device_of(captured.joint), self.settings.device)
        asked = parse_budget(self.settings.budget, self._whole_bytes(graph))
        return int(asked * self._usable_share(captured))

    def _usable_share(self, captured: Capture) -> float:
        """Of a budget in bytes, what tensors may take."""
        on_cuda = device_of(captured.joint).type == "cuda" and self.settings.device is None
        return 1 - _ALLOCATOR_SHARE if on_cuda else 1.0

    def _whole_bytes(self, graph: Graph) -> int:
        """What a percentage is of: the peak without recomputation of the largest training graph so far.

        A smaller batch or inference has less to save, and would often not fit into that share of its own peak.
        """
        peak_bytes = simulate(graph, baseline(graph)).peak_bytes
        if graph.loss is not None:
            self._largest_peak_bytes = max(peak_bytes, self._largest_peak_bytes)
        return self._largest_peak_bytes or peak_bytes

    def _solve(self, problem: Problem, captured: Capture) -> Plan:
        from rematch.solvers.minimum import surely_needed_bytes

        s = self.settings
        if surely_needed_bytes(problem.graph) > problem.budget_bytes:  # say at once what no search can find
            raise self._infeasible(problem, captured, _tightest(problem.graph, 0)[1], proved=True)
        with solving_progress(problem.graph.baseline_seconds, s.progress) as on_progress:
            found = solve(problem, s.solver, time_limit=s.time_limit, on_progress=on_progress, **s.options)
        if found.schedule is None:
            found = self._last_resort(problem, captured, found)
        return Plan.from_solution(problem, found, captured.notes)

    def _last_resort(self, problem: Problem, captured: Capture, failed: Solution) -> Solution:
        """Where a solver found nothing, the search for the smallest budget may have; else it has one to name."""
        schedule, peak_bytes = _tightest(problem.graph, problem.budget_bytes)
        if peak_bytes <= problem.budget_bytes:
            return Solution(schedule, Status.FEASIBLE, f"{failed.solver}, then the search for small budgets")
        possible_bytes = min(peak_bytes, failed.feasible_from_bytes or peak_bytes)
        raise self._infeasible(problem, captured, possible_bytes, proved=failed.status is Status.INFEASIBLE)

    def _infeasible(self, problem: Problem, captured: Capture, possible_bytes: int, proved: bool) -> BudgetInfeasible:
        """The limit, what dominates it, the smallest budget that works and what to try."""
        from rematch.planning.budget import describe_largest_need

        verdict = "cannot be kept" if proved else "could not be kept in the time there was"
        works_bytes = math.ceil(possible_bytes / self._usable_share(captured))
        return BudgetInfeasible(
            f"a budget of {format_bytes(problem.budget_bytes)} {verdict} by {problem.graph.name}: "
            f"the smallest that was found to work is {works_bytes} bytes ({format_bytes(works_bytes)}).\n"
            f"  {describe_largest_need(problem.graph)}\n"
            f"  Try budget={works_bytes}, a smaller batch, or a shorter sequence or lower resolution"
            + ("" if proved else ", or a longer time_limit"),
            feasible_from_bytes=works_bytes,
        )

    def loss_measured(self, captured: Capture, cost: LossCost) -> bool:
        """Take note of what the loss really takes. True if a plan no longer keeps the budget and must be made again."""
        size = captured.differentiable_output_bytes
        if self.loss is not None or not size:
            return False
        self._loss_ratios = (cost.workspace_bytes / size, cost.retained_bytes / size)
        measured = self.with_outside(captured)
        budget_bytes = self.budget_bytes(measured)
        known = next((p for p in self.plans if p.graph_fingerprint == captured.graph.fingerprint), None)
        return known is not None and simulate(measured.graph, known.schedule).peak_bytes > budget_bytes


@cache
def _load_libraries(device: torch.device) -> None:
    """Have cuBLAS allocate its workspace now, in this thread and in backward's: it stays, and belongs to the peak."""
    with _disable_current_modes(), torch.enable_grad():
        matrix = torch.ones(16, 16, device=device, requires_grad=True)
        torch.nn.functional.linear(matrix, matrix, matrix[0]).sum().backward()


def _still_fits(plan: Plan, problem: Problem) -> bool:
    if plan.graph_ops != len(problem.graph.ops) or plan.graph_values != len(problem.graph.values):
        return False
    seen = simulate(problem.graph, plan.schedule)
    return seen.valid and seen.peak_bytes <= problem.budget_bytes


def _bytes_of(module: nn.Module) -> int:
    """Parameters, buffers and gradients there are, each storage once."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [p.grad for p in module.parameters() if p.grad is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def available_bytes(device: torch.device, planned_for: str | None) -> int:
    """What budget="auto" may use beyond what is resident: the device's free memory, less a margin."""
    if planned_for is not None:
        from rematch.capture.devices import find_device

        total = find_device(planned_for).memory_bytes
        return int(total * (1 - _MARGIN))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused - _MARGIN * total)
    with open("/proc/meminfo") as lines:
        memory = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return int(memory["MemAvailable"] - _MARGIN * memory["MemTotal"])


def _tightest(graph: Graph, enough_bytes: int) -> tuple[Schedule, int]:
    """The schedule with the smallest peak that can be found, and that peak; one that has `enough_bytes` will do.

    What was found is remembered, so that whoever is told of a budget can have it, however busy the machine is then.
    """
    from rematch.solvers.minimum import smallest_budget

    known = [_TIGHTEST[graph.fingerprint]] if graph.fingerprint in _TIGHTEST else []
    if not known or simulate(graph, known[0]).peak_bytes > enough_bytes:
        known.append(smallest_budget(graph, Deadline(_MINIMUM_SECONDS)).schedule)
    best = _TIGHTEST[graph.fingerprint] = min(known, key=lambda schedule: simulate(graph, schedule).peak_bytes)
    return best, simulate(graph, best).peak_bytes
