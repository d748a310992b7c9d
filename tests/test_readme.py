"""The Python shown in the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rematch.graph.formats import save_graph
from rematch.graph.generators import gpt
from rematch.plans import Plan
from rematch.solvers import base, make_solver

README = Path(__file__).parent.parent / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_planning_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(gpt(layers=4), "gpt.json")
    exec(python_blocks()[0], {})
    assert capsys.readouterr().out.strip() == str(Plan.load("plan.json"))


def test_a_solver_in_ten_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_registered", {})
    exec(python_blocks()[1], {"__name__": "readme"})
    assert make_solver("keep-everything").name == "keep-everything"


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
