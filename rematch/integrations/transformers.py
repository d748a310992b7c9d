"""A budget for Hugging Face's `Trainer`, in place of `gradient_checkpointing=True`.

`Trainer(model, args, train_dataset=data, callbacks=[RematCallback(budget="8GiB")])`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rematch.api import remat
from rematch.errors import CaptureError, RematchError
from rematch.execute.module import runner_of
from rematch.integrations.ranks import share_first_batch


class RematCallback(TrainerCallback):  # type: ignore[misc]  # read as Any, see pyproject.toml
    """Trains the Trainer's model inside `budget`; the first batch is planned when it comes.

    loss: from the model's output to what the Trainer differentiates. By default the model's own loss. Give it if you
        give the Trainer a `compute_loss_func` or label smoothing: the model then returns no loss.
    options: as `rematch.remat` takes them. The optimizer and gradient accumulation are known from the Trainer.

    The model stays the same object, so saving, resuming, evaluation and generation work as before. Calls without
    gradients run plainly. `rematch.plans_of(model)` has the plans.
    """

    def __init__(
        self, budget: str | int | float, *, loss: Callable[[Any], torch.Tensor] | None = None, **options: Any
    ) -> None:
        self.budget = budget
        self.loss = loss or loss_of_output
        self.options = options

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        if args.gradient_checkpointing and "checkpoints" not in self.options:
            raise RematchError(
                "gradient_checkpointing=True recomputes whole blocks by itself; leave it out, the budget replaces it. "
                "Or say what becomes of those blocks: RematCallback(budget, checkpoints='replace') or 'respect'"
            )
        if runner_of(model) is not None:  # planned before, by an earlier call of train() or by the user
            return
        planned = remat(
            model,
            budget=self.budget,
            loss=self.loss,
            optimizer=getattr(optimizer, "optimizer", optimizer),  # Accelerate wraps it
            accumulate=args.gradient_accumulation_steps > 1,
            in_place=True,
            **self.options,
        )
        share_first_batch(planned, self.options)


def loss_of_output(output: Any) -> torch.Tensor:
    """The loss that a model of transformers returns if it is called with labels."""
    loss: torch.Tensor | None = output.get("loss") if hasattr(output, "get") else None
    if loss is None:
        raise CaptureError(
            "the model returned no loss. If the Trainer computes it (compute_loss_func, label smoothing), say how: "
            "RematCallback(budget, loss=lambda output: ...)"
        )
    return loss
