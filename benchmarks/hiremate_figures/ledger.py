"""What methods found on graphs at budgets: solved once, kept as JSON, and shared by all figures.

`Ledger(settings).row("unet", graph, 50, AUTO).overhead_percent`

A row that the file has for at least the same limit is not solved again, so that a run that was stopped goes on where it
was, and a longer limit can be given to some methods or figures later. Of several, that with the longest limit counts.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rematch
from rematch.files import write_text
from rematch.graph import Graph, simulate
from rematch.solvers import Problem, Progress, Solution, make_solver, solve

from .graphs import Library, budget_bytes, plain_peak_bytes

_LIBRARIES = ("highspy", "numba", "numpy", "ortools", "torch")
Key = tuple[str, str, float, str, float]


@dataclass(frozen=True)
class FigureSettings:
    """library: whose graphs; limit: seconds for a point; again: solve also what the results have.

    methods: a regular expression on the names of those that are solved; of others, what the results have is drawn.
    """

    library: Library
    results: Path
    limit: float = 10.0
    again: bool = False
    methods: str = ""

    def picture(self, name: str) -> Path:
        return self.results / f"hiremate-{name}.png"


@dataclass(frozen=True)
class Method:
    """A solver with options, under the name that legends have for it."""

    label: str
    solver: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One method on one graph at one budget, a share of the activations; numbers are None where it found nothing."""

    graph: str
    device: str
    operators: int
    plain_peak_bytes: int
    percent: float
    budget_bytes: int
    method: str
    limit_seconds: float
    status: str
    found_by: str | None = None
    overhead_percent: float | None = None
    bound_percent: float | None = None
    peak_bytes: int | None = None
    solve_seconds: float | None = None
    seconds_to_best: float | None = None
    load_average: float = 0.0  # of the machine, in the minute before the search ended

    @property
    def key(self) -> Key:
        return self.graph, self.device, self.percent, self.method, self.limit_seconds


class Ledger:
    """The rows of all figures, in a file."""

    def __init__(self, settings: FigureSettings) -> None:
        self._settings = settings
        self._path = settings.results / "hiremate-figures.json"
        known = json.loads(self._path.read_text())["rows"] if self._path.exists() else []
        self._rows = {row.key: row for row in (Row(**fields) for fields in known)}

    def row(self, name: str, graph: Graph, percent: float, method: Method) -> Row | None:
        """What is known or found; None where nothing is known and the settings leave the method out."""
        settings = self._settings
        key = (name, settings.library.device, percent, method.label)
        known = max(
            (row for row in self._rows.values() if row.key[:-1] == key),
            key=lambda row: row.limit_seconds,
            default=None,
        )
        is_asked = re.search(settings.methods, method.label) is not None
        if is_asked and (known is None or known.limit_seconds < settings.limit or settings.again):
            known = _solved(name, settings.library.device, graph, percent, method, settings.limit)
            self._rows[known.key] = known
            self._keep()
            print(_line(known), flush=True)
        return known

    def rows(self, name: str, graph: Graph, percents: Iterable[float], methods: Iterable[Method]) -> list[Row]:
        asked = [(percent, method) for method in methods for percent in percents]
        rows = (self.row(name, graph, percent, method) for percent, method in asked)
        return [row for row in rows if row is not None]

    def _keep(self) -> None:
        kept = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "versions": {"rematch": rematch.__version__, **{name: version(name) for name in _LIBRARIES}},
            "rows": [asdict(row) for row in self._rows.values()],
        }
        write_text(self._path, json.dumps(kept, indent=1))


def _solved(name: str, device: str, graph: Graph, percent: float, method: Method, limit: float) -> Row:
    problem = Problem(graph, budget_bytes(graph, percent))
    facts = (name, device, len(graph.ops), plain_peak_bytes(graph), percent, problem.budget_bytes, method.label, limit)
    solver = make_solver(method.solver, **method.options)
    if not solver.applicable(problem):
        return Row(*facts, status="does not apply")
    solution = solve(problem, solver, time_limit=limit)
    best = best_entry(solution)
    seen = None if solution.schedule is None else simulate(graph, solution.schedule)

    def extra_percent(seconds: float | None) -> float | None:
        return None if seconds is None else (seconds / graph.baseline_seconds - 1) * 100

    return Row(
        *facts,
        status=solution.status.value,
        found_by=best and best.solver,
        overhead_percent=extra_percent(seen and seen.seconds),
        bound_percent=extra_percent(solution.lower_bound_seconds),
        peak_bytes=seen and seen.peak_bytes,
        solve_seconds=solution.solve_seconds,
        seconds_to_best=best and best.at_seconds,
        load_average=os.getloadavg()[0],
    )


def best_entry(solution: Solution) -> Progress | None:
    """The moment in which the best schedule was first known, and to whom."""
    known = (entry for entry in solution.log if entry.best_seconds is not None)
    return min(known, key=lambda entry: entry.best_seconds or 0.0, default=None)


def _line(row: Row) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return (
        f"{row.graph:24} {row.percent:>4g} % {row.method:22} {row.status:14} {number(row.overhead_percent):>7} % "
        f"{number(row.bound_percent):>7} % {number(row.seconds_to_best):>7} s {number(row.solve_seconds):>7} s"
    )
