"""What is said while recording, measuring and solving, on a terminal, in a notebook and elsewhere."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path

import pytest

import rematch
from rematch.report import progress
from rematch.report.progress import measuring_progress, progress_reporter, solving_progress
from rematch.solvers.base import Progress


def test_elsewhere_the_first_schedule_is_told_at_once_and_the_rest_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_reporter(10.0) as on_progress:
        on_progress(Progress(0.0, "s", "looking"))
        on_progress(Progress(0.1, "s", best_seconds=11.0))
        on_progress(Progress(0.2, "s", best_seconds=10.5))
    first, second = capsys.readouterr().err.splitlines()
    assert "best unknown  bound unknown  s  looking" in first
    assert "best +10.00 %  bound unknown" in second


def test_best_and_bound_are_remembered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    with progress_reporter(10.0) as on_progress:
        on_progress(Progress(0.0, "s", best_seconds=11.0, bound_seconds=10.2))
        on_progress(Progress(0.1, "t", best_seconds=12.0, bound_seconds=10.1))
        on_progress(Progress(0.1, "u", "tired"))
    for line in capsys.readouterr().err.splitlines():
        assert "best +10.00 %  bound +2.00 %" in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_live_line_that_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_reporter(10.0) as on_progress:
        on_progress(Progress(0.0, "s", "looking", best_seconds=11.0))
    assert "best +10.00 %  bound unknown  s  looking" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")


def test_recording_and_measuring_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with measuring_progress(None) as tell:
        for operator in ("aten.mm", "aten.add\x1b[2J"):
            tell(operator)
    assert "measuring  2 operators  aten.add\\x1b[2J" in terminal.getvalue()


def test_elsewhere_library_calls_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with solving_progress(1.0, None) as on_progress, measuring_progress(None) as tell:
        assert on_progress is None
        tell("aten.mm")
    with solving_progress(1.0, False) as on_progress:
        assert on_progress is None
    assert capsys.readouterr() == ("", "")


NOTEBOOK = """
import torch, rematch
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU())]
plan = rematch.plan(torch.nn.Sequential(*layers), torch.randn(256, 32), budget="70%", time_limit=1.0, cache=False,
                    engine="tape", loss=lambda output: output.square().mean())
plan
"""


def test_a_real_notebook_shows_lines_that_change_and_the_plan_as_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(Path(rematch.__file__).parent.parent))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of Jupyter's own libraries
        nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert [output for output in outputs if output.output_type == "stream"] == [], "nothing is printed, no warning"
    recorded, solved, plan = outputs
    assert recorded.data["text/plain"].startswith("rematch: recorded the training step in ")
    assert "operators measured" in recorded.data["text/plain"]
    assert solved.data["text/plain"].startswith("rematch: solved in ")
    assert "best +" in solved.data["text/plain"]
    assert plan.data["text/plain"].startswith("<Plan for 'Sequential'")
    assert "<svg" in plan.data["text/html"]
