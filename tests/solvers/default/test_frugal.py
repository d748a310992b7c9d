"""Schedules from minimum cuts: within the budget, in default order, and nearer to the least than local search comes."""

from __future__ import annotations

import pytest
from hypothesis import given

from rematch.graph import Graph, simulate
from rematch.graph.generators import chain, gpt, unet
from rematch.solvers import Deadline, Problem
from rematch.solvers.common.least_memory import most_needed_bytes
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.default.frugal import frugal_schedule
from tests.examples import examples
from tests.problems import tiny_problems


@given(tiny_problems())
@examples(60)
def test_what_is_found_keeps_the_budget_and_the_default_order(problem: Problem) -> None:
    found = frugal_schedule(problem, Deadline())
    if found is not None:
        assert simulate(problem.graph, found).checked().peak_bytes <= problem.budget_bytes
        assert tuple(dict.fromkeys(found.ops.tolist())) == tuple(problem.graph.order)


@pytest.mark.parametrize(
    ("graph", "factor"),
    [(chain(layers=60), 1.02), (unet(depth=3), 1.03), (gpt(layers=2), 1.03)],
    ids=["chain", "unet", "gpt"],
)
def test_on_training_steps_it_comes_close_to_what_is_proved(graph: Graph, factor: float) -> None:
    budget = int(factor * most_needed_bytes(Precedence.of(graph), Deadline()))
    found = frugal_schedule(Problem(graph, budget), Deadline())
    assert found is not None
    assert simulate(graph, found).checked().peak_bytes <= budget


def test_it_ends_at_its_deadline() -> None:
    assert frugal_schedule(Problem(chain(layers=60), 1), Deadline(0.0)) is None
