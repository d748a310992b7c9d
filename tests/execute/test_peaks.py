"""The tape's peak is the one that its plan predicts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import rematch
from rematch.capture.memory import PeakMemory
from rematch.execute.tape import UnpackEvent
from tests.taped import plan_for, taped


class Residual(nn.Module):
    """One block used four times: its sums are computed again, in turn, from branches that are then needed no more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(4):
            x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x


def test_what_a_call_needs_is_let_go_when_it_has_run_for_the_last_time() -> None:
    torch.manual_seed(0)
    module, x = Residual(), torch.randn(256, 64)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().mean()

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    with autocast():
        inside = rematch.remat(module, x, budget="60%", loss=loss, engine="tape", time_limit=5, progress=False)
    (plan,) = rematch.plans_of(inside)
    held_bytes = x.nbytes + sum(parameter.nbytes for parameter in module.parameters())
    for _ in range(2):
        inside.zero_grad(set_to_none=True)
        with PeakMemory(torch.device("cpu")) as used:
            with autocast():
                value = loss(inside(x))
            value.backward()  # type: ignore[no-untyped-call]
        del value
    assert plan.recomputed
    assert plan.figures.peak_bytes is not None and held_bytes + used.peak_bytes <= plan.figures.peak_bytes


def test_a_call_that_runs_twice_for_one_access_is_let_go_after_the_second_run() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, 4))

        def forward(self, x: torch.Tensor) -> Any:
            return (x * self.weight).exp()

    plain, x = Module(), torch.rand(4, 4)
    plan = plan_for(plain, x)
    product, result = sorted(plan.noted)
    twice: tuple[Any, ...] = (product, result, (result, 0), product, result)
    event = UnpackEvent((result, 0), twice, last=True, done=(product, result))
    module = taped(copy.deepcopy(plain), replace(plan, events=(event,)))
    for either in (plain, module):
        either(x).sum().backward()
    assert plain.weight.grad is not None and module.weight.grad is not None
    assert torch.equal(plain.weight.grad, module.weight.grad)
