"""What a plan depends on: equal in every process, and other where something else would run."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rematch.planning.fingerprint import fingerprint
from tests.modules import Net, batch, mean_square

CPU = torch.device("cpu")


class Configured(Net):
    """Has a configuration, as models of transformers have, with a hash of itself that differs between processes."""

    limit = 3

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(heads=4, names={"b", "a", "c"}, rate=0.5, own_hash=hash("a"))
        self.myself = [self]

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(self.halved(x), scale)

    def halved(self, x: torch.Tensor) -> torch.Tensor:
        return x / helper()


def helper() -> float:
    return 2.0


def name(module: nn.Module | None = None, sample: Any = None, loss: Any = mean_square, **settings: Any) -> str:
    return fingerprint(module or Configured(), batch() if sample is None else sample, loss, settings, device=CPU)


def test_it_is_the_same_again_and_in_another_process() -> None:
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})"
    code = f"{threads}\nfrom tests.planning.test_fingerprint import name; print(name(budget='8GiB'))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.stdout.strip() == name(budget="8GiB") == name(budget="8GiB"), run.stderr


def test_values_in_tensors_do_not_matter() -> None:
    assert name(sample=torch.zeros(128, 32)) == name(sample=torch.ones(128, 32))


def changed(change: Callable[[Configured], Any]) -> dict[str, Any]:
    module = Configured()
    change(module)
    return {"module": module}


def _hook(*_: Any) -> None:
    """Does nothing."""


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "budget": lambda: {"budget": "9GiB"},
    "shape": lambda: {"sample": batch(16)},
    "type": lambda: {"sample": batch().double()},
    "strides": lambda: {"sample": torch.zeros(32, 128).t()},
    "argument": lambda: {"sample": (batch(), 2.0)},
    "loss": lambda: {"loss": lambda y: y.sum()},
    "what the loss closes over": lambda: {"loss": partial(torch.sum, dim=0)},
    "mode": lambda: changed(lambda m: m.eval()),
    "mode of a part": lambda: changed(lambda m: m.blocks[1].eval()),
    "frozen": lambda: changed(lambda m: m.head.requires_grad_(False)),
    "gradient": lambda: changed(lambda m: setattr(m.head.weight, "grad", torch.zeros_like(m.head.weight))),
    "attribute": lambda: changed(lambda m: setattr(m.blocks[0].drop, "p", 0.2)),
    "configuration": lambda: changed(lambda m: setattr(m.config, "heads", 8)),
    "hook": lambda: changed(lambda m: m.head.register_forward_hook(_hook)),
    "part": lambda: changed(lambda m: m.blocks.append(nn.Identity())),
    "tied": lambda: changed(lambda m: setattr(m.blocks[1].up, "weight", m.blocks[0].up.weight)),
    "class": lambda: {"module": Net()},
}


@pytest.mark.parametrize("other", OTHERS)
def test_it_differs_with(other: str) -> None:
    given = {"budget": "8GiB", **OTHERS[other]()}
    assert name(**given) != name(budget="8GiB")
    assert name(**given) == name(**{**given, **OTHERS[other]()})


def test_it_differs_with_the_code_that_forward_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name()}
    monkeypatch.setitem(globals(), "helper", lambda: 3.0)
    names.add(name())
    monkeypatch.setattr(Configured, "halved", lambda self, x: x * self.limit)
    names.add(name())
    monkeypatch.setattr(Configured, "limit", 4)
    names.add(name())
    assert len(names) == 4


def test_it_differs_with_settings_of_torch() -> None:
    plain = name()
    with torch.autocast("cpu", torch.bfloat16):
        assert name() != plain
