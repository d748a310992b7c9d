"""Pictures of schedules: that they are drawn, of what, and that bad names are refused before any work."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from rematch.errors import FormatError, RematchError, ScheduleError
from rematch.graph import Graph, Op, Schedule, Value, baseline
from rematch.graph.generators import gpt
from rematch.report.plot import first_runs, kept_lines, plot_schedule


def line(length: int) -> Graph:
    ops = tuple(Op(f"op{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(length))
    return Graph(ops, tuple(Value(f"v{i}", 1) for i in range(length)), targets=frozenset({length - 1}))


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")])
def test_draws_each_format(name: str, magic: bytes, tmp_path: Path) -> None:
    graph = gpt(layers=1)
    plot_schedule(graph, None, tmp_path / name, budget_bytes=2**30)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_the_picture_names_what_it_shows(tmp_path: Path) -> None:
    graph = line(4)
    schedule = Schedule.from_ops(graph, [0, 1, 0, 1, 2, 3])
    plot_schedule(graph, schedule, tmp_path / "a.svg", budget_bytes=3)
    text = (tmp_path / "a.svg").read_text()
    for part in ("budget 3 B", "computed again", "kept in memory", "without recomputation", "+50.00 % time"):
        assert f"<!-- {part} -->" in text or part in text


def test_graphs_without_operators_time_or_bytes_are_drawn(tmp_path: Path) -> None:
    weightless = Graph((Op("a", 0.0, (), (0,)),), (Value("a", 0),))
    for index, graph in enumerate((Graph((), ()), weightless)):
        plot_schedule(graph, None, tmp_path / f"{index}.png")
        assert (tmp_path / f"{index}.png").exists()


def test_refuses_an_unknown_format_and_a_broken_schedule(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"a.gif: its name should end in .png, .svg, .pdf"):
        plot_schedule(line(2), None, tmp_path / "a.gif")
    with pytest.raises(ScheduleError, match="never runs"):
        plot_schedule(line(2), Schedule([0]), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_says_how_to_get_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RematchError, match="pip install matplotlib"):
        plot_schedule(line(2), None, tmp_path / "a.png")


def testfirst_runs() -> None:
    assert first_runs(np.array([2, 0, 2, 1, 0], dtype=np.int32)).tolist() == [True, True, False, True, False]


def testkept_lines_lines_follow_values_through_stages() -> None:
    graph = line(4)
    assert kept_lines(graph, baseline(graph)) == [
        [(0.0, 0.0), (0.0, 1.5)],
        [(1.0, 1.0), (1.0, 2.5)],
        [(2.0, 2.0), (2.0, 3.5)],
    ]
    again = Schedule.from_ops(graph, [0, 1, 2, 0, 1, 2, 3])
    assert kept_lines(graph, again) == [
        [(0.0, 0.0), (0.0, 1.5)],
        [(1.0, 1.0), (1.0, 2.5)],
    ]


def test_a_value_computed_while_it_is_alive_starts_a_new_line() -> None:
    values = (Value("a", 1), Value("b", 1), Value("c", 1))
    graph = Graph((Op("ab", 1.0, (), (0, 1)), Op("c", 1.0, (0,), (2,)), Op("d", 1.0, (0, 1, 2), ())), values)
    schedule = Schedule([0, 1, ~0, 0, 2])
    assert kept_lines(graph, schedule) == [
        [(0.0, 0.0), (0.0, 1.5)],
        [(0.0, 0.0), (0.0, 2.5)],
        [(1.0, 1.0), (1.0, 2.5)],
    ]
