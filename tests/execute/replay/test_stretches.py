"""Gradients leave a replayed backward while it runs; what takes them away then makes room for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rematch
from rematch.capture.joint import read
from tests.modules import mean_square
from tests.training import measured_peak, same_bits

CPU = torch.device("cpu")
LAYERS, WIDTH = 8, 96
INPUTS = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(0))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS)))


@pytest.fixture(autouse=True)
def a_stretch_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "STRETCH_BYTES", 4 * WIDTH * WIDTH)


def planned(engine: str = "replay", budget: str = "90%", **options: Any) -> nn.Module:
    options = {"time_limit": 0.3, "solver": "anneal", "cache": False, **options}
    return rematch.remat(layers(), INPUTS, loss=mean_square, budget=budget, engine=engine, **options)


def step(module: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    mean_square(module(INPUTS)).backward()


def test_gradients_leave_while_others_are_computed() -> None:
    module = planned()
    came: list[int] = []
    alive: list[int] = []
    step(module)  # which measures
    for place, parameter in enumerate(module.parameters()):
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(lambda _, place=place: came.append(place))
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(each.grad is not None for each in module.parameters()))
        )
    step(module)
    assert came[0] >= 2 * (LAYERS - 1), "those of the last layer come first"
    assert sorted(came) == list(range(2 * LAYERS))
    assert alive == list(range(1, 2 * LAYERS + 1))


@pytest.mark.parametrize("engine", ["replay", "tape"])
def test_an_optimizer_in_hooks_frees_gradients_and_the_plan_counts_on_it(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "INPUTS", INPUTS[:8])  # so that gradients set the peak
    module, plain = planned(engine, budget="700KiB"), layers()
    for each in (module, plain):
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(_descend)
    before = rematch.plans_of(module)[-1].figures.baseline_peak_bytes
    for seed in range(3):
        for each in (module, plain):
            step(each, seed)
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    assert all(same_bits(mine, theirs) for mine, theirs in pairs)
    figures = rematch.plans_of(module)[-1].figures
    gradient_bytes = sum(parameter.nbytes for parameter in plain.parameters())
    assert figures.baseline_peak_bytes < before - gradient_bytes // 2, "gradients are gone when others come"
    peak_bytes, _ = measured_peak(CPU, lambda: step(module))
    resident_bytes = gradient_bytes + INPUTS.nbytes
    assert peak_bytes + resident_bytes <= figures.budget_bytes


def _descend(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        assert parameter.grad is not None
        parameter.sub_(parameter.grad.mul_(0.01))
    parameter.grad = None


def test_gradients_that_are_added_to_others_leave_room() -> None:
    module, plain = planned(accumulate=True), layers()
    for seed in range(4):
        for each in (module, plain):
            if seed != 3:
                step(each, seed)
    plan = rematch.plans_of(module)[-1]
    peak_bytes, _ = measured_peak(CPU, lambda: step(module, 3))
    step(plain, 3)
    gradient_bytes = sum(parameter.nbytes for parameter in plain.parameters())
    assert peak_bytes + 2 * gradient_bytes + INPUTS.nbytes <= plan.figures.budget_bytes
    stay = [plan_value for plan_value in plan.parts if plan_value.role == "gradients"]
    assert sum(part.size_bytes for part in stay) < gradient_bytes // 2
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    assert all(same_bits(mine.grad, theirs.grad) for mine, theirs in pairs)


def test_a_gradient_that_has_left_counts_until_the_end() -> None:
    """A plan must not free it and keep the half-precision one that it was made of: the parameter has it."""
    inputs = INPUTS.repeat(6, 1)

    def half_step(module: nn.Module) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mean_square(module(inputs))
        loss.backward()

    def within(budget: int) -> nn.Module:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rematch.remat(
                layers(), inputs, loss=mean_square, budget=budget, engine="replay", time_limit=1.5, cache=False
            )

    with pytest.raises(rematch.BudgetInfeasible) as refused:
        within(700 * 1024)
    least = refused.value.feasible_from_bytes
    assert least is not None
    module = within(least)
    peak_bytes, _ = measured_peak(CPU, lambda: half_step(module))
    parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
    assert peak_bytes + parameter_bytes + inputs.nbytes <= least


@pytest.mark.parametrize(
    "ask",
    [
        lambda module: torch.autograd.grad(mean_square(module(INPUTS)), [module[-1][0].weight]),
        lambda module: torch.autograd.grad(mean_square(module(INPUTS)), [module[3][0].bias, module[0][0].weight]),
        lambda module: _twice(mean_square(module(INPUTS)), module),
        lambda module: _two_forwards(module),
        lambda module: _with_graph(mean_square(module(INPUTS)), module),
        lambda module: _of_computed_weights(module),
        lambda module: _seen_by_hooks(module),
    ],
    ids=[
        "of the first stretch",
        "of later ones",
        "twice",
        "of two forwards",
        "with create_graph",
        "of computed weights",
        "seen by hooks",
    ],
)
def test_gradients_however_they_are_asked_for(ask: Callable[[Any], tuple[torch.Tensor, ...]]) -> None:
    module, plain = planned(), layers()
    step(module)
    module.zero_grad()
    found = []
    for each in (module, plain):
        torch.manual_seed(5)
        found.append(ask(each))
    assert all(same_bits(mine, theirs) for mine, theirs in zip(*found, strict=True))


def _twice(loss: torch.Tensor, module: nn.Module) -> tuple[torch.Tensor, ...]:
    parameters = list(module.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    return *first, *torch.autograd.grad(loss, parameters)


def _two_forwards(module: nn.Module) -> tuple[torch.Tensor, ...]:
    loss = mean_square(module(INPUTS)) + mean_square(module(2 * INPUTS))
    return torch.autograd.grad(loss, list(module.parameters()))


def _with_graph(loss: torch.Tensor, module: nn.Module) -> tuple[torch.Tensor, ...]:
    return tuple(each.detach() for each in torch.autograd.grad(loss, list(module.parameters()), create_graph=True))


def _of_computed_weights(module: nn.Module) -> tuple[torch.Tensor, ...]:
    weights = {name: parameter * 2 for name, parameter in module.named_parameters()}
    loss = mean_square(torch.func.functional_call(module, weights, (INPUTS,)))
    return torch.autograd.grad(loss, list(module.parameters()))


def _seen_by_hooks(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Each once, and with its whole gradient."""
    seen: list[torch.Tensor] = []
    handles = [parameter.register_hook(lambda gradient: seen.append(gradient)) for parameter in module.parameters()]
    (mean_square(module(INPUTS)) + mean_square(module(INPUTS / 2))).backward()
    for handle in handles:
        handle.remove()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert len(seen) == len(gradients)
    return *sorted(seen, key=lambda each: float(each.sum())), *gradients
