"""Pictures of checkpoints: that they are drawn, where operators stand, and what is marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from rematch.errors import FormatError
from rematch.graph import Graph, Op, Value
from rematch.graph.generators import chain, training_graph, unet
from rematch.report.checkpoints import _edges, _places, draw_checkpoints
from rematch.solvers.common.forward_pass import forward_ops


def residual_block() -> Graph:
    """stem - (a - b | c) - add - head."""
    reads: list[tuple[int, ...]] = [(), (0,), (1,), (0,), (2, 3), (4,)]
    values = tuple(Value(f"v{i}", 1) for i in range(len(reads)))
    return training_graph(Graph(tuple(Op(f"o{i}", 1.0, read, (i,)) for i, read in enumerate(reads)), values))


def test_operators_stand_behind_all_they_read_and_beside_those_of_the_same_step() -> None:
    graph = residual_block()
    ops = forward_ops(graph).tolist()
    edges = _edges(graph, ops)
    assert edges == [(0, 1), (0, 3), (1, 2), (2, 4), (3, 4), (4, 5)]
    places = _places(ops, edges)
    assert [places[op][0] for op in ops] == [0, 1, 2, 1, 3, 4]
    assert {places[1][1], places[3][1]} == {0.5, -0.5}
    assert len(set(places.values())) == len(ops)


@pytest.mark.parametrize("graph", [chain(layers=12), unet(), residual_block()], ids=lambda graph: graph.name)
def test_each_choice_has_a_row_with_its_name_and_bytes(graph: Graph, tmp_path: Path) -> None:
    draw_checkpoints(graph, {"ours": [0, 3], "theirs": [1, 2, 4]}, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert f"{graph.name}, ours: 2 checkpoints" in text
    assert f"{graph.name}, theirs: 3 checkpoints" in text


def test_marks_as_many_operators_as_are_chosen(tmp_path: Path) -> None:
    draw_checkpoints(chain(layers=12), {"ours": [0, 3, 7], "theirs": [5]}, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text().lower()
    assert text.count('style="fill: #009e73') == 3
    assert text.count('style="fill: #d55e00') == 1


def test_draws_a_graph_without_operators_and_without_choices(tmp_path: Path) -> None:
    draw_checkpoints(Graph((), ()), {}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_refuses_what_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="should end in"):
        draw_checkpoints(chain(layers=2), {"ours": [0]}, tmp_path / "a.txt")
