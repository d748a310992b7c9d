"""Bytes and seconds as they are shown."""

from __future__ import annotations

import pytest

from rematch.units import format_bytes, format_seconds


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
