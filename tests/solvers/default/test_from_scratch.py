"""Schedules that keep nothing of forward."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from rematch.graph import Graph, Schedule, simulate
from rematch.graph.generators import chain, gpt, random_layered
from rematch.solvers import Problem
from rematch.solvers.common.pruning import pruned
from rematch.solvers.default.from_scratch import from_scratch
from rematch.solvers.minimum import surely_needed_bytes
from tests.problems import peak_bytes, tiny_problems


def test_on_a_chain_no_schedule_holds_less() -> None:
    graph = chain(40)
    schedule = from_scratch(graph)
    assert schedule is not None
    assert simulate(graph, schedule).checked().peak_bytes == surely_needed_bytes(graph)


@settings(deadline=None)
@given(tiny_problems())
def test_is_valid_wherever_there_is_a_loss(problem: Problem) -> None:
    schedule = from_scratch(problem.graph)
    assert (schedule is None) == (problem.graph.arrays.loss < 0)
    if schedule is not None:
        assert simulate(problem.graph, schedule).valid


def test_what_there_is_room_for_is_kept() -> None:
    graph = gpt(layers=2)
    schedule = from_scratch(graph)
    assert schedule is not None
    budget_bytes = peak_bytes(graph) // 2
    assert simulate(graph, schedule).checked().peak_bytes <= budget_bytes
    shorter = Schedule.from_ops(graph, pruned(graph, schedule.ops, budget_bytes, keep_first=True))
    result = simulate(graph, shorter).checked()
    assert result.peak_bytes <= budget_bytes
    assert result.seconds < simulate(graph, schedule).seconds / 2


@pytest.mark.parametrize("graph", [random_layered(20), chain(2_000)], ids=["without a loss", "too long"])
def test_there_may_be_none(graph: Graph) -> None:
    assert from_scratch(graph) is None
