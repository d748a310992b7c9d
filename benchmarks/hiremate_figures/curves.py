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
HIREMATE_LABEL = "HiRemate"
_LONGEST_BESIDE = 20  # letters of a name that has room for more in the same line of a title
WHO_RAN = {  # by the labels of methods
    "Checkmate's program": "by HiGHS",
    "moccasin": "CP-SAT from a greedy start",
    "rotor (for Rockmate)": "ours, on blocks with options by local search",
    "H-ILP alone": "H-ILP on every level of the hierarchy",
    "auto (ours)": "to the proof",
}


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
    if not rows:
        return name
    apart = " " if len(name) <= _LONGEST_BESIDE else "\n"
    return f"{name}:{apart}{rows[0].operators:,} operators, {format_bytes(rows[0].plain_peak_bytes)}"


def caption(text: str, settings: FigureSettings, rows: Iterable[Row]) -> str:
    """A picture's title: which code made which curve, what a missing point means, limits, and how busy it was."""
    drawn = list(rows)
    loads = [row.load_average for row in drawn if row.load_average]
    by_limit: dict[float, set[str]] = {}
    for row in drawn:
        by_limit.setdefault(row.limit_seconds, set()).add(row.method)
    usual = min(by_limit, default=settings.limit)
    longer = [f"{limit:g} s for points of {', '.join(sorted(by_limit[limit]))}" for limit in by_limit if limit > usual]
    load = f"; load average {min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} cores" if loads else ""
    shown = {row.method for row in drawn}
    who = [f"{name}: {what}" for name, what in WHO_RAN.items() if name in shown]
    if HIREMATE_LABEL in shown:
        who.append(_of_hiremate([row for row in drawn if row.method == HIREMATE_LABEL]))
    return "\n".join(
        (
            f"{text}; times: {settings.library.device} by its roofline",
            *(("; ".join(who),) if who else ()),
            f"no point: nothing found in {'; '.join((f'{usual:g} s', *longer))}, or the method does not apply{load}",
        )
    )


def _of_hiremate(rows: Sequence[Row]) -> str:
    """What HiRemate is, and which of its solvers its points are by."""
    found = [row.found_by for row in rows if row.found_by is not None]
    whole = [name for name in found if not name.startswith("hiremate")]
    by = f" ({len(whole)} of {len(found)} points are TWRemat's or rotor's on the whole graph)" if found else ""
    return f"{HIREMATE_LABEL}: H-ILP, rotor and TWRemat, as in the paper{by}"
