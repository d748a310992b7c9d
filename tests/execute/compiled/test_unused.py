"""Outputs that get no gradient: the graph is compiled without one, and says so where one comes after all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import rematch
from rematch.execute.compiled.backend import CompiledBackend
from rematch.planning.planner import Planner
from rematch.planning.settings import COMPILED, Settings
from rematch.trial import Trial
from tests.inductor_graphs import use_eager_kernels

SAMPLE = torch.randn(256, 128)


@pytest.fixture(autouse=True)
def _eager_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    use_eager_kernels(monkeypatch)
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path))
    yield


class WithLogits(nn.Module):
    """Returns its loss and what it was computed from, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())))
        self.head = nn.Linear(128, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(x))
        return logits.square().mean(), logits


def compiled_within(module: nn.Module, budget: int) -> tuple[Trial, CompiledBackend]:
    """The module after the steps that its plan is settled in."""
    torch._dynamo.reset()
    backend = CompiledBackend(Planner(Settings(budget=budget, time_limit=1.0, progress=False, engine=COMPILED)))
    trial = Trial(torch.compile(module, backend=backend, dynamic=False), lambda outputs: outputs[0])  # type: ignore[arg-type]
    for _ in range(4):
        trial.step(SAMPLE)
    return trial, backend


def test_a_gradient_that_never_comes_takes_no_memory() -> None:
    module = WithLogits()
    kept, _ = compiled_within(module, 2**40)
    whole = kept.peak_bytes(SAMPLE)
    logits_bytes = 256 * 512 * 4
    budget = whole - logits_bytes // 2
    inside, backend = compiled_within(module, budget)
    (graph,) = backend.alive()
    assert graph.planner.around.unused == (1,)
    assert graph.planner.around.correction_bytes < 1.5 * logits_bytes  # it was twice that above, and one is gone
    assert len(backend.planner.plans) == 1  # the plan of the graph as it was before is gone
    assert inside.peak_bytes(SAMPLE) <= budget
    inside.step(SAMPLE)
    plain = WithLogits()
    plain(SAMPLE)[0].backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_comes_after_all_raises_once() -> None:
    module = WithLogits()
    whole = compiled_within(module, 2**40)[0].peak_bytes(SAMPLE)
    inside, backend = compiled_within(module, whole - 256 * 512 * 2)
    (graph,) = backend.alive()
    assert graph.planner.around.unused == (1,)
    module.zero_grad()
    loss, logits = inside.model(SAMPLE)
    assert logits.requires_grad
    with pytest.raises(rematch.CaptureError, match="Run this step again"):
        (loss + logits.mean()).backward()
    module.zero_grad()
    loss, logits = inside.model(SAMPLE)
    (loss + logits.mean()).backward()
    plain = WithLogits()
    loss, logits = plain(SAMPLE)
    (loss + logits.mean()).backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
