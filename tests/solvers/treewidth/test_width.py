"""The width that `rematch show` prints: right on small graphs, and found in bounded work on dense ones."""

from __future__ import annotations

import pytest

from rematch.graph import Graph, Op, Value
from rematch.graph.generators import gpt
from rematch.report.text import describe_graph
from rematch.solvers.treewidth import elimination, width
from rematch.solvers.treewidth.width import quick_width


def dense(count: int) -> Graph:
    """Every operator reads all others before it but its neighbour."""
    ops = tuple(Op(f"o{i}", 1.0, tuple(range(i - 1)), (i,)) for i in range(count))
    return Graph(ops, tuple(Value(f"v{i}", 1) for i in range(count)))


def test_small_graphs_take_min_fill() -> None:
    assert quick_width(gpt(layers=2)) == (4, "min-fill")


def test_a_dense_graph_never_counts_its_missing_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "_MinFill", None)  # raises if it is used
    found = quick_width(dense(400))
    assert found is not None
    assert found[1] == "min-degree"
    assert 200 < found[0] < 400


def test_a_graph_with_too_many_edges_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width, "_MOST_READS", 10)
    assert quick_width(dense(8)) is None
    assert "the graph is too dense" in describe_graph(dense(8))
