"""The rules of recomputation: what runs again gives the same bits and changes nothing that it changed before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

import rematch
from rematch.execute.random import note_state, replay
from rematch.execute.replay import engine
from rematch.graph import Graph, Op, Schedule
from tests.captures import UNLIMITED_BYTES, Computed, Given, ReadsItsStatistics, everything_twice, recomputing
from tests.training import assert_trains_alike

SAMPLE = torch.linspace(-1, 1, 40).reshape(8, 5)


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def repeating(model: nn.Module, schedule_of: Callable[[Graph], Schedule], sample: Any = SAMPLE) -> nn.Module:
    """The model, run by a schedule that is known."""
    solver = Given(schedule_of)
    return rematch.remat(
        model, sample, budget=UNLIMITED_BYTES, loss=squares, solver=solver, engine="replay", progress=False
    )


def assert_repeats_alike(
    model: nn.Module, chosen: Callable[[Op], bool] = lambda _: True, sample: Any = SAMPLE
) -> rematch.Plan:
    """With the chosen operators computed again, the model trains as without; the plan says which these were."""
    wrapped = repeating(copy.deepcopy(model), partial(recomputing, chosen=chosen), sample)
    assert_trains_alike(wrapped, model, sample, squares)
    return rematch.plans_of(wrapped)[-1]


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GraphModule, GraphModule]]:
    """The forward and backward modules that are made from now on."""
    made: list[tuple[GraphModule, GraphModule]] = []
    partition = engine.partition

    def partition_and_note(*args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        made.append(partition(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(engine, "partition", partition_and_note)
    return made


def targets(module: GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


# Random numbers


def dropouts() -> nn.Module:
    layers = [nn.Linear(5, 6), nn.Dropout(0.5), nn.GELU(), nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 2)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("path", ["1", "4"])
def test_a_recomputed_dropout_drops_the_same(path: str) -> None:
    plan = assert_repeats_alike(dropouts(), lambda op: op.module_path == path)
    assert {again.module_path for again in plan.recomputed} == {path}


def test_dropout_of_memory_that_is_not_contiguous() -> None:
    plan = assert_repeats_alike(Computed(lambda y: F.dropout(y.t(), 0.5).sin().t()))
    assert any("bernoulli" in again.name for again in plan.recomputed)


def test_the_generator_is_noted_only_for_what_runs_again(halves: list[tuple[GraphModule, GraphModule]]) -> None:
    repeating(dropouts(), partial(recomputing, chosen=lambda op: op.module_path == "1"))
    forward, backward = halves[-1]
    assert targets(forward).count(note_state) == 1
    assert targets(backward).count(replay) == 1


def test_a_replay_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(0)
    state = note_state("cpu", None)
    first = torch.rand(3)
    torch.rand(5)
    before = torch.get_rng_state()
    assert torch.equal(replay(state, "cpu", None, torch.rand, 3), first)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError):
        replay(state, "cpu", None, torch.mm, first, first)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_schedule_that_draws_in_another_order_is_refused() -> None:
    model = Computed(lambda y: F.dropout(y, 0.5) + F.dropout(y, 0.2))

    def swapped(graph: Graph) -> Schedule:
        """The states of the generator are noted before everything else, so that no operator is missing its inputs."""
        states = [op for op in graph.order if graph.ops[op].name.endswith(".state")]
        order = states + [op for op in graph.order if op not in states]
        one, other = (order.index(op) for op in order if "bernoulli" in graph.ops[op].name and op not in states)
        order.insert(one, order.pop(other))
        return Schedule.from_ops(graph, order)

    with pytest.raises(rematch.ScheduleError, match=r"bernoulli.*default order"):
        repeating(model, swapped)


# Statistics


def test_batch_norm_computed_again_updates_its_statistics_once() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    plan = assert_repeats_alike(model, lambda op: "batch_norm" in op.name)
    assert any(again.module_path == "1" for again in plan.recomputed)


def test_statistics_that_others_read_are_read_as_eager_reads_them() -> None:
    assert_repeats_alike(ReadsItsStatistics())


# In place


def test_rows_apart_are_computed_again_in_rows_apart() -> None:
    def partly(y: torch.Tensor) -> torch.Tensor:
        y[:, 1:20].tanh_()
        return y.sin()

    plan = assert_repeats_alike(Computed(partly, width=37))
    assert any("tanh" in again.name for again in plan.recomputed)


def test_an_operator_that_overwrites_is_computed_again_from_its_start() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Sigmoid())
    plan = assert_repeats_alike(model)
    assert any("batch_norm" in again.name and "relu" in again.name for again in plan.recomputed)


# What runs once


def test_a_custom_operator_is_not_repeated() -> None:
    runs: list[torch.Tensor] = []

    @torch.library.custom_op("rematch_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(x)
        return x / 2

    counted.register_fake(torch.empty_like)
    counted.register_autograd(lambda _, gradient: gradient / 2)
    wrapped = repeating(Computed(lambda y: counted(y.sin()).exp()), everything_twice)
    runs.clear()
    squares(wrapped(SAMPLE)).backward()
    assert len(runs) == 1


# What backward is given


def test_what_is_computed_again_is_not_saved(halves: list[tuple[GraphModule, GraphModule]]) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 2))
    repeating(model, partial(recomputing, chosen=lambda _: False))
    repeating(model, partial(recomputing, chosen=lambda op: "gelu" in op.name))
    kept, recomputed = (
        {node.name for node in backward.graph.nodes if node.op == "placeholder"} for _, backward in halves
    )
    assert [name.startswith("saved_gelu") for name in kept - recomputed] == [True]
    assert not recomputed - kept


def test_tangents_laid_out_otherwise_than_outputs() -> None:
    """Eager adds a gradient up in the order that it lies in memory, which the loss chooses."""
    assert_repeats_alike(Computed(lambda y: y.t().sin()))
