"""Plans for a graph that inductor compiles: costs, what lies around the graph, and a budget that measuring corrects.

`GraphPlanner(planner).decide(joint, own, split, forward_outputs=1, static=frozenset())`

A plan is made for the buffers that `read_fused` expects. Inductor then lowers and schedules both halves, which says
what they really take. Where that is more than the budget, or much less, the difference goes into another plan, before
anything is compiled. What measuring finds beyond it corrects the next compilation.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule

from rematch.capture.inductor.lowered import Kernel, LoweredStep, lower_step
from rematch.capture.inductor.peak import StepPeaks, predicted_peaks
from rematch.capture.inductor.read import COPIES, FusedCapture, read_fused
from rematch.capture.joint.read import LossCost, graph_with_outside
from rematch.capture.joint.traced import device_of
from rematch.capture.memory import allocated_bytes, has_expandable_segments
from rematch.errors import BudgetInfeasible, ScheduleError
from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.planning.budget import parse_budget
from rematch.planning.cuda_allocator import Requests, requests_of
from rematch.planning.joint import profiling
from rematch.planning.layouts import Layout, Layouts
from rematch.planning.places import Places
from rematch.planning.placing import TOGETHER, instead_of, keeps
from rematch.planning.plan import Plan
from rematch.planning.planner import Planner, available_bytes
from rematch.planning.settings import ASSUMED_LOSS, AUTO, COMPILED
from rematch.report.progress import measuring_progress
from rematch.solvers.base import Deadline, Problem, Solution, Solver, Status, solve, verify
from rematch.solvers.common.local_search import LocalSearch
from rematch.units import format_bytes

MOST_SECONDS = 10.0  # to solve for one graph: whoever compiles waits already
_MOST_MOVES = 10**9  # of local search, which ends when its time does
_NEAR = 2.0  # times the budget: a plan that is predicted to take no more is tried and measured
_SHARES = (0.5, 0.3, 0.2)  # of the time to solve, for the first plan and those that follow what inductor makes of it
_SOLVING = 0.35  # of such a share; the rest goes to the search for places, where tensors have to have some
_SLACK = 0.02  # of the budget: with more than this left over, another plan could be faster
_SLACK_AGAIN = 0.04  # the same after a second look, which takes a part of a compilation
_UNMEASURED = 0.01  # of the budget, on a card, until a step is measured: what libraries take beyond predictions
_PLACES_UNSEEN = 0.005  # of the budget: what inductor's layout may need beyond the places that a schedule tells of
_WORTH_A_PLACE = 10.0  # of a step, for as much of the budget that a process needs less: a tenth for a percent
_UNSURE_BELOW, _UNSURE_ABOVE = 0.25, 0.1  # of the budget: predictions of torch's own partition as close are checked
_FREE_STEP = 2**28  # bytes, less than what budget="auto" leaves unused
_LADDER = (0.2, 0.4, 0.6, 0.8)  # of the way from the smallest peak to the largest: where other plans are tried
_LAYOUTS = Layouts()  # of this process; refusals go by them
OWN = "torch.compile's own partition"
Halves = tuple[GraphModule, GraphModule]
Cut = Callable[[FusedCapture, Schedule], Halves]
log = logging.getLogger("rematch")


@dataclass(frozen=True)
class Decision:
    """How one graph is to be cut."""

    plan: Plan
    by_torch: bool  # torch's own partition keeps the budget as it is
    predicted_bytes: int
    lost_bytes: int = 0  # of the budget, that nothing can be put into because tensors need addresses in one piece
    capture: FusedCapture | None = None  # None for one that another process made
    peaks: StepPeaks | None = None  # None if only the plan's own prediction is there
    halves: Halves | None = None

    @property
    def remembered(self) -> Decision:
        """Without traced graphs and what inductor made of them."""
        return replace(self, capture=None, peaks=None, halves=None)

    def cuts_like(self, other: Decision) -> bool:
        """Whether the other decision about the same graph makes the same halves."""
        return self.by_torch == other.by_torch and self.plan.schedule == other.plan.schedule


@dataclass(frozen=True)
class _Job:
    """A graph to be cut, as inductor's buffers, and what the loss takes between its halves."""

    capture: FusedCapture
    cut: Cut
    loss_bytes: int
    target_bytes: int  # that its tensors may take at the peak

    @property
    def device(self) -> torch.device:
        return device_of(self.capture.joint)


@dataclass(frozen=True)
class _Candidate:
    """A plan, cut, and what inductor makes of it."""

    plan: Plan
    halves: Halves
    peaks: StepPeaks | None
    predicted_bytes: int
    needed_bytes: int  # its peak, or more so that a process may train which can reserve no more than the budget

    def rank(self, target_bytes: int) -> tuple[bool, float]:
        """Smaller is better: what keeps the budget by its time, what does not by its memory.

        Longer steps are taken so that all tensors have places, but not for a sliver of memory.
        """
        if self.predicted_bytes > target_bytes:
            return True, self.predicted_bytes - target_bytes
        excess = max(0.0, self.needed_bytes / target_bytes - 1)
        return False, (self.plan.figures.seconds or 0.0) * (1 + _WORTH_A_PLACE * excess)


@dataclass(frozen=True)
class Around:
    """What measuring has found out about a graph, and what lies around it."""

    correction_bytes: int = 0  # by how much the measured peak exceeds the predicted one
    between_bytes: int | None = None  # taken between forward and backward, by the loss or by other graphs
    before_bytes: int = 0  # that other graphs of the model have saved when this one runs
    unused: tuple[int, ...] = ()  # places of results that get no gradient, and are dropped once there is a loss
    shares: bool = False  # the budget, with other graphs or other calls of this one, whose shares are known


class OtherGraph(ScheduleError):
    """The plan that must be followed is for another graph."""


class GraphPlanner:
    """Plans one graph of a model; `planner` keeps the plans of all of them.

    It is `lenient` if other graphs hold memory that they could do without: what does not fit runs as torch cuts it, or
    takes the least it can once it is known what it shares with them. What is `placed` gets its memory from CUDA's
    allocator, tensor by tensor.
    """

    def __init__(self, planner: Planner, state_bytes: int = 0, *, placed: bool = True) -> None:
        settings = planner.settings
        self.planner = planner
        self.settings = replace(settings, time_limit=min(settings.time_limit, MOST_SECONDS))
        self.state_bytes = state_bytes  # that the user keeps besides parameters: gradients, optimizers
        self.asked_bytes: int | None = None  # the user's budget, once a graph says what a percentage is of
        self.around = Around()
        self.placed = placed
        self.lenient = False
        self.decision: Decision | None = None
        self.layouts = _LAYOUTS
        self.tried: tuple[Layout, ...] = ()  # of those, what there is of this graph
        self._beyond_bytes = 0  # that inductor takes beyond what a plan predicts, as far as it was seen,
        self._beyond_of: tuple[int, ...] = ()  # of the graph without the gradients of these outputs
        self._lowered: dict[tuple[object, ...], LoweredStep] = {}  # halves that inductor has laid out before
        self._unreadable = ""  # why inductor's layout could not be read

    @property
    def identity(self) -> tuple[object, ...]:
        """What decides a plan besides the graph and what lies around it."""
        s = self.settings
        solver = s.solver if isinstance(s.solver, str) else repr(s.solver)
        options = tuple(sorted((name, repr(value)) for name, value in s.options.items()))
        required = self.planner.required
        schedule = None if required is None else hashlib.sha256(required.schedule.steps.tobytes()).hexdigest()
        return (str(s.budget), solver, options, s.pins, s.time_limit, self.state_bytes, s.reserve_bytes, schedule)

    def free_share(self, device: torch.device) -> int | None:
        """For budget="auto", what is free on the device, in steps: caches must not return a partition for more."""
        if self.settings.budget != AUTO:
            return None
        return available_bytes(device, self.settings.device) // _FREE_STEP

    def decide(
        self, joint: GraphModule, own: Halves, cut: Cut, *, forward_outputs: int, static: frozenset[int]
    ) -> Decision:
        """How to `cut` a joint graph; `own` are torch's own halves of it. `BudgetInfeasible` if nothing fits."""
        capture = self._read(joint, forward_outputs, static)
        between_bytes = self.around.between_bytes
        if between_bytes is None and not capture.returns_loss:
            # The loss is not known yet. If what we assume of it does not fit, the first step will tell.
            with suppress(BudgetInfeasible):
                return self._decide(capture, own, cut, int(ASSUMED_LOSS * capture.tangent_bytes))
        return self._decide(capture, own, cut, between_bytes or 0)

    def _decide(self, capture: FusedCapture, own: Halves, cut: Cut, between_bytes: int) -> Decision:
        device = device_of(capture.joint)
        planner = Planner(self.settings)
        if self._beyond_of != self.around.unused:  # the graph is another one now
            self._beyond_bytes, self._beyond_of = 0, self.around.unused
        loss = _loss_cost(capture, between_bytes)
        there = _without_copies(capture.graph)
        outside_bytes = planner.outside_bytes(there, device, self.state_bytes + self.around.before_bytes)
        graph = graph_with_outside(capture.graph, loss, outside_bytes)
        capture = replace(capture, graph=graph)
        usable_bytes = planner.budget_bytes(graph, device)
        if self.asked_bytes is None:
            auto = self.settings.budget == AUTO
            self.asked_bytes = usable_bytes if auto else parse_budget(self.settings.budget, planner.whole_bytes or 0)
        target_bytes = usable_bytes - self.around.correction_bytes
        loss_bytes = loss.workspace_bytes + loss.retained_bytes
        job = _Job(capture, cut, loss_bytes, target_bytes)
        peaks, needed_bytes = self._own_peaks(job, own)
        own_bytes = peaks.peak_bytes(loss_bytes)
        required, self.planner.required = self.planner.required, None
        found: _Candidate | None = None
        try:
            if required is not None:
                found = self._tried(job, self._followed(required, graph))
            elif needed_bytes > target_bytes:
                found = self._solved(job, needed_bytes)
        finally:
            self.tried = self.layouts.of(graph, self.settings.pins)
        if found is None:
            plan, lost_bytes = self._own_plan(capture, usable_bytes), needed_bytes - own_bytes
            decision = Decision(plan, True, own_bytes, lost_bytes, capture, peaks, own)
        else:
            lost_bytes = found.needed_bytes - found.predicted_bytes
            decision = Decision(
                found.plan, False, found.predicted_bytes, lost_bytes, capture, found.peaks, found.halves
            )
        self.adopt(replace(decision, halves=None), self.asked_bytes)
        return decision

    def _own_peaks(self, job: _Job, own: Halves) -> tuple[StepPeaks, int]:
        """What torch's own partition takes, as exactly as it matters, and what it needs, as of a candidate."""
        graph, returned = job.capture.graph, job.capture.found.forward_outputs
        peaks = predicted_peaks(
            *own, returned=returned, dropped=self.around.unused, resident_bytes=graph.resident_bytes
        )
        share = peaks.peak_bytes(job.loss_bytes) / max(1, job.target_bytes) - 1
        step = self._lowered_step(job.capture, own) if -_UNSURE_BELOW < share < _UNSURE_ABOVE else None
        if step is None:
            return peaks, peaks.peak_bytes(job.loss_bytes)
        peaks = _peaks_of(step, graph)
        return peaks, self._needed_bytes(job, step, peaks)

    def _needed_bytes(self, job: _Job, step: LoweredStep, peaks: StepPeaks) -> int:
        """The peak, or more so that all tensors have places."""
        peak_bytes = peaks.peak_bytes(job.loss_bytes)
        if not self._is_placed(job):
            return peak_bytes
        graph = _without_copies(job.capture.graph)
        resident = tuple(value.size_bytes for value in graph.values if value.resident and value.size_bytes)
        asked = Requests(resident, tuple(step.requests(job.loss_bytes, _workspace_of(job.capture.graph))))
        return max(peak_bytes, self._within_target(job, Places(job.device).needed_for(asked)))

    def _planned_bytes(self, job: _Job, schedule: Schedule) -> int:
        """The same as far as a schedule tells, before inductor has laid it out."""
        graph = job.capture.graph
        peak_bytes = simulate(graph, schedule).peak_bytes
        if not self._is_placed(job):
            return peak_bytes
        return max(peak_bytes, self._within_target(job, Places(job.device).needed_for(requests_of(graph, schedule))))

    def _within_target(self, job: _Job, reserved_bytes: int) -> int:
        """How much of the job's target a process uses that has to reserve so many bytes."""
        return job.target_bytes + reserved_bytes - self._cap_bytes

    @property
    def _cap_bytes(self) -> int:
        """What a process may reserve, by the model of its allocator."""
        assert self.asked_bytes is not None
        return self.asked_bytes - max(0, self.around.correction_bytes)

    def _is_placed(self, job: _Job) -> bool:
        """Whether tensors are to have places in a process that may reserve no more than the budget.

        Without expandable segments too much would be left unused for it: there only the peak is kept.
        """
        by_cuda = self.placed and job.device.type == "cuda"
        return by_cuda and self.settings.budget != AUTO and has_expandable_segments()

    def _lowered_step(self, capture: FusedCapture, halves: Halves) -> LoweredStep | None:
        """Both halves as inductor lays them out; None if that cannot be read. Those laid out before still are so."""
        if capture.symbolic or self._unreadable:
            return None
        key = (self.around.unused, *(half.code for half in halves))
        try:
            if key not in self._lowered:
                self._lowered[key] = lower_step(
                    *halves, returned=capture.found.forward_outputs, dropped=self.around.unused
                )
        except Exception as error:
            # Private to inductor, and only a prediction: what is compiled will be measured.
            self._unreadable = f"{type(error).__name__}: {error}".splitlines()[0]
            log.info("inductor's layout of a graph cannot be read", exc_info=True)
            return None
        return self._lowered[key]

    def _tried(self, job: _Job, plan: Plan) -> _Candidate:
        """The plan with what inductor makes of it."""
        halves = job.cut(job.capture, plan.schedule)
        step = self._lowered_step(job.capture, halves)
        self.layouts.add(self._layout_of(plan))
        if step is None:
            planned_bytes = self._planned_bytes(job, plan.schedule)
            return _Candidate(plan, halves, None, plan.figures.peak_bytes or 0, planned_bytes)
        peaks = _peaks_of(step, job.capture.graph)
        predicted_bytes = peaks.peak_bytes(job.loss_bytes)
        needed_bytes = self._needed_bytes(job, step, peaks)
        return _Candidate(plan, halves, peaks, predicted_bytes, needed_bytes)

    def measured(self, peak_bytes: int, between_bytes: int) -> None:
        """Note what a step of this plan took, with so much outside of the graph."""
        decision = self.decision
        if decision is not None and decision.capture is not None and not decision.by_torch and not self.around.shares:
            predicted_bytes = self._predicted_bytes(decision, decision.capture, between_bytes)
            layout = self._layout_of(decision.plan)
            self.layouts.add(replace(layout, beyond_bytes=peak_bytes - predicted_bytes))
            self.tried = self.layouts.of(decision.capture.graph, self.settings.pins)

    def _layout_of(self, plan: Plan) -> Layout:
        return Layout(plan.graph_fingerprint, self.settings.pins, plan.schedule, plan.figures.solver)

    def adopt(self, decision: Decision, asked_bytes: int) -> None:
        """Go by `decision`, made here or by another process for the same graph and `asked_bytes`."""
        if self.decision is not None:  # of the same graph, before it was measured
            self.planner.forget(self.decision.plan)
        self.planner.remember(decision.plan)
        self.decision = decision
        self.asked_bytes = asked_bytes

    def rest(self) -> None:
        """Nothing is to be planned for now: let go of traced graphs and of what inductor made of them."""
        self._lowered.clear()
        if self.decision is not None:
            self.decision = self.decision.remembered

    def _solved(self, job: _Job, own_bytes: int) -> _Candidate | None:
        """The fastest plan found that keeps the budget as inductor lays it out, or the one that comes closest.

        None if torch's own partition has to do, which needs `own_bytes`.
        """
        target_bytes = job.target_bytes
        proven = self._proven(job)
        if proven is not None and self.around.correction_bytes > 0:
            return proven  # the plan before exceeded its prediction, and another one may too
        best: _Candidate | None = None
        tried: list[Plan] = []
        for share in _SHARES:
            plan = self._search(job, share * self.settings.time_limit, tried[-1] if tried else None)
            if plan is None or any(plan.schedule == other.schedule for other in tried):
                break
            tried.append(plan)
            found = self._tried(job, plan)
            self._beyond_bytes = found.needed_bytes - self._planned_bytes(job, plan.schedule)
            best = found if best is None else min(best, found, key=lambda made: made.rank(target_bytes))
            slack = _SLACK if len(tried) == 1 else _SLACK_AGAIN
            if found.peaks is None or 0 <= target_bytes - found.needed_bytes <= slack * target_bytes:
                break
        if best is not None and best.predicted_bytes > target_bytes:
            # A refusal names what inductor makes of one of these: whoever asks for that gets it.
            best = min(self._laid_out(job), key=lambda made: made.rank(self._target_of(made, job)))
            if best.predicted_bytes > self._target_of(best, job) and proven is not None:
                return proven
        if best is not None and best.needed_bytes >= own_bytes:
            return None
        return best

    def _proven(self, job: _Job) -> _Candidate | None:
        """The fastest plan that was measured to take no more than the budget."""
        assert self.asked_bytes is not None
        known = [layout for layout in self.layouts.of(job.capture.graph, self.settings.pins) if layout.is_measured]
        made = [self._tried_again(job, layout) for layout in known]
        kept = [each for each in made if each.needed_bytes <= self._target_of(each, job)]
        return min(kept, key=lambda each: each.plan.figures.seconds or 0.0, default=None)

    def _least(self, job: _Job) -> _Candidate:
        """The plan that needs least, as far as any was tried: the same one whenever it is asked for."""
        return min(self._laid_out(job), key=lambda made: made.needed_bytes - self._target_of(made, job))

    def _target_of(self, made: _Candidate, job: _Job) -> int:
        """What the plan may be predicted to take: by its own steps where it was measured, else by those of others."""
        assert self.asked_bytes is not None
        beyond_bytes = self._beyond(made)
        return job.target_bytes if beyond_bytes is None else self.asked_bytes - beyond_bytes

    def _beyond(self, made: _Candidate) -> int | None:
        """By how much a step of this plan was measured to exceed its prediction."""
        return self.layouts.measured(self._layout_of(made.plan))

    def _laid_out(self, job: _Job) -> list[_Candidate]:
        """All plans that were tried for the graph, and if none of them fits, others of which one may."""
        graph, pins = job.capture.graph, self.settings.pins
        found = [self._tried_again(job, layout) for layout in self.layouts.of(graph, pins)]
        if all(made.predicted_bytes > job.target_bytes for made in found) and self.layouts.first_search(graph, pins):
            self._climb(job)
            found = [self._tried_again(job, layout) for layout in self.layouts.of(graph, pins)]
        return found

    def _climb(self, job: _Job) -> None:
        """Try the plan with the smallest peak, and some for larger budgets.

        Inductor computes together what reads the same memory. The more runs again, the more of its results wait for
        each other, so the plan with the smallest peak may be laid out largest.
        """
        graph, device, notes = job.capture.graph, job.device, job.capture.notes
        settings = replace(self.settings, time_limit=_SHARES[-1] * self.settings.time_limit)
        smallest = Planner(settings).least_memory_plan(graph, device, engine=COMPILED, notes=notes)
        if self._tried(job, smallest).peaks is None:  # nobody knows what inductor makes of it
            return
        least_bytes, whole_bytes = smallest.figures.peak_bytes or 0, simulate(graph, baseline(graph)).peak_bytes
        for share in _LADDER:
            planner = Planner(settings)
            peak_bytes = least_bytes + int(share * (whole_bytes - least_bytes))
            planner = Planner(replace(settings, budget=planner.budget_for(peak_bytes, device)))
            with suppress(BudgetInfeasible):
                self._tried(job, planner.plan(graph, device, engine=COMPILED, notes=notes, placed=False))

    def _tried_again(self, job: _Job, layout: Layout) -> _Candidate:
        """A schedule that was tried before, of the graph with what lies around it now."""
        graph = job.capture.graph
        peak_bytes = simulate(graph, layout.schedule).peak_bytes
        problem = Problem(graph, max(peak_bytes, Planner(self.settings).budget_bytes(graph, job.device)))
        found = Solution(layout.schedule, Status.FEASIBLE, layout.solver)
        return self._tried(job, Plan.from_solution(problem, found, (*job.capture.notes, *self._notes()), COMPILED))

    def _search(self, job: _Job, seconds: float, before: Plan | None) -> Plan | None:
        """A plan that should need the budget with what inductor takes beyond it; `before` it another was tried.

        If there is none, the plan with the smallest peak, where measuring it may help.
        """
        deadline = Deadline(seconds)
        assert self.asked_bytes is not None
        graph, device = job.capture.graph, job.device
        measured = self.around.correction_bytes != 0 or self.around.between_bytes is not None
        unsure_bytes = 0 if measured or device.type != "cuda" else int(_UNMEASURED * self.asked_bytes)
        budget = max(1, self.asked_bytes - self.around.correction_bytes - self._beyond_bytes - unsure_bytes)
        limit = _SOLVING * seconds if self._is_placed(job) else seconds
        planner = Planner(replace(self.settings, budget=budget, time_limit=limit))
        # Those of an earlier start, where inductor has forgotten what we remember, or of rank 0.
        planner.plans += [known for known in self.planner.plans if known.graph is None]
        notes = (*job.capture.notes, *self._notes())
        if before is not None and not self.settings.pins:
            budget_bytes = planner.budget_bytes(graph, device)
            if self._is_placed(job):  # by as much less than before as that one needed too much
                excess_bytes = self._planned_bytes(job, before.schedule) + self._beyond_bytes - job.target_bytes
                budget_bytes = min(budget_bytes, (before.figures.peak_bytes or 0) - excess_bytes)
            problem = Problem(graph, budget_bytes)
            found = self._near(problem, before.schedule, limit)
            if found is None:
                return self._least(job).plan
            return self._with_places(job, Plan.from_solution(problem, found, notes, COMPILED), deadline)
        try:
            plan = planner.plan(graph, device, engine=COMPILED, notes=notes, placed=False)
            return self._with_places(job, plan, deadline)
        except BudgetInfeasible as refusal:
            if before is not None or self.around.shares:
                return self._least(job).plan
            if self.lenient:
                return None
            least_bytes = refusal.feasible_from_bytes or 0
            if not least_bytes:
                raise
            # Library kernels may need less workspace than in eager mode, and results other than the loss may have no
            # gradients: measuring will tell. What was measured of one plan need not hold for a tighter one, so that one
            # is measured too before the budget is refused.
            least = self._least(job)
            beyond_bytes = self._beyond(least)
            more_bytes = self.around.correction_bytes if beyond_bytes is None else beyond_bytes
            is_known = beyond_bytes is not None or least_bytes > _NEAR * self.asked_bytes
            if is_known and least.predicted_bytes + more_bytes > self.asked_bytes:
                raise self._refusal(refusal, least, more_bytes, device) from None
            return least.plan

    def _with_places(self, job: _Job, plan: Plan, deadline: Deadline) -> Plan:
        """The plan, or one near it whose tensors have places as far as a schedule tells.

        To have inductor lay out a plan takes as long as hundreds of these looks, and shows much the same.
        """
        if not self._is_placed(job):
            return plan
        places, figures = Places(job.device), plan.figures
        problem = Problem(job.capture.graph, figures.budget_bytes)
        cap_bytes = int((1 - _PLACES_UNSEEN) * self._cap_bytes) - self._beyond_bytes

        def judged(schedule: Schedule) -> float | None:
            if not keeps(schedule, problem):
                return None
            fits = places.suffice_for(requests_of(problem.graph, schedule), cap_bytes)
            return simulate(problem.graph, schedule).seconds if fits else None

        def needed_bytes(found: Solution) -> int:
            assert found.schedule is not None
            return places.needed_for(requests_of(problem.graph, found.schedule))

        if judged(plan.schedule) is not None:
            return plan
        first = Solution(
            plan.schedule, figures.status, figures.solver, figures.lower_bound_seconds, figures.bound_scope
        )
        excess, seconds = needed_bytes(first) / max(1, cap_bytes) - 1, deadline.remaining / TOGETHER
        hunt = Planner(self.settings).hunt(problem, first, judged, excess=excess, time_limit=seconds)
        best = hunt.best or min(hunt.searches, key=needed_bytes)
        if best is first:
            return plan
        return Plan.from_solution(problem, instead_of(first, best, deadline.elapsed), plan.notes, COMPILED)

    def _near(self, problem: Problem, before: Schedule, limit: float) -> Solution | None:
        """The faster of what the solver finds in half of the time, and local search from a schedule for another budget.

        Large graphs take more than a part of the time from scratch. None if neither finds anything.
        """
        settings, graph = self.settings, problem.graph
        solved = solve(problem, settings.solver, time_limit=limit / 2, **settings.options)
        if isinstance(settings.solver, Solver) or solved.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return solved if solved.schedule is not None else None
        search = LocalSearch(problem)
        with suppress(ScheduleError):  # of one whose first computations are in another order
            search.adopt(before)
            search.run(_MOST_MOVES, Deadline(limit / 2))
        solved_seconds = math.inf if solved.schedule is None else simulate(graph, solved.schedule).seconds
        if search.best is None or (search.best_seconds or 0.0) >= solved_seconds:
            return solved if solved.schedule is not None else None
        by = f"{solved.solver}, then local search from a plan for another budget"
        found = replace(solved, schedule=search.best, status=Status.FEASIBLE, solver=by)
        verify(problem, found)
        return found

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

    def missed_bytes(self, saved_bytes: int) -> int:
        """By how much forward saves more than was predicted, if it saves so much."""
        decision = self.decision
        if decision is None or decision.capture is None or decision.peaks is None:
            return max(0, self.around.correction_bytes)
        graph = decision.capture.graph
        predicted_bytes = decision.peaks.at_loss_bytes - graph.resident_bytes - decision.capture.tangent_bytes
        return max(0, saved_bytes - predicted_bytes)

    def _predicted_bytes(self, decision: Decision, capture: FusedCapture, between_bytes: int) -> int:
        """The peak that would have been predicted, had one known what is taken outside of the graph."""
        loss = _loss_cost(capture, between_bytes)
        if decision.peaks is not None:
            return decision.peaks.peak_bytes(loss.workspace_bytes + loss.retained_bytes)
        graph = graph_with_outside(capture.graph, loss, capture.graph.already_allocated_bytes)
        return simulate(graph, decision.plan.schedule).peak_bytes

    def _read(self, joint: GraphModule, forward_outputs: int, static: frozenset[int]) -> FusedCapture:
        progress, planned_for, device = self.settings.progress, self.settings.device, device_of(joint)
        with measuring_progress(progress) as shown, profiling(planned_for, device, shown) as profiler:
            made = read_fused(
                joint,
                forward_outputs=forward_outputs,
                dropped=self.around.unused,
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
        notes = []
        if self._unreadable:
            notes.append(f"memory: as planned, for inductor's own layout could not be read ({self._unreadable})")
        if self.around.correction_bytes:
            sign = "more" if self.around.correction_bytes > 0 else "less"
            size = format_bytes(abs(self.around.correction_bytes))
            notes.append(f"measured: {size} {sign} than predicted, which the plan counts")
        return tuple(notes)

    def _refusal(
        self, refusal: BudgetInfeasible, least: _Candidate, more_bytes: int, device: torch.device
    ) -> BudgetInfeasible:
        """In terms of the user's own budget, and of what inductor makes of the smallest plan, measured or not."""
        works_bytes = Planner(self.settings).budget_for(least.needed_bytes + more_bytes, device)
        if works_bytes == refusal.feasible_from_bytes:
            return refusal
        works = f"{works_bytes} bytes ({format_bytes(works_bytes)})"
        why = f"the smallest that was found to work is {works}, as inductor lays its kernels out"
        if more_bytes:
            taken = f"{format_bytes(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'} than predicted"
            why = f"inductor was measured to take {taken}; the smallest budget that should work is {works}"
        return BudgetInfeasible(
            f"a budget of {format_bytes(self.asked_bytes or 0)} cannot be kept: {why}.\n"
            f"  Try budget={works_bytes}, or a smaller batch",
            feasible_from_bytes=works_bytes,
        )


def _peaks_of(step: LoweredStep, graph: Graph) -> StepPeaks:
    """With what is resident beside the buffers; inductor's copies are buffers."""
    return step.peaks(resident_bytes=_without_copies(graph).resident_bytes, workspace=_workspace_of(graph))


def _workspace_of(graph: Graph) -> Callable[[Kernel], int]:
    """What a library's kernel takes for itself, as it was measured in eager mode."""
    known = {op.name: op.workspace_bytes for op in graph.ops if op.workspace_bytes}
    return lambda kernel: max((known.get(node, 0) for node in kernel.nodes), default=0) if kernel.library else 0


def _without_copies(graph: Graph) -> Graph:
    """The graph as it is before a step: what inductor copies into another order is not there yet."""
    values = tuple(replace(value, size_bytes=0) if value.name == COPIES else value for value in graph.values)
    return replace(graph, values=values)


def _loss_cost(capture: FusedCapture, between_bytes: int) -> LossCost:
    """What is taken between forward and backward, and what small things stay: the loss and its gradient."""
    small_bytes = 4 * allocated_bytes(16, device_of(capture.joint))
    return LossCost(between_bytes, small_bytes, capture.first_run_seconds)
