"""Other batch sizes and other costs of the same graph."""

from __future__ import annotations

import pytest

from rematch.errors import GraphError
from rematch.graph import Graph, Op, Phase, Value
from rematch.graph.generators import chain, gpt
from rematch.graph.transforms import with_batch, with_flop_costs


def training_step() -> Graph:
    values = (
        Value("weights", 100, resident=True, role="parameters"),
        Value("image", 7, resident=True, role="inputs"),
        Value("hidden", 30),
        Value("loss", 4),
        Value("gradient", 100, role="gradients"),
        Value("state", 16, role="random states"),
    )
    ops = (
        Op("forward", 2.0, (0, 1), (2, 5), workspace_bytes=5, flops=10.0),
        Op("loss", 1.0, (2,), (3,), phase=Phase.LOSS, flops=0.0),
        Op("backward", 4.0, (0, 2, 3), (4,), phase=Phase.BACKWARD, flops=20.0),
    )
    return Graph(ops, values, targets=frozenset({4}))


def test_a_batch_scales_activations_inputs_workspace_and_time_only() -> None:
    larger = with_batch(training_step(), 12, captured=4)
    assert [value.size_bytes for value in larger.values] == [100, 21, 90, 12, 100, 16]
    assert [op.seconds for op in larger.ops] == [6.0, 3.0, 12.0]
    assert [op.flops for op in larger.ops] == [30.0, 0.0, 60.0]
    assert [op.workspace_bytes for op in larger.ops] == [15, 0, 0]


def test_targets_keep_their_size_without_a_role_too() -> None:
    graph = Graph((Op("a", 1.0, (), (0, 1)),), (Value("x", 3), Value("gradient", 5)), targets=frozenset({1}))
    assert [value.size_bytes for value in with_batch(graph, 10).values] == [30, 5]


def test_sizes_are_rounded_up() -> None:
    assert with_batch(training_step(), 1, captured=4).values[2].size_bytes == 8
    assert with_batch(training_step(), 4, captured=4) == training_step()


def test_refuses_empty_batches() -> None:
    with pytest.raises(GraphError, match="0 was asked for of a graph captured at 4"):
        with_batch(training_step(), 0, captured=4)


def test_flops_become_costs() -> None:
    graph = with_flop_costs(training_step())
    assert [op.seconds for op in graph.ops] == [10.0, 0.0, 20.0]
    assert graph.baseline_seconds == 30.0


def test_generated_architectures_carry_both_costs() -> None:
    graph = gpt(layers=1)
    assert with_flop_costs(graph).baseline_seconds > 1e6 * graph.baseline_seconds


def test_refuses_graphs_that_do_not_know_their_flops() -> None:
    with pytest.raises(GraphError, match=r"'layer0' of graph .* does not say how many"):
        with_flop_costs(chain(layers=2))
