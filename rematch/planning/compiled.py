"""Plans for a graph that inductor compiles: costs, what lies around the graph, and a budget that measuring corrects.

`GraphPlanner(planner).decide(joint, own, forward_outputs=1, static=frozenset())`
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule

from rematch.capture.inductor.peak import StepPeaks, predicted_peaks
from rematch.capture.inductor.read import FusedCapture, read_fused
from rematch.capture.joint.read import LossCost, graph_with_outside
from rematch.capture.joint.traced import device_of
from rematch.capture.memory import allocated_bytes
from rematch.errors import BudgetInfeasible, ScheduleError
from rematch.graph import Graph, baseline, simulate
from rematch.graph.model import ALREADY_ALLOCATED
from rematch.planning.budget import parse_budget
from rematch.planning.joint import profiling
from rematch.planning.plan import Plan
from rematch.planning.planner import Planner
from rematch.planning.settings import ASSUMED_LOSS, COMPILED
from rematch.report.progress import measuring_progress
from rematch.solvers.base import Problem, Solution, Status
from rematch.units import format_bytes

MOST_SECONDS = 10.0  # to solve for one graph: whoever compiles waits already
_NEAR = 2.0  # times the budget: a plan that is predicted to take no more is tried and measured
OWN = "torch.compile's own partition"


@dataclass(frozen=True)
class Decision:
    """How one graph is to be cut."""

    plan: Plan
    by_torch: bool  # torch's own partition keeps the budget as it is
    predicted_bytes: int
    capture: FusedCapture | None = None  # None for one that another process made
    own_peaks: StepPeaks | None = None  # of torch's own partition


@dataclass(frozen=True)
class Around:
    """What measuring has found out about a graph, and what lies around it."""

    correction_bytes: int = 0  # by how much the measured peak exceeds the predicted one
    between_bytes: int | None = None  # taken between forward and backward, by the loss or by other graphs
    before_bytes: int = 0  # that other graphs of the model have saved when this one runs
    unused: tuple[int, ...] = ()  # places of results that get no gradient


class OtherGraph(ScheduleError):
    """The plan that must be followed is for another graph."""


class GraphPlanner:
    """Plans one graph of a model; `planner` keeps the plans of all of them.

    It is `lenient` if other graphs hold memory that they could do without: what does not fit runs as torch cuts it.
    """

    def __init__(self, planner: Planner, state_bytes: int = 0) -> None:
        settings = planner.settings
        self.planner = planner
        self.settings = replace(settings, time_limit=min(settings.time_limit, MOST_SECONDS))
        self.state_bytes = state_bytes  # that the user keeps besides parameters: gradients, optimizers
        self.asked_bytes: int | None = None  # the user's budget, once a graph says what a percentage is of
        self.around = Around()
        self.lenient = False
        self.decision: Decision | None = None
        self._least_tried = False  # the plan of the smallest peak, after another one took more than was predicted

    @property
    def identity(self) -> tuple[object, ...]:
        """What decides a plan besides the graph and what lies around it."""
        s = self.settings
        solver = s.solver if isinstance(s.solver, str) else repr(s.solver)
        options = tuple(sorted((name, repr(value)) for name, value in s.options.items()))
        required = None if self.planner.required is None else hash(self.planner.required.schedule)
        return (str(s.budget), solver, options, s.pins, s.time_limit, self.state_bytes, s.reserve_bytes, required)

    def decide(
        self, joint: GraphModule, own: tuple[GraphModule, GraphModule], *, forward_outputs: int, static: frozenset[int]
    ) -> Decision:
        """How to cut `joint`; `own` are the halves that torch makes of it. `BudgetInfeasible` if nothing fits."""
        capture = self._read(joint, forward_outputs, static)
        between_bytes = self.around.between_bytes
        if between_bytes is None and not capture.returns_loss:
            # The loss is not known yet. If what we assume of it does not fit, the first step will tell.
            with suppress(BudgetInfeasible):
                return self._decide(capture, own, int(ASSUMED_LOSS * capture.tangent_bytes))
        return self._decide(capture, own, between_bytes or 0)

    def _decide(self, capture: FusedCapture, own: tuple[GraphModule, GraphModule], between_bytes: int) -> Decision:
        device = device_of(capture.joint)
        planner = Planner(self.settings)
        loss = _loss_cost(capture, between_bytes)
        outside_bytes = planner.outside_bytes(capture.graph, device, self.state_bytes + self.around.before_bytes)
        graph = graph_with_outside(capture.graph, loss, outside_bytes)
        capture = replace(capture, graph=graph)
        usable_bytes = planner.budget_bytes(graph, device)
        if self.asked_bytes is None:
            auto = self.settings.budget == "auto"
            self.asked_bytes = usable_bytes if auto else parse_budget(self.settings.budget, planner.whole_bytes or 0)
        returned = capture.found.forward_outputs
        peaks = predicted_peaks(*own, returned=returned, resident_bytes=graph.resident_bytes)
        own_bytes = peaks.peak_bytes(loss.workspace_bytes + loss.retained_bytes)
        required, self.planner.required = self.planner.required, None
        plan = self._followed(required, graph) if required else None
        if plan is None and own_bytes > usable_bytes - self.around.correction_bytes:
            plan = self._solved(capture, device, own_bytes)
        if plan is None:
            decision = Decision(self._own_plan(capture, usable_bytes), True, own_bytes, capture, peaks)
        else:
            decision = Decision(plan, False, plan.figures.peak_bytes or 0, capture)
        self.adopt(decision, self.asked_bytes)
        return decision

    def adopt(self, decision: Decision, asked_bytes: int) -> None:
        """Go by `decision`, made here or by another process for the same graph and `asked_bytes`."""
        if self.decision is not None:  # of the same graph, before it was measured
            self.planner.forget(self.decision.plan)
        self.planner.remember(decision.plan)
        self.decision = decision
        self.asked_bytes = asked_bytes

    def _solved(self, capture: FusedCapture, device: torch.device, own_bytes: int) -> Plan | None:
        """A plan that keeps the budget; None if torch's own partition has to do, which takes `own_bytes`."""
        assert self.asked_bytes is not None
        planner = Planner(replace(self.settings, budget=max(1, self.asked_bytes - self.around.correction_bytes)))
        if self.decision is not None and self.decision.capture is None:  # inductor has forgotten what we remember
            planner.plans.append(self.decision.plan)
        notes = (*capture.notes, *self._notes())
        try:
            return planner.plan(capture.graph, device, engine=COMPILED, notes=notes)
        except BudgetInfeasible as refusal:
            if self.lenient:
                return None
            least_bytes = refusal.feasible_from_bytes or 0
            measured = self.around.correction_bytes != 0 or self.around.between_bytes is not None
            # Inductor writes into memory that is no longer read, library kernels may need less workspace than in eager
            # mode, and results other than the loss may have no gradients: measuring will tell. What was measured of
            # one plan need not hold for a tighter one, so that one is measured too before the budget is refused.
            near_bytes = self.asked_bytes if measured else int(_NEAR * self.asked_bytes)
            if self._least_tried or not 0 < least_bytes <= near_bytes:
                raise self._refusal(refusal) from None
            self._least_tried = measured
            least = planner.least_memory_plan(capture.graph, device, engine=COMPILED, notes=notes)
            return least if (least.figures.peak_bytes or 0) < own_bytes else None

    def _followed(self, required: Plan, graph: Graph) -> Plan:
        try:
            required.check(graph)
        except ScheduleError as error:
            raise OtherGraph(str(error)) from None
        return required

    def corrected(self, peak_bytes: int, between_bytes: int, margin_bytes: int) -> Around:
        """What the next plan has to count, after a step that took so much at its peak and outside of the graph."""
        assert self.decision is not None
        around, predicted_bytes = self.around, self.decision.predicted_bytes
        if self.decision.capture is not None:
            around = replace(around, between_bytes=between_bytes)
            predicted_bytes = self._predicted_bytes(self.decision, self.decision.capture, between_bytes)
        return replace(around, correction_bytes=peak_bytes - predicted_bytes + margin_bytes)

    def _predicted_bytes(self, decision: Decision, capture: FusedCapture, between_bytes: int) -> int:
        """The peak that would have been predicted, had one known what is taken outside of the graph."""
        loss = _loss_cost(capture, between_bytes)
        if decision.own_peaks is not None:
            return decision.own_peaks.peak_bytes(loss.workspace_bytes + loss.retained_bytes)
        allocated = next(value.size_bytes for value in capture.graph.values if value.role == ALREADY_ALLOCATED)
        graph = graph_with_outside(capture.graph, loss, allocated)
        return simulate(graph, decision.plan.schedule).peak_bytes

    def _read(self, joint: GraphModule, forward_outputs: int, static: frozenset[int]) -> FusedCapture:
        progress, planned_for, device = self.settings.progress, self.settings.device, device_of(joint)
        with measuring_progress(progress) as shown, profiling(planned_for, device, shown) as profiler:
            made = read_fused(
                joint,
                forward_outputs=forward_outputs,
                static=static,
                profile=profiler.profile,
                name="a graph of torch.compile",
            )
            return replace(made, notes=(*profiler.notes, *made.notes))

    def _own_plan(self, capture: FusedCapture, usable_bytes: int) -> Plan:
        """Torch recomputes what costs next to nothing, which is not ours to say: as a schedule, everything is kept."""
        everything = baseline(capture.graph)
        budget = max(usable_bytes, simulate(capture.graph, everything).peak_bytes)
        kept = Solution(everything, Status.FEASIBLE, OWN)
        return Plan.from_solution(Problem(capture.graph, budget), kept, (*capture.notes, *self._notes()), COMPILED)

    def _notes(self) -> tuple[str, ...]:
        if not self.around.correction_bytes:
            return ()
        sign = "more" if self.around.correction_bytes > 0 else "less"
        return (
            f"measured: {format_bytes(abs(self.around.correction_bytes))} {sign} than predicted, which the plan counts",
        )

    def _refusal(self, refusal: BudgetInfeasible) -> BudgetInfeasible:
        """In terms of the user's own budget."""
        if not self.around.correction_bytes or refusal.feasible_from_bytes is None:
            return refusal
        works_bytes = refusal.feasible_from_bytes + self.around.correction_bytes
        sign = "more" if self.around.correction_bytes > 0 else "less"
        return BudgetInfeasible(
            f"a budget of {format_bytes(self.asked_bytes or 0)} cannot be kept: inductor was measured to take "
            f"{format_bytes(abs(self.around.correction_bytes))} {sign} than planned; the smallest budget that should "
            f"work is {works_bytes} bytes ({format_bytes(works_bytes)}).\n"
            f"  Try budget={works_bytes}, or a smaller batch",
            feasible_from_bytes=works_bytes,
        )


def _loss_cost(capture: FusedCapture, between_bytes: int) -> LossCost:
    """What is taken between forward and backward, and what small things stay: the loss and its gradient."""
    small_bytes = 4 * allocated_bytes(16, device_of(capture.joint))
    return LossCost(between_bytes, small_bytes, capture.first_run_seconds)
