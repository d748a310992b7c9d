"""Plans for a graph that inductor compiles: costs, what lies around the graph, and a budget that measuring corrects.

`GraphPlanner(planner).decide(joint, own, forward_outputs=1, static=frozenset())`
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule

from rematch.capture.inductor.peak import predicted_peak_bytes
from rematch.capture.inductor.read import FusedCapture, read_fused
from rematch.capture.joint.read import LossCost, graph_with_outside
from rematch.capture.joint.traced import device_of
from rematch.capture.memory import allocated_bytes
from rematch.errors import BudgetInfeasible, ScheduleError
from rematch.graph import Graph, baseline, simulate
from rematch.planning.budget import parse_budget
from rematch.planning.joint import profiling
from rematch.planning.plan import Plan
from rematch.planning.planner import Planner
from rematch.planning.settings import ASSUMED_LOSS, COMPILED
from rematch.report.progress import measuring_progress
from rematch.solvers.base import Problem, Solution, Status
from rematch.units import format_bytes

MOST_SECONDS = 10.0  # to solve for one graph: whoever compiles waits already
OWN = "torch.compile's own partition"


@dataclass(frozen=True)
class Decision:
    """How one graph is to be cut."""

    plan: Plan
    by_torch: bool  # torch's own partition keeps the budget as it is
    predicted_bytes: int
    capture: FusedCapture | None = None  # None for one that another process made


@dataclass(frozen=True)
class Share:
    """What other graphs of the same model take, where a model falls into several."""

    before_bytes: int = 0  # that they have saved when this one runs
    between_bytes: int = 0  # that they take between its forward and its backward


class OtherGraph(ScheduleError):
    """The plan that must be followed is for another graph."""


class GraphPlanner:
    """Plans one graph of a model; `planner` keeps the plans of all of them.

    `correct` says by how much the memory that was measured exceeds what was predicted.
    """

    def __init__(self, planner: Planner, state_bytes: int = 0) -> None:
        settings = planner.settings
        self.planner = planner
        self.settings = replace(settings, time_limit=min(settings.time_limit, MOST_SECONDS))
        self.state_bytes = state_bytes  # that the user keeps besides parameters: gradients, optimizers
        self.asked_bytes: int | None = None  # the user's budget, once a graph says what a percentage is of
        self.correction_bytes = 0
        self.share = Share()
        self.decision: Decision | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """What decides a plan besides the graph and the correction."""
        s = self.settings
        solver = s.solver if isinstance(s.solver, str) else repr(s.solver)
        options = tuple(sorted((name, repr(value)) for name, value in s.options.items()))
        around = (self.share, self.state_bytes, s.reserve_bytes)
        required = None if self.planner.required is None else hash(self.planner.required.schedule)
        return (str(s.budget), solver, options, s.time_limit, str(around), required)

    def decide(
        self, joint: GraphModule, own: tuple[GraphModule, GraphModule], *, forward_outputs: int, static: frozenset[int]
    ) -> Decision:
        """How to cut `joint`; `own` are the halves that torch makes of it. `BudgetInfeasible` if nothing fits."""
        device = device_of(joint)
        capture = self._read(joint, device, forward_outputs, static)
        planner = Planner(self.settings)
        graph, loss_bytes = self._with_outside(capture, planner, device)
        usable_bytes = planner.budget_bytes(graph, device)
        if self.asked_bytes is None:
            whole = planner.whole_bytes or 0
            auto = self.settings.budget == "auto"
            self.asked_bytes = usable_bytes if auto else parse_budget(self.settings.budget, whole)
        own_bytes = predicted_peak_bytes(
            *own, returned=forward_outputs, resident_bytes=graph.resident_bytes, loss_bytes=loss_bytes
        )
        capture = replace(capture, graph=graph)
        required, self.planner.required = self.planner.required, None
        if required is None and own_bytes <= usable_bytes - self.correction_bytes:
            decision = Decision(self._own_plan(capture, usable_bytes), True, own_bytes, capture)
        else:
            plan = self._followed(required, graph) if required else self._solved(capture, device)
            decision = Decision(plan, False, plan.figures.peak_bytes or 0, capture)
        self.adopt(decision, self.asked_bytes)
        return decision

    def adopt(self, decision: Decision, asked_bytes: int) -> None:
        """Go by `decision`, made here or by another process for the same graph and `asked_bytes`."""
        self.planner.remember(decision.plan)
        self.decision = decision
        self.asked_bytes = asked_bytes

    def _solved(self, capture: FusedCapture, device: torch.device) -> Plan:
        assert self.asked_bytes is not None
        planner = Planner(replace(self.settings, budget=max(1, self.asked_bytes - self.correction_bytes)))
        if self.decision is not None and self.decision.capture is None:  # inductor has forgotten what we remember
            planner.plans.append(self.decision.plan)
        try:
            return planner.plan(capture.graph, device, engine=COMPILED, notes=(*capture.notes, *self._notes()))
        except BudgetInfeasible as refusal:
            raise self._refusal(refusal) from None

    def _followed(self, required: Plan, graph: Graph) -> Plan:
        try:
            required.check(graph)
        except ScheduleError as error:
            raise OtherGraph(str(error)) from None
        return required

    def correct(self, measured_bytes: int) -> int:
        """What the correction has to be, so that the next plan takes what was measured into account."""
        assert self.decision is not None
        return measured_bytes - self.decision.predicted_bytes

    def _read(
        self, joint: GraphModule, device: torch.device, forward_outputs: int, static: frozenset[int]
    ) -> FusedCapture:
        progress, planned_for = self.settings.progress, self.settings.device
        with measuring_progress(progress) as shown, profiling(planned_for, device, shown) as profiler:
            made = read_fused(joint, forward_outputs=forward_outputs, static=static, profile=profiler.profile)
            return replace(made, notes=(*profiler.notes, *made.notes))

    def _with_outside(self, capture: FusedCapture, planner: Planner, device: torch.device) -> tuple[Graph, int]:
        assumed = 0 if capture.returns_loss else int(ASSUMED_LOSS * capture.tangent_bytes)
        loss = LossCost(max(assumed, self.share.between_bytes), 4 * allocated_bytes(16, device))
        outside_bytes = planner.outside_bytes(capture.graph, device, self.state_bytes + self.share.before_bytes)
        return (
            graph_with_outside(capture.graph, loss, outside_bytes),
            loss.workspace_bytes + loss.retained_bytes,
        )

    def _own_plan(self, capture: FusedCapture, usable_bytes: int) -> Plan:
        """Torch recomputes what costs next to nothing, which is not ours to say: as a schedule, everything is kept."""
        everything = baseline(capture.graph)
        budget = max(usable_bytes, simulate(capture.graph, everything).peak_bytes)
        kept = Solution(everything, Status.FEASIBLE, OWN)
        return Plan.from_solution(Problem(capture.graph, budget), kept, (*capture.notes, *self._notes()), COMPILED)

    def _notes(self) -> tuple[str, ...]:
        if not self.correction_bytes:
            return ()
        sign = "more" if self.correction_bytes > 0 else "less"
        return (f"measured: {format_bytes(abs(self.correction_bytes))} {sign} than predicted, which the plan counts",)

    def _refusal(self, refusal: BudgetInfeasible) -> BudgetInfeasible:
        """In terms of the user's own budget."""
        if not self.correction_bytes or refusal.feasible_from_bytes is None:
            return refusal
        works_bytes = refusal.feasible_from_bytes + self.correction_bytes
        return BudgetInfeasible(
            f"a budget of {format_bytes(self.asked_bytes or 0)} cannot be kept: inductor was measured to take "
            f"{format_bytes(abs(self.correction_bytes))} more than planned; the smallest budget that should work is "
            f"{works_bytes} bytes ({format_bytes(works_bytes)}).\n  Try budget={works_bytes}, or a smaller batch",
            feasible_from_bytes=works_bytes,
        )
