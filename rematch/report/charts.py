"""Charts of measurements: curves in panels side by side, and groups of bars; matplotlib is imported when one is drawn.

`draw_curves([Panel("VGG16", {"rounding": [(0.9, 1.2), (0.8, 2.1)]})], "curves.png", x="budget", y="overhead, %")`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from textwrap import fill
from typing import TYPE_CHECKING

from rematch.report.figure import new_figure, save_figure
from rematch.units import BYTES_UNITS, unit_for

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, each with a mark of its own, so that series stay apart for colour-blind readers and in grey.
_STYLES = (
    ("#D55E00", "o"), ("#0072B2", "s"), ("#009E73", "^"), ("#CC79A7", "v"),
    ("#56B4E9", "D"), ("#E69F00", "P"), ("#30363C", "X"), ("#9AA3AB", "*"),
    ("#7A5230", "h"), ("#6A3D9A", "p"),
)  # fmt: skip
_PANELS_IN_A_ROW = 3

_LETTERS_PER_INCH = 14  # of a legend, and of the title above it
_HANDLE_LETTERS = 7  # the width of a line with its marker and the gap after it


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a title, and series of (x, y) by name; a curve breaks where y is not a number.

    `y` labels an axis that is not as in other panels.
    """

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    y: str = ""
    logarithmic: bool = False


def draw_curves(
    panels: Sequence[Panel],
    path: str | PathLike[str],
    *,
    x: str,
    y: str,
    logarithmic: bool = False,
    columns: int = _PANELS_IN_A_ROW,
    title: str = "",
) -> None:
    """Draw the panels to a picture, so many in a row; a name has the same colour in each of them."""
    columns = min(columns, max(1, len(panels)))
    rows = -(-max(1, len(panels)) // columns)
    figure = new_figure(4.2 * columns, 3.4 * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    for panel, one in zip(panels, axes, strict=False):
        for name, points in panel.series.items():
            colour, mark = _STYLES[names.index(name) % len(_STYLES)]
            one.plot(*zip(*sorted(points), strict=True), color=colour, marker=mark, ms=4.5, lw=1.3, label=name)
        one.set(title=panel.title, xlabel=x, ylabel=panel.y or y)
        if logarithmic or panel.logarithmic:
            _scale_logarithmically(one)
        _tidy(one)
    for unused in axes[len(panels) :]:
        unused.remove()
    _legend(figure, names, title)
    save_figure(figure, path)


def draw_bars(groups: Mapping[str, Mapping[str, float]], path: str | PathLike[str], *, y: str, title: str = "") -> None:
    """Draw a group of bars for each key, one bar for each name in it."""
    figure = new_figure(1.5 + 1.9 * max(1, len(groups)), 4.0)
    axes = figure.subplots()
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    width = 0.8 / max(1, len(names))
    for rank, name in enumerate(names):
        at = [index for index, bars in enumerate(groups.values()) if name in bars]
        heights = [bars[name] for bars in groups.values() if name in bars]
        places = [index + (rank - (len(names) - 1) / 2) * width for index in at]
        drawn = axes.bar(places, heights, width, color=_STYLES[rank % len(_STYLES)][0], label=name)
        axes.bar_label(drawn, fmt="{:,.0f}", fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(y)
    axes.set_title(_fitting(title, figure), fontsize=9)
    _tidy(axes)
    _legend(figure, names)
    save_figure(figure, path)


def draw_areas(
    layers: Mapping[str, Sequence[int]], path: str | PathLike[str], *, title: str, mark: int | None = None
) -> None:
    """Draw bytes over operators as areas on top of each other; `mark` is the operator to point at."""
    figure = new_figure(9, 4.6)
    axes = figure.subplots()
    largest = max((sum(levels) for levels in zip(*layers.values(), strict=True)), default=0)
    scale, unit = unit_for(BYTES_UNITS, largest)
    heights = [[size / scale for size in sizes] for sizes in layers.values()]
    places = range(max(map(len, heights), default=0))
    colours = [_STYLES[rank % len(_STYLES)][0] for rank in range(len(layers))]
    axes.stackplot(places, *heights, labels=list(layers), colors=colours, alpha=0.85, lw=0)
    if mark is not None:
        axes.axvline(mark, color="#1A1A1A", lw=1, ls=(0, (4, 3)))
    axes.set(xlabel="operator, in the order of plain training", ylabel=f"memory ({unit})")
    axes.margins(x=0)
    axes.set_title(title, loc="left", fontsize=10)
    _tidy(axes)
    _legend(figure, list(layers))
    save_figure(figure, path)


def _scale_logarithmically(axes: Axes) -> None:
    """With plain numbers at 1, 2 and 5 of each power of ten, so that a narrow range has labels too."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E3E6E9", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _legend(figure: Figure, names: Sequence[str], title: str = "") -> None:
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    shown = [name for name in names if name in handles]
    longest = max(map(len, shown), default=1) + _HANDLE_LETTERS
    fitting = max(1, int(_LETTERS_PER_INCH * figure.get_figwidth() / longest))
    legend = figure.legend(
        [handles[name] for name in shown], shown,
        loc="outside upper center", ncols=min(6, fitting, max(1, len(shown))), frameon=False,
        fontsize=8, title=_fitting(title, figure), title_fontsize=9,
    )  # fmt: skip
    legend.get_title().set_multialignment("center")


def _fitting(title: str, figure: Figure) -> str:
    """The title with its lines broken where the picture ends."""
    letters = max(1, int(_LETTERS_PER_INCH * figure.get_figwidth()))
    return "\n".join(fill(line, letters) for line in title.splitlines())
