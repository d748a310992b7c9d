"""What optimizers keep: forecast without running them, and seen when they make it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rematch.capture.measure import measuring
from rematch.execute.optimizers import StepWatch, forecast_state_bytes, state_bytes
from tests.training import noted, same_bits

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True, foreach=False),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.1),
    "groups": lambda parameters: torch.optim.SGD([{"params": [p], "momentum": 0.9 * (p.ndim - 1)} for p in parameters]),
    "one for all": lambda parameters: OneForAll(parameters),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    made[4].bias.requires_grad_(False)
    return made


def backward(module: nn.Module) -> None:
    module(torch.ones(4, 32)).square().mean().backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_forecast_is_what_the_first_step_makes(name: str) -> None:
    module = model()
    optimizer = OPTIMIZERS[name](module.parameters())
    before = [noted(parameter) for parameter in module.parameters()]
    with measuring(CPU) as measurer:
        expected_bytes = forecast_state_bytes(optimizer, measurer.profile)
    assert not optimizer.state, "nothing has happened"
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(same_bits(*pair) for pair in zip(before, module.parameters(), strict=True))
    backward(module)
    optimizer.step()
    assert expected_bytes == state_bytes([optimizer])


class OneForAll(torch.optim.Optimizer):
    """Keeps one buffer for all its parameters together, with the first of them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        self.state[trained[0]]["all"] = torch.cat([parameter.grad.flatten() for parameter in trained])


def test_a_state_that_is_there_needs_no_forecast() -> None:
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    backward(module)
    optimizer.step()
    held_bytes = state_bytes([optimizer])
    with measuring(CPU) as measurer:
        assert forecast_state_bytes(optimizer, measurer.profile) == held_bytes > 0


class Owner:
    """Has parameters, and notes what it is told."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.told: list[int] = []
        self.watch = StepWatch(self.owns, self.told_of)

    def owns(self, parameter: torch.Tensor) -> bool:
        return any(parameter is own for own in self.module.parameters())

    def told_of(self, held_bytes: int) -> None:
        self.told.append(held_bytes)


def test_the_owner_of_the_parameters_is_told_of_new_state() -> None:
    ours, other = Owner(model()), Owner(model())
    optimizer = torch.optim.Adam(ours.module.parameters())
    for _ in range(3):
        backward(ours.module)
        optimizer.step()
    assert ours.told == [state_bytes([optimizer])]
    assert other.told == []
    second = torch.optim.SGD(ours.module.parameters(), lr=0.1, momentum=0.5)
    second.step()
    assert ours.told[1:] == [state_bytes([optimizer, second])]


def test_optimizers_go_on_when_an_owner_is_gone() -> None:
    owners = [Owner(model()) for _ in range(3)]
    optimizer = torch.optim.Adam(owners[1].module.parameters())
    backward(owners[1].module)
    gone = weakref.ref(owners[0])
    del owners[0]
    gc.collect()
    assert gone() is None, "a watch keeps nobody alive"
    optimizer.step()
    assert owners[0].told
