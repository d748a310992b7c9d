from __future__ import annotations

import torch
from torch import nn

import rematch
from rematch.trial import Trial, alternate, same_bits, same_outcome


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 4))


def mean(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean()


SAMPLE = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


def test_a_trial_equals_itself_but_no_other() -> None:
    plain = Trial(model_of(), mean)
    assert same_outcome(plain, plain, SAMPLE)
    assert not same_outcome(plain, Trial(model_of(), lambda values: 2 * mean(values)), SAMPLE)


def test_the_weight_of_a_step_is_known() -> None:
    """One linear layer: at backward's end parameters, gradients, sample, output and its tangent are there."""
    layer = nn.Linear(1024, 1024, bias=False)
    sample = torch.zeros(1024, 1024)
    weighed = Trial(layer, torch.sum).peak_bytes(sample)
    size = sample.nbytes
    assert 4 * size <= weighed <= 5 * size


def test_the_weight_agrees_with_a_plan() -> None:
    model = model_of()
    kept = rematch.remat(model, SAMPLE, budget="100%", loss=mean, solver="noremat", progress=False)
    (plan,) = rematch.plans_of(kept)
    assert plan.figures.peak_bytes is not None
    assert 0.9 * plan.figures.peak_bytes <= Trial(kept, mean).peak_bytes(SAMPLE) <= plan.figures.peak_bytes


def test_steps_are_taken_in_turns() -> None:
    ran: list[str] = []

    def noting(name: str) -> Trial:
        def loss(values: torch.Tensor) -> torch.Tensor:
            ran.append(name)
            return mean(values)

        return Trial(model_of(), loss)

    seconds = alternate([noting("a"), noting("b")], SAMPLE, rounds=2)
    assert ran == ["a", "b", "a", "b"]
    assert [len(taken) for taken in seconds] == [2, 2]


def test_bits_are_compared_not_values() -> None:
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.tensor(0.0)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, None)
    assert same_bits(None, None)
    assert same_bits(torch.ones(2, 3), torch.ones(3, 2).t())
