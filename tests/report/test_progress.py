"""What is said while solving."""

from __future__ import annotations

import io
import sys

import pytest

from rematch.report import progress
from rematch.report.progress import progress_reporter
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
