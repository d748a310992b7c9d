"""The Python shown in the README and in docs/graphs.md runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rematch
from rematch.graph.formats import save_graph
from rematch.graph.generators import gpt
from rematch.planning.plan import Plan
from rematch.solvers import base, make_solver
from tests.pages import DOCS, python_blocks

GRAPHS = DOCS / "graphs.md"


@pytest.fixture(autouse=True)
def costs_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path / "costs"))


@pytest.mark.slow
def test_training_a_hugging_face_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(python_blocks()[0], scope)
    plan = scope["plan"]
    assert plan.graph_fingerprint[:8] in Path("plan.html").read_text(encoding="utf-8")
    assert plan.figures.peak_bytes <= plan.figures.budget_bytes < plan.figures.baseline_peak_bytes
    assert len(scope["optimizer"].state) == len(list(scope["model"].parameters())), "it has been trained"


def test_looking_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(python_blocks()[1], scope)
    assert capsys.readouterr().out.strip() == str(Plan.load("training.json"))
    assert rematch.plans_of(scope["model"]) == (scope["plan"],)


def test_planning_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(gpt(layers=4), "gpt.json")
    exec(python_blocks(GRAPHS)[0], {})
    assert capsys.readouterr().out.strip() == str(Plan.load("plan.json"))


def test_a_solver_in_ten_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base._solvers, "_added", {})
    exec(python_blocks(GRAPHS)[1], {"__name__": "docs"})
    assert make_solver("keep-everything").name == "keep-everything"
