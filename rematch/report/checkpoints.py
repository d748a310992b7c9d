"""A forward pass as a picture, with the checkpoints of one or several methods marked on it.

`draw_checkpoints(graph, {"ours": [0, 4, 9], "Chen's": [2, 5, 8]}, "checkpoints.png")`

One row for each method, the forward pass from left to right: an operator stands as far to the right as the longest way
to it has steps. Where there is room it is named, with the bytes that it makes. Edges that jump over operators bend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING

from rematch.graph import Graph
from rematch.report.figure import new_figure, picture_format, save_figure
from rematch.solvers.common.forward_pass import forward_ops
from rematch.units import count_of, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As in the paper's figures ours are green and Chen's red; Okabe and Ito's, so that all readers can tell them apart.
_COLOURS = ("#009E73", "#D55E00", "#0072B2", "#CC79A7")
_PLAIN, _EDGE, _INK = "#FFFFFF", "#9AA3AB", "#30363C"
_INCHES_PER_STEP, _WIDEST_INCHES = 0.55, 30.0
_MOST_NAMED_STEPS = 40  # with more there is no room for names

Place = tuple[float, float]


def draw_checkpoints(graph: Graph, choices: Mapping[str, Collection[int]], path: str | PathLike[str]) -> None:
    """Draw the forward pass of `graph` once for each of `choices`, whose operators are marked, to a picture."""
    picture_format(path)  # a bad name is refused before the work
    ops = forward_ops(graph).tolist()
    edges = _edges(graph, ops)
    places = _places(ops, edges)
    steps = max((x for x, _ in places.values()), default=0.0) + 1
    lanes = max((y for _, y in places.values()), default=0.0) * 2 + 1
    named = steps <= _MOST_NAMED_STEPS and lanes == 1
    row_inches = 0.9 + 0.35 * lanes + 0.9 * named
    figure = new_figure(min(_WIDEST_INCHES, max(7.0, steps * _INCHES_PER_STEP)), row_inches * max(1, len(choices)))
    rows = figure.subplots(max(1, len(choices)), 1, squeeze=False).ravel().tolist()
    for rank, (axes, (name, chosen)) in enumerate(zip(rows, choices.items(), strict=False)):
        kept = sum(_bytes_of(graph, op) for op in chosen)
        title = f"{graph.name}, {name}: {count_of(len(chosen), 'checkpoint')}, {format_bytes(kept)} of "
        title += format_bytes(sum(_bytes_of(graph, op) for op in ops))
        axes.set_title(title, loc="left", fontsize=10, color=_INK)
        _draw_edges(axes, edges, places)
        _draw_ops(axes, ops, places, set(chosen), _COLOURS[rank % len(_COLOURS)], steps)
        if named:
            _draw_names(axes, graph, ops, places)
        axes.set(xlim=(-0.8, steps - 0.2), ylim=(-lanes / 2 - 0.6 - 1.2 * named, lanes / 2 + 0.6))
        axes.set_axis_off()
    save_figure(figure, path, dpi=130)


def _edges(graph: Graph, ops: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of a forward operator and one that reads from it."""
    a = graph.arrays
    among = set(ops)
    return sorted({(int(maker), op) for op in ops for maker in a.producer[a.inputs_of(op)] if int(maker) in among})


def _places(ops: Sequence[int], edges: Sequence[tuple[int, int]]) -> dict[int, Place]:
    """Where each operator stands: its step to the right, and its lane among those of the same step, around 0."""
    before: dict[int, list[int]] = {op: [] for op in ops}
    for maker, reader in edges:
        before[reader].append(maker)
    step: dict[int, int] = {}
    columns: dict[int, list[int]] = {}
    for op in ops:
        step[op] = 1 + max((step[maker] for maker in before[op]), default=-1)
        columns.setdefault(step[op], []).append(op)
    places: dict[int, Place] = {}
    for at, column in sorted(columns.items()):
        lane = {op: _mean([places[maker][1] for maker in before[op]]) for op in column}
        for rank, op in enumerate(sorted(column, key=lambda op: -lane[op])):
            places[op] = float(at), (len(column) - 1) / 2 - rank
    return places


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _draw_edges(axes: Axes, edges: Sequence[tuple[int, int]], places: Mapping[int, Place]) -> None:
    from matplotlib.patches import FancyArrowPatch

    for maker, reader in edges:
        start, end = places[maker], places[reader]
        bend = -0.3 if end[0] - start[0] > 1 and start[1] == end[1] else 0.0
        arrow = FancyArrowPatch(
            start, end, arrowstyle="-", connectionstyle=f"arc3,rad={bend}", color=_EDGE, lw=0.9, zorder=1
        )
        axes.add_patch(arrow)


def _draw_ops(
    axes: Axes, ops: Sequence[int], places: Mapping[int, Place], chosen: set[int], colour: str, steps: float
) -> None:
    width = min(_WIDEST_INCHES, steps * _INCHES_PER_STEP)
    points = min(15.0, 0.55 * 72 * width / steps)  # so that neighbours do not touch
    fills = [colour if op in chosen else _PLAIN for op in ops]
    xs, ys = [places[op][0] for op in ops], [places[op][1] for op in ops]
    axes.scatter(xs, ys, s=points**2, c=fills, edgecolors=_INK, linewidths=0.7, zorder=2)


def _draw_names(axes: Axes, graph: Graph, ops: Sequence[int], places: Mapping[int, Place]) -> None:
    for op in ops:
        x, y = places[op]
        text = f"{graph.ops[op].name}, {format_bytes(_bytes_of(graph, op))}"
        axes.text(x, y - 0.35, text, rotation=45, ha="right", va="top", rotation_mode="anchor", fontsize=7, color=_INK)


def _bytes_of(graph: Graph, op: int) -> int:
    return sum(graph.values[value].size_bytes for value in graph.ops[op].outputs)
