"""What the planner counts, what a percentage is of, and when it plans again."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rematch
from rematch.capture.recorded_graph import RecordedGraph
from rematch.errors import BudgetInfeasible
from rematch.execute import runner
from rematch.graph import Schedule, baseline, simulate
from rematch.graph.generators import gpt
from rematch.planning import planner
from rematch.planning.plan import Plan
from rematch.planning.settings import Settings
from rematch.solvers import Deadline, OnProgress, Problem, Solution, Solver, Status
from rematch.solvers.minimum import surely_needed_bytes
from tests.captures import Given, everything_twice
from tests.modules import BATCH, Net, batch, mean_square
from tests.training import assert_trains_alike, measured_peak, step_of

REMAT: dict[str, Any] = {"budget": "75%", "time_limit": 0.5}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fixed_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(planner, "_MINIMUM_SECONDS", 1.0)


def part(plan: Plan, role: str) -> int:
    return next((part.size_bytes for part in plan.parts if part.role == role), 0)


# Plans are kept


def test_a_graph_that_was_planned_gets_its_plan_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = rematch.remat(Net(), batch(), **REMAT)
    (plan,) = rematch.plans_of(module)
    monkeypatch.setattr(planner, "solve", _never)
    twin = copy.deepcopy(module)  # has to compile anew
    mean_square(twin(batch())).backward()
    assert rematch.plans_of(twin) == (plan,)


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("there was nothing to solve")


def test_an_old_schedule_is_kept_if_it_fits_the_new_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    module = rematch.remat(Net(), batch(), **REMAT)
    (plan,) = rematch.plans_of(module)
    monkeypatch.setattr(planner, "solve", _never)
    module(batch(BATCH - 8))
    _, smaller = rematch.plans_of(module)
    assert smaller.figures.solver == f"{plan.figures.solver}, for another shape"
    assert smaller.schedule == plan.schedule
    assert smaller.figures.peak_bytes < plan.figures.peak_bytes


def test_everything_is_kept_where_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch far below the budget must not pay for the schedule of a larger one."""
    module = rematch.remat(Net(), batch(), **REMAT)
    monkeypatch.setattr(planner, "solve", _never)
    module(batch(BATCH // 4))
    _, smaller = rematch.plans_of(module)
    assert smaller.figures.solver == "everything kept"
    assert smaller.figures.overhead_pct == smaller.figures.lower_bound_pct == 0.0
    assert not smaller.recomputed


def test_a_solver_of_the_users_own_is_asked_also_where_everything_fits() -> None:
    plan = rematch.plan(Net(), batch(), budget="200%", solver=Given(everything_twice))
    assert plan.figures.solver == "given"
    assert plan.recomputed


def test_a_shape_that_the_old_schedule_does_not_fit_is_solved() -> None:
    module = rematch.remat(Net(), batch(), budget=440_000, time_limit=0.5)
    module(batch(BATCH + 16))
    plan, larger = rematch.plans_of(module)
    assert larger.figures.solver == "auto"
    assert larger.figures.peak_bytes <= larger.figures.budget_bytes <= 440_000
    assert larger.schedule != plan.schedule


# Percentages, and batches that they do not fit


def test_a_percentage_is_of_the_first_training_graph_for_good() -> None:
    module = rematch.remat(Net(), **REMAT)
    with torch.no_grad():
        module(batch(2 * BATCH))
    assert rematch.plans_of(module) == ()
    for size in (BATCH, 16, BATCH + 2):
        module(batch(size))
    plans = rematch.plans_of(module)
    assert len(plans) == 3
    (budget_bytes,) = {plan.figures.budget_bytes for plan in plans}
    assert budget_bytes == pytest.approx(0.75 * plans[0].figures.baseline_peak_bytes, abs=1024)


def test_a_later_batch_that_does_not_fit_gets_the_least_memory_and_one_warning() -> None:
    plain = Net()
    module = rematch.remat(copy.deepcopy(plain), batch(), **REMAT)
    with pytest.warns(UserWarning, match=r"does not fit the budget.*least memory that was found.*KiB") as warned:
        for size in (4 * BATCH, 4 * BATCH + 8):
            assert_trains_alike(module, plain, batch(size), mean_square)
    assert len(warned) == 1
    plan, *larger = rematch.plans_of(module)
    for one in larger:
        assert plan.figures.budget_bytes < one.figures.peak_bytes < 0.9 * one.figures.baseline_peak_bytes


def test_a_later_batch_that_not_even_the_device_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = rematch.remat(Net(), batch(), **REMAT)
    monkeypatch.setattr(runner, "available_bytes", lambda device, name: 1000)
    with pytest.raises(BudgetInfeasible, match="smallest that was found to work is"):
        module(batch(4 * BATCH))
    module(batch(BATCH - 8))


def test_a_smaller_batch_never_raises() -> None:
    """Also with gradients there, which take memory that the first plan did not have to leave."""
    plain = Net()
    smallest = _smallest_budget(plain)
    module = rematch.remat(copy.deepcopy(plain), batch(), budget=smallest, time_limit=0.5)
    warnings.simplefilter("ignore")  # that the gradients do not fit
    for size in (BATCH, BATCH - 1, 7, 2):
        for one in (module, plain):
            torch.manual_seed(size)
            mean_square(one(batch(size))).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), plain.parameters(), strict=True))


def _smallest_budget(module: nn.Module) -> int:
    with pytest.raises(BudgetInfeasible) as refused:
        rematch.plan(module, batch(), budget=1000)
    assert refused.value.feasible_from_bytes is not None
    return refused.value.feasible_from_bytes


# What lies outside the module


def test_gradients_that_are_there_already_are_counted() -> None:
    plain = Net()
    free = rematch.plan(plain, batch(), budget="100%")
    expected = rematch.plan(plain, batch(), budget="100%", accumulate=True)
    mean_square(plain(batch())).backward()
    taken = rematch.plan(plain, batch(), budget="100%")
    whole_bytes = sum(parameter.nbytes for parameter in plain.parameters())
    assert part(taken, "gradients") >= whole_bytes > part(free, "gradients")
    assert taken.parts == expected.parts


def test_an_automatic_budget_is_what_is_free_beside_what_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "available_bytes", lambda device, name: 350_000)
    plan = rematch.plan(Net(), batch(), budget="auto", time_limit=0.5)
    resident = sum(part(plan, role) for role in ("parameters", "buffers", "inputs"))
    assert plan.figures.budget_bytes == resident + 350_000
    assert plan.figures.peak_bytes <= plan.figures.budget_bytes
    assert plan.recomputed


# The loss


def hungry(output: torch.Tensor) -> torch.Tensor:
    """A loss that needs many times its input."""
    return output.repeat(1, 40).square().mean()


def test_a_given_loss_is_counted() -> None:
    given = rematch.plan(Net(), batch(), budget="100%", loss=hungry).figures.baseline_peak_bytes
    unknown = rematch.plan(Net(), batch(), budget="100%").figures.baseline_peak_bytes
    assert given - unknown > 60 * BATCH * 4 * 4, "repeated outputs and their squares, both alive at once"


def test_the_first_step_measures_the_loss_and_plans_again() -> None:
    plain = Net()
    module = rematch.remat(copy.deepcopy(plain), batch(), budget=850_000, time_limit=0.5)
    (assumed,) = rematch.plans_of(module)
    assert assumed.figures.overhead_pct == 0.0
    assert_trains_alike(module, plain, batch(), hungry)
    *_, measured = rematch.plans_of(module)
    assert measured.figures.overhead_pct > 0.0
    assert measured.figures.baseline_peak_bytes > 850_000 >= measured.figures.peak_bytes
    peak_bytes, _ = measured_peak(CPU, lambda: step_of(batch(), hungry)(module.train()))
    resident = sum(part(measured, role) for role in ("parameters", "buffers", "inputs"))
    assert peak_bytes + resident <= 1.02 * 850_000


def test_a_loss_that_fits_changes_no_plan() -> None:
    module = rematch.remat(Net(), batch(), **REMAT)
    before = rematch.plans_of(module)
    for _ in range(2):
        mean_square(module(batch())).backward()
        module.zero_grad(set_to_none=True)
    assert rematch.plans_of(module) == before


def test_outputs_that_are_held_lead_to_a_new_plan() -> None:
    module = rematch.remat(nn.Sequential(*Net().blocks), batch(), loss=mean_square, engine="tape", **REMAT)
    (let_go,) = rematch.plans_of(module)
    for _ in range(2):
        output = module(batch())
        mean_square(output).backward()
        module.zero_grad(set_to_none=True)
    *_, held = rematch.plans_of(module)
    assert held.graph_fingerprint != let_go.graph_fingerprint
    assert held.figures.budget_bytes == let_go.figures.budget_bytes
    assert part(held, "outputs") == output.nbytes


@pytest.mark.parametrize("engine", ["tape", "replay"])
def test_parameters_that_a_call_does_not_use_are_part_of_its_peak(engine: str) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(32, 32), nn.Linear(100, 100)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    x = torch.randn(64, 32)
    whole = rematch.plan(Part(), x, budget="150%", engine=engine, progress=False)
    alone = rematch.plan(nn.Linear(32, 32), x, budget="150%", engine=engine, progress=False)
    more_bytes = whole.figures.baseline_peak_bytes - alone.figures.baseline_peak_bytes
    assert more_bytes == 4 * (100 * 100 + 100)


# As its engine runs it


@pytest.mark.parametrize("over", [1, 99], ids=["once", "always"])
def test_a_schedule_that_takes_more_as_it_is_run_is_searched_again(
    over: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine is made to run the first schedules without recomputation, which no budget below the peak allows."""
    asked: list[Schedule] = []

    def run_as(recorded: RecordedGraph, schedule: Schedule) -> Schedule:
        asked.append(schedule)
        return schedule if len(asked) > over else baseline(recorded.graph)

    monkeypatch.setattr(runner, "at_unpackings", run_as)
    plan = rematch.plan(Net(), batch(), engine="tape", budget="95%", time_limit=0.5, loss=mean_square)
    assert plan.figures.peak_bytes <= plan.figures.budget_bytes
    assert len(asked) > 1
    assert ("more than the budget" in caplog.text) == (over > 1)


# Where a solver finds nothing


class Clueless(Solver):
    """Finds no schedule for anything."""

    name = "clueless"
    requires = "nothing"

    def applicable(self, problem: Problem) -> bool:
        return True

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        return Solution(None, Status.NOT_FOUND, self.name)


def test_what_is_found_instead_recomputes_no_more_than_the_budget_asks_for() -> None:
    graph = gpt(3)
    least = planner.budget_range(graph, 1.0)
    budget = (least.feasible_from_bytes + simulate(graph, baseline(graph)).peak_bytes) // 2
    settings = Settings(budget=budget, solver=Clueless())
    plan = planner.Planner(settings).plan(graph, CPU, engine="tape")
    assert plan.figures.solver == "clueless, then the search for small budgets"
    assert plan.figures.peak_bytes is not None and plan.figures.peak_bytes <= budget
    assert simulate(graph, plan.schedule).seconds < simulate(graph, least.schedule).seconds


class Asked(Clueless):
    """Must not be asked."""

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        raise AssertionError("what is proved needs no search")


def test_for_a_budget_that_is_proved_to_be_too_small_no_solver_is_asked() -> None:
    graph = replace(gpt(3), recompute_after_loss=True)
    known = planner.budget_range(graph, 5.0)
    assert known.infeasible_up_to_bytes >= surely_needed_bytes(graph), "the test needs a proof that takes a search"
    refusing = planner.Planner(Settings(budget=known.infeasible_up_to_bytes, solver=Asked()))
    with pytest.raises(BudgetInfeasible, match="cannot be kept") as refusal:
        refusing.plan(graph, CPU, engine="tape")
    assert refusal.value.feasible_from_bytes is not None
    assert refusal.value.feasible_from_bytes <= refusing.budget_for(known.feasible_from_bytes, CPU)


def test_a_proof_for_one_order_says_nothing_about_others() -> None:
    graph = gpt(3)  # whose schedules may be in any order
    known = planner.budget_range(graph, 2.0)
    with pytest.raises(AssertionError, match="no search"):
        planner.Planner(Settings(budget=known.infeasible_up_to_bytes, solver=Asked())).plan(graph, CPU, engine="replay")
