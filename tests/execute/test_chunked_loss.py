"""A head and its cross entropy in slices: eager's loss and gradients up to rounding, in less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rematch
from rematch.errors import CaptureError, RematchError
from rematch.execute.chunked_loss import Logits, head_of, with_chunked_loss
from tests.training import measured_peak

VOCABULARY, WIDTH, TOKENS = 4096, 32, 256


class Language(nn.Module):
    """An embedding, a layer and a tied head, with the loss inside or not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.body(self.embedding(tokens)))
        if labels is None:
            return logits
        return F.cross_entropy(logits[..., :-1, :].float().reshape(-1, VOCABULARY), labels[..., 1:].reshape(-1)), logits


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def gradients(module: nn.Module, step: Callable[[nn.Module], torch.Tensor]) -> list[torch.Tensor]:
    module.zero_grad()
    value = step(module)
    value.backward()
    return [
        value.detach(),
        *(parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None),
    ]


def inside(module: nn.Module) -> torch.Tensor:
    return module(tokens(), tokens())[0]


def outside(module: nn.Module) -> torch.Tensor:
    labels = tokens().flatten()
    labels[::7] = -100
    return F.cross_entropy(module(tokens()).flatten(0, 1).view(-1, VOCABULARY), labels)


def viewed(module: nn.Module) -> torch.Tensor:
    return F.cross_entropy(module(tokens()).view(-1, VOCABULARY), tokens().flatten(), reduction="sum")


@pytest.mark.parametrize("step", [inside, viewed, outside])
def test_loss_and_gradients_are_those_of_eager_up_to_rounding(step: Callable[[nn.Module], torch.Tensor]) -> None:
    plain = Language()
    chunked = copy.deepcopy(plain)
    chunked.forward = with_chunked_loss(chunked.forward, chunked.head, 8)  # type: ignore[method-assign]
    for ours, theirs in zip(gradients(chunked, step), gradients(plain, step), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert "forward" not in chunked.head.__dict__


def test_the_least_budget_is_far_below_what_the_logits_need() -> None:
    plain = Language()
    sample = {"tokens": tokens(), "labels": tokens()}
    logits_bytes = 2 * TOKENS * VOCABULARY * 4
    options: dict[str, Any] = {"loss": lambda output: output[0], "time_limit": 2.0, "progress": False, "cache": False}
    whole = gradients(plain, inside)
    resident_bytes = 2 * sum(parameter.nbytes for parameter in plain.parameters())
    budget = resident_bytes + logits_bytes
    with pytest.raises(rematch.BudgetInfeasible):
        rematch.remat(plain, sample, budget=budget, **options)
    model = rematch.remat(plain, sample, budget=budget, chunk_loss=8, **options)
    plan = rematch.plans_of(model)[-1]
    assert plan.engine == "tape"
    assert any("8 slices" in note for note in plan.notes)
    gradients(model, inside)
    model.zero_grad(set_to_none=True)
    peak_bytes, found = measured_peak(torch.device("cpu"), lambda: gradients(model, inside))
    assert peak_bytes < 1.5 * logits_bytes  # above what is resident; eager takes four times the logits
    for ours, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_questions_about_memory_see_the_slices() -> None:
    sample = {"tokens": tokens(), "labels": tokens()}
    whole, sliced = (
        (
            rematch.memory(Language(), sample, loss=first, chunk_loss=slices).peak_bytes,
            rematch.min_budget(Language(), sample, loss=first, chunk_loss=slices, time_limit=1.0).budget_bytes,
            rematch.max_batch(Language(), batch, budget="64MiB", loss=first, chunk_loss=slices, time_limit=1.0).batch,
            len(rematch.trace(Language(), sample, loss=first, chunk_loss=slices).ops),
        )
        for slices in (1, 8)
    )
    assert sliced[0] < 0.7 * whole[0]
    assert sliced[1] < 0.7 * whole[1]
    assert sliced[2] > 1.3 * whole[2]
    assert sliced[3] > whole[3] + 20


def first(output: Any) -> torch.Tensor:
    return output[0]  # type: ignore[no-any-return]


def batch(size: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(size, TOKENS, dtype=torch.long) for name in ("tokens", "labels")}


def test_logits_are_computed_when_they_are_read() -> None:
    model = Language()
    forward = with_chunked_loss(model.forward, model.head, 4)
    expected = model(tokens())
    for read in (
        lambda logits: logits.argmax(-1),
        lambda logits: torch.softmax(logits, -1),
        lambda logits: logits[0, 3],
        lambda logits: logits[..., :5],
        lambda logits: logits.view(2, -1),
        lambda logits: logits.flatten(),
        lambda logits: logits.mean() * 2,
        lambda logits: F.cross_entropy(logits.view(-1, VOCABULARY), tokens().flatten(), reduction="none"),
    ):
        logits = forward(tokens())
        assert isinstance(logits, Logits)
        assert logits.shape == expected.shape
        torch.testing.assert_close(read(logits), read(expected))
    with torch.no_grad():
        assert isinstance(forward(tokens()), torch.Tensor)


def test_causal_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    plain = transformers.LlamaForCausalLM(config)
    sample = {"input_ids": tokens(), "labels": tokens()}

    def step(module: nn.Module) -> torch.Tensor:
        return module(**sample).loss

    whole = gradients(plain, step)
    model = rematch.remat(
        plain, sample, budget="60%", chunk_loss=4, loss=lambda output: output.loss, time_limit=2.0, cache=False
    )
    for _ in range(2):
        for ours, theirs in zip(gradients(model, step), whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert model(**sample).logits.shape == (2, TOKENS, VOCABULARY)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(CaptureError, match="no plain linear layer"):
        head_of(nn.Conv2d(1, 1, 1))
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(RematchError, match="chunk_loss= takes a number of slices"):
            rematch.remat(Language(), tokens(), budget="60%", chunk_loss=wrong)  # type: ignore[arg-type]
    with pytest.raises(RematchError, match="needs engine='tape'"):
        rematch.remat(Language(), tokens(), budget="60%", chunk_loss=2, engine="replay")
