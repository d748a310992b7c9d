"""Orders other than the default one: they keep the rules, they help, and the bound for all of them is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from rematch.errors import SolverError
from rematch.graph import Graph, Op, Value, baseline, simulate
from rematch.graph.generators import gpt, unet
from rematch.solvers import BoundScope, Deadline, Problem, Status, solve
from rematch.solvers.default.auto import Auto
from rematch.solvers.default.orders import any_order_bound, lighter_order
from rematch.solvers.exhaustive import Exhaustive
from tests.examples import examples
from tests.problems import peak_bytes, tiny_problems
from tests.strategies import graphs


def two_to_shrink() -> Problem:
    """Two large values do not fit together: each is shrunk before the other is made, or both are made twice."""
    ops = (
        Op("make a", 1.0, (), (0,)),
        Op("make b", 1.0, (), (1,)),
        Op("shrink a", 1.0, (0,), (2,)),
        Op("shrink b", 1.0, (1,), (3,)),
    )
    values = (Value("a", 10), Value("b", 10), Value("small a", 1), Value("small b", 1))
    return Problem(Graph(ops, values, frozenset({2, 3})), 12)


@given(tiny_problems())
@examples(150)
def test_the_bound_holds_for_every_order(problem: Problem) -> None:
    found = any_order_bound(problem, Deadline(10.0))
    truth = solve(problem, Exhaustive(order="any")).lower_bound_seconds
    if found is None or truth is None:
        return
    assert not found.infeasible
    assert (1.0 + found.bound / 100.0) * problem.graph.baseline_seconds <= truth + 1e-6


def test_the_bound_is_nearly_that_of_the_default_order_on_training_graphs() -> None:
    graph = gpt(layers=3)
    problem = Problem(graph, peak_bytes(graph) * 60 // 100)
    found, in_order = any_order_bound(problem, Deadline(30.0)), solve(problem, "auto", time_limit=20.0)
    assert found is not None
    assert in_order.lower_bound_seconds is not None
    assert found.bound >= 0.8 * (in_order.lower_bound_seconds / graph.baseline_seconds - 1.0) * 100.0


@given(graphs(max_ops=9))
def test_a_lighter_order_keeps_the_rules_of_the_graph(graph: Graph) -> None:
    """Among them the windows of mutations, so that its schedules are schedules of the graph as it is."""
    order = lighter_order(graph)
    if order is None:
        return
    other = replace(graph, order=order)
    simulate(graph, baseline(other)).checked()
    assert np.array_equal(other.arrays.once_from, graph.arrays.once_from)
    assert np.array_equal(other.arrays.once_until, graph.arrays.once_until)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("exhaustive", [False, True])
def test_any_order_beats_recomputation(exhaustive: bool, threads: int) -> None:
    problem = two_to_shrink()
    auto = Auto(threads=threads, iterations=20_000, gap=0.0, exhaustive=exhaustive)
    in_order, anyhow = (solve(problem, replace(auto, order=order), time_limit=10.0) for order in ("default", "any"))
    assert (in_order.lower_bound_seconds, in_order.bound_scope) == (pytest.approx(6.0), BoundScope.DEFAULT_ORDER)
    assert anyhow.schedule is not None
    assert simulate(problem.graph, anyhow.schedule).checked().seconds == 4.0
    assert (anyhow.lower_bound_seconds, anyhow.bound_scope) == (4.0, BoundScope.ANY_ORDER)
    assert anyhow.status is Status.OPTIMAL


def test_any_order_is_no_worse_and_its_bound_is_for_any() -> None:
    graph = unet(depth=2)
    problem = Problem(graph, peak_bytes(graph) * 60 // 100)
    solution = solve(problem, Auto(threads=1, iterations=20_000, order="any"), time_limit=10.0)
    assert solution.schedule is not None
    assert solution.bound_scope is BoundScope.ANY_ORDER
    assert solution.lower_bound_seconds is not None
    assert solution.lower_bound_seconds > graph.baseline_seconds
    assert any("the default order: at least" in progress.message for progress in solution.log)


def test_an_engine_that_runs_forward_as_it_is_has_one_order() -> None:
    graph = replace(gpt(layers=1), recompute_after_loss=True)
    assert lighter_order(graph) is None
    problem = Problem(graph, peak_bytes(graph) * 80 // 100)
    solution = solve(problem, Auto(threads=1, iterations=20_000, order="any"), time_limit=10.0)
    assert solution.schedule is not None


def test_refuses_an_unknown_order() -> None:
    with pytest.raises(SolverError, match="order of solver 'auto'"):
        Auto(order="random")  # type: ignore[arg-type]
