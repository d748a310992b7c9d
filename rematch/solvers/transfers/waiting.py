"""Where a schedule waits for its copies, and for which.

`for wait in waits(graph, schedule): print(wait.seconds, wait.values)`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rematch.graph import Compute, Fetch, Free, Graph, Offload, Schedule
from rematch.graph.simulate import clock


class Wait(NamedTuple):
    """A time in which computation waits for copies of one direction."""

    seconds: float
    kind: type[Offload] | type[Fetch]
    values: list[int]  # whose copies kept the link busy until the wait ended


def waits(graph: Graph, schedule: Schedule) -> Iterator[Wait]:
    """Each time that computation waits for copies: how long, and the values whose copies kept the link busy until then.

    A copy that begins where the one before it ended was kept from beginning earlier.
    """
    times = clock(graph, schedule)
    begins, ends = times.begins.tolist(), times.ends.tolist()
    last: dict[type, tuple[float, list[int]]] = {Offload: (-1.0, []), Fetch: (-1.0, [])}
    copies: dict[float, tuple[type, list[int]]] = {}  # by when they ended
    now = 0.0
    for step, begin, end in zip(schedule, begins, ends, strict=True):
        if isinstance(step, Compute | Free):
            if begin > now and begin in copies:
                yield Wait(begin - now, *copies[begin])
            now = end
            continue
        until, busy = last[type(step)]
        busy = [*busy, step.value] if begin == until else [step.value]
        last[type(step)] = end, busy
        copies[end] = type(step), busy
