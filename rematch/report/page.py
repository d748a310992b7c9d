"""A plan as one HTML page that needs nothing else: no network, no library, no server.

`write_page(plan, "plan.html")`

The pictures are SVG, made here; the script only tells what is under the pointer. Names of operators and modules come
from files and from other people's code: they are escaped in the page, and so is every `<` of the JSON that the script
reads.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from rematch import __version__
from rematch.files import write_text
from rematch.graph import Graph, Phase, Schedule, baseline
from rematch.graph.model import Longs
from rematch.graph.traffic import traffic
from rematch.report.chart_html import UNITS, band, bars, bytes_ticks, chart, number, path, seconds_ticks, steps, ticks
from rematch.report.link_html import host_line, link_chart, said
from rematch.report.plot import first_runs, kept_lines
from rematch.report.timeline import MOST_SAMPLES, Timeline, module_pattern, timeline
from rematch.solvers.base import Status
from rematch.units import count_of, format_bytes, format_extra, format_seconds, printable

if TYPE_CHECKING:
    from rematch.planning.plan import Figures, Plan

_NAME_LETTERS = 120
_ROWS_SHOWN = 12
_LOG_ROWS = 30
_HEADROOM = 1.04  # above the highest line
_FINE_MATRIX_OPS = 150  # with more, cells are smaller than marks that can be seen
_NOTEBOOK_SAMPLES = 200


def write_page(plan: Plan, file: str | PathLike[str], trade_off: Iterable[Figures] = ()) -> None:
    """Write the page, whole or not at all. `trade_off` draws the curve of extra time against budgets too."""
    write_text(file, page(plan, trade_off))


def page(plan: Plan, trade_off: Iterable[Figures] = ()) -> str:
    """The page as text."""
    name = _short(plan.graph_name) or "graph"
    engine = f", engine {plan.engine}" if plan.engine else ""
    about = f"Plan for graph {plan.graph_fingerprint[:8]}, {count_of(plan.graph_ops, 'operator')}{engine}"
    sections = [_tiles(plan), _memory(plan), _extra_time(plan), _trade_off(trade_off, plan), _proof(plan)]
    if plan.graph is not None:
        sections.insert(2, _schedule(plan.graph, plan.schedule))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}: rematch plan</title><style>{_asset('page.css')}</style></head>\n<body><main>"
        f"<header><h1>{escape(name)}</h1><p>{escape(about)}</p></header>\n"
        + "\n".join(section for section in sections if section)
        + f"\n<footer>rematch {__version__}</footer></main>\n"
        f'<script type="application/json" id="data">{_script_data(plan)}</script>\n'
        f"<script>{_asset('page.js')}</script></body></html>\n"
    )


def notebook_html(plan: Plan) -> str:
    """A compact summary for notebooks: the figures and the memory over time."""
    name = _short(plan.graph_name) or "graph"
    css = _asset("page.css").replace(":root", "&").replace("body{", "&{")  # below `.rematch` alone
    return (
        f'<div class="rematch"><style>.rematch{{padding:.5rem;max-width:56rem;{css}}}</style>'
        f"<h3>{escape(name)}</h3>{_tiles(plan)}{_memory_chart(plan, _NOTEBOOK_SAMPLES)}{_legend(plan)}</div>"
    )


def _asset(name: str) -> str:
    return files("rematch.report").joinpath(name).read_text(encoding="utf-8").strip()


def _short(text: str) -> str:
    return printable(text, _NAME_LETTERS)


def _section(title: str, body: str, said: str = "") -> str:
    return f"<section><h2>{escape(title)}</h2>{f'<p>{escape(said)}</p>' if said else ''}{body}</section>"


def _tiles(plan: Plan) -> str:
    f = plan.figures
    share = f"{100 * f.budget_bytes / f.baseline_peak_bytes:.1f} % of " if f.baseline_peak_bytes else ""
    runs = count_of(sum(entry.extra_runs for entry in plan.recomputed), "extra run")
    bound = "proved optimal" if f.status is Status.OPTIMAL else f"bound {format_extra(f.lower_bound_pct)}"
    rows = [
        ("Budget", format_bytes(f.budget_bytes), f"{share}{format_bytes(f.baseline_peak_bytes)} without recomputation"),
        ("Peak", format_bytes(f.peak_bytes or 0), _of_the_budget(f)),
        ("Extra time", format_extra(f.overhead_pct), f"{format_seconds(f.seconds or 0.0)} a step; {bound}"),
        ("Recomputed", f"{len(plan.recomputed):,} of {plan.graph_ops:,}", f"operators, {runs}"),
    ]
    if plan.moved:
        rows.append(("Moved", format_bytes(plan.moved.out_bytes), str(plan.moved)))
    return (
        '<div class="tiles">'
        + "".join(
            f"<div><small>{escape(label)}</small><b>{escape(value)}</b><small>{escape(note)}</small></div>"
            for label, value, note in rows
        )
        + "</div>"
    )


def _of_the_budget(f: Figures) -> str:
    return f"{100 * (f.peak_bytes or 0) / f.budget_bytes:.1f} % of the budget" if f.budget_bytes else ""


# Memory


def _memory(plan: Plan) -> str:
    parts = bars((part.role, part.size_bytes, format_bytes(part.size_bytes)) for part in plan.parts)
    if plan.graph is None:
        said = "This plan came without its graph, so the page cannot tell which modules hold the memory."
        return _section("Memory over time", _memory_chart(plan) + _legend(plan) + parts, said)
    views = _views(plan)
    buttons = "".join(
        f'<button type="button" data-view="{view}" aria-pressed="{"true" if view == "plan" else "false"}">'
        f"{escape(title)}</button>"
        for view, title in (("plan", "this plan"), ("plain", "without recomputation"))
        if view in views
    )
    return _section(
        "Memory over time",
        f'<div class="choice" id="views">{buttons}</div><div id="memory" tabindex="0">{_memory_chart(plan)}</div>'
        f'{_legend(plan)}{_link(plan)}<div id="held" aria-live="polite"></div>'
        "<noscript>The rest of this section needs JavaScript.</noscript>",
        "Point at the picture, or use the arrow keys, to see what holds the memory at that moment.",
    )


def _link(plan: Plan) -> str:
    """The link below the memory, over the same time; nothing where no value moves."""
    if plan.moved is None or plan.graph is None:
        return ""
    link = traffic(plan.graph, plan.schedule)
    seconds = max(view.seconds for view in _views(plan).values())
    return f'<div class="strip">{link_chart(link, seconds)}</div><p>{escape(said(link))}</p>'


def _views(plan: Plan, most_samples: int = MOST_SAMPLES) -> dict[str, Timeline]:
    """What the picture can show: the plan, and plain training where that is something else."""
    assert plan.graph is not None
    shown = {"plan": timeline(plan.graph, plan.schedule, most_samples)}
    if plan.recomputed or plan.moved:
        shown["plain"] = timeline(plan.graph, baseline(plan.graph), most_samples)
    return shown


def _memory_chart(plan: Plan, most_samples: int = MOST_SAMPLES) -> str:
    f = plan.figures
    host_bytes = plan.moved.host_bytes if plan.moved and plan.graph is not None else 0
    shown_budget = f.budget_bytes if plan.recomputed else 0
    top = _HEADROOM * max(f.baseline_peak_bytes, shown_budget, f.peak_bytes or 0, host_bytes, 1)
    y_ticks, y_unit = bytes_ticks(top)
    label = f"Memory over time: at most {format_bytes(f.peak_bytes or 0)}, budget {format_bytes(f.budget_bytes)}"
    budget = path("budget", f"M0 {number((1 - f.budget_bytes / top) * UNITS)}h{UNITS}" if f.budget_bytes <= top else "")
    if plan.graph is None:
        levels = _highest(plan.timeline_bytes, most_samples)
        edges = [index / max(1, len(levels)) for index in range(len(levels) + 1)]
        shares = [level / top for level in levels]
        marks = path("stack g3", band(edges, [0.0] * len(levels), shares)) + path("outline", steps(edges, shares))
        x_ticks, x_title = ticks(len(plan.timeline_bytes)), "computations"
        return chart(
            marks + budget, x_ticks=x_ticks, y_ticks=y_ticks, y_title=f"memory, {y_unit}", x_title=x_title, label=label
        )
    views = _views(plan, most_samples)
    seconds = max(view.seconds for view in views.values()) or 1.0
    x_ticks, x_unit = seconds_ticks(seconds)
    marks = "".join(
        f'<g class="view" data-of="{name}"{"" if name == "plan" else " hidden"}>{_stack(view, seconds, top)}</g>'
        for name, view in views.items()
    )
    if "plain" in views:
        plain = views["plain"]
        marks += path("plain", steps(_edges(plain, seconds), [sample.total_bytes / top for sample in plain.samples]))
    if plan.moved is not None:
        marks += host_line(traffic(plan.graph, plan.schedule), seconds, top)
    return chart(
        marks + budget + '<path class="cursor" d=""/>',
        x_ticks=x_ticks, y_ticks=y_ticks, y_title=f"memory, {y_unit}", x_title=f"time, {x_unit}", label=label,
    )  # fmt: skip


def _highest(levels: Sequence[int], most: int) -> list[int]:
    """The levels, or the highest of each share of them."""
    if len(levels) <= most:
        return list(levels)
    starts = np.linspace(0, len(levels), most, endpoint=False).astype(int)
    return [int(level) for level in np.maximum.reduceat(np.asarray(levels), starts)]


def _edges(view: Timeline, seconds: float) -> list[float]:
    return [0.0, *(sample.end_seconds / seconds for sample in view.samples)]


def _stack(view: Timeline, seconds: float, top: float) -> str:
    """The groups on top of each other, the line around them, and a strip where something is computed again."""
    edges = _edges(view, seconds)
    held = np.array([sample.held_bytes for sample in view.samples], dtype=np.float64).reshape(-1, len(view.groups))
    tops = np.cumsum(held, axis=1) / top
    marks = []
    for group in range(len(view.groups)):
        bottoms = tops[:, group - 1].tolist() if group else [0.0] * len(tops)
        if held[:, group].any():
            marks.append(path(f"stack {_colour(view.groups, group)}", band(edges, bottoms, tops[:, group].tolist())))
    marks.append(path("outline", steps(edges, tops[:, -1].tolist() if len(tops) else [])))
    again = "".join(
        f"M{number(UNITS * start)} {UNITS - 8}H{number(UNITS * max(end, start + 0.001))}"
        for start, end, sample in zip(edges, edges[1:], view.samples, strict=False)
        if sample.recomputes
    )
    return "".join(marks) + path("again", again)


def _colour(groups: Sequence[str], group: int) -> str:
    """The style class of a group: the fixed ones have their own, modules take theirs in turn."""
    fixed = {"parameters": "parameters", "other residents": "residents", "gradients": "gradients"}
    if group == len(groups) - 1:
        return "workspace"
    modules = [name for name in groups[:-1] if name not in fixed]
    return fixed.get(groups[group]) or f"g{modules.index(groups[group])}"


def _legend(plan: Plan) -> str:
    lines = [("budget", "budget")]
    if plan.graph is not None and (plan.recomputed or plan.moved):
        lines.append(("plain", "without recomputation"))
    if plan.graph is not None and plan.recomputed:
        lines.append(("again", "computed again"))
    if plan.graph is not None and plan.moved:
        lines.append(("host", "in host memory"))
    return (
        '<ul class="legend">'
        + "".join(f'<li><i class="line {kind}"></i>{escape(text)}</li>' for kind, text in lines)
        + "</ul>"
    )


# Schedule


def _schedule(graph: Graph, schedule: Schedule) -> str:
    """Stages downwards, operators to the right, as in figure 7 of the Checkmate paper."""
    count = max(1, len(graph.ops))
    ops = schedule.ops
    first = first_runs(ops)
    column = graph.arrays.position[ops]
    stage: Longs = np.cumsum(first) - first
    backward = np.array([graph.ops[op].phase is not Phase.FORWARD for op in ops], dtype=np.bool_)
    kept = "".join(
        f"M{number(UNITS * (line[0][0] + 0.5) / count)} {number(UNITS * line[0][1] / count)}"
        f"V{number(UNITS * line[1][1] / count)}"
        for line in kept_lines(graph, schedule)
    )
    fine = count <= _FINE_MATRIX_OPS
    marks = [f'<path class="kept" style="stroke-width:{max(0.25, 400 / count):.2f}" d="{kept}"/>' if kept else ""]
    for kind, chosen in (("forward", first & ~backward), ("backward", first & backward), ("repeated", ~first)):
        cells = [_cell(int(x), int(y), count, fine) for x, y in zip(column[chosen], stage[chosen], strict=True)]
        marks.append(path(f"cell {kind}{'' if fine else ' dots'}", "".join(cells)))
    x_ticks = ticks(count)
    y_ticks = [(1 - at, text) for at, text in x_ticks]
    picture = chart(
        "".join(marks), x_ticks=x_ticks, y_ticks=y_ticks, y_title="stage", x_title="operator, in default order",
        label="The schedule: what is computed for the first time, computed again and kept in each stage",
    )  # fmt: skip
    legend = "".join(
        f'<li><i class="{kind}"></i>{text}</li>'
        for kind, text in (
            ("forward", "forward"),
            ("backward", "loss and backward"),
            ("repeated", "computed again"),
            ("kept", "kept in memory"),
        )
    )
    said = (
        "A row is a stage: what happens up to the next first computation. First computations make the diagonal, "
        "and everything left of it is computed again."
    )
    body = f'<div id="schedule" class="square">{picture}</div><ul class="legend">{legend}</ul>'
    return _section("Schedule", f'{body}<p id="pointed" class="said">Point at the picture to see names.</p>', said)


def _cell(column: int, stage: int, count: int, fine: bool) -> str:
    """A square of the matrix, or a dot in its middle where squares would be too small."""
    cell = UNITS / count
    if fine:
        return f"M{number(column * cell)} {number(stage * cell)}h{cell:.2f}v{cell:.2f}h-{cell:.2f}z"
    return f"M{number((column + 0.5) * cell)} {number((stage + 0.5) * cell)}h0"


# Time


def _extra_time(plan: Plan) -> str:
    if not plan.recomputed:
        why = "what does not fit the budget moves to host memory" if plan.moved else "everything fits the budget"
        return _section("Where the extra time goes", "", f"Nothing is computed again: {why}.")
    by_module: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    by_kernel: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for entry in plan.recomputed:
        kernels = "+".join(re.sub(r"_\d+(?=$|\.)", "", kernel) for kernel in entry.name.split("+"))
        for sums, key in ((by_module, entry.module_path), (by_kernel, kernels)):
            total = sums[module_pattern(key) or "outside of submodules"]
            total[0] += entry.extra_seconds
            total[1] += entry.extra_runs
    seconds = plan.figures.baseline_seconds
    return _section(
        "Where the extra time goes",
        '<div class="columns">'
        f"<div><h3>by module</h3>{_costliest(by_module, seconds)}</div>"
        f"<div><h3>by operator</h3>{_costliest(by_kernel, seconds)}</div></div>",
        "In per cent of a step without recomputation. A * stands for the numbers of repeated blocks.",
    )


def _costliest(sums: dict[str, list[float]], baseline_seconds: float) -> str:
    ranked = sorted(sums, key=lambda name: (-sums[name][0], name))
    rows = [(name, sums[name][0], sums[name][1]) for name in ranked[:_ROWS_SHOWN]]
    if len(ranked) > _ROWS_SHOWN:
        rest = ranked[_ROWS_SHOWN:]
        rows.append((f"{len(rest)} others", sum(sums[name][0] for name in rest), sum(sums[name][1] for name in rest)))
    return bars(
        (_short(name), seconds, f"{_share(seconds, baseline_seconds)}{int(runs):,} x") for name, seconds, runs in rows
    )


def _share(seconds: float, whole: float) -> str:
    return f"+{100 * seconds / whole:.2f} %, " if whole > 0 else ""


# Trade-off and proof


def _trade_off(figures: Iterable[Figures], plan: Plan) -> str:
    points = [(f.budget_bytes, f.overhead_pct, f.lower_bound_pct) for f in figures if f.overhead_pct is not None]
    points.sort(key=lambda point: point[0])
    if not points:
        return ""
    most_bytes = _HEADROOM * max(points[-1][0], plan.figures.baseline_peak_bytes, 1)
    extra = [pct for _, pct, _ in points]
    top = 1.1 * max([*extra, plan.figures.overhead_pct or 0.0, 0.1])
    x_ticks, x_unit = bytes_ticks(most_bytes)

    def line(kind: str, ends: Sequence[tuple[float, float]]) -> str:
        places = [f"{number(UNITS * x / most_bytes)} {number(UNITS * (1 - y / top))}" for x, y in ends]
        return path(kind, f"M{'L'.join(places)}" if places else "")

    known = [(budget, pct) for budget, pct, _ in points]
    here = [(plan.figures.budget_bytes, plan.figures.overhead_pct or 0.0)]
    marks = line("bound", [(budget, bound) for budget, _, bound in points if bound is not None]) + line("curve", known)
    marks += "".join(line("spot", [spot, spot]) for spot in known) + line("spot chosen", here * 2)
    picture = chart(
        marks, x_ticks=x_ticks, y_ticks=ticks(top), y_title="extra time, %", x_title=f"budget, {x_unit}",
        label="Extra time against budgets",
    )  # fmt: skip
    legend = '<ul class="legend"><li><i class="line curve"></i>found</li><li><i class="line bound"></i>lower bound</li>'
    legend += '<li><i class="round"></i>this plan</li></ul>'
    return _section("Trade-off", picture + legend, "The least extra time that was found for each budget.")


def _proof(plan: Plan) -> str:
    rows = plan.log if len(plan.log) <= _LOG_ROWS else [*plan.log[: _LOG_ROWS // 2], *plan.log[-_LOG_ROWS // 2 :]]
    left_out = len(plan.log) - len(rows)
    whole = plan.figures.baseline_seconds
    log = "".join(
        f"<tr><td>{format_seconds(row.at_seconds)}</td><td>{escape(_short(row.solver))}</td>"
        f"<td>{_pct(row.best_seconds, whole)}</td><td>{_pct(row.bound_seconds, whole)}</td>"
        f"<td>{escape(_short(row.message))}</td></tr>"
        for row in rows
    )
    head = "<tr><th>after</th><th>method</th><th>best</th><th>bound</th><th>what it did</th></tr>"
    table = f'<details><summary>The search, {count_of(len(plan.log), "line")}</summary><div class="wide"><table>'
    table += f"{head}{log}</table></div>{f'<p>{left_out} lines in between are left out.</p>' if left_out else ''}"
    table += "</details>"
    notes = "".join(f"<li>{escape(printable(note))}</li>" for note in plan.notes)
    body = (f"<ul>{notes}</ul>" if notes else "") + (table if plan.log else "")
    return _section("How good it is", body, verdict(plan.figures))


def _pct(seconds: float | None, whole: float) -> str:
    return "" if seconds is None or whole <= 0 else f"+{abs(100 * (seconds / whole - 1)):.2f} %"


def verdict(f: Figures) -> str:
    """What is proved about the schedule, in words."""
    by = f"Found by {f.solver} in {format_seconds(f.solve_seconds)}."
    if f.lower_bound_pct is None:
        return f"{by} This method gives no lower bound, so how much faster another schedule could be is not known."
    scope = f"The bound holds for: {f.bound_scope.value}."
    if f.status is Status.OPTIMAL:
        fastest = format_extra(f.overhead_pct)
        return f"{by} Proved optimal: no schedule within this budget takes less extra time than {fastest}. {scope}"
    return (
        f"{by} The schedule takes {format_extra(f.overhead_pct)}, and none within this budget can take less than "
        f"{format_extra(f.lower_bound_pct)}: another could save at most {f.gap_pct:.2f} points. {scope}"
    )


# What the script reads


def _script_data(plan: Plan) -> str:
    data: dict[str, Any] = {}
    graph = plan.graph
    if graph is not None:
        views = _views(plan)
        data["seconds"] = max(view.seconds for view in views.values())
        data["views"] = {name: _view_data(view) for name, view in views.items()}
        data["order"] = [int(op) for op in graph.order]
        data["ops"] = [[_short(op.name), _short(op.module_path), op.phase.value] for op in graph.ops]
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _view_data(view: Timeline) -> dict[str, Any]:
    return {
        "groups": [[_short(name), _colour(view.groups, index)] for index, name in enumerate(view.groups)],
        "ends": [float(f"{sample.end_seconds:.6g}") for sample in view.samples],
        "ops": [sample.op for sample in view.samples],
        "again": [int(sample.again) for sample in view.samples],
        "held": [list(sample.held_bytes) for sample in view.samples],
    }
