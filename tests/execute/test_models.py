"""Every model of the zoo trains inside its budget as it trains without, bit by bit, on each engine."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import rematch
from benchmarks.models import TINY, Case
from rematch.graph import Graph, Phase, Schedule, baseline, simulate
from rematch.planning.settings import REPLAY, TAPE
from rematch.solvers.base import Deadline
from rematch.solvers.minimum import smallest_budget
from tests.captures import UNLIMITED_BYTES, Given, everything_twice, planned_graphs
from tests.training import Outcome, TrainingStep, assert_same_steps, deterministic, train

_TIME_LIMIT = 1.0
_MINIMUM_SECONDS = 2.0
_SMALL_BYTES = 8192  # numbers that kernels wrap as tensors, states of generators
_OFF_BY = 0.02  # the measured peak may differ so much from the predicted one
# cuDNN's recurrent kernels cannot be traced, and draw dropout from a state that no seed sets back.
_WITHOUT_CUDNN = {"lstm", "gru"}
# Replay is slow to trace, and has tests of its own: every second model will do.
_RUNS = [(TAPE, name) for name in TINY] + [(REPLAY, name) for name in list(TINY)[::2]]


@dataclass(frozen=True)
class Subject:
    """A model on a device, and what is known of it without a budget; each fact is found out once."""

    case: Case
    device: torch.device

    @cached_property
    def model(self) -> nn.Module:
        """As it is before training; kept on the CPU, where it is in nobody's way."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.case.build()

    def fresh(self) -> nn.Module:
        return copy.deepcopy(self.model).to(self.device)

    @cached_property
    def sample(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), self.case.sample())

    @property
    def step(self) -> TrainingStep:
        """Without a name for what the model returns, for whoever holds that pays for it."""
        args, kwargs = self.sample

        def step(module: nn.Module) -> torch.Tensor:
            value = self.case.loss(module(*args, **kwargs))
            value.backward()
            return value

        return step

    @cached_property
    def plain(self) -> list[Outcome]:
        return train(self.fresh(), self.step)

    def wrapped(self, engine: str, **options: Any) -> tuple[nn.Module, Graph]:
        """The model made to train inside a budget, and the graph that was planned."""
        with planned_graphs() as graphs:
            model = rematch.remat(
                self.fresh(), self.sample, loss=self.case.loss, engine=engine, progress=False, **options
            )
        return model, graphs[-1]


@pytest.fixture(autouse=True)
def _same_bits_whenever_they_run() -> Iterator[None]:
    with deterministic():
        yield


@cache
def _subject(name: str, device: torch.device) -> Subject:
    return Subject(TINY[name], device)


@pytest.fixture(
    params=[pytest.param(run, id="-".join(run), marks=pytest.mark.xdist_group(run[1])) for run in _RUNS],
)
def run(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Subject]:
    """An engine and a model."""
    engine, name = request.param
    if device.type == "cuda" and name in _WITHOUT_CUDNN:
        monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    return engine, _subject(name, device)


def _check_training(subject: Subject, model: nn.Module, graph: Graph, budget_bytes: int) -> None:
    """Trained for some steps, the model does what plain training does, within the budget and as predicted."""
    expected = subject.plain
    figures = rematch.plans_of(model)[-1].figures
    outcomes = train(model, subject.step)
    assert_same_steps(outcomes, expected)
    peak_bytes = graph.resident_bytes + max(o.peak_bytes for o in outcomes if o.peak_bytes is not None)
    assert peak_bytes <= budget_bytes + _SMALL_BYTES
    assert peak_bytes <= (1 + _OFF_BY) * figures.peak_bytes
    assert len(rematch.plans_of(model)) == 1, "the first step planned anew: the loss was not what it was taken for"


def test_trains_alike_in_a_share_of_its_peak(run: tuple[str, Subject]) -> None:
    engine, subject = run
    model, graph = subject.wrapped(engine, budget=_feasible(engine, subject, "60%"), time_limit=_TIME_LIMIT)
    plan = rematch.plans_of(model)[-1]
    assert plan.engine == engine
    # On a card one kernel's workspace can be most of the peak, so that the smallest budget is nearly the plain peak.
    plain_fits = simulate(graph, baseline(graph)).peak_bytes <= plan.figures.budget_bytes
    assert plan.recomputed or plain_fits, "the budget is below the plain peak, so something must be computed again"
    _check_training(subject, model, graph, plan.figures.budget_bytes)


def _feasible(engine: str, subject: Subject, budget: str) -> str | int:
    """The budget, or the smallest that its refusal names. Nothing of the refused attempt is in memory afterwards."""
    try:
        subject.wrapped(engine, budget=budget, time_limit=_TIME_LIMIT)
    except rematch.BudgetInfeasible as error:
        assert error.feasible_from_bytes is not None
        # A little more, for how close to the minimum a search comes in its time depends on the machine.
        return int(1.02 * error.feasible_from_bytes)
    finally:
        torch._dynamo.reset()
        gc.collect()
    return budget


def test_trains_alike_at_the_smallest_budget(run: tuple[str, Subject]) -> None:
    """The smallest that is found: the schedule's own peak is the budget, with not a byte to spare."""
    engine, subject = run
    model, graph = subject.wrapped(engine, budget=UNLIMITED_BYTES, solver=Given(_of_smallest_peak))
    peak_bytes = rematch.plans_of(model)[-1].figures.peak_bytes
    assert peak_bytes is not None
    assert peak_bytes < simulate(graph, baseline(graph)).peak_bytes
    _check_training(subject, model, graph, budget_bytes=peak_bytes)


def _of_smallest_peak(graph: Graph) -> Schedule:
    return smallest_budget(graph, Deadline(_MINIMUM_SECONDS)).schedule


def test_trains_alike_with_every_operator_repeated(run: tuple[str, Subject]) -> None:
    """Much more than any plan asks for, so that no rule of recomputation goes untried."""
    engine, subject = run
    model, graph = subject.wrapped(engine, budget=UNLIMITED_BYTES, solver=Given(everything_twice))
    again = sum(again.extra_runs for again in rematch.plans_of(model)[-1].recomputed)
    assert again > sum(not op.once for op in graph.ops if op.phase is Phase.FORWARD) // 2
    _check_training(subject, model, graph, UNLIMITED_BYTES)
