"""Products whose gradients are computed one by one: eager's bits, in less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rematch
from rematch.execute.split_products import with_split_products
from tests.training import assert_same_steps, step_of, train

WIDTH, MIDDLE, TOKENS = 32, 512, 256


class Gated(nn.Module):
    """A gated MLP, as large language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, MIDDLE, bias=False)
        self.up = nn.Linear(WIDTH, MIDDLE, bias=False)
        self.down = nn.Linear(MIDDLE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def sample() -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Gated() for _ in range(3)))


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


OPTIONS: dict[str, Any] = {"loss": loss, "engine": "tape", "time_limit": 2.0, "progress": False, "cache": False}
MIDDLE_BYTES = 4 * TOKENS * MIDDLE


def least_with_both_at_once(model: nn.Module) -> int:
    """The smallest budget of the module as it is."""
    from rematch.planning.planner import budget_range

    return budget_range(rematch.trace(model, sample(), loss=loss), 5.0).feasible_from_bytes


def test_below_the_least_budget_of_eagers_nodes_steps_are_those_of_eager_to_the_bit() -> None:
    plain = stack()
    budget = least_with_both_at_once(plain) - MIDDLE_BYTES
    model = rematch.remat(copy.deepcopy(plain), sample(), budget=budget, **OPTIONS)
    (plan,) = rematch.plans_of(model)
    assert plan.engine == "tape"
    assert any(note.startswith("products:") for note in plan.notes)
    outcomes = train(model, step_of(sample(), loss))
    assert_same_steps(outcomes, train(plain, step_of(sample(), loss)))
    resident_bytes = sum(parameter.nbytes for parameter in plain.parameters()) + sample().nbytes
    assert all((outcome.peak_bytes or 0) <= budget - resident_bytes for outcome in outcomes)


def test_the_smallest_budget_counts_it_and_a_refusal_names_it() -> None:
    model = stack()
    found = rematch.min_budget(model, sample(), loss=loss, time_limit=5.0)
    assert found.budget_bytes <= least_with_both_at_once(model) - MIDDLE_BYTES
    with pytest.raises(rematch.BudgetInfeasible) as refusal:
        rematch.remat(model, sample(), budget=1000, **OPTIONS)
    assert refusal.value.feasible_from_bytes is not None
    assert refusal.value.feasible_from_bytes <= found.budget_bytes
    assert rematch.plan(model, sample(), budget=refusal.value.feasible_from_bytes, **OPTIONS).recomputed


def test_where_eagers_nodes_fit_nothing_is_split() -> None:
    plan = rematch.plan(stack(), sample(), budget="60%", **OPTIONS)
    assert plan.recomputed
    assert not any(note.startswith("products:") for note in plan.notes)


def test_such_a_plan_can_be_saved_applied_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path))
    monkeypatch.setenv("REMATCH_PLAN_CACHE", "on")
    plain = stack()
    expected = train(copy.deepcopy(plain), step_of(sample(), loss))
    budget = least_with_both_at_once(plain) - MIDDLE_BYTES
    options = {**OPTIONS, "cache": True}
    first, second = (rematch.remat(copy.deepcopy(plain), sample(), budget=budget, **options) for _ in range(2))
    plan = rematch.plans_of(first)[-1]
    assert any("cache" in note for note in rematch.plans_of(second)[-1].notes)
    applied = rematch.apply(copy.deepcopy(plain), plan, sample(), loss=loss)
    for model in (first, second, applied):
        outcomes = train(model, step_of(sample(), loss))
        assert_same_steps(outcomes, expected)
        assert max(outcome.peak_bytes or 0 for outcome in outcomes) <= budget


# Autograd's nodes

Function = Callable[[Tensor, Tensor], Tensor]


def gradients(function: Function, *, twice: bool = False) -> list[Tensor]:
    one, two = (torch.linspace(start, 2, 12, dtype=torch.float64, requires_grad=True) for start in (-1, 1))
    made = torch.autograd.grad(function(one, two), (one, two), create_graph=twice)
    if not twice:
        return list(made)
    return [*made, *torch.autograd.grad(sum(part.square().sum() for part in made), (one, two))]  # type: ignore[arg-type]


def silu_times(one: Tensor, two: Tensor) -> Tensor:
    return (F.silu(one * 3) * (two + 1)).exp().sum()


def squared(one: Tensor, two: Tensor) -> Tensor:
    both = one + two
    return (both * both).sum()


def written_in_place(one: Tensor, two: Tensor) -> Tensor:
    product = torch.mul(one.sin(), two.cos())
    product += 1
    return product.square().sum()


def under_a_checkpoint(one: Tensor, two: Tensor) -> Tensor:
    return checkpoint(silu_times, one, two, use_reentrant=False) * two.sum().exp()  # type: ignore[no-any-return]


def under_a_transform(one: Tensor, two: Tensor) -> Tensor:
    return torch.func.vmap(lambda a, b: a.sin() * b.cos())(one, two).sum()


@pytest.mark.parametrize("function", [silu_times, squared, written_in_place, under_a_checkpoint, under_a_transform])
def test_gradients_are_those_of_eager(function: Function) -> None:
    for ours, theirs in zip(gradients(with_split_products(function)), gradients(function), strict=True):
        assert torch.equal(ours, theirs)


def test_derivatives_of_derivatives_are_those_of_eager() -> None:
    split = gradients(with_split_products(silu_times), twice=True)
    for ours, theirs in zip(split, gradients(silu_times, twice=True), strict=True):
        assert torch.equal(ours, theirs)


def test_the_first_gradient_is_used_up_before_the_second_is_made() -> None:
    order: list[str] = []
    one, two = (torch.ones(3, requires_grad=True) for _ in range(2))

    def product() -> Tensor:
        left = one * 2
        right = two * 3
        left.register_hook(lambda gradient: order.append("left"))
        right.grad_fn.register_hook(lambda *_: order.append("right is done"))  # type: ignore[union-attr]
        made = left * right
        made.grad_fn.next_functions[0][0].register_hook(lambda *_: order.append("left is made"))  # type: ignore[union-attr]
        return made

    with_split_products(product)().sum().backward()
    assert order == ["right is done", "left is made", "left"]


def test_what_was_multiplied_and_is_changed_raises_eagers_error() -> None:
    one, two = (torch.ones(3, requires_grad=True) for _ in range(2))

    def product() -> tuple[Tensor, Tensor]:
        left = one.exp()
        return left * two.exp(), left

    made, left = with_split_products(product)()
    with torch.no_grad():
        left += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()
