"""What a schedule does with the link: when copies run, when computation waits, and what is in host memory.

`traffic(graph, schedule).waits`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rematch.graph.model import Floats, Graph
from rematch.graph.schedule import Compute, Fetch, Offload, Schedule
from rematch.graph.simulate import clock


class Span(NamedTuple):
    """A stretch of time, in seconds from the start."""

    begin: float
    end: float


@dataclass(frozen=True)
class Traffic:
    """The link over the time of a schedule; spans of one kind follow each other without overlap."""

    out: tuple[Span, ...]  # one for each copy out, in the order in which they run
    back: tuple[Span, ...]
    waits: tuple[Span, ...]  # in which no operator runs
    host: tuple[tuple[float, int], ...]  # (since when, bytes in host memory)
    seconds: float  # of the schedule


def traffic(graph: Graph, schedule: Schedule) -> Traffic:
    """Follow the link through a valid schedule."""
    times = clock(graph, schedule)
    spans: dict[type, list[Span]] = {Offload: [], Fetch: []}
    waits: list[Span] = []
    host: list[tuple[float, int]] = [(0.0, 0)]
    now = 0.0
    for step, begin, end in zip(schedule, times.begins.tolist(), times.ends.tolist(), strict=True):
        if isinstance(step, Offload | Fetch):
            spans[type(step)].append(Span(begin, end))
        if isinstance(step, Offload):
            host.append((begin, host[-1][1] + graph.values[step.value].size_bytes))
        elif isinstance(step, Compute):
            if begin > now:
                waits.append(Span(now, begin))
            now = end
    if times.seconds > now:
        waits.append(Span(now, times.seconds))
    return Traffic(tuple(spans[Offload]), tuple(spans[Fetch]), tuple(waits), tuple(host), times.seconds)


def total_seconds(spans: Sequence[Span]) -> float:
    """How long the spans take together."""
    return sum(span.end - span.begin for span in spans)


def busy_shares(spans: Sequence[Span], edges: Floats) -> Floats:
    """The share of the time between each two neighbouring edges that the spans cover."""
    begins = np.array([span.begin for span in spans])
    ends = np.array([span.end for span in spans])
    covered = np.array([np.clip(edge - begins, 0.0, ends - begins).sum() for edge in edges])
    widths = np.diff(edges)
    return np.asarray(np.diff(covered) / np.where(widths > 0, widths, 1.0))
