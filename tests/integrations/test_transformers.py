"""Hugging Face's Trainer inside a budget: every loss and weight as without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

import rematch
from rematch.integrations.transformers import RematCallback
from tests.integrations.tiny import BUDGET, assert_same_weights, gpt2, padded, texts


def trainer(folder: Path, callbacks: list[Any], **changed: Any) -> Trainer:
    """Two epochs of a batch of 4 long texts and one of 3 shorter ones."""
    arguments = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_only_model": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(output_dir=str(folder), **{**arguments, **changed})
    data = texts()
    return Trainer(gpt2(), args, train_dataset=data, eval_dataset=data[:5], data_collator=padded, callbacks=callbacks)


def losses(trained: Trainer) -> list[tuple[str, float]]:
    return [
        (key, entry[key])
        for entry in trained.state.log_history
        for key in ("loss", "eval_loss", "grad_norm")
        if key in entry
    ]


def assert_equal_training(budgeted: Trainer, plain: Trainer) -> None:
    plans = rematch.plans_of(budgeted.model)
    assert plans[0].recomputed
    assert len(plans) >= 2, "two lengths, and a smaller last batch"
    assert losses(budgeted) == losses(plain)
    assert_same_weights(budgeted.model, plain.model)


def test_a_budget_changes_no_bit_in_bf16_with_accumulation(tmp_path: Path) -> None:
    changed = {"gradient_accumulation_steps": 2, "bf16": True}
    plain = trainer(tmp_path / "plain", [], **changed)
    plain.train()
    budgeted = trainer(tmp_path / "budgeted", [RematCallback(**BUDGET)], **changed)
    budgeted.train()
    assert_equal_training(budgeted, plain)


def test_saving_resuming_and_generating(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", [])
    plain.train()
    whole = trainer(tmp_path / "whole", [RematCallback(**BUDGET)])
    whole.train()
    assert_equal_training(whole, plain)
    first = sorted((tmp_path / "whole").glob("checkpoint-*"))[0]
    resumed = trainer(tmp_path / "resumed", [RematCallback(**BUDGET)])
    resumed.train(resume_from_checkpoint=str(first))
    assert_equal_training(resumed, plain)

    whole.model.save_pretrained(tmp_path / "saved")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert_same_weights(loaded, whole.model)
    known = len(rematch.plans_of(whole.model))
    prompt = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(whole.model.generate(prompt, **options), loaded.eval().generate(prompt, **options))
    assert len(rematch.plans_of(whole.model)) == known, "generation is not planned"
    whole.train()  # again: the plans stay
    assert len(rematch.plans_of(whole.model)) == known


def test_gradient_checkpointing_beside_a_budget_needs_a_word(tmp_path: Path) -> None:
    with pytest.raises(rematch.RematchError, match="the budget replaces it"):
        trainer(tmp_path, [RematCallback("60%")], gradient_checkpointing=True).train()
    changed = {"max_steps": 1, "save_strategy": "no", "eval_strategy": "no"}
    callback = RematCallback(**BUDGET, checkpoints="replace")
    budgeted = trainer(tmp_path, [callback], gradient_checkpointing=True, **changed)
    budgeted.train()
    plain = trainer(tmp_path, [], **changed)
    plain.train()
    (plan,) = rematch.plans_of(budgeted.model)
    assert plan.recomputed and any("1 region under" in note for note in plan.notes)
    assert losses(budgeted) == losses(plain)
    assert_same_weights(budgeted.model, plain.model)


def test_a_loss_of_the_trainer_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(rematch.CaptureError, match="label smoothing"):
        trainer(tmp_path, [RematCallback(**BUDGET)], label_smoothing_factor=0.1).train()
