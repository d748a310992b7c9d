"""Charts as HTML: an SVG without text that stretches to any width, with its axis labels as text around it.

`chart(paths, x_ticks=ticks(3.0), y_ticks=ticks(8.0), ratio=0.4)`

Text inside a stretched SVG would be stretched too, and shrink on a phone. Coordinates run from 0 to `UNITS` both ways,
downwards as SVG has them. Colours come from the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from rematch.units import SECONDS_UNITS

UNITS = 1000
_MOST_TICKS = 5
_BYTES_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))

Tick = tuple[float, str]  # a place between 0 and 1, and what is written there


def chart(
    marks: str, *, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick], y_title: str, x_title: str, label: str
) -> str:
    """A chart with grid lines at `y_ticks`; `label` says what it shows to those who cannot see it."""
    grid = "".join(f"M0 {number((1 - at) * UNITS)}h{UNITS}" for at, _ in y_ticks)
    ys = "".join(f'<span style="bottom:{number(100 * at)}%">{escape(text)}</span>' for at, text in y_ticks)
    xs = "".join(f'<span style="left:{number(100 * at)}%">{escape(text)}</span>' for at, text in x_ticks)
    return (
        f'<div class="chart"><div class="title">{escape(y_title)}</div><div class="ys" aria-hidden="true">{ys}</div>'
        f'<div class="plot"><svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}"><path class="grid" d="{grid}"/>{marks}</svg></div>'
        f'<div class="xs" aria-hidden="true">{xs}</div><div class="title right">{escape(x_title)}</div></div>'
    )


def path(kind: str, data: str) -> str:
    """An SVG path that the style sheet knows as `kind`; nothing for one without points."""
    return f'<path class="{kind}" d="{data}"/>' if data else ""


def steps(edges: Sequence[float], levels: Sequence[float]) -> str:
    """A line that is at each level between its two edges; both are shares of the chart."""
    if not levels:
        return ""
    parts = [f"M{number(edges[0] * UNITS)} {number((1 - levels[0]) * UNITS)}"]
    for edge, level in zip(edges[1:], [*levels[1:], None], strict=True):
        parts.append(f"H{number(edge * UNITS)}")
        if level is not None:
            parts.append(f"V{number((1 - level) * UNITS)}")
    return "".join(parts)


def band(edges: Sequence[float], bottoms: Sequence[float], tops: Sequence[float]) -> str:
    """The area between two step lines."""
    if not tops:
        return ""
    back = [f"L{number(edges[-1] * UNITS)} {number((1 - bottoms[-1]) * UNITS)}"]
    for place in range(len(bottoms) - 1, -1, -1):
        back.append(f"V{number((1 - bottoms[place]) * UNITS)}H{number(edges[place] * UNITS)}")
    return steps(edges, tops) + "".join(back) + "Z"


def number(amount: float) -> str:
    """`number(12.30) == "12.3"`: a coordinate, no longer than a screen can show."""
    return f"{amount:.1f}".rstrip("0").rstrip(".") if math.isfinite(amount) else "0"


def ticks(top: float, unit: float = 1.0, suffix: str = "") -> list[Tick]:
    """Round amounts from 0 up to `top`, in `unit`s: `ticks(6.0)[1] == (1 / 3, "2")`."""
    amount = top / unit
    if not 0 < amount < 1e18:
        return [(0.0, f"0{suffix}")]
    rough = amount / _MOST_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    count = int(amount / step + 1e-9)
    return [(step * index / amount, f"{step * index:.6g}{suffix}") for index in range(count + 1)]


def bytes_ticks(top_bytes: float) -> tuple[list[Tick], str]:
    """Ticks of an axis in bytes, and its unit."""
    unit, name = next(((unit, name) for unit, name in _BYTES_UNITS if top_bytes >= unit), _BYTES_UNITS[-1])
    return ticks(top_bytes, unit), name


def seconds_ticks(top_seconds: float) -> tuple[list[Tick], str]:
    """Ticks of an axis in seconds, and its unit."""
    unit, name = next(((unit, name) for unit, name in SECONDS_UNITS if top_seconds >= unit), SECONDS_UNITS[-1])
    return ticks(top_seconds, unit), name


def bars(rows: Iterable[tuple[str, float, str]]) -> str:
    """A list of names with bars; each row is a name, an amount and how it is written."""
    rows = list(rows)
    most = max((amount for _, amount, _ in rows), default=0.0) or 1.0
    return (
        '<ul class="bars">'
        + "".join(
            f'<li><span class="name">{escape(name)}</span><span class="amount">{escape(text)}</span>'
            f'<span class="bar" style="width:{number(100 * amount / most)}%"></span></li>'
            for name, amount, text in rows
        )
        + "</ul>"
    )
