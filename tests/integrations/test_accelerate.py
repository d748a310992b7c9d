"""Accelerate around a module inside a budget: every loss and weight as without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import rematch
from tests.integrations.tiny import BUDGET, assert_same_weights, forget_accelerate, gpt2, padded, texts


@pytest.fixture(autouse=True)
def _forget_settings() -> None:
    forget_accelerate()


def loss_of(output: Any) -> torch.Tensor:
    return output.loss


def train(accelerator: Accelerator, model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(texts(), 4, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(4)
    losses = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_a_budget_changes_no_bit(tmp_path: Path) -> None:
    def accelerator() -> Accelerator:
        return Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)

    plain, model = gpt2(), gpt2()
    expected = train(accelerator(), plain)
    budgeted = rematch.remat(model, loss=loss_of, accumulate=True, **BUDGET)
    here = accelerator()
    assert train(here, budgeted) == expected
    assert_same_weights(budgeted, plain)
    assert rematch.plans_of(budgeted)[0].recomputed

    here.save_state(str(tmp_path))
    with torch.no_grad():
        budgeted.transformer.wte.weight.zero_()
    here.load_state(str(tmp_path))
    assert_same_weights(budgeted, plain)
    # In mixed precision Accelerate wraps forward, and takes its wrapping off again.
    unwrapped = here.unwrap_model(budgeted, keep_fp32_wrapper=False)
    known = len(rematch.plans_of(unwrapped))
    unwrapped(**padded(texts()[-1:])).loss.backward()
    assert len(rematch.plans_of(unwrapped)) == known + 1, "a call without autocast is planned for itself"
