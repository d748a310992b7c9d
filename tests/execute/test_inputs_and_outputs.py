"""What goes into a module and what comes out, set beside plain autograd, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rematch
from tests.modules import BATCH, WIDTH, Block, Net, batch, mean_square
from tests.training import step_of
from tests.uses import Several, Stack, assert_alike, chosen, wrap

pytestmark = pytest.mark.usefixtures("engine")

# Inputs and outputs


@dataclass
class Inputs:
    x: torch.Tensor
    scale: float = 2.0


@dataclass
class Outputs:
    logits: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)


class Structured(Net):
    def forward(self, given: Inputs, parts: list[Any], *, shift: float = 0.0, options: Any = None) -> Outputs:
        x = given.x * given.scale + parts[0] - parts[1]["y"] + shift
        logits = super().forward(x + options["z"][0])
        return Outputs(logits, {"more": [logits.exp(), 3], "none": None, "apart": (logits.detach(), "name")})


def test_structures_go_in_and_come_out() -> None:
    x = batch()
    sample = ((Inputs(x), [x, {"y": x.sin()}]), {"shift": 0.5, "options": {"z": (x.cos(),)}})

    def loss(output: Outputs) -> torch.Tensor:
        return mean_square(output.logits) + output.extra["more"][0].mean()

    plain = Structured()
    wrapped = wrap(plain, sample)
    assert_alike(wrapped, plain, step_of(sample, loss))
    output = wrapped(*sample[0], **sample[1])
    assert type(output) is Outputs
    assert list(output.extra) == ["more", "none", "apart"]
    assert (output.extra["more"][1], output.extra["none"], output.extra["apart"][1]) == (3, None, "name")
    assert output.logits.requires_grad and not output.extra["apart"][0].requires_grad


@pytest.mark.parametrize("sample", [((batch(),), {"scale": 0.5}), {"x": batch(), "scale": 0.5}, (batch(), 0.5)])
def test_keywords_and_numbers(sample: Any) -> None:
    plain = Net()
    assert_alike(wrap(plain, sample), plain, step_of(sample, mean_square))


def test_a_sequential() -> None:
    plain = nn.Sequential(Block(), nn.ReLU(inplace=True), Block(), Block(), nn.Linear(WIDTH, 4))
    assert_alike(wrap(plain, batch()), plain, step_of(batch(), mean_square))


class Attention(nn.Module):
    def __init__(self, fill: bool) -> None:
        super().__init__()
        self.fill = fill
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.queries(x) @ self.keys(x).transpose(-1, -2)
        scores = scores.masked_fill(mask < 0, float("-inf")) if self.fill else scores + mask
        return x + F.softmax(scores, -1) @ self.values(x)


@pytest.mark.parametrize("fill", [True, False], ids=["filled", "added"])
def test_masks_of_minus_infinity(fill: bool) -> None:
    plain = Stack(nn.ModuleList(Attention(fill) for _ in range(3)))
    x = torch.randn(4, 64, WIDTH)
    sample = (x, torch.full((64, 64), float("-inf")).triu(1))
    assert_alike(wrap(plain, sample), plain, step_of(sample, mean_square))


@chosen
@pytest.mark.parametrize("used", [0, 1, 3])
def test_outputs_that_nobody_uses(used: int) -> None:
    plain = Several()
    assert_alike(wrap(plain, batch()), plain, step_of(batch(), lambda outputs: outputs[used].sum()))


def test_outputs_stay_what_they_were_after_backward() -> None:
    plain = Several()
    wrapped = wrap(plain, batch())

    def step(module: nn.Module) -> Any:
        outputs = module(batch())
        mean_square(outputs[0]).backward()
        return outputs

    assert_alike(wrapped, plain, step)


def test_gradients_of_inputs() -> None:
    plain = Net()
    wrapped = wrap(plain, batch().requires_grad_())

    def step(module: nn.Module) -> Any:
        leaf = batch().requires_grad_()
        inner = leaf * 2
        inner.retain_grad()
        mean_square(module(leaf) + module(inner)).backward()
        return leaf.grad, inner.grad

    assert_alike(wrapped, plain, step)


# Other shapes and modes


def test_batches_of_all_sizes() -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), budget="85%")

    def step(module: nn.Module) -> torch.Tensor:
        values = []
        for size in (BATCH, 32, BATCH + 8, 32, 7):
            values.append(mean_square(module(batch(size))))
            values[-1].backward()
        return torch.stack(values)

    assert_alike(wrapped, plain, step)
    plans = rematch.plans_of(wrapped)
    assert len({plan.graph_fingerprint for plan in plans}) == len(plans) >= 4


def test_between_training_and_evaluation() -> None:
    plain = Net()
    wrapped = wrap(plain, batch())

    def step(module: nn.Module) -> Any:
        assert module.train() is module
        value = mean_square(module(batch()))
        value.backward()
        module.eval()
        with torch.no_grad():
            scored = module(batch())
        with torch.inference_mode():
            inferred = module(batch(32))
        assert not scored.requires_grad and inferred.is_inference()
        differentiable = module(batch())
        module.train()
        with torch.no_grad():
            updating = module(batch())  # running statistics and random numbers too
        return value, scored, inferred.clone(), differentiable, updating

    assert_alike(wrapped, plain, step)
