"""What the tests of uses share: modules wrapped in a budget, set beside plain autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rematch
from rematch.planning.settings import AUTO, REPLAY, TAPE
from tests.modules import Net
from tests.training import TrainingStep, assert_same_steps, train

on_tape = pytest.mark.parametrize("engine", [TAPE], indirect=True)
on_replay = pytest.mark.parametrize("engine", [REPLAY], indirect=True)
# Where replay traces something else than eager runs it refuses, and the choice falls on the tape.
chosen = pytest.mark.parametrize("engine", [TAPE, AUTO], indirect=True)


def wrap(plain: nn.Module, sample: Any = None, **options: Any) -> nn.Module:
    """A copy of `plain` made to train in two thirds of its memory; `plain` stays as it is."""
    settings: dict[str, Any] = {"budget": "75%", "time_limit": 0.5, **options}
    return rematch.remat(copy.deepcopy(plain), sample, **settings)


def recomputes(module: nn.Module) -> bool:
    return any(plan.recomputed for plan in rematch.plans_of(module))


def assert_alike(wrapped: nn.Module, plain: nn.Module, step: TrainingStep) -> None:
    """Three steps of both, and at least one operator computed again, so that there was something to get wrong."""
    assert_same_steps(train(wrapped, step), train(plain, step))
    assert recomputes(wrapped)


class Stack(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


class Several(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
        logits = super().forward(x, scale)
        return logits, logits.exp(), (x * 2).sin(), self.head.weight.square()
