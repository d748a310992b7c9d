"""Describe graphs, plans and failed searches in a few lines of text.

`print(describe_plan(plan))`
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rematch.graph import Graph, Link, Phase, baseline, simulate
from rematch.graph.blocks import BlockClass, repeated_blocks
from rematch.solvers.base import Status
from rematch.solvers.treewidth.width import quick_width
from rematch.units import count_of, format_bytes, format_extra, format_seconds, printable

if TYPE_CHECKING:
    from rematch.planning.plan import Figures, Plan, Recomputed

_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 60
_GROUPS_SHOWN = 8
_NAME_LETTERS = 100  # of a name, before it is cut


def sparkline(levels: Sequence[int], top: int, width: int = _SPARKLINE_WIDTH) -> str:
    """Draw `levels` as one line of bars, each the maximum of its share; a full bar is `top`."""
    if not levels or top <= 0:
        return ""
    edges = np.linspace(0, len(levels), min(width, len(levels)) + 1).astype(int)
    highest = np.maximum.reduceat(np.asarray(levels), edges[:-1]).tolist()  # Python's numbers, which never overflow
    return "".join(_BARS[min(len(_BARS) - 1, level * len(_BARS) // top)] for level in highest)


def describe_graph(graph: Graph) -> str:
    """Describe a graph: what it holds, what it needs without recomputation, and the least it can need."""
    seen = simulate(graph, baseline(graph))
    a = graph.arrays
    made = _by_phase(graph, lambda ops: format_bytes(_output_bytes(graph, ops)))
    spent = _by_phase(graph, lambda ops: format_seconds(float(a.seconds[ops].sum())))
    rows = [
        ("operators", f"{len(graph.ops):,}", _by_phase(graph, lambda ops: f"{len(ops):,}")),
        ("values", f"{len(graph.values):,}", _roles(graph)),
        ("sizes", format_bytes(int(a.size.sum())), made),
        ("time", format_seconds(graph.baseline_seconds), spent),
        *([("link", *_link(graph.link))] if graph.link else []),
        ("peak", format_bytes(seen.peak_bytes), f"without recomputation{_peak_place(graph, seen.peak_step)}"),
    ]
    if graph.ops:
        rows.append(("width", *_width(graph)))
    rows += [("blocks", f"{len(block.paths)} alike", _block_note(block)) for block in repeated_blocks(graph)]
    if graph.ops:
        largest = _quoted(graph.ops[int(np.argmax(graph.op_bytes))].name)
        share = _share(graph.largest_op_bytes, seen.peak_bytes)
        floor = f"{share} of the peak: what {largest} needs by itself; no budget below it can work"
        during = seen.timeline_bytes[baseline(graph).steps >= 0]
        rows.append(("least", format_bytes(graph.largest_op_bytes), floor))
        rows.append(("memory", sparkline(during.tolist(), seen.peak_bytes), ""))
    return table(f"{_title(graph.name)}  (fingerprint {graph.fingerprint[:8]})", rows)


def _link(link: Link) -> tuple[str, str]:
    out_speed, in_speed = (format_bytes(int(speed)) for speed in link.speeds)
    return f"{out_speed}/s", f"out, {in_speed}/s in, to {format_bytes(link.host_bytes)} of host memory"


def _width(graph: Graph) -> tuple[str, str]:
    """How far the graph is from a tree."""
    found = quick_width(graph)
    if found is None:
        return "unknown", "the graph is too dense to look for a tree decomposition"
    width, heuristic = found
    return f"{width:,}", f"at most: that of a tree decomposition by {heuristic}"


def _block_note(block: BlockClass) -> str:
    shown = ", ".join(printable(path, _NAME_LETTERS) for path in block.paths[:3]) + (
        ", ..." if len(block.paths) > 3 else ""
    )
    return f"{count_of(len(block.ops[0]), 'operator')} each: {shown}"


def _by_phase(graph: Graph, shown: Callable[[list[int]], str]) -> str:
    members = {phase: [index for index, op in enumerate(graph.ops) if op.phase is phase] for phase in Phase}
    return ", ".join(f"{phase.value} {shown(ops)}" for phase, ops in members.items() if ops)


def _output_bytes(graph: Graph, ops: Iterable[int]) -> int:
    return sum(graph.values[value].size_bytes for op in ops for value in graph.ops[op].outputs)


def _roles(graph: Graph) -> str:
    roles = {
        "resident": [index for index, value in enumerate(graph.values) if value.resident],
        "targets": sorted(graph.targets),
        "held": sorted(graph.held),
    }
    return ", ".join(
        f"{role} {len(members):,} ({format_bytes(sum(graph.values[index].size_bytes for index in members))})"
        for role, members in roles.items()
        if members
    )


def _peak_place(graph: Graph, peak_step: int | None) -> str:
    if peak_step is None:
        return ""
    schedule = baseline(graph)
    op = graph.ops[schedule.steps[peak_step]]
    nth = int((schedule.steps[: peak_step + 1] >= 0).sum())
    return f", while {_quoted(op.name)} runs ({op.phase.value}, {nth:,} of {len(graph.ops):,})"


def describe_plan(plan: Plan) -> str:
    """Describe a plan: its memory and time, how good it is known to be, and what it recomputes."""
    f = plan.figures
    before = format_bytes(f.baseline_peak_bytes)
    extra_runs = count_of(sum(entry.extra_runs for entry in plan.recomputed), "extra run")
    effort = (
        f"in {format_seconds(f.solve_seconds)}; {len(plan.recomputed):,} of {count_of(plan.graph_ops, 'operator')} "
        f"recomputed, {extra_runs}"
    )
    share = _share(f.budget_bytes, f.baseline_peak_bytes)
    rows = [
        ("budget", format_bytes(f.budget_bytes), f"{share} of {before} without recomputation"),
        ("peak", format_bytes(f.peak_bytes or 0), f"{_share(f.peak_bytes or 0, f.budget_bytes)} of the budget"),
        ("step", format_extra(f.overhead_pct), _times(f)),
        ("bound", format_extra(f.lower_bound_pct), _bound(f)),
        *([("moves", format_bytes(plan.moved.out_bytes), str(plan.moved))] if plan.moved else []),
        *_link_use(plan),
        ("by", f.solver, effort),
        *_found(plan),
        ("memory", sparkline(plan.timeline_bytes, f.baseline_peak_bytes), ""),
        *_link_lines(plan),
        *(("note", note, "") for note in plan.notes),
    ]
    if plan.parts:
        rows.insert(2, ("parts", ", ".join(f"{part.role} {format_bytes(part.size_bytes)}" for part in plan.parts), ""))
    text = table(f"{_title(plan.graph_name)}  (plan for graph {plan.graph_fingerprint[:8]})", rows)
    return "\n".join([text, *_recomputed_groups(plan.recomputed, f.baseline_seconds)])


def _link_use(plan: Plan) -> list[tuple[str, str, str]]:
    """How long each direction of the link is busy, and what is in host memory in the end."""
    moved, seconds = plan.moved, plan.figures.seconds
    if moved is None or not seconds:
        return []
    out, back = (
        f"{format_seconds(busy)} ({100 * busy / seconds:.0f} %)" for busy in (moved.out_seconds, moved.in_seconds)
    )
    busy = f"busy out {out}, in {back} of a step; {format_bytes(moved.host_bytes)} of host memory"
    return [("link", _share_of_time(moved.stall_seconds, seconds), f"of a step waits for it; {busy}")]


def _share_of_time(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.1f} %"


def _link_lines(plan: Plan) -> list[tuple[str, str, str]]:
    """Below the memory, how busy each direction of the link is and how much of the time is waited for it."""
    if plan.moved is None:
        return []
    rows = (("out", plan.moved.out_busy), ("in", plan.moved.in_busy), ("waits", plan.moved.stalled))
    return [(label, sparkline(shares, 100), "") for label, shares in rows if any(shares)]


def _found(plan: Plan) -> list[tuple[str, str, str]]:
    """Say which of several methods found the schedule, when, and which others took part."""
    asked = list(dict.fromkeys(progress.solver for progress in plan.log))
    known = [progress for progress in plan.log if progress.best_seconds is not None]
    if len(asked) < 2 or not known:
        return []
    winner = min(known, key=lambda progress: progress.best_seconds or 0.0)
    others = ", ".join(solver for solver in asked if solver != winner.solver)
    return [("found", f"by {winner.solver}", f"after {format_seconds(winner.at_seconds)}; others: {others}")]


def _times(f: Figures) -> str:
    if f.seconds is None:
        return ""
    return f"{format_seconds(f.seconds)} instead of {format_seconds(f.baseline_seconds)}"


def _bound(f: Figures) -> str:
    if f.lower_bound_pct is None:
        return f"solver {f.solver!r} gives none"
    if f.status is Status.OPTIMAL:
        return f"optimal: no schedule is faster ({f.bound_scope.value})"
    return f"at most {f.gap_pct:.2f} points from the fastest schedule ({f.bound_scope.value})"


def _recomputed_groups(recomputed: Iterable[Recomputed], baseline_seconds: float) -> list[str]:
    """The costliest groups of recomputed operators; numbers in names are what tells repeated blocks apart."""
    groups: dict[str, list[Recomputed]] = defaultdict(list)
    for entry in recomputed:
        groups[_group_name(entry)].append(entry)
    cost = {name: sum(entry.extra_seconds for entry in members) for name, members in groups.items()}
    costliest = sorted(groups, key=lambda name: (-cost[name], name))
    lines = []
    for name in costliest[:_GROUPS_SHOWN]:
        runs = sum(entry.extra_runs for entry in groups[name])
        share = f"+{100 * cost[name] / baseline_seconds:.2f} %" if baseline_seconds > 0 else ""
        lines.append(f"    {runs:>6,} x  {share:>9}  {printable(name, _NAME_LETTERS)}")
    if len(costliest) > _GROUPS_SHOWN:
        rest = costliest[_GROUPS_SHOWN:]
        lines.append(f"    and {count_of(len(rest), 'other group')}")
    return ["  again, costliest first", *lines] if lines else []


def _group_name(entry: Recomputed) -> str:
    """`h.*.mlp.act  gelu` for a captured operator, its own name with numbers left out for any other."""
    if not entry.module_path or entry.name.startswith(entry.module_path):
        return re.sub(r"\d+", "*", entry.name)
    kernels = "+".join(re.sub(r"_\d+$", "", kernel) for kernel in entry.name.split("+"))
    return f"{re.sub(r'[0-9]+', '*', entry.module_path)}  {kernels}"


def describe_failure(figures: Figures, graph_name: str, time_limit: float) -> str:
    """Describe a search without a schedule in one line: what is known, and what to try."""
    f = figures
    budget = f"{format_bytes(f.budget_bytes)} ({_share(f.budget_bytes, f.baseline_peak_bytes)} of the peak)"
    by = f"{f.solver!r} in {format_seconds(f.solve_seconds)}"
    if f.status is Status.INFEASIBLE:
        what = f"{_quoted(graph_name)} has no schedule within {budget}, proved by {by} ({f.bound_scope.value})"
    else:
        what = f"no schedule for {_quoted(graph_name)} within {budget} found by {by}, and none ruled out"
    return "; ".join([what, *_known_limits(f), _what_to_try(f, ran_out_of_time=f.solve_seconds >= time_limit)])


def _known_limits(f: Figures) -> list[str]:
    known = []
    if f.infeasible_up_to_bytes is not None:
        known.append(f"nothing fits up to {format_bytes(f.infeasible_up_to_bytes)}")
    if f.feasible_from_bytes is not None:
        known.append(f"a schedule is known for {format_bytes(f.feasible_from_bytes)}")
    return known


def _what_to_try(f: Figures, ran_out_of_time: bool) -> str:
    if f.feasible_from_bytes is not None:
        return f"try --budget {f.feasible_from_bytes}"
    if f.status is Status.INFEASIBLE:
        return "try a larger --budget"
    longer = ", a longer --time-limit" if ran_out_of_time else ""
    return f"try a larger --budget{longer} or another --solver (rematch solvers)"


def _title(graph_name: str) -> str:
    return printable(graph_name, _NAME_LETTERS) or "graph"


def _quoted(name: str) -> str:
    return f"'{printable(name, _NAME_LETTERS)}'"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "all"


def table(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """Aligned columns; a cell without a note does not widen its column. Names in it are made safe to print."""
    rows = [(printable(label), printable(cell), printable(note)) for label, cell, note in rows]
    label_width = max(len(label) for label, _, _ in rows)
    cell_width = max(len(cell) for _, cell, note in rows if note)
    lines = (f"  {label:<{label_width}}  {cell:<{cell_width}}  {note}".rstrip() for label, cell, note in rows)
    return "\n".join([printable(title), *lines])
