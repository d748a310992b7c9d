"""What must be alive at first computations, against the exact smallest budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from rematch.graph import Graph, Op, Phase, Value
from rematch.graph.generators import gpt
from rematch.solvers import Deadline, Problem
from rematch.solvers.common.least_memory import finally_needed_bytes, most_needed_bytes, needed_bytes
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.exhaustive import min_budget
from rematch.solvers.minimum import surely_needed_bytes
from tests.examples import examples
from tests.problems import tiny_problems


def needed(graph: Graph) -> int:
    return most_needed_bytes(Precedence.of(graph), Deadline())


@given(tiny_problems())
@examples(200)
def test_no_schedule_in_default_order_needs_less(problem: Problem) -> None:
    graph = problem.graph
    assert graph.largest_op_bytes <= needed(graph) <= min_budget(graph, "default")


def gradients_beside(shared: int) -> Graph:
    """x and y leave a summary each, of 3 bytes; z is large. Both summaries can be made from w, of `shared` bytes."""
    ops = (
        Op("w", 1.0, (), (0,), once=True),
        Op("x", 1.0, (0,), (1,)),
        Op("y", 1.0, (0,), (2,)),
        Op("z", 1.0, (), (3,)),
        Op("end", 1.0, (1, 2), ()),
    )
    return Graph(ops, (Value("w", shared), Value("x", 3), Value("y", 3), Value("z", 10)))


@pytest.mark.parametrize(("shared", "least"), [(20, 16), (5, 15), (2, 12)])
def test_the_cheapest_values_that_all_else_can_be_made_from_are_alive(shared: int, least: int) -> None:
    assert needed_bytes(Precedence.of(gradients_beside(shared)), 3) == least


def test_what_is_held_counts_from_the_loss_on() -> None:
    ops = (
        Op("x", 1.0, (), (0,)),
        Op("loss", 1.0, (0,), (1,), phase=Phase.LOSS),
        Op("back", 1.0, (1,), (2,), phase=Phase.BACKWARD),
    )
    graph = Graph(ops, (Value("x", 7), Value("loss", 1), Value("gradient", 5)), targets=frozenset({2}))
    assert needed(graph) == 8
    assert needed(replace(graph, held=frozenset({0}))) == 13


def test_on_training_graphs_it_proves_more_than_the_largest_operator() -> None:
    graph = gpt(layers=2)
    assert needed(graph) > 1.1 * surely_needed_bytes(graph)


@given(tiny_problems())
@examples(100)
def test_the_last_runs_of_what_lasts_need_no_more_than_any_schedule(problem: Problem) -> None:
    assert finally_needed_bytes(problem.graph) <= min_budget(problem.graph, "any")


def test_gradients_add_up_beside_what_the_last_of_them_is_made_from() -> None:
    ops = (
        Op("x", 1.0, (), (0,)),
        Op("large", 1.0, (0,), (1,)),
        Op("left", 1.0, (1,), (2,)),
        Op("right", 1.0, (0,), (3,)),
    )
    values = (Value("x", 4), Value("large", 9), Value("left", 2), Value("right", 2))
    graph = Graph(ops, values, targets=frozenset({2, 3}))
    assert finally_needed_bytes(graph) == 9 + 2  # left first, then right beside it with x: 2 + 4 + 2
    assert finally_needed_bytes(replace(graph, targets=frozenset({1, 2, 3}))) == 9 + 2 + 4  # right beside large


def test_enough_and_time_end_the_search() -> None:
    precedence = Precedence.of(gradients_beside(20))
    assert most_needed_bytes(precedence, Deadline(0.0)) == 23  # what x alone touches
    assert most_needed_bytes(precedence, Deadline(), enough_bytes=1) == 23


@given(tiny_problems())
@examples(100)
def test_what_is_surely_alive_is_what_operators_touch_and_what_is_held(problem: Problem) -> None:
    graph, precedence = problem.graph, Precedence.of(problem.graph)
    resident = {number for number, value in enumerate(graph.values) if value.resident}
    held = set(graph.held) - resident
    after_loss = False
    for position, number in enumerate(graph.arrays.order.tolist()):
        op = graph.ops[number]
        after_loss = after_loss or op.phase is Phase.LOSS
        alive = ({*op.inputs, *op.outputs} - resident) | (held if after_loss else set())
        needs_bytes = graph.resident_bytes + op.workspace_bytes + sum(graph.values[value].size_bytes for value in alive)
        assert precedence.surely_bytes[position] == needs_bytes
