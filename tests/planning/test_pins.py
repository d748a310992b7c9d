"""Pins: every schedule keeps what is to be kept and recomputes what is to be recomputed, and the oracle accepts it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import rematch
from rematch.graph import Phase, simulate
from rematch.planning.pins import pin
from rematch.solvers import Problem, solve
from tests.modules import Net, batch, mean_square
from tests.training import assert_same_steps, step_of, train

OPTIONS: dict[str, Any] = {"loss": mean_square, "device": "h200", "time_limit": 1.0, "engine": "tape"}


@pytest.fixture(scope="module")
def graph() -> rematch.graph.Graph:
    torch.manual_seed(0)
    return rematch.trace(Net(), batch(), loss=mean_square, device="h200")


@pytest.mark.parametrize("solver", ["auto", "anneal"])
@pytest.mark.parametrize("share", [100, 80])
def test_solvers_respect_pins(graph: rematch.graph.Graph, solver: str, share: int) -> None:
    pinned = pin(graph, ("blocks.0",), ("blocks.1.up", "blocks.2"))
    peak = simulate(graph, rematch.graph.baseline(graph)).peak_bytes
    found = solve(Problem(pinned.graph, peak * share // 100), solver, time_limit=2.0)
    assert found.schedule is not None
    seen = simulate(graph, pinned.schedule_of(found.schedule)).checked()
    assert seen.peak_bytes <= peak * share // 100
    counts = {op.name: int(count) for op, count in zip(graph.ops, seen.counts, strict=True)}
    kept = [op.name for op in graph.ops if op.phase is Phase.FORWARD and op.module_path.startswith("blocks.0")]
    assert {counts[name] for name in kept} == {1}
    again = [pinned.graph.ops[op].name for op in pinned.original[len(graph.ops) :]]
    assert len(again) >= 3
    assert all(counts[name] >= 2 for name in again)


def test_training_follows_them_with_equal_bits() -> None:
    torch.manual_seed(0)
    plain = Net()
    pins: dict[str, Any] = {"keep": ["blocks.0"], "recompute": ["blocks.2"]}
    options = {name: value for name, value in OPTIONS.items() if name != "device"}
    wrapped = rematch.remat(copy.deepcopy(plain), batch(), budget="100%", **pins, **options)
    (plan,) = rematch.plans_of(wrapped)
    paths = {entry.module_path.split(".")[1] for entry in plan.recomputed if entry.module_path.startswith("blocks")}
    assert paths == {"2"}, "there was memory for all, but it was asked for"
    assert "recompute: blocks.2" in plan.notes
    step = step_of(batch(), mean_square)
    assert_same_steps(train(wrapped, step), train(plain, step))
    tight = rematch.plan(plain, batch(), budget="75%", keep=["blocks.0"], **OPTIONS)
    assert not any(entry.module_path.startswith("blocks.0") for entry in tight.recomputed)
    assert tight.recomputed


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"keep": ["blok*"]}, "keep='blok\\*' names no operator and no submodule that forward of Net runs"),
        ({"recompute": ["head"]}, "recompute='head' cannot be followed"),
        ({"keep": "blocks"}, "keep= takes a list of patterns"),
        ({"keep": ["blocks"], "engine": "replay"}, "need engine='tape'"),
        ({"keep": ["blocks.*"], "recompute": ["blocks.1.up"]}, "recompute='blocks.1.up' and keep= both name"),
    ],
)
def test_a_pin_that_cannot_be_followed_is_named(pins: dict[str, Any], said: str) -> None:
    with pytest.raises(rematch.RematchError, match=said):
        rematch.plan(Net(), batch(), budget="80%", **{**OPTIONS, **pins})


def test_a_budget_that_pins_make_impossible_is_an_error() -> None:
    with pytest.raises(rematch.BudgetInfeasible, match="pins"):
        rematch.plan(Net(), batch(), budget="60%", keep=["blocks.*"], **OPTIONS)
