"""Lightning's Trainer inside a budget: every loss and weight as without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import rematch
from rematch.integrations.lightning import RematCallback
from tests.integrations.tiny import BUDGET, assert_same_weights, gpt2, padded, texts

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
]


class Language(pl.LightningModule):
    """A LightningModule as most are: no forward of its own, the model is a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        self.losses.append(self.model(**batch).loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Unused(Language):
    """Has a forward that its training step does not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).logits


def fit(
    folder: Path,
    callbacks: list[Any],
    module: Language | None = None,
    *,
    checkpoint: Path | None = None,
    save_as: Path | None = None,
    **changed: Any,
) -> Language:
    module = module or Language()
    torch.manual_seed(4)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        enable_checkpointing=False,
        **{"max_epochs": 2, **changed},
    )
    data = texts()
    loaders = DataLoader(data, 4, collate_fn=padded), DataLoader(data[:5], 5, collate_fn=padded)
    trainer.fit(module, *loaders, ckpt_path=checkpoint)
    if save_as is not None:
        trainer.save_checkpoint(save_as)
    return module


def loss_of(output: Any) -> torch.Tensor:
    return output.loss


def test_a_budget_changes_no_bit_in_bf16_with_accumulation(tmp_path: Path) -> None:
    changed = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    plain = fit(tmp_path, [], **changed)
    budgeted = fit(tmp_path, [RematCallback(**BUDGET, loss=loss_of)], **changed)
    assert rematch.plans_of(budgeted.model)[0].recomputed
    assert budgeted.losses == plain.losses
    assert_same_weights(budgeted, plain)


def test_saving_and_resuming(tmp_path: Path) -> None:
    def callback() -> RematCallback:
        return RematCallback(**BUDGET, loss=loss_of, module="model")

    saved = tmp_path / "last.ckpt"
    fit(tmp_path, [callback()], max_epochs=1, save_as=saved)
    resumed = fit(tmp_path, [callback()], checkpoint=saved)
    plain_saved = tmp_path / "plain.ckpt"
    fit(tmp_path, [], max_epochs=1, save_as=plain_saved)
    plain = fit(tmp_path, [], checkpoint=plain_saved)
    assert rematch.plans_of(resumed.model)[0].recomputed
    assert resumed.losses == plain.losses
    assert_same_weights(resumed, plain)


def test_a_module_that_training_does_not_call_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rematch.RematchError, match=r"does not call it, but something inside; .* 'model'"):
        fit(tmp_path, [RematCallback(**BUDGET)], Unused())


def test_the_module_must_be_clear(tmp_path: Path) -> None:
    two = Language()
    two.teacher = nn.Linear(2, 2)
    with pytest.raises(rematch.RematchError, match=r"2 submodules with parameters; .* 'model', 'teacher'"):
        fit(tmp_path, [RematCallback("60%")], two)
    with pytest.raises(rematch.RematchError, match="has no submodule 'modle'; it has 'model'"):
        fit(tmp_path, [RematCallback("60%", module="modle")])
