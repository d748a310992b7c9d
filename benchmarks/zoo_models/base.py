"""What a model of the zoo is, and how families list theirs.

    family = Family("decoders", needs=("transformers",))

    @family.model("llama")
    def llama() -> Example: ...

Nothing is built, and no library imported, before a model is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Loss = Callable[[Any], torch.Tensor]
Step = Callable[[nn.Module, int], Any]


def unobserved(module: nn.Module) -> None:
    """Nothing but losses, gradients, buffers and random states is to be compared."""


@dataclass(frozen=True)
class Example:
    """A module with what it takes to train it.

    sample and loss are what `rematch.remat` takes. `context` is entered around planning, forward and loss.
    step: a whole training step of the module, given its number, for those that do more than forward, loss and
        backward; it returns the tensors to compare. It also updates the parameters if `updates` is set.
    observe: what else of the module must be as in plain training, such as a counter.
    makes_inputs: whether the step makes inputs of its own instead of using the sample.
    bounded: whether the budget covers the step at all; it does not where the user keeps graphs.
    """

    module: nn.Module
    sample: Any
    loss: Loss
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    step: Step | None = None
    updates: bool = False
    observe: Callable[[nn.Module], Any] = unobserved
    makes_inputs: bool = False
    bounded: bool = True


@dataclass(frozen=True)
class Entry:
    """A model by name; `needs` are the modules that must be importable to build it."""

    name: str
    family: str
    build: Callable[[], Example]
    needs: tuple[str, ...]


@dataclass
class Family:
    """Models that share a file."""

    name: str
    needs: tuple[str, ...] = ()
    entries: list[Entry] = field(default_factory=list)

    def model(
        self, name: str, *, needs: tuple[str, ...] = ()
    ) -> Callable[[Callable[[], Example]], Callable[[], Example]]:
        """List the function below as the model `name`."""

        def listed(build: Callable[[], Example]) -> Callable[[], Example]:
            self.add(name, build, needs=needs)
            return build

        return listed

    def add(self, name: str, build: Callable[..., Example], *args: Any, needs: tuple[str, ...] = (), **kw: Any) -> None:
        """List `build(*args, **kw)` as the model `name`."""
        if any(entry.name == name for entry in self.entries):
            raise ValueError(f"{self.name} has two models {name!r}")
        self.entries.append(Entry(name, self.name, lambda: build(*args, **kw), (*self.needs, *needs)))


def mean_square(output: Any) -> torch.Tensor:
    """A loss of any tensor, or of the first tensor of a tuple or a model's output."""
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output.float().square().mean()


def own_loss(output: Any) -> torch.Tensor:
    """The loss that the model has computed itself."""
    loss: torch.Tensor = output.loss
    return loss


def bfloat16_autocast() -> AbstractContextManager[Any]:
    """What mixed-precision training on CPU enters."""
    return torch.autocast("cpu", dtype=torch.bfloat16)
