"""Drawings of hierarchies: every operator in its place, equal parts in one colour, any depth."""

from __future__ import annotations

from pathlib import Path

import pytest

from rematch.errors import FormatError
from rematch.graph import Graph, Op, Value
from rematch.graph.generators import gpt, unet
from rematch.report.hierarchy import _boxes, _classes, _colours, _names, _skips, draw_hierarchy
from rematch.solvers.hiremate import Part, make_partitioner


def line(length: int) -> Graph:
    ops = tuple(Op(f"op{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(length))
    return Graph(ops, tuple(Value(f"v{i}", 1024) for i in range(length)))


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_draws_to_a_file(name: str, magic: bytes, tmp_path: Path) -> None:
    graph = unet(depth=3)
    draw_hierarchy(graph, make_partitioner("hpartition").partition(graph), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_odd_graphs_and_names(tmp_path: Path) -> None:
    draw_hierarchy(Graph((), ()), Part(()), tmp_path / "empty.png")
    draw_hierarchy(line(1), Part((0,)), tmp_path / "single.png")
    with pytest.raises(FormatError, match=r"a\.gif"):
        draw_hierarchy(line(1), Part((0,)), tmp_path / "a.gif")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.png", "single.png"]


def test_boxes_of_a_level_do_not_overlap_and_children_lie_under_their_part() -> None:
    root = Part((0, 1, 2, 3), (Part((0, 2), ()), Part((1,)), Part((3,))))
    places = {(box.part.forward, box.level): box.start for box in _boxes(root)}
    assert places == {
        ((0, 1, 2, 3), 0): 0,
        ((0, 2), 1): 0, ((1,), 1): 2, ((3,), 1): 3,
        ((0,), 2): 0, ((2,), 2): 1,
    }  # fmt: skip


def test_skips_are_values_between_nodes_with_others_in_between() -> None:
    values = tuple(Value(f"v{i}", 10 + i) for i in range(4))
    ops = tuple(Op(f"op{i}", 1.0, reads, (i,)) for i, reads in enumerate([(), (0,), (0, 1), (0, 2)]))
    graph = Graph(ops, values)
    assert _skips(graph, Part((0, 1, 2, 3))) == {(0, 2): 10, (0, 3): 10}
    halves = Part((0, 1, 2, 3), (Part((0, 1)), Part((2, 3))))
    assert _skips(graph, halves) == {}


def test_equal_parts_share_a_colour() -> None:
    graph = gpt(layers=24)
    root = make_partitioner("hpartition").partition(graph)
    colours = list(_colours(_classes(graph, root)).values())
    assert max(map(colours.count, colours)) >= 22
    assert len(set(colours)) > 1


def test_a_part_is_named_after_the_modules_it_spans() -> None:
    graph = gpt(layers=3)
    by_module: dict[str, list[int]] = {}
    for index, op in enumerate(graph.ops[:47]):
        by_module.setdefault(op.module_path, []).append(index)
    attention, mlp, following = (by_module[path] for path in ("h.0.attention", "h.0.mlp", "h.1.attention"))
    for ops, names in (
        (attention, ["h.0.attention"]),
        ([*attention, *mlp], ["h.0.attention \N{EN DASH} mlp", "h.0"]),
        ([*mlp, *following], ["h.0 \N{EN DASH} 1", "h"]),
        ([0, *attention], ["10 operators"]),
        (attention[:1], ["h.0.attention.norm"]),
    ):
        assert list(_names(graph, Part(tuple(ops)))) == names
