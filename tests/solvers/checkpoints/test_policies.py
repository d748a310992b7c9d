"""Table 1's heuristics: on linear graphs the generalizations equal the originals; elsewhere they refuse or adapt."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from rematch.errors import SolverError
from rematch.graph import Graph, Op, Value, simulate
from rematch.graph.generators import chain, feed_forward, gpt, training_graph, unet
from rematch.solvers import Problem, Status, solve
from rematch.solvers.checkpoints.articulation import articulation_points
from rematch.solvers.checkpoints.checkpointing import checkpoint_policy, every_sqrt, greedy_segments
from rematch.solvers.common.forward_pass import forward_ops, is_linear
from rematch.solvers.common.policy import schedule_keeping
from tests.examples import examples
from tests.problems import check_against_truth, peak_bytes, tiny_problems

ANYWHERE = ("ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy")
LINEAR_ONLY = ("chen_sqrt", "chen_greedy", "revolve")


@given(tiny_problems(), st.sampled_from(ANYWHERE + LINEAR_ONLY))
@examples(200)
def test_never_claims_more_than_the_truth(problem: Problem, name: str) -> None:
    if name in ANYWHERE or is_linear(problem.graph):
        check_against_truth(problem, solve(problem, name))
    else:
        with pytest.raises(SolverError, match="needs a linear forward pass"):
            solve(problem, name)


@pytest.mark.parametrize("percent", [90, 70, 50, 35])
@pytest.mark.parametrize("graph", [chain(layers=30), feed_forward(layers=9)], ids=lambda graph: graph.name)
def test_generalizations_equal_the_originals_on_linear_graphs(graph: Graph, percent: int) -> None:
    problem = Problem(graph, peak_bytes(graph) * percent // 100)
    for rule in ("sqrt", "greedy"):
        schedules = [solve(problem, f"{family}_{rule}").schedule for family in ("chen", "ap", "linearized")]
        assert schedules[0] == schedules[1] == schedules[2]


def test_they_keep_budgets_that_nothing_but_recomputation_can() -> None:
    graph = chain(layers=40, vary_percent=0)
    problem = Problem(graph, peak_bytes(graph) * 40 // 100)
    for name in ("chen_sqrt", "chen_greedy", "revolve"):
        solution = solve(problem, name)
        assert solution.status is Status.FEASIBLE
        assert solution.schedule is not None


def test_sqrt_computes_each_dropped_layer_once_more_and_no_more() -> None:
    graph = chain(layers=16)
    schedule = schedule_keeping(graph, checkpoint_policy(graph, every_sqrt(forward_ops(graph))))
    counts = simulate(graph, schedule).checked().counts
    kept = {3, 7, 11, 15}
    assert counts[:16].tolist() == [1 if layer in kept else 2 for layer in range(16)]
    assert counts[16:].tolist() == [1] * 17


def test_what_lies_behind_the_last_checkpoint_is_not_dropped() -> None:
    graph = chain(layers=6)
    schedule = schedule_keeping(graph, checkpoint_policy(graph, [2]))
    assert simulate(graph, schedule).counts[:6].tolist() == [2, 2, 1, 1, 1, 1]


def test_greedy_segments_hold_at_most_b_bytes_before_their_last_operator() -> None:
    graph = chain(layers=20)
    sizes = [graph.values[op].size_bytes for op in range(20)]
    sets = list(greedy_segments(graph, forward_ops(graph)))
    assert sets[0] == []
    assert len(sets[-1]) == 20
    assert len({tuple(chosen) for chosen in sets}) == len(sets)
    for chosen in sets:
        filled = [sum(sizes[start + 1 : end]) for start, end in pairwise([-1, *chosen])]
        full = [sum(sizes[start + 1 : end + 1]) for start, end in pairwise([-1, *chosen])]
        assert max(filled, default=0) < min(full, default=1)


def test_sqrt_of_no_candidates_is_no_checkpoint() -> None:
    assert every_sqrt(forward_ops(Graph((), ()))) == []


def residual_blocks() -> Graph:
    """stem - (a - b) + skip - (c - d) + skip: everything but the insides of the blocks is a cut."""
    reads: list[tuple[int, ...]] = [(), (0,), (1,), (0, 2), (3,), (4,), (3, 5), (6,)]
    values = tuple(Value(f"v{i}", 1) for i in range(len(reads)))
    return training_graph(Graph(tuple(Op(f"o{i}", 1.0, read, (i,)) for i, read in enumerate(reads)), values))


def test_articulation_points_are_the_ends_of_blocks() -> None:
    assert articulation_points(residual_blocks()).tolist() == [0, 3, 6, 7]
    linear = chain(layers=5)
    assert articulation_points(linear).tolist() == [0, 1, 2, 3, 4]


def test_a_constant_that_is_read_late_leaves_the_cuts_as_they_are() -> None:
    """A leaf of the undirected graph ties nothing together."""
    reads: list[tuple[int, ...]] = [(), (), (1,), (2, 0), (3,)]
    ops = tuple(Op(f"o{i}", 1.0, read, (i,)) for i, read in enumerate(reads))
    graph = training_graph(Graph(ops, tuple(Value(f"v{i}", 1) for i in range(5))))
    assert {2, 3, 4} <= set(articulation_points(graph).tolist())


def test_long_skips_leave_few_articulation_points() -> None:
    graph = unet(depth=2, convolutions=1)
    assert len(articulation_points(graph)) < len(forward_ops(graph)) / 2


def test_refuses_graphs_that_are_not_linear() -> None:
    graph = gpt(layers=1)
    for name in LINEAR_ONLY:
        with pytest.raises(SolverError, match="it needs a linear forward pass"):
            solve(Problem(graph, peak_bytes(graph)), name)
