"""Rows of the ledger as curves of a chart.

`Panel("U-Net", series(rows, x=percent, y=overhead))`
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence

from rematch.units import format_bytes

from .ledger import FigureSettings, Row

Series = dict[str, list[tuple[float, float]]]
OVERHEAD = "extra time, %"
PERCENT = "budget, % of activations"
GIB = "budget, GiB"


def series(rows: Iterable[Row], x: Callable[[Row], float], y: Callable[[Row], float | None]) -> Series:
    """A curve for each method, broken where it found nothing."""
    curves: Series = {}
    for row in rows:
        height = None if row.overhead_percent is None else y(row)
        curves.setdefault(row.method, []).append((x(row), math.nan if height is None else height))
    return curves


def percent(row: Row) -> float:
    return row.percent


def gib(row: Row) -> float:
    return row.budget_bytes / 2**30


def overhead(row: Row) -> float | None:
    return row.overhead_percent


def title(name: str, rows: Sequence[Row]) -> str:
    """A panel's title: the model, its operators and its peak without recomputation."""
    return f"{name}: {rows[0].operators:,} operators, {format_bytes(rows[0].plain_peak_bytes)}"


def caption(text: str, settings: FigureSettings, rows: Iterable[Row]) -> str:
    """A picture's title, with what a missing point means, for how long each method ran and how busy the machine was."""
    drawn = list(rows)
    loads = [row.load_average for row in drawn if row.load_average]
    by_limit: dict[float, set[str]] = {}
    for row in drawn:
        by_limit.setdefault(row.limit_seconds, set()).add(row.method)
    usual = min(by_limit, default=settings.limit)
    longer = [f"{limit:g} s for points of {', '.join(sorted(by_limit[limit]))}" for limit in by_limit if limit > usual]
    load = f"; load average {min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} cores" if loads else ""
    who = "; HiRemate: H-ILP, rotor and TWRemat, as in the paper" if any(r.method == "HiRemate" for r in drawn) else ""
    return (
        f"{text}{who}\n"
        f"no point: nothing found in {'; '.join((f'{usual:g} s', *longer))}, or the method does not apply{load}"
    )
