"""The zoo's judge tells equal training from every other outcome; the zoo lists what it promises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rematch
from benchmarks.zoo_models import ENTRIES, Entry, judge as judging
from benchmarks.zoo_models.base import Example, Family, mean_square
from benchmarks.zoo_models.judge import (
    EAGER_REFUSES,
    EAGER_VARIES,
    EQUAL,
    NAMED_MINIMUM,
    OTHER_BITS,
    OVER_BUDGET,
    RAW_EXCEPTION,
    REFUSED,
    SKIPPED,
    Verdict,
    judge,
)


class Scaled(nn.Module):
    """What a wrong plan could make of a module."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) * self.factor


def layers() -> Example:
    return Example(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8), mean_square)


def entry(build: Any = layers, needs: tuple[str, ...] = ()) -> Entry:
    return Entry("layers", "tests", build, needs)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`planned(wrap, whole_bytes)` makes `remat` return `wrap(module, budget)`, with a plan of that peak in eager."""

    def install(wrap: Any, whole_bytes: int = 10**9) -> None:
        figures = SimpleNamespace(peak_bytes=1, overhead_pct=0.0)
        plan = SimpleNamespace(figures=figures, graph_ops=1)
        monkeypatch.setattr(rematch, "remat", lambda module, sample, *, budget, **_: wrap(module, budget))
        monkeypatch.setattr(rematch, "plans_of", lambda module: (plan,))
        monkeypatch.setattr(judging, "_whole_bytes", lambda module: whole_bytes)

    return install


def verdict(built: Entry | None = None) -> Verdict:
    return judge(built or entry(), time_limit=1)


def test_equal_training_within_the_budget(planned: Any) -> None:
    planned(lambda module, budget: module)
    found = verdict()
    assert found.outcome == EQUAL and found.budget == "60%"
    assert found.peak_bytes == found.plain_peak_bytes and found.time_ratio is not None


def test_another_loss_is_other_bits(planned: Any) -> None:
    planned(lambda module, budget: Scaled(module, 1 + 1e-6))
    assert verdict().outcome == OTHER_BITS


def test_planning_that_draws_is_other_bits(planned: Any) -> None:
    def draw(module: nn.Module, budget: Any) -> nn.Module:
        torch.rand(1)
        return module

    planned(draw)
    assert verdict().outcome == OTHER_BITS


def test_a_peak_above_the_budget(planned: Any) -> None:
    planned(lambda module, budget: module, whole_bytes=100)
    assert verdict().outcome == OVER_BUDGET


def test_the_named_minimum_is_tried_last(planned: Any) -> None:
    asked = []

    def refuse_percentages(module: nn.Module, budget: Any) -> nn.Module:
        asked.append(budget)
        if isinstance(budget, str):
            raise rematch.BudgetInfeasible("too small", feasible_from_bytes=12345)
        return module

    planned(refuse_percentages)
    found = verdict()
    assert (found.outcome, found.budget, found.budget_bytes) == (EQUAL, NAMED_MINIMUM, 12345)
    assert asked == ["60%", "80%", 12345]


@pytest.mark.parametrize(("error", "outcome"), [(rematch.CaptureError("no"), REFUSED), (KeyError("no"), RAW_EXCEPTION)])
def test_exceptions_are_told_apart(planned: Any, error: Exception, outcome: str) -> None:
    def fail(module: nn.Module, budget: Any) -> nn.Module:
        raise error

    planned(fail)
    assert verdict().outcome == outcome


def test_plain_training_that_fails_or_varies(planned: Any) -> None:
    planned(lambda module, budget: module)
    calls = iter(range(100))
    varying = entry(lambda: Example(Scaled(nn.Linear(8, 8), next(calls)), torch.randn(4, 8), mean_square))
    failing = entry(lambda: Example(nn.Linear(3, 8), torch.randn(4, 8), mean_square))
    assert (verdict(varying).outcome, verdict(failing).outcome) == (EAGER_VARIES, EAGER_REFUSES)


def test_a_missing_library_is_named() -> None:
    found = verdict(entry(needs=("no_such_library",)))
    assert found.outcome == SKIPPED and "no_such_library" in found.reason


def test_the_zoo_is_large_and_a_name_is_used_once() -> None:
    assert len(ENTRIES) >= 300
    family = Family("tests")
    family.add("one", layers)
    with pytest.raises(ValueError, match="one"):
        family.add("one", layers)
