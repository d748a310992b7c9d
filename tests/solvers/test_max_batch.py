"""The largest batch within a budget: against trying every batch, and what is proved when none is larger."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from rematch.graph import Graph, Op, Value, simulate
from rematch.graph.generators import chain
from rematch.graph.transforms import with_batch
from rematch.solvers import Problem, Progress, Status, solve
from rematch.solvers.exhaustive import Exhaustive
from rematch.solvers.max_batch import max_batch, most_seconds
from tests.examples import examples
from tests.problems import mirror_graphs, peak_bytes


@given(mirror_graphs(max_layers=3), st.integers(1, 4), st.sampled_from((None, 0.5, 1.0)))
@examples(60)
def test_equals_trying_every_batch(graph: Graph, times: int, passes: float | None) -> None:
    graph = Graph(graph.ops, graph.values, graph.targets, graph.held)
    budget = times * peak_bytes(graph)
    found = max_batch(graph, budget, solver=Exhaustive(order="default"), extra_forward_passes=passes, close_enough=0.0)
    fits = [_fits(with_batch(graph, batch), budget, passes) for batch in range(1, min(found.batch, 40) + 2)]
    assert all(fits[: found.batch])
    if found.batch < 40:
        assert not fits[-1]
        assert found.impossible_from == found.batch + 1
    assert found.without_recomputation <= found.batch


def _fits(graph: Graph, budget: int, passes: float | None) -> bool:
    solution = solve(Problem(graph, budget), Exhaustive(order="default"))
    if solution.schedule is None:
        return False
    return simulate(graph, solution.schedule).seconds <= most_seconds(graph, passes)


def test_recomputation_allows_larger_batches_and_more_of_it_larger_ones() -> None:
    graph = chain(layers=12)
    budget = 4 * peak_bytes(graph)
    plain = max_batch(graph, budget, solver="noremat")
    bounded = max_batch(graph, budget, solver="chen_greedy")
    unbounded = max_batch(graph, budget, solver="checkmate", extra_forward_passes=None)
    assert plain.batch == plain.without_recomputation == 4
    assert plain.batch < bounded.batch <= unbounded.batch
    for found, passes in ((bounded, 1.0), (unbounded, None)):
        larger = with_batch(graph, found.batch)
        assert found.schedule is not None
        seen = simulate(larger, found.schedule).checked()
        assert seen.peak_bytes <= budget
        assert seen.seconds <= most_seconds(larger, passes)


def test_starts_from_the_batch_of_the_capture() -> None:
    graph = chain(layers=8)
    at_16 = with_batch(graph, 16)
    budget = 40 * peak_bytes(graph)
    one, sixteen = max_batch(graph, budget), max_batch(at_16, budget, captured=16)
    assert one.batch == sixteen.batch


def test_not_even_one_sample_fits() -> None:
    graph = chain(layers=4)
    found = max_batch(graph, graph.largest_op_bytes - 1)
    assert (found.batch, found.schedule, found.impossible_from) == (0, None, 1)


def test_a_graph_of_parameters_alone_takes_any_batch() -> None:
    graph = Graph((Op("a", 1.0, (0,), (1,)),), (Value("w", 5, resident=True), Value("x", 0)))
    found = max_batch(graph, 5)
    assert (found.batch, found.impossible_from) == (2**30, None)


def test_a_solver_that_proves_nothing_leaves_the_upper_end_open() -> None:
    graph = chain(layers=12)
    found = max_batch(graph, 4 * peak_bytes(graph), solver="noremat", close_enough=0.0)
    assert found.batch == 4
    assert found.impossible_from is not None
    assert found.impossible_from > 5


def test_one_more_forward_pass_is_the_paper_s_bound() -> None:
    graph = chain(layers=3, vary_percent=0)
    assert most_seconds(graph, 1.0) == pytest.approx(2 * 3e-3 + 6e-3)
    assert most_seconds(graph, None) == math.inf


@pytest.mark.parametrize(("enough", "reaches"), [(10.0, True), (1.0 + 1e-6, False)])
def test_a_search_ends_when_enough_is_known(enough: float, reaches: bool) -> None:
    """In units of the time without recomputation: any schedule will do, or none can."""
    graph = chain(layers=30)
    problem = Problem(graph, peak_bytes(graph) * 40 // 100)
    told: list[Progress] = []
    seconds = enough * graph.baseline_seconds
    solution = solve(problem, "auto", enough_seconds=seconds, on_progress=told.append)
    assert solution.status is not Status.OPTIMAL
    decided = [
        (p.best_seconds is not None and p.best_seconds <= seconds) or (p.bound_seconds or 0.0) > seconds for p in told
    ]
    assert True in decided
    assert reaches == (solution.schedule is not None and simulate(graph, solution.schedule).seconds <= seconds)
