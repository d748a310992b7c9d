"""The link between device and host memory, which makes a third choice beside keeping a value and computing it again.

`Graph(ops, values, link=Link(55e9, 55e9, host_bytes=64 * 2**30))`

A schedule of a graph with a link may copy a value out to host memory (`Offload`) and back (`Fetch`). The copies run
beside computation, one at a time in each direction, in the order of their steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematch.errors import GraphError

_LARGEST_SPEED = 1e18  # bytes in a second
_LARGEST_HOST_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class Link:
    """How fast values move to host memory and back, and how much of it a schedule may use."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    host_bytes: int

    def __post_init__(self) -> None:
        for direction, speed in (("out", self.out_bytes_per_second), ("in", self.in_bytes_per_second)):
            if not 1.0 <= speed <= _LARGEST_SPEED:  # false for nan too
                raise GraphError(f"the link moves {speed} bytes in a second {direction}; 1 to 1e18 is possible")
        if not 0 <= self.host_bytes <= _LARGEST_HOST_BYTES:
            raise GraphError(f"the link leads to {self.host_bytes} bytes of host memory; 0 to 2**60 is possible")

    @property
    def speeds(self) -> tuple[float, float]:
        """Bytes in a second, out and in."""
        return self.out_bytes_per_second, self.in_bytes_per_second
