"""The solver `anneal`: what it finds, claims and refuses; the search itself is tested beside it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rematch.errors import SolverError
from rematch.graph import Graph, baseline, simulate
from rematch.graph.generators import chain, gpt, random_layered
from rematch.solvers import BoundScope, Problem, Progress, Status, solve
from rematch.solvers.default.anneal import Anneal
from rematch.solvers.exhaustive import Exhaustive
from tests.examples import examples
from tests.problems import peak_bytes
from tests.strategies import graphs, plain_graphs


def less_than_baseline(graph: Graph, percent: int) -> Problem:
    return Problem(graph, peak_bytes(graph) * percent // 100)


@given(st.one_of(graphs(max_ops=5, max_bytes=4), plain_graphs(max_ops=6, max_bytes=4)), st.integers(0, 6))
@examples(100)
def test_never_beats_the_ground_truth_and_keeps_the_budget(graph: Graph, less: int) -> None:
    problem = Problem(graph, peak_bytes(graph) - less)
    truth = solve(problem, Exhaustive(order="default"))
    found = solve(problem, Anneal(iterations=2000))
    if found.schedule is None:
        assert found.status in (Status.NOT_FOUND, Status.INFEASIBLE)
        return
    assert truth.schedule is not None
    assert simulate(graph, found.schedule).seconds >= simulate(graph, truth.schedule).seconds
    if found.status is Status.OPTIMAL:
        assert simulate(graph, found.schedule).seconds == graph.baseline_seconds


@pytest.mark.parametrize("percent", [90, 70, 60])
def test_finds_the_optimum_of_small_graphs(percent: int) -> None:
    graph = random_layered(12)
    problem = less_than_baseline(graph, percent)
    truth, found = solve(problem, Exhaustive(order="default")), solve(problem, Anneal(iterations=20_000))
    assert (truth.schedule is None) == (found.schedule is None)
    if truth.schedule is not None and found.schedule is not None:
        assert simulate(graph, found.schedule).seconds == pytest.approx(simulate(graph, truth.schedule).seconds)


@pytest.mark.parametrize(("graph", "percent"), [(gpt(layers=4), 30), (chain(60), 20), (random_layered(100), 80)])
def test_finds_schedules_for_tight_budgets(graph: Graph, percent: int) -> None:
    solution = solve(less_than_baseline(graph, percent), Anneal(iterations=20_000))
    assert solution.status is Status.FEASIBLE
    assert (solution.lower_bound_seconds, solution.bound_scope) == (graph.baseline_seconds, BoundScope.ANY_ORDER)


def test_a_budget_that_fits_is_optimal_without_a_move() -> None:
    graph = gpt(layers=2)
    solution = solve(Problem(graph, peak_bytes(graph)), Anneal())
    assert solution.status is Status.OPTIMAL
    assert solution.schedule == baseline(graph)


def test_a_budget_below_one_operator_is_infeasible() -> None:
    graph = chain(10)
    solution = solve(Problem(graph, graph.largest_op_bytes - 1), Anneal())
    assert (solution.status, solution.infeasible_up_to_bytes) == (Status.INFEASIBLE, graph.largest_op_bytes - 1)


def test_a_graph_without_operators_is_solved() -> None:
    assert solve(Problem(Graph((), ()), 0), Anneal()).status is Status.OPTIMAL


def test_progress_tells_the_best_so_far() -> None:
    heard: list[Progress] = []
    solve(less_than_baseline(chain(40), 50), Anneal(iterations=10_000), on_progress=heard.append)
    assert heard
    assert all(progress.best_seconds is not None and progress.solver == "anneal" for progress in heard)


@pytest.mark.parametrize("options", [{"seed": -1}, {"iterations": -1}])
def test_refuses_options_that_make_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(SolverError, match="-1"):
        Anneal(**options)
