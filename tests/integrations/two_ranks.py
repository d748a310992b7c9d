"""Two processes that train with each library, with gloo between them; `test_two_ranks.py` starts both.

`python -m tests.integrations.two_ranks FOLDER`, in an environment as torchrun sets it
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import rematch
from rematch.integrations import lightning as for_lightning, transformers as for_transformers
from tests.integrations.test_lightning import Language, loss_of
from tests.integrations.tiny import BUDGET, gpt2, padded, texts
from tests.training import same_bits

OPTIONS = {**BUDGET, "cache": False}


def hugging_face(folder: Path, planned: bool) -> nn.Module:
    """Both ranks have batches of one length, of other texts."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
        gradient_accumulation_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
    )
    callbacks = [for_transformers.RematCallback(**OPTIONS)] if planned else []
    trainer = Trainer(gpt2(), arguments, train_dataset=texts(16), data_collator=padded, callbacks=callbacks)
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    return trainer.model


def accelerate(folder: Path, planned: bool) -> nn.Module:
    accelerator = Accelerator(cpu=True)
    model = gpt2()
    batches = DataLoader(texts(16), 4, collate_fn=padded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if planned:
        model = rematch.remat(model, next(iter(batches)), loss=loss_of, optimizer=optimizer, **OPTIONS)
    wrapped, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    torch.manual_seed(4)
    for batch in batches:
        accelerator.backward(wrapped(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def lightning(folder: Path, planned: bool) -> nn.Module:
    module = Language()
    torch.manual_seed(4)
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[for_lightning.RematCallback(**OPTIONS, loss=loss_of)] if planned else [],
    )
    trainer.fit(module, DataLoader(texts(16), 4, collate_fn=padded))
    return module.model


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")  # of the libraries, about workers and pinned memory
    for case in (hugging_face, accelerate, lightning):
        ours, plain = (case(folder / f"{case.__name__}-{rank}", planned) for planned in (True, False))
        pairs = zip(ours.state_dict().values(), plain.state_dict().values(), strict=True)
        plan = rematch.plans_of(ours)[0]
        result = {
            "equal": all(same_bits(one, other) for one, other in pairs),
            "recomputed": len(plan.recomputed),
            "schedule": plan.schedule.steps.tolist(),
        }
        (folder / f"{case.__name__}-{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
