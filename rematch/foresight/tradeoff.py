"""What a smaller budget costs, and how small it can be.

`print(rematch.pareto(model, batch, loss=loss)); rematch.min_budget(model, batch).budget_bytes`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from rematch.api import (
    Loss,
    as_arguments,
    make_settings,
    record_step,
    with_checkpoints,
    with_chunks,
    with_offload,
)
from rematch.foresight.answer import Answer
from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.planning.budget import describe_largest_need, parse_budget
from rematch.planning.plan import Figures
from rematch.planning.planner import budget_range
from rematch.planning.settings import RESPECT
from rematch.records import to_json
from rematch.report.charts import Panel, draw_curves
from rematch.report.plot import plot_schedule
from rematch.report.text import table
from rematch.solvers.base import DEFAULT_SOLVER, Problem, Solver, make_solver, solve
from rematch.solvers.minimum import BudgetRange
from rematch.units import BYTES_UNITS, extra_pct, format_bytes, format_extra, unit_for

_BUDGETS = 8
_SECONDS = 10.0  # for each budget, and to look for the smallest
_HALVINGS = 6  # of the way from what is proved impossible to the smallest budget without host memory


@dataclass(frozen=True, repr=False)
class Pareto(Answer):
    """Extra time against budget, smallest budget first; without a schedule where none was found."""

    name: str
    baseline_peak_bytes: int
    points: tuple[Figures, ...]
    notes: tuple[str, ...] = ()

    def to_data(self) -> dict[str, Any]:
        points = [
            {**to_json(point), "overhead_pct": point.overhead_pct, "lower_bound_pct": point.lower_bound_pct}
            for point in self.points
        ]
        whole = {"name": self.name, "baseline_peak_bytes": self.baseline_peak_bytes}
        return {**whole, "points": points, "notes": list(self.notes)}

    def __str__(self) -> str:
        rows = [(format_bytes(point.budget_bytes), self._percent(point), self._cost(point)) for point in self.points]
        title = f"{self.name}: extra time by budget, {format_bytes(self.baseline_peak_bytes)} without recomputation"
        return table(title, [*rows, *(("note", note, "") for note in self.notes)])

    def _percent(self, point: Figures) -> str:
        return f"{100 * point.budget_bytes / max(1, self.baseline_peak_bytes):.1f} %"

    def _cost(self, point: Figures) -> str:
        if point.seconds is None:
            return f"{point.status.value} by {point.solver}"
        bound = "no bound" if point.lower_bound_pct is None else f"bound {format_extra(point.lower_bound_pct)}"
        return f"{format_extra(point.overhead_pct)} time, {bound}"

    def plot(self, path: str | PathLike[str]) -> None:
        scale, unit = unit_for(BYTES_UNITS, self.baseline_peak_bytes)
        found = [(point.budget_bytes / scale, point.overhead_pct) for point in self.points]
        bounds = [(point.budget_bytes / scale, point.lower_bound_pct) for point in self.points]
        series = {"found": _known(found), "no schedule is faster": _known(bounds)}
        shown = {name: points for name, points in series.items() if points}
        draw_curves([Panel(self.name, shown)], path, x=f"budget ({unit})", y="extra time, %")


def _known(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None]


@dataclass(frozen=True, repr=False)
class MinBudget(Answer):
    """The smallest budget that a schedule was found for, and the largest one that is proved to have none."""

    name: str
    budget_bytes: int  # to ask `rematch.remat` for
    infeasible_up_to_bytes: int  # in default order of first computations
    baseline_peak_bytes: int
    extra_pct: float | None  # extra time of the schedule that was found: of all that fit, it need not be the fastest
    limit: str  # what no schedule can avoid
    graph: Graph = field(compare=False)
    schedule: Schedule = field(compare=False)

    def to_data(self) -> dict[str, Any]:
        left_out = ("graph", "schedule")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __str__(self) -> str:
        rows = [
            ("smallest", format_bytes(self.budget_bytes), f"{self._percent()} of the peak, {self.budget_bytes} bytes"),
            ("time", format_extra(self.extra_pct), "by the schedule that was found; rematch.plan may find a faster"),
            ("no less", format_bytes(self.infeasible_up_to_bytes), "is proved to be too little"),
            ("limit", self.limit, ""),
        ]
        return table(f"{self.name}: the smallest budget", rows)

    def _percent(self) -> str:
        return f"{100 * self.budget_bytes / max(1, self.baseline_peak_bytes):.1f} %"

    def plot(self, path: str | PathLike[str]) -> None:
        """Memory over time by the schedule that was found, and what it computes again."""
        plot_schedule(self.graph, self.schedule, path, budget_bytes=self.budget_bytes)


def pareto(
    model: nn.Module,
    sample: Any,
    *,
    budgets: int | Sequence[str | int | float] = _BUDGETS,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool = False,
    checkpoints: str = RESPECT,
    chunk_loss: int = 1,
    offload: bool | str | int = False,
    device: str | None = None,
    solver: str | Solver = DEFAULT_SOLVER,
    time_limit: float = _SECONDS,
    progress: bool | None = None,
    **options: Any,
) -> Pareto:
    """Return the extra time that training inside each of some budgets takes, and the least that any schedule can.

    budgets: how many, between the smallest that can be found and the peak of plain training; or which ones.
    time_limit: seconds for each budget. The other arguments are those of `rematch.plan`.
    """
    settings = with_checkpoints(make_settings("100%", solver, time_limit, 0, progress, options, device), checkpoints)
    settings = with_offload(with_chunks(settings, chunk_loss), offload)
    _, recorded = record_step(model, sample, replace(settings, accumulate=accumulate), loss=loss, optimizer=optimizer)
    made = make_solver(solver, **options) if isinstance(solver, str) else solver
    return pareto_of(recorded.graph, budgets, solver=made, time_limit=time_limit, notes=recorded.notes)


def pareto_of(
    graph: Graph,
    budgets: int | Sequence[str | int | float] = _BUDGETS,
    *,
    solver: str | Solver = DEFAULT_SOLVER,
    time_limit: float = _SECONDS,
    notes: tuple[str, ...] = (),
) -> Pareto:
    """The same for a graph. A schedule for one budget counts for all larger ones."""
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    if isinstance(budgets, int):
        lowest = _range_of(graph, time_limit).feasible_from_bytes
        sizes = [lowest + (peak_bytes - lowest) * step // max(1, budgets - 1) for step in range(budgets)]
    else:
        sizes = [parse_budget(budget, peak_bytes) for budget in budgets]
    points: list[Figures] = []
    best: Schedule | None = None
    for size in sorted(set(sizes)):
        problem = Problem(graph, size)
        found = solve(problem, solver, time_limit=time_limit)
        best = _faster(graph, best, found.schedule)
        points.append(Figures.of(problem, replace(found, schedule=best)))
        if found.interrupted:
            notes = (*notes, "a signal ended the search; larger budgets were not tried")
            break
    return Pareto(graph.name, peak_bytes, tuple(points), notes)


def _faster(graph: Graph, one: Schedule | None, other: Schedule | None) -> Schedule | None:
    known = [schedule for schedule in (one, other) if schedule is not None]
    return min(known, key=lambda schedule: simulate(graph, schedule).seconds, default=None)


def _range_of(graph: Graph, seconds: float) -> BudgetRange:
    """Which budgets can be kept: by recomputation alone, and with a link to host memory by moving values as well.

    What is proved of recomputation alone does not hold for a graph with a link, only what any operator needs does.
    """
    if graph.link is None:
        return budget_range(graph, seconds)
    alone = budget_range(replace(graph, link=None), seconds / 2)
    proved = max(graph.largest_op_bytes, graph.end_bytes) - 1
    found, below = replace(alone, infeasible_up_to_bytes=proved), proved
    for _ in range(_HALVINGS):
        tried = Problem(graph, (below + found.feasible_from_bytes) // 2)
        schedule = solve(tried, DEFAULT_SOLVER, time_limit=seconds / 2 / _HALVINGS).schedule
        if schedule is None:
            below = tried.budget_bytes
        else:
            peak_bytes = simulate(graph, schedule).checked().peak_bytes
            found = replace(found, feasible_from_bytes=peak_bytes, schedule=schedule)
    return found


def min_budget(
    model: nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool = False,
    checkpoints: str = RESPECT,
    chunk_loss: int = 1,
    offload: bool | str | int = False,
    device: str | None = None,
    time_limit: float = _SECONDS,
    progress: bool | None = None,
) -> MinBudget:
    """Return the smallest budget that `model` can be trained in, as far as `time_limit` seconds can tell.

    The other arguments are those of `rematch.plan`.
    """
    settings = with_checkpoints(make_settings("100%", DEFAULT_SOLVER, 0.0, 0, progress, {}, device), checkpoints)
    settings = with_offload(with_chunks(settings, chunk_loss), offload)
    runner, recorded = record_step(
        model, sample, replace(settings, accumulate=accumulate), loss=loss, optimizer=optimizer
    )
    plain_bytes = simulate(recorded.graph, baseline(recorded.graph)).peak_bytes
    recorded = runner.leaner(recorded, *as_arguments(sample)) or recorded  # what `remat` runs where nothing else fits
    graph = recorded.graph
    found = _range_of(graph, time_limit)
    seen = simulate(graph, found.schedule).checked()
    return MinBudget(
        name=graph.name,
        budget_bytes=runner.planner.budget_for(seen.peak_bytes, recorded.device),
        infeasible_up_to_bytes=found.infeasible_up_to_bytes,
        baseline_peak_bytes=plain_bytes,
        extra_pct=extra_pct(seen.seconds, graph.baseline_seconds),
        limit=describe_largest_need(graph),
        graph=graph,
        schedule=found.schedule,
    )
