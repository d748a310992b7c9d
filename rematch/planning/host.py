"""How much host memory plans may use, and the link that leads to it.

`linked(graph, torch.device("cuda"), None, host_bytes("32GiB"))`
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from rematch.capture.link import link_to
from rematch.graph import Graph
from rematch.planning.budget import parse_size
from rematch.units import format_bytes

_SPARED_SHARE = 0.5  # of what is available: pinned memory cannot be swapped, and loaders and caches need the rest
_CONTAINER = Path("/sys/fs/cgroup")
_LEAST_MOVED_BYTES = 2**14  # of a value that is worth a copy, however slow the link is
_STARTING_SECONDS = 25e-6  # what it takes the host to start a copy on a stream, when it could start kernels instead


def host_bytes(offload: bool | str | float) -> int:
    """The host memory that `offload=` stands for: none, what the host can spare, or a size; `BudgetError` otherwise."""
    if offload is False:
        return 0
    return _spare_bytes() if offload is True else parse_size(offload)


def _spare_bytes() -> int:
    """Half of what is available now to this machine or container, shared with the ranks that train here."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, max(0, limit - used))
    return int(_SPARED_SHARE * available) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def linked(graph: Graph, device: torch.device, planned_for: str | None, limit_bytes: int) -> Graph:
    """The graph with the link of the device to so much host memory; without one if that is none.

    Values that are copied in less time than it takes to start a copy stay where they are. On a CPU nothing is started:
    copies are done when the call returns.
    """
    if not limit_bytes:
        return graph
    link = link_to(device if planned_for is None else planned_for, limit_bytes)
    is_started = device.type != "cpu" or planned_for is not None
    least_bytes = max(_LEAST_MOVED_BYTES, _STARTING_SECONDS * min(link.speeds) if is_started else 0)
    values = tuple(
        value if value.resident or value.size_bytes >= least_bytes else replace(value, movable=False)
        for value in graph.values
    )
    return replace(graph, values=values, link=link)


def about_link(graph: Graph, device: torch.device) -> tuple[str, ...]:
    """What plans say of the graph's link."""
    if graph.link is None:
        return ()
    out, back = (f"{speed / 1e9:.3g} GB/s" for speed in graph.link.speeds)
    said = f"offload: up to {format_bytes(graph.link.host_bytes)} of host memory, {out} out and {back} back"
    return (said if device.type != "cpu" else f"{said}; on a CPU that is the same memory, and moving saves none",)
