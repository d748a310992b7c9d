"""Run, time and measure training steps, to compare two ways of training a module.

`plain, ours = Trial(model, loss), Trial(rematch.remat(model, batch, budget="50%", loss=loss), loss)`
`same_outcome(plain, ours, batch)` and `alternate([plain, ours], batch, rounds=10)`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rematch.api import as_arguments
from rematch.capture.memory import PeakMemory


@dataclass(frozen=True)
class Trial:
    """A module and its loss; both run inside `context`, for autocast."""

    model: nn.Module
    loss: Callable[[Any], torch.Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def step(self, sample: Any) -> torch.Tensor:
        """Run forward, loss and backward; gradients are those of this step alone. Returns the loss."""
        args, kwargs = as_arguments(sample)
        self.model.zero_grad(set_to_none=True)
        with self.context():
            value = self.loss(self.model(*args, **kwargs))
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def timed_step(self, sample: Any, clock: Callable[[], float] = time.perf_counter) -> tuple[torch.Tensor, float]:
        """Run a step; returns the loss and the seconds it took."""
        self._wait()
        started = clock()
        value = self.step(sample)
        self._wait()
        return value, clock() - started

    def peak_bytes(self, sample: Any) -> int:
        """Return the peak memory of a step as a budget counts it, with what was allocated before."""
        self.model.zero_grad(set_to_none=True)
        with PeakMemory(self.device) as used:
            self.step(sample)
        self.model.zero_grad(set_to_none=True)
        return used.peak_bytes + self._held_bytes(sample)

    def _held_bytes(self, sample: Any) -> int:
        """Return what is allocated before and after a step; on CPU, where nobody counts, the module and the sample."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        leaves = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]
        storages = [t.untyped_storage() for t in (*self.model.parameters(), *self.model.buffers(), *leaves)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def alternate(
    trials: Sequence[Trial], sample: Any, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Time `rounds` steps of each trial in turns, so that other load on the machine affects all of them alike."""
    seconds: list[list[float]] = [[] for _ in trials]
    for _ in range(rounds):
        for trial, taken in zip(trials, seconds, strict=True):
            taken.append(trial.timed_step(sample, clock)[1])
    return seconds


def same_outcome(ours: Trial, theirs: Trial, sample: Any, seed: int = 0) -> bool:
    """Return whether a step from the same random state gives the same loss and gradients, to the bit."""
    outcomes = []
    for trial in (ours, theirs):
        torch.manual_seed(seed)
        loss = trial.step(sample)
        outcomes.append([loss, *(None if p.grad is None else p.grad.clone() for p in trial.model.parameters())])
        trial.model.zero_grad(set_to_none=True)
    return all(map(same_bits, *outcomes))


def same_bits(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    """Return whether two tensors are equal in type, shape and every bit, NaNs included."""
    if ours is None or theirs is None:
        return ours is theirs
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    raw = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs)]
    return torch.equal(*raw)
