"""Bytes, seconds, counts and names as people read them.

`format_bytes(1536) == "1.50 KiB"`

Imports nothing from rematch, so that every module can use it.
"""

from __future__ import annotations

import math

SECONDS_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
BYTES_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))  # for axes
_BYTES_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_bytes(size_bytes: int) -> str:
    """`format_bytes(1536) == "1.50 KiB"`: at most three figures and a binary unit."""
    amount, unit = float(size_bytes), 0
    while abs(amount) >= 999.5 and unit < len(_BYTES_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    if unit == 0:
        return f"{size_bytes} B"
    digits = 2 if abs(amount) < 9.995 else 1 if abs(amount) < 99.95 else 0
    return f"{amount:.{digits}f} {_BYTES_UNITS[unit]}"


def unit_for(units: tuple[tuple[float, str], ...], largest: float) -> tuple[float, str]:
    """`unit_for(BYTES_UNITS, 5000) == (1024, "KiB")`: what to divide by, and its name."""
    return next(((scale, unit) for scale, unit in units if largest >= scale), units[-1])


def format_seconds(seconds: float) -> str:
    """`format_seconds(0.00123) == "1.23 ms"`"""
    scale, unit = next(
        ((scale, unit) for scale, unit in SECONDS_UNITS if abs(seconds) >= scale), SECONDS_UNITS[-1 if seconds else 0]
    )
    amount = seconds / scale
    return f"{amount:,.0f} {unit}" if abs(amount) >= 1000 else f"{amount:.3g} {unit}"


def extra_pct(seconds: float | None, baseline_seconds: float) -> float | None:
    """`extra_pct(11.0, 10.0) == 10.0`: extra time in per cent; None if it is unknown or `baseline_seconds` is 0."""
    if seconds is None or baseline_seconds <= 0:
        return None
    extra = 100 * (seconds / baseline_seconds - 1)
    return extra if math.isfinite(extra) else None


def format_extra(pct: float | None) -> str:
    """`format_extra(2.9) == "+2.90 %"`: extra time, in per cent of the time without recomputation."""
    return "unknown" if pct is None else f"+{abs(pct):.2f} %"


def count_of(count: int, noun: str) -> str:
    """`count_of(1204, "operator") == "1,204 operators"`"""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str, most_letters: int = 1000) -> str:
    """`text` without anything a terminal would act on: escaped where a letter is not printable, cut where it is long.

    Names come from files, and a name may hold escape sequences, line breaks or half a surrogate pair.
    """
    if len(text) > most_letters:
        text = f"{text[: most_letters - 3]}..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
