"""Regions under torch.utils.checkpoint: respected they run as they are, replaced the plan takes their place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as of_torch
from torch.utils.checkpoint import checkpoint

import rematch
from tests.modules import Net, batch, mean_square
from tests.training import Outcome, assert_same_steps, step_of, train

OPTIONS: dict[str, Any] = {"loss": mean_square, "time_limit": 0.5, "progress": False, "cache": False}
REGIONS = 2


class Mixed(nn.Module):
    """Blocks under a checkpoint with dropout inside, then as many without. Batch norm would count twice in eager."""

    def __init__(self, *, checkpoints: bool = True, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(2 * REGIONS, norm=False)
        self.checkpoints, self.reentrant = checkpoints, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.net.head.weight.sum()  # reentrant regions train only what depends on their arguments
        for number, block in enumerate(self.net.blocks):
            if self.checkpoints and number < REGIONS:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return self.net.head(x)


def trained(module: nn.Module, steps: int = 3) -> list[Outcome]:
    return train(module, step_of(batch(), mean_square), steps=steps)


def highest(module: nn.Module, outcomes: list[Outcome]) -> int:
    """The measured peak, with what was there before the step."""
    resident = sum(tensor.nbytes for tensor in module.parameters()) + batch().nbytes
    return resident + max(outcome.peak_bytes or 0 for outcome in outcomes)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("checkpoints", "budget"), [(None, "90%"), ("replace", "75%")])
def test_equal_bits_inside_the_budget(reentrant: bool, checkpoints: str | None, budget: str) -> None:
    plain = Mixed(checkpoints=checkpoints is None, reentrant=reentrant)
    wrapped = rematch.remat(Mixed(reentrant=reentrant), batch(), budget=budget, checkpoints=checkpoints, **OPTIONS)
    (plan,) = rematch.plans_of(wrapped)
    assert plan.recomputed
    said = "respect; 2 regions" if checkpoints is None else "replace; 2 regions"
    assert any(f"checkpoints: {said}" in note for note in plan.notes)
    inside = {
        entry.module_path for entry in plan.recomputed if entry.module_path.startswith(("net.blocks.0", "net.blocks.1"))
    }
    assert bool(inside) == (checkpoints == "replace"), "respected regions recompute themselves"
    got = trained(wrapped)
    assert_same_steps(got, trained(plain))
    assert highest(wrapped, got) <= plan.figures.budget_bytes


def test_a_percentage_is_of_the_peak_with_regions_as_they_will_run() -> None:
    memory = {
        how: rematch.memory(Mixed(), batch(), loss=mean_square, checkpoints=how).peak_bytes
        for how in ("respect", "replace")
    }
    without = rematch.memory(Mixed(checkpoints=False), batch(), loss=mean_square).peak_bytes
    assert memory["respect"] < memory["replace"] == without
    plans = {
        how: rematch.plan(Mixed(), batch(), budget="100%", checkpoints=how, **OPTIONS) for how in ("respect", "replace")
    }
    assert plans["respect"].figures.budget_bytes < plans["replace"].figures.budget_bytes
    smallest = rematch.min_budget(Mixed(), batch(), loss=mean_square, checkpoints="replace", time_limit=0.5)
    assert smallest.baseline_peak_bytes == without


def test_where_respect_makes_a_budget_impossible_the_error_says_so() -> None:
    def all_of_it(module: Mixed) -> Mixed:
        module.net.blocks = module.net.blocks[:REGIONS]
        return module

    smallest = rematch.min_budget(all_of_it(Mixed()), batch(), loss=mean_square, checkpoints="replace", time_limit=0.5)
    with pytest.raises(
        rematch.BudgetInfeasible, match=r"2 regions under torch.utils.checkpoint .*'replace'"
    ) as refused:
        rematch.plan(all_of_it(Mixed()), batch(), budget=smallest.budget_bytes, **OPTIONS)
    assert refused.value.feasible_from_bytes is not None
    assert refused.value.feasible_from_bytes > smallest.budget_bytes
    plan = rematch.plan(all_of_it(Mixed()), batch(), budget=smallest.budget_bytes, checkpoints="replace", **OPTIONS)
    assert plan.recomputed


def test_a_reentrant_region_without_differentiable_arguments_trains_nothing_as_in_eager() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(2, norm=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.net.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.net.head(x)

    plain = First()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        expected = trained(copy.deepcopy(plain))
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        wrapped = rematch.remat(plain, batch(), budget="100%", checkpoints="replace", **OPTIONS)
        assert_same_steps(trained(wrapped), expected)


def test_regions_of_others_stay_and_torch_is_left_as_it_was() -> None:
    before = of_torch.CheckpointFunction, of_torch._checkpoint_without_reentrant_generator
    wrapped = rematch.remat(Mixed(), batch(), budget="75%", checkpoints="replace", **OPTIONS)
    trained(wrapped, steps=1)
    assert (of_torch.CheckpointFunction, of_torch._checkpoint_without_reentrant_generator) == before
    runs: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin()

    class Asking(nn.Module):
        """Runs a region of its own while rematch looks on, in another thread."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from threading import Thread

            def outside() -> None:
                checkpoint(counted, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()

            thread = Thread(target=outside)
            thread.start()
            thread.join()
            return x * self.scale

    module = Asking()
    module.scale = nn.Parameter(torch.ones(()))
    planned = rematch.remat(module, budget="100%", checkpoints="replace", **OPTIONS)
    mean_square(planned(batch())).backward()  # type: ignore[no-untyped-call]
    assert len(runs) % 2 == 0 and runs, "each was computed again"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"checkpoints": "replaced"}, "unknown value for checkpoints= 'replaced'; did you mean 'replace'"),
        ({"checkpoints": "respect", "engine": "replay"}, "checkpoints='respect' needs engine='tape'"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(rematch.RematchError, match=said):
        rematch.remat(Mixed(), batch(), budget="100%", **asked, **OPTIONS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_replay_runs_traced_code_without_regions(reentrant: bool) -> None:
    wrapped = rematch.remat(Mixed(reentrant=reentrant), batch(), budget="75%", engine="replay", **OPTIONS)
    (plan,) = rematch.plans_of(wrapped)
    assert plan.engine == "replay" and plan.recomputed
    assert_same_steps(trained(wrapped), trained(Mixed(checkpoints=False)))


@pytest.mark.parametrize("engine", ["replay", "tape"])
def test_plans_are_made_inside_a_region_of_others(engine: str) -> None:
    """Gradients that are there already ask for another plan, and for a loss that is measured beside them."""
    plain = Net(norm=False)
    wrapped = rematch.remat(copy.deepcopy(plain), batch(), budget="95%", engine=engine, **OPTIONS)

    def accumulate(module: nn.Module) -> None:
        for _ in range(3):
            mean_square(checkpoint(module, batch(), use_reentrant=False)).backward()

    assert_same_steps(train(wrapped, accumulate, steps=1), train(plain, accumulate, steps=1))
