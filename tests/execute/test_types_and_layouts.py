"""Losses, number formats, layouts and parameters, set beside plain autograd, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rematch
from rematch.errors import CaptureError
from tests.modules import Net, batch, mean_square
from tests.training import Loss, TrainingStep, same_bits, step_of
from tests.uses import Several, assert_alike, chosen, on_replay, on_tape, recomputes, wrap

pytestmark = pytest.mark.usefixtures("engine")

# Losses


@pytest.mark.parametrize(("loss", "given"), [(mean_square, True), (mean_square, False), (torch.sum, False)])
def test_a_loss_given_or_unknown(loss: Loss, given: bool) -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), loss=loss if given else None)
    assert_alike(wrapped, plain, step_of(batch(), loss))


@on_tape
def test_a_loss_whose_gradient_is_one_number_everywhere() -> None:
    plain = Net()
    assert_alike(wrap(plain, batch(), loss=torch.sum), plain, step_of(batch(), torch.sum))


@on_replay
def test_a_loss_that_is_known_is_traced_as_eager_runs_it_or_refused() -> None:
    plain = nn.Sequential(Net(), nn.BatchNorm1d(4))
    with pytest.raises(CaptureError, match="not what eager runs"):
        wrap(plain, batch(), loss=torch.sum)
    with pytest.raises(CaptureError, match="not what eager runs"):
        wrap(Several(), batch(), loss=lambda outputs: outputs[3].sum())


@chosen
def test_the_sum_of_what_a_batch_norm_returns() -> None:
    plain = nn.Sequential(Net(), nn.BatchNorm1d(4))
    assert_alike(wrap(plain, batch()), plain, step_of(batch(), torch.sum))


# Types and layouts


def under_autocast(inputs: torch.Tensor) -> TrainingStep:
    def step(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = module(inputs)
        value = mean_square(output)
        value.backward()
        return value

    return step


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "at_first_call"])
def test_autocast(ahead: bool) -> None:
    plain = Net()
    with torch.autocast("cpu", torch.bfloat16):
        wrapped = wrap(plain, batch() if ahead else None)
    assert_alike(wrapped, plain, under_autocast(batch()))
    assert len(rematch.plans_of(wrapped)) == 1


@chosen
def test_autocast_with_a_shared_parameter() -> None:
    plain = Net(norm=False)
    plain.blocks[1].up.weight = plain.blocks[0].up.weight
    assert_alike(wrap(plain), plain, under_autocast(batch()))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(F.silu(norm(x), inplace=True))
        return self.head(x.mean((2, 3)))


def test_channels_last() -> None:
    plain = Images().to(memory_format=torch.channels_last)
    images = torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last)
    assert_alike(wrap(plain, images, budget="90%"), plain, step_of(images, mean_square))


def test_another_dtype_is_planned_anew() -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), budget=900_000)
    assert not recomputes(wrapped)
    assert wrapped.to(torch.float64) is wrapped
    assert_alike(wrapped, plain.to(torch.float64), step_of(batch().double(), mean_square))


# Parameters


def test_frozen_parameters_get_no_gradient() -> None:
    plain = Net()
    plain.blocks[0].requires_grad_(False)
    plain.head.bias.requires_grad_(False)
    assert_alike(wrap(plain, batch(), budget="80%"), plain, step_of(batch(), mean_square))


def test_shared_parameters() -> None:
    plain = Net()
    plain.blocks[1].up.weight = plain.blocks[0].up.weight
    plain.blocks[2].down = plain.blocks[0].down
    wrapped = wrap(plain, batch())
    assert wrapped.blocks[1].up.weight is wrapped.blocks[0].up.weight
    assert_alike(wrapped, plain, step_of(batch(), mean_square))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), budget="95%")

    def trained(module: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        steps = optimizer(module.parameters(), lr=0.01)
        for _ in range(3):
            steps.zero_grad()
            mean_square(module(batch())).backward()
            steps.step()
        return list(module.state_dict().values())

    assert all(same_bits(*pair) for pair in zip(trained(wrapped), trained(plain), strict=True))
