"""What the planner counts, what a percentage is of, and when it plans again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rematch
from rematch.planning import planner
from rematch.planning.plan import Plan
from tests.modules import BATCH, Net, batch, mean_square
from tests.training import assert_trains_alike, measured_peak, step_of

REMAT: dict[str, Any] = {"budget": "66%", "time_limit": 1.0}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fixed_parameters() -> None:
    torch.manual_seed(0)


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
    assert smaller.figures.solver == "auto, for another shape"
    assert smaller.schedule == plan.schedule
    assert smaller.figures.peak_bytes < plan.figures.peak_bytes


def test_a_shape_that_the_old_schedule_does_not_fit_is_solved() -> None:
    module = rematch.remat(Net(), batch(), budget=400_000, time_limit=1.0)
    module(batch(BATCH + 24))
    plan, larger = rematch.plans_of(module)
    assert larger.figures.solver == "auto"
    assert larger.figures.peak_bytes <= 400_000
    assert larger.figures.overhead_pct > plan.figures.overhead_pct


# Percentages


def test_a_percentage_is_of_the_largest_training_graph_so_far() -> None:
    module = rematch.remat(Net(), batch(), **REMAT)
    module(batch(16))
    with torch.no_grad():
        module(batch())
    module(batch(2 * BATCH))
    module(batch(17))
    budgets = [plan.figures.budget_bytes for plan in rematch.plans_of(module)]
    first, small, inference, large, last = budgets
    assert first == small == inference < large == last
    assert large == rematch.plans_of(module)[3].figures.baseline_peak_bytes * 66 // 100


# What lies outside the module


def test_gradients_that_are_there_already_are_counted() -> None:
    plain = Net()
    free = rematch.plan(plain, batch(), budget="100%", time_limit=1.0)
    mean_square(plain(batch())).backward()
    taken = rematch.plan(plain, batch(), budget="100%", time_limit=1.0)
    assert part(free, "already allocated") == 0
    assert part(taken, "already allocated") == sum(parameter.nbytes for parameter in plain.parameters())


def test_an_automatic_budget_is_what_is_free_beside_what_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "available_bytes", lambda device, name: 350_000)
    plan = rematch.plan(Net(), batch(), budget="auto", time_limit=1.0)
    resident = sum(part(plan, role) for role in ("parameters", "buffers", "inputs"))
    assert plan.figures.budget_bytes == resident + 350_000
    assert plan.figures.peak_bytes <= plan.figures.budget_bytes
    assert plan.recomputed


# The loss


def hungry(output: torch.Tensor) -> torch.Tensor:
    """A loss that needs many times its input."""
    return output.repeat(1, 40).square().mean()


def test_a_given_loss_is_counted_in_proportion_to_the_outputs() -> None:
    module = rematch.remat(Net(), batch(), budget="100%", loss=hungry, time_limit=1.0)
    module(batch(2 * BATCH))
    one, two = (plan.figures.baseline_peak_bytes for plan in rematch.plans_of(module))
    unknown = rematch.plan(Net(), batch(), budget="100%", time_limit=1.0).figures.baseline_peak_bytes
    assert one - unknown > 30 * BATCH * 4 * 4
    assert two > 1.7 * one


def test_the_first_step_measures_the_loss_and_plans_again() -> None:
    plain = Net()
    module = rematch.remat(copy.deepcopy(plain), batch(), budget=600_000, time_limit=1.0)
    (assumed,) = rematch.plans_of(module)
    assert assumed.figures.overhead_pct == 0.0
    assert_trains_alike(module, plain, batch(), hungry)
    (measured,) = rematch.plans_of(module)
    assert measured.figures.overhead_pct > 0.0
    assert measured.figures.baseline_peak_bytes > 600_000 >= measured.figures.peak_bytes
    peak_bytes, _ = measured_peak(CPU, lambda: step_of(batch(), hungry)(module.train()))
    resident = sum(part(measured, role) for role in ("parameters", "buffers", "inputs"))
    assert peak_bytes + resident <= 600_000 * 1.02


def test_a_loss_that_fits_changes_no_plan() -> None:
    module = rematch.remat(Net(), batch(), **REMAT)
    before = rematch.plans_of(module)
    for _ in range(2):
        mean_square(module(batch())).backward()
        module.zero_grad(set_to_none=True)
    assert rematch.plans_of(module) == before


def test_a_module_whose_parameters_are_all_frozen_has_no_loss() -> None:
    module = rematch.remat(Net().eval().requires_grad_(False), batch(), budget="100%", time_limit=1.0)
    assert same_as_plain(module)
    (plan,) = rematch.plans_of(module)
    assert part(plan, "gradients") == part(plan, "loss") == 0


def same_as_plain(module: nn.Module) -> bool:
    return torch.equal(module(batch()), type(module).forward(module, batch()))


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
