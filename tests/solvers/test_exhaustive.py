"""The ground truth against a second, dumber one that tries every step in every state."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rematch.errors import SolverError
from rematch.graph import Graph, Op, Phase, Value, baseline, simulate
from rematch.graph.generators import chain, random_layered
from rematch.solvers import BoundScope, Problem, Status, solve
from rematch.solvers.common.order import Order
from rematch.solvers.exhaustive import MOST_OPERATORS, Exhaustive, min_budget
from tests.examples import examples
from tests.reference import least_budget, least_seconds
from tests.strategies import graphs, plain_graphs

ORDERS = st.sampled_from(("any", "default"))
tiny_graphs = st.one_of(graphs(max_ops=5, max_bytes=4), plain_graphs(max_ops=6, max_bytes=4)).filter(
    lambda graph: sum(not value.resident for value in graph.values) <= 7
)


@given(tiny_graphs, ORDERS, st.integers(0, 6))
@examples(200)
def test_equals_brute_force(graph: Graph, order: Order, less: int) -> None:
    budget = simulate(graph, baseline(graph)).peak_bytes - less
    solution = solve(Problem(graph, budget), Exhaustive(order=order))
    seconds = least_seconds(graph, budget, default_order=order == "default")
    assert solution.lower_bound_seconds == seconds
    assert solution.status is (Status.INFEASIBLE if seconds is None else Status.OPTIMAL)
    if solution.schedule is not None:
        seen = simulate(graph, solution.schedule).checked()
        assert (seen.seconds, seen.peak_bytes <= budget) == (seconds, True)
        if order == "default":
            assert tuple(dict.fromkeys(solution.schedule.ops.tolist())) == graph.order


@given(tiny_graphs, ORDERS)
@examples(200)
def test_min_budget_equals_brute_force(graph: Graph, order: Order) -> None:
    assert min_budget(graph, order) == least_budget(graph, default_order=order == "default")


@given(tiny_graphs, ORDERS)
def test_min_budget_is_feasible_and_one_less_is_not(graph: Graph, order: Order) -> None:
    smallest = min_budget(graph, order)
    assert solve(Problem(graph, smallest), Exhaustive(order=order)).status is Status.OPTIMAL
    below = solve(Problem(graph, smallest - 1), Exhaustive(order=order))
    assert (below.status, below.infeasible_up_to_bytes) == (Status.INFEASIBLE, smallest - 1)


def test_another_order_can_beat_recomputation() -> None:
    """Two large values do not fit together; unless each is shrunk before the other is made, both are made twice."""
    ops = (
        Op("make a", 1.0, (), (0,)),
        Op("make b", 1.0, (), (1,)),
        Op("shrink a", 1.0, (0,), (2,)),
        Op("shrink b", 1.0, (1,), (3,)),
    )
    values = (Value("a", 10), Value("b", 10), Value("small a", 1), Value("small b", 1))
    problem = Problem(Graph(ops, values, frozenset({2, 3})), 12)
    anyhow, in_order = (solve(problem, Exhaustive(order=order)) for order in ("any", "default"))
    assert (anyhow.lower_bound_seconds, anyhow.bound_scope) == (4.0, BoundScope.ANY_ORDER)
    assert (in_order.lower_bound_seconds, in_order.bound_scope) == (6.0, BoundScope.DEFAULT_ORDER)


def test_a_unit_chain_by_hand() -> None:
    """Below all 4 units for the backward of layer 1, layer 0 has to be computed again."""
    ops = (
        Op("layer0", 1.0, (), (0,)),
        Op("layer1", 1.0, (0,), (1,)),
        Op("layer2", 1.0, (1,), (2,)),
        Op("loss", 1.0, (2,), (3,), phase=Phase.LOSS),
        Op("layer2.backward", 1.0, (1, 3), (4,), phase=Phase.BACKWARD),
        Op("layer1.backward", 1.0, (0, 4), (5,), phase=Phase.BACKWARD),
    )
    graph = Graph(ops, tuple(Value(f"v{i}", 1) for i in range(6)))
    seconds = {budget: solve(Problem(graph, budget), Exhaustive()).lower_bound_seconds for budget in (2, 3, 4)}
    assert seconds == {2: None, 3: 7.0, 4: 6.0}


def test_held_values_take_part_in_the_peak_of_the_loss() -> None:
    """The loss does not read y, yet y is held: 10 + 1 for the values, 1 for the tangent and 5 of workspace."""
    ops = (
        Op("f", 1.0, (), (0,)),
        Op("g", 1.0, (), (1,)),
        Op("loss", 1.0, (1,), (2,), workspace_bytes=5, phase=Phase.LOSS),
    )
    graph = Graph(ops, (Value("y", 10), Value("x", 1), Value("t", 1)), held=frozenset({0}))
    assert min_budget(graph) == 17


def test_a_held_value_made_again_after_the_loss_counts_twice() -> None:
    """After the loss the held y stays, and f runs again for z, which did not fit beside the workspace of the loss."""
    ops = (
        Op("f", 1.0, (), (0, 1)),
        Op("loss", 1.0, (0,), (2,), workspace_bytes=30, phase=Phase.LOSS),
        Op("back", 1.0, (1, 2), (3,), phase=Phase.BACKWARD),
    )
    values = (Value("y", 10), Value("z", 20), Value("t", 1), Value("gradient", 1))
    graph = Graph(ops, values, held=frozenset({0}))
    assert min_budget(graph) == 10 + 30 + 1  # y, y and z made again, the tangent: as much as the loss needs
    assert solve(Problem(graph, 41), Exhaustive()).lower_bound_seconds == 4.0


def test_refuses_large_graphs_and_unknown_orders() -> None:
    large = chain(MOST_OPERATORS)
    with pytest.raises(SolverError, match="needs a graph of at most"):
        solve(Problem(large, 1), Exhaustive())
    with pytest.raises(SolverError, match="at most"):
        min_budget(large)
    with pytest.raises(SolverError, match="no order 'random'"):
        Exhaustive(order="random")  # type: ignore[arg-type]


def test_stops_at_the_deadline() -> None:
    graph = random_layered(MOST_OPERATORS, 80)
    solution = solve(Problem(graph, graph.largest_op_bytes), Exhaustive(), time_limit=0.0)
    assert (solution.status, solution.schedule) == (Status.NOT_FOUND, None)
