"""A schedule as a picture: memory over time above, what is computed and kept in each stage below.

`plot_schedule(graph, schedule, "plan.png", budget_bytes=budget)`

Where values move, the link is between the two: when copies out and back run, and when computation waits for them.

Below, a row is a stage (what happens up to and including the next first computation) and a column an operator in
default order, as in figure 7 of the Checkmate paper. First computations make the diagonal; everything left of it is
computed again. A grey line says that an output of the operator is kept in memory from stage to stage. matplotlib is
imported when a picture is drawn.
"""

from __future__ import annotations

import textwrap
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np

from rematch.graph import (
    Compute,
    Fetch,
    Free,
    Graph,
    Phase,
    Schedule,
    Simulation,
    baseline,
    simulate,
)
from rematch.graph.model import Bools, Floats, Ints, Longs
from rematch.graph.simulate import computation_edges
from rematch.graph.traffic import Traffic, traffic
from rematch.report.figure import new_figure, picture_format, save_figure
from rematch.units import (
    BYTES_UNITS,
    SECONDS_UNITS,
    count_of,
    extra_pct,
    format_bytes,
    format_extra,
    format_seconds,
    printable,
    unit_for,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Two blues for the work that is done anyway and one warm colour for what is added: apart in hue and in lightness, so
# that they stay apart for colour-blind readers and in grey (colours of Okabe and Ito).
_FORWARD, _BACKWARD, _AGAIN = "#56B4E9", "#0072B2", "#D55E00"
_OUT, _BACK = "#009E73", "#CC79A7"
_BEFORE, _BUDGET, _KEPT, _INK = "#9AA3AB", "#1A1A1A", "#C3CAD1", "#30363C"
_SMALLEST_MARK_POINTS = 1.6  # thinner marks vanish when thousands of operators share the width
_LEGEND_MARK_POINTS = 6.0
_MATRIX_POINTS = 72 * 6.5  # about the width of the matrix on the page
_TITLE_LETTERS = 95  # that fit on a line
_NAME_LETTERS = 200  # of the graph's name


def plot_schedule(
    graph: Graph, schedule: Schedule | None, path: str | PathLike[str], *, budget_bytes: int | None = None
) -> None:
    """Draw `schedule`, or the one without recomputation if None, to a .png, .svg or .pdf file, whole or not at all."""
    picture_format(path)  # a bad name is refused before the work
    drawn = baseline(graph) if schedule is None else schedule
    seen = simulate(graph, drawn).checked()
    figure = new_figure(9, 11.5 if drawn.moves else 10.5)
    heights = (1, 0.25, 2.2) if drawn.moves else (1, 2.2)
    axes = figure.subplots(len(heights), 1, height_ratios=heights).tolist()
    _draw_memory(axes[:-1], graph, drawn, seen, budget_bytes)
    _draw_matrix(axes[-1], graph, drawn)
    _save(figure, path)


def plot_memory(
    graph: Graph, schedule: Schedule, path: str | PathLike[str], *, budget_bytes: int | None = None
) -> None:
    """Draw the memory of `schedule` over time alone, to a .png, .svg or .pdf file, whole or not at all."""
    picture_format(path)
    seen = simulate(graph, schedule).checked()
    figure = new_figure(9, 5 if schedule.moves else 4)
    heights = (1, 0.25) if schedule.moves else (1,)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False).ravel().tolist()
    _draw_memory(axes, graph, schedule, seen, budget_bytes)
    _save(figure, path)


def _save(figure: Figure, path: str | PathLike[str]) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=9)
    save_figure(figure, path)


def _draw_memory(
    panels: list[Axes], graph: Graph, schedule: Schedule, seen: Simulation, budget_bytes: int | None
) -> None:
    """The schedule's memory while it runs, over the profile without recomputation and under the budget.

    Where values move, there is a second panel for the link.
    """
    axes = panels[0]
    before = simulate(graph, baseline(graph))
    byte_scale, byte_unit = unit_for(BYTES_UNITS, before.peak_bytes)
    time_scale, time_unit = unit_for(SECONDS_UNITS, seen.seconds)
    before_edges, before_levels = _profile(graph, baseline(graph), before)
    edges, levels = _profile(graph, schedule, seen)
    _draw_profile(axes, before_levels / byte_scale, before_edges / time_scale, _BEFORE, "without recomputation")
    if schedule.moves or not np.array_equal(schedule.ops, baseline(graph).ops):
        _draw_profile(axes, levels / byte_scale, edges / time_scale, _BACKWARD, "this schedule")
        _mark_recomputation(axes, schedule, edges / time_scale)
    link = traffic(graph, schedule) if schedule.moves else None
    if link is not None:
        host_edges = np.array([*(since for since, _ in link.host), link.seconds]) / time_scale
        host_levels = np.array([size for _, size in link.host]) / byte_scale
        axes.stairs(host_levels, host_edges, baseline=None, label="in host memory", color=_OUT, lw=1.2, ls=":")
    if budget_bytes is not None:
        label = f"budget {format_bytes(budget_bytes)}"
        axes.axhline(budget_bytes / byte_scale, color=_BUDGET, lw=1.2, ls=(0, (5, 3)), label=label)
    axes.set_xlim(0, max(edges[-1], before_edges[-1]) / time_scale or 1)
    highest = max(before.peak_bytes, seen.peak_bytes, seen.host_bytes, budget_bytes or 0)
    axes.set_ylim(0, 1.05 * highest / byte_scale or 1)
    axes.set_ylabel(f"memory ({byte_unit})", color=_INK)
    if link is not None:
        _draw_link(panels[1], link, time_scale)
        panels[1].set_xlim(axes.get_xlim())
        axes.tick_params(labelbottom=False)
    panels[-1].set_xlabel(f"time ({time_unit})", color=_INK)
    title = textwrap.fill(_title(graph, schedule, seen, before), _TITLE_LETTERS)
    axes.set_title(title, loc="left", fontsize=11, color=_INK, pad=44 if schedule.moves else 28)
    _legend(axes)


def _legend(axes: Axes, markerscale: float = 1.0) -> None:
    """One row above the axes, where it hides nothing."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4,
        frameon=False, fontsize=9, labelcolor=_INK, markerscale=markerscale,
    )  # fmt: skip


def _title(graph: Graph, schedule: Schedule, seen: Simulation, before: Simulation) -> str:
    name = printable(graph.name, _NAME_LETTERS) or "graph"
    what = f"{name}: {count_of(len(graph.ops), 'operator')}, peak {format_bytes(seen.peak_bytes)}"
    extra = len(schedule.ops) - len(graph.ops)
    if extra == 0 and not schedule.moves:
        return f"{what}, {format_seconds(seen.seconds)} without recomputation"
    return (
        f"{what} instead of {format_bytes(before.peak_bytes)}, {count_of(extra, 'recomputation')}, "
        f"{format_extra(extra_pct(seen.seconds, graph.baseline_seconds))} time"
    )


def _profile(graph: Graph, schedule: Schedule, seen: Simulation) -> tuple[Floats, Floats]:
    """When each computation starts, when all has ended, and the memory while each runs."""
    return computation_edges(graph, schedule), seen.timeline_bytes[schedule.steps >= 0].astype(np.float64)


def _draw_profile(axes: Axes, levels: Floats, edges: Floats, colour: str, label: str) -> None:
    axes.stairs(levels, edges, fill=True, color=colour, alpha=0.3, lw=0)
    axes.stairs(levels, edges, color=colour, lw=1.2, label=label)


def _mark_recomputation(axes: Axes, schedule: Schedule, edges: Floats) -> None:
    """A warm strip along the time axis wherever an operator runs again."""
    again = ~first_runs(schedule.ops)
    spans = [(start, end - start) for start, end in zip(edges[:-1][again], edges[1:][again], strict=True)]
    axes.broken_barh(
        spans, (0, 0.025), transform=axes.get_xaxis_transform(), color=_AGAIN, lw=0.4, label="computed again"
    )


def _draw_link(axes: Axes, link: Traffic, time_scale: float) -> None:
    """A lane for each direction of the link, where a copy runs, and one where computation waits."""
    lanes = (("out", link.out, _OUT), ("back", link.back, _BACK), ("waits", link.waits, _AGAIN))
    for lane, (_, spans, colour) in enumerate(lanes):
        drawn = [(span.begin / time_scale, (span.end - span.begin) / time_scale) for span in spans]
        axes.broken_barh(drawn, (lane - 0.35, 0.7), color=colour, lw=0)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), [label for label, _, _ in lanes])
    axes.set_ylabel("link", color=_INK)


def first_runs(ops: Ints) -> Bools:
    """Which entries of a sequence of operators are the first of their kind."""
    first = np.zeros(len(ops), dtype=np.bool_)
    first[np.unique(ops, return_index=True)[1]] = True
    return first


def _draw_matrix(axes: Axes, graph: Graph, schedule: Schedule) -> None:
    """Stages downwards, operators to the right: what is computed for the first time, computed again, and kept."""
    from matplotlib.collections import LineCollection

    ops = schedule.ops
    first = first_runs(ops)
    column = graph.arrays.position[ops]
    stage: Longs = np.cumsum(first) - first  # a stage ends with the first computation it is named by
    cell = 0.85 * _MATRIX_POINTS / max(1, len(graph.ops))
    mark = max(_SMALLEST_MARK_POINTS, cell)
    # Lines are never widened: where columns are thinner than a pixel, their grey shows how many are kept.
    lines = LineCollection(kept_lines(graph, schedule), colors=_KEPT, linewidths=cell, capstyle="butt", zorder=1)
    axes.add_collection(lines)
    backward = np.array([graph.ops[op].phase is not Phase.FORWARD for op in ops], dtype=np.bool_)
    for chosen, colour, label in (
        (first & ~backward, _FORWARD, "forward"),
        (first & backward, _BACKWARD, "loss and backward"),
        (~first, _AGAIN, "computed again"),
    ):
        if chosen.any():
            axes.scatter(column[chosen], stage[chosen], s=mark**2, c=colour, marker="s", lw=0, label=label, zorder=2)
    axes.plot([], [], color=_KEPT, lw=4, label="kept in memory")
    last = max(1, len(graph.ops))
    axes.set_xlim(-0.02 * last - 0.5, 1.01 * last)
    axes.set_ylim(1.01 * last, -0.02 * last - 0.5)
    axes.set_xlabel("operator, in default order", color=_INK)
    axes.set_ylabel("stage", color=_INK)
    _legend(axes, markerscale=_LEGEND_MARK_POINTS / mark)


def kept_lines(graph: Graph, schedule: Schedule) -> list[list[tuple[float, float]]]:
    """A line for each stretch of stages through which a value stays in memory, at its producer's column."""
    a = graph.arrays
    since: dict[int, int] = {}
    lines = []
    row = 0  # the stage of the last computation
    done: set[int] = set()

    def end(value: int) -> None:
        if row > since[value]:
            x = float(a.position[a.producer[value]])
            lines.append([(x, float(since[value])), (x, row + 0.5)])

    for step in schedule:
        if isinstance(step, Free):
            end(step.value)
            del since[step.value]
        if isinstance(step, Fetch):
            since[step.value] = row
        if not isinstance(step, Compute):
            continue
        row = len(done)
        done.add(step.op)
        for value in a.outputs_of(step.op).tolist():
            if value in since:
                end(value)
            since[value] = row
    for value in since:
        end(value)
    return lines
