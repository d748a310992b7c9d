"""Plans for graphs that inductor compiles: what lies around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rematch.capture.inductor.copies import traced_name
from rematch.capture.inductor.peak import StepPeaks, predicted_peaks
from rematch.capture.inductor.read import COPIES
from rematch.errors import BudgetInfeasible
from rematch.execute.compiled.partitioner import Partitioner
from rematch.graph import Graph, baseline, simulate
from rematch.graph.generators import gpt
from rematch.planning import compiled, planner as planner_module
from rematch.planning.compiled import Around, GraphPlanner
from rematch.planning.cuda_allocator import Requests
from rematch.planning.layouts import Layout, Layouts
from rematch.planning.plan import Plan
from rematch.planning.planner import Planner
from rematch.planning.settings import Settings
from rematch.solvers.base import Problem, Solution, Status, solve
from tests.inductor_graphs import run_partitioned, use_eager_kernels
from tests.modules import Net, batch


def test_copies_that_inductor_will_make_are_not_there_when_a_graph_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what libraries have allocated by then would be taken for the copies."""
    use_eager_kernels(monkeypatch)
    monkeypatch.setattr("rematch.capture.inductor.read.GraphLowering.decide_layout_opt", lambda *_, **__: True)
    counted: list[int] = []

    def outside_bytes(_: Planner, graph: Graph, *__: object) -> int:
        counted.extend(value.size_bytes for value in graph.values if value.name == COPIES)
        return 0

    monkeypatch.setattr(Planner, "outside_bytes", outside_bytes)
    planner = GraphPlanner(Planner(Settings(budget="1GiB", progress=False)))
    run_partitioned(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), Partitioner(planner, ()))
    assert planner.decision is not None and planner.decision.capture is not None
    planned = [value.size_bytes for value in planner.decision.capture.graph.values if value.name == COPIES]
    assert counted == [0] and planned[0] > 0


def test_halves_that_are_the_same_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is compiled again has the same partition by torch, which is compared with the budget each time."""
    lowered: list[object] = []
    lower_step = compiled.lower_step

    def noting(*halves: Any, **options: Any) -> Any:
        lowered.append(halves)
        return lower_step(*halves, **options)

    monkeypatch.setattr(compiled, "lower_step", noting)
    planner = GraphPlanner(Planner(Settings(budget="100%", progress=False)))
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        run_partitioned(Net(depth=2), batch(), Partitioner(planner, ()))
    assert len(lowered) == 1


def test_on_a_card_the_first_plan_leaves_room_for_what_is_not_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that ends a little above its budget is compiled again, which takes as long as the first time."""
    monkeypatch.setattr(compiled, "_SHARES", (1.0,))  # what inductor lays out for it leads to no second plan
    monkeypatch.setattr(compiled._Job, "device", property(lambda _: torch.device("cuda")))

    def planned_share(around: Around) -> float:
        torch._dynamo.reset()
        torch.manual_seed(0)
        planner = GraphPlanner(Planner(Settings(budget="70%", progress=False)))
        planner.around = around
        run_partitioned(Net(depth=4), batch(), Partitioner(planner, ()))
        assert planner.decision is not None and not planner.decision.by_torch
        return planner.decision.plan.figures.budget_bytes / (planner.asked_bytes or 1)

    assert planned_share(Around()) < planned_share(Around(between_bytes=0)) - 0.005


LOST_SHARE = 0.06


@pytest.fixture
def scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card whose allocator loses a part of what is asked for."""

    class Scattered:
        def __init__(self, *_: object) -> None:
            pass

        def needed_for(self, requests: Requests) -> int:
            return int((1 + LOST_SHARE) * requests.peak_bytes)

        def suffice_for(self, requests: Requests, cap_bytes: int) -> bool:
            return self.needed_for(requests) <= cap_bytes

    monkeypatch.setattr(compiled._Job, "device", property(lambda _: torch.device("cuda")))
    monkeypatch.setattr(compiled, "Places", Scattered)
    monkeypatch.setattr(compiled, "has_expandable_segments", lambda: True)


@pytest.mark.usefixtures("scattered")
def test_on_a_card_a_plan_leaves_what_the_allocator_needs_beyond_the_peak() -> None:
    """The budget is what a process may reserve, in which tensors need addresses in one piece."""

    def predicted_share(placed: bool) -> float:
        torch._dynamo.reset()
        torch.manual_seed(0)
        planner = GraphPlanner(Planner(Settings(budget="70%", progress=False)), placed=placed)
        planner.around = Around(between_bytes=0)
        run_partitioned(Net(depth=4), batch(), Partitioner(planner, ()))
        assert planner.decision is not None and not planner.decision.by_torch
        return planner.decision.predicted_bytes / (planner.asked_bytes or 1)

    assert predicted_share(placed=True) <= 1 / (1 + LOST_SHARE) < predicted_share(placed=False) <= 1


@pytest.mark.usefixtures("scattered")
def test_plans_without_places_are_not_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a schedule tells of places is known at once, and inductor takes long."""
    laid_out: list[float] = []
    tried = GraphPlanner._tried

    def seen(self: GraphPlanner, job: Any, plan: Plan) -> Any:
        laid_out.append((plan.figures.peak_bytes or 0) / (self.asked_bytes or 1))
        return tried(self, job, plan)

    monkeypatch.setattr(GraphPlanner, "_tried", seen)
    torch._dynamo.reset()
    torch.manual_seed(0)
    planner = GraphPlanner(Planner(Settings(budget="70%", progress=False)))
    planner.around = Around(between_bytes=0)
    run_partitioned(Net(depth=4), batch(), Partitioner(planner, ()))
    assert laid_out and laid_out[0] <= 1 / (1 + LOST_SHARE) + 0.001


def lay_out_larger_what_runs_again(monkeypatch: pytest.MonkeyPatch, bytes_each: int) -> None:
    """The more so the more of it there is, as where results wait for each other."""

    def lowered(forward: Any, backward: Any, *, returned: int, dropped: Any = ()) -> StepPeaks:
        first = {traced_name(node) for node in forward.graph.nodes if node.op == "call_function"}
        again = sum(traced_name(node) in first for node in backward.graph.nodes if node.op == "call_function")
        peaks = predicted_peaks(forward, backward, returned=returned, resident_bytes=0, dropped=dropped)
        return StepPeaks(peaks.forward_bytes, peaks.at_loss_bytes, peaks.backward_bytes + again**2 * bytes_each)

    def with_residents(peaks: StepPeaks, graph: Graph) -> StepPeaks:
        more = graph.resident_bytes
        return StepPeaks(peaks.forward_bytes + more, peaks.at_loss_bytes + more, peaks.backward_bytes + more)

    monkeypatch.setattr(compiled, "lower_step", lowered)
    monkeypatch.setattr(compiled, "_peaks_of", with_residents)
    monkeypatch.setattr(compiled, "_LAYOUTS", Layouts())


def planned_within(budget: str | int, around: Around | None = None) -> GraphPlanner:
    torch._dynamo.reset()
    torch.manual_seed(0)
    planner = GraphPlanner(Planner(Settings(budget=budget, time_limit=8.0, progress=False)))
    planner.around = around or Around(between_bytes=0)
    run_partitioned(Net(depth=4), batch(), Partitioner(planner, ()))
    return planner


def named_by_the_refusal_of(budget: str) -> int:
    with pytest.raises(Exception, match="smallest that was found to work") as caught:
        planned_within(budget)
    refusal = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(refusal, BudgetInfeasible) and refusal.feasible_from_bytes is not None
    return refusal.feasible_from_bytes


def test_a_refusal_goes_by_the_plan_that_inductor_lays_out_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is not the one with the smallest peak where inductor takes more the more runs again."""
    monkeypatch.setattr(planner_module, "_MINIMUM_SECONDS", 1.0)
    lay_out_larger_what_runs_again(monkeypatch, 15)
    whole = planned_within("1TiB").decision
    assert whole is not None and whole.by_torch
    works_bytes = named_by_the_refusal_of("1KiB")
    assert works_bytes < 0.95 * whole.predicted_bytes
    planner = planned_within(works_bytes)
    assert planner.decision is not None and planner.decision.predicted_bytes <= works_bytes


def test_a_plan_that_was_measured_to_keep_the_budget_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one exceeded its prediction. A third may too."""
    monkeypatch.setattr(compiled, "_LAYOUTS", Layouts())
    first = planned_within("70%")
    assert first.decision is not None and first.asked_bytes is not None and first.decision.plan.recomputed
    first.measured(first.asked_bytes - 1000, between_bytes=0)
    again = planned_within(first.asked_bytes, Around(between_bytes=0, correction_bytes=first.asked_bytes // 20))
    assert again.decision is not None
    assert again.decision.plan.schedule == first.decision.plan.schedule


def test_what_was_measured_of_a_schedule_stays_known() -> None:
    graph = gpt(1)
    layouts, layout = Layouts(), Layout(graph.fingerprint, (), baseline(graph), "a solver", beyond_bytes=5)
    layouts.add(layout)
    layouts.add(Layout(graph.fingerprint, (), baseline(graph), "a solver"))
    assert layouts.of(graph, ()) == (layout,) and layouts.of(graph, ("pinned",)) == ()
    elsewhere = Layouts()
    elsewhere.remember(layouts.of(graph, ()))
    assert elsewhere.of(graph, ()) == (layout,)


def test_convolutions_are_planned_with_the_costs_of_a_data_sheet() -> None:
    """Their arguments in another order go into one operator with a bias that has no order."""
    layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    planner = GraphPlanner(Planner(Settings(budget="1GiB", device="h100", progress=False)))
    run_partitioned(layers, torch.randn(4, 1, 8, 8), Partitioner(planner, ()))
    assert planner.decision is not None


@pytest.mark.parametrize("found_from_scratch", [None, Status.FEASIBLE, Status.OPTIMAL])
def test_a_plan_for_less_begins_with_the_one_before(
    monkeypatch: pytest.MonkeyPatch, found_from_scratch: Status | None
) -> None:
    """From scratch, the part of the time that is left may be too short for a large graph."""
    graph = gpt(4)
    whole = simulate(graph, baseline(graph)).peak_bytes
    problem = Problem(graph, int(0.7 * whole))
    before = solve(Problem(graph, int(0.85 * whole)), "greedy").schedule
    slow = solve(Problem(graph, int(0.6 * whole)), "greedy").schedule  # which fits too, and recomputes more
    assert before is not None and slow is not None
    scratch = Solution(None, Status.NOT_FOUND, "scratch")
    if found_from_scratch is not None:
        scratch = Solution(slow, found_from_scratch, "scratch")
    monkeypatch.setattr(compiled, "solve", lambda *_, **__: scratch)
    found = GraphPlanner(Planner(Settings(budget="1GiB", progress=False)))._near(problem, before, limit=0.5)
    assert found is not None and found.schedule is not None
    seen = simulate(graph, found.schedule).checked()
    assert seen.peak_bytes <= problem.budget_bytes
    if found_from_scratch is Status.OPTIMAL:
        assert found is scratch
    else:
        assert seen.seconds < simulate(graph, slow).seconds and "another budget" in found.solver
