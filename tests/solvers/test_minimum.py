"""The range of budgets that can be kept, against the exact smallest one."""

from __future__ import annotations

import pytest
from hypothesis import given

from rematch.graph import Graph, Op, Phase, Value
from rematch.graph.generators import chain, gpt
from rematch.solvers import Deadline, Problem
from rematch.solvers.exhaustive import min_budget
from rematch.solvers.minimum import smallest_budget, surely_needed_bytes
from tests.examples import examples
from tests.problems import peak_bytes, tiny_problems

SECONDS = 0.05  # a range is valid whenever it is looked at, so little time is enough to test it


@given(tiny_problems())
@examples(60)
def test_the_exact_smallest_budget_lies_in_the_range(problem: Problem) -> None:
    graph = problem.graph
    known = smallest_budget(graph, Deadline(SECONDS), exhaustive=False)
    assert known.infeasible_up_to_bytes < min_budget(graph, "default") <= known.feasible_from_bytes
    assert peak_bytes(graph, known.schedule) <= known.feasible_from_bytes


@given(tiny_problems())
@examples(20)
def test_the_range_of_a_tiny_graph_is_exact(problem: Problem) -> None:
    known = smallest_budget(problem.graph, Deadline())
    assert known.infeasible_up_to_bytes + 1 == min_budget(problem.graph, "default") == known.feasible_from_bytes
    assert peak_bytes(problem.graph, known.schedule) == known.feasible_from_bytes


@given(tiny_problems())
@examples(60)
def test_what_is_surely_needed_is_needed_in_any_order(problem: Problem) -> None:
    assert surely_needed_bytes(problem.graph) <= min_budget(problem.graph, "any")


@pytest.mark.parametrize("graph", [chain(12), gpt(layers=1)], ids=lambda graph: graph.name)
def test_searches_narrow_the_range(graph: Graph) -> None:
    known = smallest_budget(graph, Deadline(1.0))
    assert surely_needed_bytes(graph) - 1 <= known.infeasible_up_to_bytes
    assert known.infeasible_up_to_bytes < known.feasible_from_bytes < peak_bytes(graph)
    assert peak_bytes(graph, known.schedule) == known.feasible_from_bytes


def test_the_relaxation_proves_more_than_the_largest_operator() -> None:
    """x and y cannot be made again, so both are alive beside z, which comes before they are read."""
    ops = (
        Op("x", 1.0, (), (0,), once=True),
        Op("y", 1.0, (), (1,), once=True),
        Op("z", 1.0, (), (2,)),
        Op("end", 1.0, (0,), ()),
        Op("end too", 1.0, (1, 2), ()),
    )
    graph = Graph(ops, (Value("x", 4000), Value("y", 4000), Value("z", 2000)))
    assert (graph.largest_op_bytes, min_budget(graph, "default")) == (6000, 10_000)
    known = smallest_budget(graph, Deadline(0.5), exhaustive=False)
    assert 9900 < known.infeasible_up_to_bytes < 10_000
    assert known.feasible_from_bytes == 10_000


def test_without_time_the_range_is_what_is_known_beforehand() -> None:
    graph = chain(10)
    known = smallest_budget(graph, Deadline(0.0))
    assert known.infeasible_up_to_bytes == surely_needed_bytes(graph) - 1
    assert known.feasible_from_bytes == peak_bytes(graph)


def test_residents_targets_and_held_values_are_needed_at_the_end() -> None:
    ops = (Op("a", 1.0, (0,), (1,)), Op("b", 1.0, (0,), (2,)), Op("loss", 1.0, (), (3,), phase=Phase.LOSS))
    values = (Value("weights", 7, resident=True), Value("x", 5), Value("y", 4), Value("t", 1))
    graph = Graph(ops, values, targets=frozenset({0, 1, 3}), held=frozenset({1, 2}))
    assert surely_needed_bytes(graph) == 7 + 5 + 4 + 1
