"""The width that `rematch show` prints: right on small graphs, and found in bounded work on dense ones."""

from __future__ import annotations

import pytest

from rematch.graph import Graph, Op, Value
from rematch.graph.generators import gpt
from rematch.solvers.treewidth import elimination
from rematch.solvers.treewidth.width import quick_width


def dense(count: int) -> Graph:
    """Every operator reads all others before it but its neighbour."""
    ops = tuple(Op(f"o{i}", 1.0, tuple(range(i - 1)), (i,)) for i in range(count))
    return Graph(ops, tuple(Value(f"v{i}", 1) for i in range(count)))


def test_small_graphs_take_min_fill() -> None:
    assert quick_width(gpt(layers=2)) == (4, "min-fill")


def test_a_dense_graph_never_counts_its_missing_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "_MinFill", None)  # raises if it is used
    width, heuristic = quick_width(dense(400))
    assert heuristic == "min-degree"
    assert 200 < width < 400
