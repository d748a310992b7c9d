"""A budget for Lightning's `Trainer`.

`Trainer(callbacks=[RematCallback(budget="8GiB")]).fit(module, data)`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from rematch.api import remat
from rematch.errors import RematchError
from rematch.execute.module import runner_of
from rematch.integrations.ranks import share_first_batch


class RematCallback(pl.Callback):  # type: ignore[misc]  # read as Any, see pyproject.toml
    """Trains inside `budget` what `training_step` calls; the first batch is planned when it comes.

    module: the name of the submodule that `training_step` calls, such as "model" or "net.encoder". By default the
        LightningModule itself if it has a `forward`, otherwise its only submodule with parameters.
    loss: from the output of that module to the loss, if you want it counted exactly from the first step on. By default
        it is measured in the first step.
    options: as `rematch.remat` takes them. The optimizer and gradient accumulation are known from the Trainer.

    The module stays the same object, so checkpoints, resuming, validation and prediction work as before. Calls without
    gradients run plainly. `rematch.plans_of(module)` has the plans.
    """

    def __init__(
        self,
        budget: str | int | float,
        *,
        module: str | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        self.budget = budget
        self.module = module
        self.loss = loss
        self.options = options
        self._checked = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        planned = self._planned(pl_module)
        self._checked = False
        if runner_of(planned) is not None:  # planned before, by an earlier fit() or by the user
            return
        optimizers = trainer.optimizers
        remat(
            planned,
            budget=self.budget,
            loss=self.loss,
            optimizer=optimizers[0] if len(optimizers) == 1 else None,
            accumulate=trainer.accumulate_grad_batches > 1,
            in_place=True,
            **self.options,
        )
        share_first_batch(planned, self.options)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """A module that `training_step` never calls would leave the budget unkept without a word."""
        if self._checked:
            return
        self._checked = True
        runner = runner_of(self._planned(pl_module))
        if runner is not None and not runner.has_trained:
            what = f"its submodule {self.module!r}" if self.module else "it, but something inside"
            raise RematchError(
                f"the training_step of {type(pl_module).__name__} does not call {what}; name the submodule that it "
                f"calls: RematCallback(budget, module=...) with one of {_names(pl_module)}"
            )

    def _planned(self, pl_module: pl.LightningModule) -> nn.Module:
        if self.module is not None:
            try:
                return pl_module.get_submodule(self.module)
            except AttributeError:
                raise RematchError(
                    f"{type(pl_module).__name__} has no submodule {self.module!r}; it has {_names(pl_module)}"
                ) from None
        if type(pl_module).forward is not pl.LightningModule.forward:
            return pl_module
        trained = [child for child in pl_module.children() if any(True for _ in child.parameters())]
        if len(trained) != 1:
            raise RematchError(
                f"{type(pl_module).__name__} has no forward and {len(trained)} submodules with parameters; say which "
                f"to plan: RematCallback(budget, module=...) with one of {_names(pl_module)}"
            )
        return trained[0]


def _names(module: nn.Module) -> str:
    return ", ".join(repr(name) for name, _ in module.named_children()) or "none"
