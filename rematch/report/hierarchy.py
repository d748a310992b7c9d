"""A hierarchy of parts as a picture (HiRemate's figure 7).

`draw_hierarchy(graph, make_partitioner("hpartition").partition(graph), "hierarchy.png")`

In the picture a column is a forward operator, in the order in which the parts run, and a row a level: the whole graph
on top, single operators at the bottom. Parts of one colour are equal up to renaming; those in grey are the only ones of
their kind. Arcs above tie parts of the top level that exchange values over others in between, thicker for more bytes.
matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from os import PathLike
from typing import TYPE_CHECKING

from rematch.graph import Graph
from rematch.report.figure import new_figure, picture_format, save_figure
from rematch.solvers.hiremate.canonical import EqualBlocks, equal_blocks
from rematch.solvers.hiremate.partition import Part
from rematch.units import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Light tints, so that names stay readable on them; reused in turn when there are more classes.
_TINTS = ("#9ecae9", "#ffbf79", "#88d27a", "#f2cf5b", "#83bcb6", "#ff9d98", "#fcbfd2", "#d6a5c9", "#d8b5a5")
_GREY, _OPERATOR, _INK, _ARC = "#dcdfe2", "#eef1f3", "#30363C", "#7a8794"
_PICTURE_INCHES = 12.0
_LETTER_INCHES = 0.075  # about the width of a letter of a name
_LEAST_OUTLINED_INCHES = 0.03  # narrower boxes would be hidden by their outlines


@dataclass(frozen=True)
class _Box:
    """A part's place in the picture: columns from `start`, in row `level`."""

    part: Part
    level: int
    start: int


def draw_hierarchy(graph: Graph, root: Part, path: str | PathLike[str]) -> None:
    """Draw the parts of `root` to a .png, .svg or .pdf file, whole or not at all."""
    picture_format(path)  # a bad name is refused before the work
    boxes = list(_boxes(root))
    levels = max(box.level for box in boxes) + 1
    skips = _skips(graph, root)
    arcs_inches, rows_inches = 1.4 if skips else 0.05, 0.45 * levels
    figure = new_figure(_PICTURE_INCHES, 1.0 + arcs_inches + rows_inches)
    arcs, rows = figure.subplots(2, 1, sharex=True, height_ratios=(arcs_inches, rows_inches))
    _draw_arcs(arcs, root, skips)
    classes = _classes(graph, root)
    _draw_rows(rows, graph, boxes, _colours(classes))
    figure.suptitle(_title(graph, root, classes), fontsize=10, color=_INK)
    save_figure(figure, path)


def _classes(graph: Graph, root: Part) -> tuple[EqualBlocks, ...]:
    return equal_blocks(graph, [part.forward for part in root.walk() if not part.is_layer])


def _title(graph: Graph, root: Part, classes: tuple[EqualBlocks, ...]) -> str:
    operators = count_of(len(root.forward), "forward operator")
    parts = count_of(sum(len(alike.members) for alike in classes), "part")
    return (
        f"{graph.name or 'graph'}: {operators} in {parts}, {len(classes)} unique, "
        f"on {count_of(root.depth, 'level')}; {count_of(root.width, 'node')} on top"
    )


def _boxes(root: Part) -> Iterator[_Box]:
    """All parts, and the operators of parts at the bottom as elementary layers."""
    waiting = [_Box(root, 0, 0)]
    while waiting:
        box = waiting.pop()
        yield box
        start = box.start
        for child in _nodes(box.part):
            waiting.append(_Box(child, box.level + 1, start))
            start += len(child.forward)


def _nodes(part: Part) -> tuple[Part, ...]:
    """The children of a part; at the bottom, its operators as elementary layers."""
    return part.children or (() if part.is_layer else tuple(Part((op,)) for op in part.forward))


def _colours(classes: tuple[EqualBlocks, ...]) -> dict[tuple[int, ...], str]:
    """Per part by its operators: a tint for each class of several, grey for the others."""
    colours: dict[tuple[int, ...], str] = {}
    repeated = 0
    for alike in classes:
        several = len(alike.members) > 1
        colours |= dict.fromkeys(alike.members, _TINTS[repeated % len(_TINTS)] if several else _GREY)
        repeated += several
    return colours


def _draw_rows(axes: Axes, graph: Graph, boxes: list[_Box], colours: Mapping[tuple[int, ...], str]) -> None:
    operators = len(boxes[0].part.forward)
    inches = _PICTURE_INCHES / max(1, operators)  # of a column
    for level in range(max(box.level for box in boxes) + 1):
        row = [box for box in boxes if box.level == level]
        axes.broken_barh(
            [(box.start, len(box.part.forward)) for box in row],
            (level, 0.92),
            facecolors=[colours.get(box.part.forward, _OPERATOR) for box in row],
            edgecolors="white",
            linewidths=[0.5 if len(box.part.forward) * inches > _LEAST_OUTLINED_INCHES else 0.0 for box in row],
        )
        for box in row:
            letters = len(box.part.forward) * inches / _LETTER_INCHES
            name = next((name for name in _names(graph, box.part) if len(name) < letters), "")
            middle = box.start + len(box.part.forward) / 2
            axes.text(middle, level + 0.46, name, ha="center", va="center", fontsize=7, color=_INK)
    axes.set_xlim(0, max(1, operators))
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("forward operators, in the order in which parts run", fontsize=8, color=_INK)
    axes.tick_params(labelsize=8, colors=_INK)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _names(graph: Graph, part: Part) -> Iterator[str]:
    """What a part may be called, the most telling first: the module it is all in and those it spans inside it."""
    if part.is_layer:
        yield graph.ops[part.forward[0]].name
        return
    paths = [graph.ops[op].module_path.split(".") for op in part.forward]
    shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False)))
    inside = list(dict.fromkeys(path[shared] if len(path) > shared else "" for path in paths))
    module = ".".join(paths[0][:shared]) if paths else ""
    if module and len(inside) > 1 and all(inside):
        yield f"{module}.{inside[0]} \N{EN DASH} {inside[-1]}"
    yield module or count_of(len(part.forward), "operator")


def _draw_arcs(axes: Axes, root: Part, skips: Mapping[tuple[int, int], int]) -> None:
    """Each pair of nodes of the top level that exchange bytes, tied by half an ellipse."""
    import numpy as np

    ends = np.cumsum([0, *(len(child.forward) for child in _nodes(root))])
    most = max(skips.values(), default=0)
    half_circle = np.linspace(0, np.pi, 60)
    for (maker, reader), size_bytes in skips.items():
        left, right = (ends[maker] + ends[maker + 1]) / 2, (ends[reader] + ends[reader + 1]) / 2
        x = (left + right) / 2 - (right - left) / 2 * np.cos(half_circle)
        width = 0.4 + 1.2 * (size_bytes / most if most else 0.0)
        axes.plot(x, (right - left) ** 0.5 * np.sin(half_circle), color=_ARC, lw=width, alpha=0.75)
    axes.set_ylim(bottom=0)
    axes.axis("off")


def _skips(graph: Graph, root: Part) -> dict[tuple[int, int], int]:
    """Per pair of nodes of the top level with others in between, the bytes that one makes and the other reads."""
    node_of = {op: number for number, node in enumerate(_nodes(root)) for op in node.forward}
    exchanged = {(node_of[maker], node_of[reader], value) for maker, reader, value in _forward_reads(graph, node_of)}
    skips: Counter[tuple[int, int]] = Counter()
    for maker, reader, value in exchanged:
        if reader - maker > 1:
            skips[maker, reader] += graph.values[value].size_bytes
    return skips


def _forward_reads(graph: Graph, ops: Mapping[int, object]) -> Iterator[tuple[int, int, int]]:
    """Maker, reader and value, for all values that pass between these operators."""
    for reader in ops:
        for value in dict.fromkeys(graph.ops[reader].inputs):
            maker = int(graph.arrays.producer[value])
            if maker in ops:
                yield maker, reader, value
