"""Charts: that every series and group is drawn and named, and that bad names are refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rematch.errors import FormatError, RematchError
from rematch.report.charts import Panel, draw_bars, draw_curves

PANELS = [
    Panel(f"graph {index}", {"rounding": [(2.0, 1.0), (1.0, 3.0)], "auto": [(1.0, 2.0)]} if index else {})
    for index in range(4)
]


def test_curves_name_their_panels_axes_and_series_once(tmp_path: Path) -> None:
    draw_curves(PANELS, tmp_path / "a.svg", x="budget, GiB", y="extra time, %", logarithmic=True)
    text = (tmp_path / "a.svg").read_text()
    for title in ("graph 0", "graph 1", "graph 2", "graph 3"):
        assert f"<!-- {title} -->" in text
    assert len(re.findall("<!-- rounding -->", text)) == len(re.findall("<!-- auto -->", text)) == 1
    assert len(re.findall("<!-- budget, GiB -->", text)) == len(re.findall('<g id="axes_', text)) == 4


def test_a_panel_may_measure_something_else_and_the_picture_has_a_title(tmp_path: Path) -> None:
    panels = [Panel("above", {"a": [(1.0, 2.0)]}), Panel("below", {"a": [(1.0, 2.0)]}, y="seconds", logarithmic=True)]
    draw_curves(panels, tmp_path / "a.svg", x="layers", y="extra time, %", columns=1, title="figure 4")
    text = (tmp_path / "a.svg").read_text()
    for label in ("figure 4", "extra time, %", "seconds"):
        assert len(re.findall(f"<!-- {label} -->", text)) == 1


def test_bars_are_labelled_with_their_heights(tmp_path: Path) -> None:
    draw_bars(
        {"U-Net": {"plain": 26, "auto": 1066}, "VGG": {"auto": 333}},
        tmp_path / "a.svg",
        y="largest batch",
        title="who ran",
    )
    text = (tmp_path / "a.svg").read_text()
    for part in ("U-Net", "VGG", "26", "1,066", "333", "plain", "auto", "largest batch"):
        assert f"<!-- {part} -->" in text


def test_a_title_that_is_wider_than_the_picture_is_broken(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(40))
    draw_curves([PANELS[1]], tmp_path / "a.svg", x="x", y="y", title=f"{words}\nsecond line")
    draw_bars({"VGG": {"auto": 333}}, tmp_path / "b.svg", y="y", title=words)
    for name in ("a.svg", "b.svg"):
        lines = re.findall(r"<!-- ((?:word\d+[ \n]?)+|second line)", (tmp_path / name).read_text())
        parts = [line for text in lines for line in text.splitlines()]
        assert len(parts) > 2 and max(map(len, parts)) <= 80


def test_nothing_to_draw_is_a_picture_too(tmp_path: Path) -> None:
    draw_curves([], tmp_path / "a.png", x="x", y="y")
    draw_bars({}, tmp_path / "b.png", y="y")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


def test_refuses_unknown_formats_and_says_how_to_get_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FormatError, match=r"a\.gif"):
        draw_curves(PANELS, tmp_path / "a.gif", x="x", y="y")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RematchError, match="pip install matplotlib"):
        draw_bars({}, tmp_path / "a.png", y="y")
