"""Outputs that get no gradient: the graph is compiled without one, and one that comes after all is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from rematch.execute.compiled import backend as backend_module
from rematch.execute.compiled.backend import CompiledBackend, CompiledGraph
from rematch.execute.compiled.meter import StepMeter
from rematch.planning.planner import Planner
from rematch.planning.settings import COMPILED, Settings
from rematch.trial import Trial
from tests.inductor_graphs import use_eager_kernels

SAMPLE = torch.randn(256, 128)
LOGITS_BYTES = 256 * 512 * 4


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


def compiled_within(module: nn.Module, budget: int, steps: int = 4) -> tuple[Trial, CompiledBackend]:
    """The module after the steps that its plan is settled in, or fewer."""
    torch._dynamo.reset()
    backend = CompiledBackend(Planner(Settings(budget=budget, time_limit=1.0, progress=False, engine=COMPILED)))
    trial = Trial(torch.compile(module, backend=backend, dynamic=False), lambda outputs: outputs[0])  # type: ignore[arg-type]
    for _ in range(steps):
        trial.step(SAMPLE)
    return trial, backend


def test_a_gradient_that_never_comes_takes_no_memory() -> None:
    module = WithLogits()
    kept, _ = compiled_within(module, 2**40)
    whole = kept.peak_bytes(SAMPLE)
    budget = whole - LOGITS_BYTES // 2
    inside, backend = compiled_within(module, budget)
    (graph,) = backend.alive()
    assert graph.planner.around.unused == (1,)
    # Eager kernels take two such tensors more than fused ones do; zeros for a gradient would be a third.
    assert graph.planner.around.correction_bytes < 2.5 * LOGITS_BYTES
    assert len(backend.planner.plans) == 1  # the plan of the graph as it was before is gone
    assert inside.peak_bytes(SAMPLE) <= budget
    inside.step(SAMPLE)
    plain = WithLogits()
    plain(SAMPLE)[0].backward()
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def gradients_with_logits(model: nn.Module) -> list[torch.Tensor]:
    """Of a loss that uses both outputs, always with the same random numbers."""
    model.zero_grad()
    torch.manual_seed(1)
    loss, logits = model(SAMPLE)
    assert logits.requires_grad
    (loss + logits.float().tanh().mean()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class Summed(WithLogits):
    """Its loss needs no logits in backward, so that nobody but the user holds them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(x))
        return logits.sum(), logits


def test_logits_that_the_user_lets_go_of_before_backward_are_not_counted_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans take them to be dropped with the loss; whoever holds them is noticed by measuring."""
    judge, measured = CompiledGraph._judge, []

    def noting(graph: CompiledGraph, meter: StepMeter) -> None:
        measured.append(meter.peak_bytes)
        judge(graph, meter)

    monkeypatch.setattr(CompiledGraph, "_judge", noting)
    for holds in (False, True):
        trial, backend = compiled_within(Summed(), 2**40, steps=0)
        outputs = trial.model(SAMPLE)
        loss = outputs[0]
        if not holds:
            del outputs
        loss.backward()
        (graph,) = backend.alive()
        assert graph.planner.decision is not None
        planned = graph.planner.decision.plan.graph
        assert planned is not None
        (logits,) = [n for n, value in enumerate(planned.values) if value.size_bytes == LOGITS_BYTES]
        assert logits not in planned.held
    dropped, held = measured
    assert held == pytest.approx(dropped + LOGITS_BYTES, abs=64)  # but for the loss, which is let go with them


def test_logits_beside_a_loss_need_no_second_compilation() -> None:
    _, backend = compiled_within(WithLogits(), 2**40)
    (graph,) = backend.alive()
    assert graph.planner.around.unused == (1,) and graph.compilations == 1


@pytest.mark.parametrize("steps", [0, 4])
def test_a_gradient_that_comes_after_all_is_right(steps: int) -> None:
    """In the first step, when logits were taken to have none, and in a later one."""
    inside, backend = compiled_within(WithLogits(), 2**40, steps)
    for _ in range(2):
        assert_close(gradients_with_logits(inside.model), gradients_with_logits(WithLogits()))
    (graph,) = backend.alive()
    assert graph.planner.around.unused == ()
    torch._dynamo.reset()
    _, known = compiled_within(WithLogits(), 2**40, steps=1)  # as another process finds the notes of the first
    (graph,) = known.alive()
    assert graph.planner.around.unused == ()


class Dropping(WithLogits):
    """Draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.Dropout(0.5))


@pytest.mark.parametrize("cast", [False, True])
def test_forward_runs_again_as_it_ran(monkeypatch: pytest.MonkeyPatch, cast: bool) -> None:
    """With the same random numbers and inside the same autocast, for a gradient that comes after all."""
    found = []
    for guess in (lambda _: (), backend_module.likely_unused):
        monkeypatch.setattr(backend_module, "likely_unused", guess)
        inside, _ = compiled_within(Dropping(), 2**40, steps=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            found.append(gradients_with_logits(inside.model))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if cast else 1e-4, atol=1e-4 if cast else 1e-6)


class Counting(WithLogits):
    """Changes a buffer that it reads, so it must not run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        return super().forward(x * self.calls)


def test_a_forward_that_changes_buffers_has_all_gradients_from_the_start() -> None:
    module, plain = Counting(), Counting()
    inside, backend = compiled_within(module, 2**40, steps=0)
    for _ in range(2):
        assert_close(gradients_with_logits(inside.model), gradients_with_logits(plain))
    assert module.calls == plain.calls == 2
    (graph,) = backend.alive()
    assert graph.planner.around.unused == ()


class Auxiliary(nn.Module):
    """Returns a number that is not computed from its other result, as blocks with a loss of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = nn.Linear(128, 4), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate(x).square().mean(), self.body(x)


def test_only_what_the_loss_is_computed_from_is_taken_to_have_no_gradient() -> None:
    seen: list[tuple[int, ...]] = []

    def look(module: GraphModule, _: object) -> GraphModule:
        seen.append(backend_module.likely_unused(module))
        return module

    for module in (WithLogits(), Auxiliary(), nn.Linear(128, 128)):
        torch._dynamo.reset()
        torch.compile(module, backend=look)(SAMPLE)
    assert seen == [(1,), (), ()]
