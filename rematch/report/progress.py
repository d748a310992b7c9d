"""How a search is going, on standard error: one live line on a terminal, a line now and then elsewhere.

`with progress_reporter(baseline_seconds) as on_progress: solve(problem, on_progress=on_progress)`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rematch.solvers.base import OnProgress, Progress
from rematch.units import extra_pct, format_extra, printable

_QUIET_SECONDS = 5.0  # between two plain lines, so that a log file stays short


@contextmanager
def solving_progress(baseline_seconds: float, wanted: bool | None) -> Iterator[OnProgress | None]:
    """For library calls: shown if `wanted`, or if that is None and someone watches a terminal."""
    if sys.stderr.isatty() if wanted is None else wanted:
        with progress_reporter(baseline_seconds) as on_progress:
            yield on_progress
    else:
        yield None


@contextmanager
def measuring_progress(wanted: bool | None) -> Iterator[Callable[[str], None]]:
    """A function to be told which operator is being measured; shown as in `solving_progress`."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda operator: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.completed} operators  {task.description}"))
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(operator: str) -> None:
            bar.update(task, advance=1, description=printable(operator))

        yield tell


@contextmanager
def progress_reporter(baseline_seconds: float) -> Iterator[OnProgress]:
    """An `on_progress` that shows what it is told until the block ends."""
    latest = _Latest(baseline_seconds)
    if sys.stderr.isatty():
        with _live_line(latest):
            yield latest.update
    else:
        yield _PlainLines(latest).update


class _Latest:
    """The best and the bound known so far: solvers may leave out what has not changed."""

    def __init__(self, baseline_seconds: float) -> None:
        self._baseline_seconds = baseline_seconds
        self._started = time.monotonic()
        self._progress = Progress(0.0, "starting", "(the first run compiles its code)")
        self.best_seconds: float | None = None
        self.bound_seconds: float | None = None

    def update(self, progress: Progress) -> None:
        self._progress = progress
        if progress.best_seconds is not None:
            self.best_seconds = min(progress.best_seconds, self.best_seconds or progress.best_seconds)
        if progress.bound_seconds is not None:
            self.bound_seconds = max(progress.bound_seconds, self.bound_seconds or progress.bound_seconds)

    def line(self) -> str:
        elapsed = time.monotonic() - self._started
        best = format_extra(extra_pct(self.best_seconds, self._baseline_seconds))
        bound = format_extra(extra_pct(self.bound_seconds, self._baseline_seconds))
        said = f"  {self._progress.message}" if self._progress.message else ""
        return printable(f"{elapsed:6.1f} s  best {best}  bound {bound}  {self._progress.solver}{said}")


class _PlainLines:
    """Prints the first schedule at once, then at most one line every few seconds."""

    def __init__(self, latest: _Latest) -> None:
        self._latest = latest
        self._printed_at = float("-inf")
        self._best_shown = False

    def update(self, progress: Progress) -> None:
        self._latest.update(progress)
        first_schedule = self._latest.best_seconds is not None and not self._best_shown
        if first_schedule or time.monotonic() - self._printed_at >= _QUIET_SECONDS:
            print(self._latest.line(), file=sys.stderr, flush=True)
            self._printed_at = time.monotonic()
            self._best_shown = self._latest.best_seconds is not None


@contextmanager
def _live_line(latest: _Latest) -> Iterator[None]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def shown() -> Text:
        return Text(latest.line(), style="dim", no_wrap=True, overflow="ellipsis")

    with Live(console=Console(stderr=True), get_renderable=shown, refresh_per_second=5, transient=True):
        yield
