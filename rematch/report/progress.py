"""What takes long, while it takes long: recording, measuring and solving.

`with progress_reporter(baseline_seconds) as on_progress: solve(problem, on_progress=on_progress)`

A terminal gets one live line on standard error, which is gone afterwards. A notebook gets one line that changes in
place and stays as a summary. Elsewhere nothing is shown unless it is asked for, and then a line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from typing import Any, Protocol

from rematch.solvers.base import OnProgress, Progress
from rematch.units import count_of, extra_pct, format_extra, format_seconds, printable

_QUIET_SECONDS = 5.0  # between two plain lines, so that a log file stays short
_NOTEBOOK_SECONDS = 0.3  # between two changes of a notebook's line, each of which is a message to the browser


class _Place(Enum):
    """Who watches."""

    TERMINAL = "terminal"
    NOTEBOOK = "notebook"
    LINES = "lines"


class _Told(Protocol):
    """Something that knows what to show now, and what to leave behind."""

    urgent: bool  # there is news that should not wait

    def line(self) -> str: ...

    def summary(self) -> str: ...


def _place(wanted: bool | None) -> _Place | None:
    """Where to show progress; None for nowhere. Without `wanted`, only where someone watches."""
    if wanted is False:
        return None
    if sys.stderr.isatty():
        return _Place.TERMINAL
    if _in_notebook():
        return _Place.NOTEBOOK
    return _Place.LINES if wanted else None


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this; IPython in a terminal has no kernel."""
    if "ipykernel" not in sys.modules or "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def solving_progress(baseline_seconds: float, wanted: bool | None) -> Iterator[OnProgress | None]:
    """For library calls: shown if `wanted`, or if that is None and someone watches a terminal or a notebook."""
    place = _place(wanted)
    if place is None:
        yield None
        return
    search = _Search(baseline_seconds)
    with _shown(search, place) as changed:

        def tell(progress: Progress) -> None:
            search.update(progress)
            changed()

        yield tell


@contextmanager
def progress_reporter(baseline_seconds: float) -> Iterator[OnProgress]:
    """An `on_progress` that shows what it is told until the block ends, as lines where nobody watches."""
    with solving_progress(baseline_seconds, True) as on_progress:
        assert on_progress is not None
        yield on_progress


@contextmanager
def measuring_progress(wanted: bool | None) -> Iterator[Callable[[str], None]]:
    """A function to be told which operator is being measured; shown as in `solving_progress`."""
    place = _place(wanted)
    if place is None:
        yield lambda operator: None
        return
    recording = _Recording()
    with _shown(recording, place) as changed:

        def tell(operator: str) -> None:
            recording.update(operator)
            changed()

        yield tell


class _Recording:
    """A model that is being recorded, and the operators that had to be measured for it."""

    def __init__(self) -> None:
        self.urgent = False
        self._started = time.monotonic()
        self._measured = 0
        self._operator = ""

    def update(self, operator: str) -> None:
        self._measured += 1
        self._operator = operator

    def line(self) -> str:
        elapsed = time.monotonic() - self._started
        if not self._measured:
            return f"{elapsed:6.1f} s  recording the training step"
        return printable(f"{elapsed:6.1f} s  measuring  {count_of(self._measured, 'operator')}  {self._operator}")

    def summary(self) -> str:
        measured = f", {count_of(self._measured, 'operator')} measured" if self._measured else ""
        return f"rematch: recorded the training step in {format_seconds(time.monotonic() - self._started)}{measured}"


class _Search:
    """The best and the bound known so far: solvers may leave out what has not changed."""

    def __init__(self, baseline_seconds: float) -> None:
        self.urgent = False  # the first schedule
        self._baseline_seconds = baseline_seconds
        self._started = time.monotonic()
        self._progress = Progress(0.0, "starting", "(the first run compiles its code)")
        self._best_seconds: float | None = None
        self._bound_seconds: float | None = None

    def update(self, progress: Progress) -> None:
        self._progress = progress
        if progress.best_seconds is not None:
            self.urgent = self._best_seconds is None
            self._best_seconds = min(progress.best_seconds, self._best_seconds or progress.best_seconds)
        if progress.bound_seconds is not None:
            self._bound_seconds = max(progress.bound_seconds, self._bound_seconds or progress.bound_seconds)

    def line(self) -> str:
        elapsed = time.monotonic() - self._started
        said = f"  {self._progress.message}" if self._progress.message else ""
        return printable(f"{elapsed:6.1f} s  {self._known()}  {self._progress.solver}{said}")

    def summary(self) -> str:
        return f"rematch: solved in {format_seconds(time.monotonic() - self._started)}, {self._known()}"

    def _known(self) -> str:
        best, bound = (
            format_extra(extra_pct(seconds, self._baseline_seconds))
            for seconds in (self._best_seconds, self._bound_seconds)
        )
        return f"best {best}  bound {bound}"


@contextmanager
def _shown(told: _Told, place: _Place) -> Iterator[Callable[[], None]]:
    """Show `told` until the block ends; the function says that it has changed."""
    if place is _Place.TERMINAL:
        with _live_line(told):
            yield lambda: None
    elif place is _Place.NOTEBOOK:
        line = _NotebookLine(told)
        try:
            yield line.changed
        finally:
            line.end()
    else:
        yield _PlainLines(told).changed


class _PlainLines:
    """Prints urgent news at once, everything else at most once every few seconds."""

    def __init__(self, told: _Told) -> None:
        self._told = told
        self._printed_at = float("-inf")

    def changed(self) -> None:
        if self._told.urgent or time.monotonic() - self._printed_at >= _QUIET_SECONDS:
            print(self._told.line(), file=sys.stderr, flush=True)
            self._printed_at = time.monotonic()
            self._told.urgent = False


class _NotebookLine:
    """A line of a notebook's output that changes in place."""

    def __init__(self, told: _Told) -> None:
        self._told = told
        self._handle: Any = None
        self._shown_at = 0.0
        self._show(told.line())

    def changed(self) -> None:
        if time.monotonic() - self._shown_at >= _NOTEBOOK_SECONDS:
            self._show(self._told.line())

    def end(self) -> None:
        self._show(self._told.summary())

    def _show(self, line: str) -> None:
        content = {"text/plain": line}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        self._shown_at = time.monotonic()


@contextmanager
def _live_line(told: _Told) -> Iterator[None]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def shown() -> Text:
        return Text(told.line(), style="dim", no_wrap=True, overflow="ellipsis")

    with Live(console=Console(stderr=True), get_renderable=shown, refresh_per_second=5, transient=True):
        yield
