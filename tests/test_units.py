"""Bytes, seconds, extra time and counts as they are shown."""

from __future__ import annotations

import pytest

from rematch.units import count_of, extra_pct, format_bytes, format_extra, format_seconds


def test_bytes_have_three_figures() -> None:
    shown = {0: "0 B", 999: "999 B", 1536: "1.50 KiB", 2**24: "16.0 MiB", 300 * 2**30: "300 GiB"}
    assert {size_bytes: format_bytes(size_bytes) for size_bytes in shown} == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 s"),
        (0.00123, "1.23 ms"),
        (2.5e-6, "2.5 us"),
        (1e-9, "0.001 us"),
        (12.345, "12.3 s"),
        (54321.0, "54,321 s"),
    ],
)
def test_seconds(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def test_extra_time() -> None:
    assert extra_pct(11.0, 10.0) == pytest.approx(10.0)
    assert (extra_pct(None, 10.0), extra_pct(1.0, 0.0)) == (None, None)
    assert (format_extra(2.9), format_extra(-1e-15), format_extra(None)) == ("+2.90 %", "+0.00 %", "unknown")


def test_counts() -> None:
    assert (count_of(1, "operator"), count_of(1204, "operator")) == ("1 operator", "1,204 operators")
