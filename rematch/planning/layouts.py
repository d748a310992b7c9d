"""Schedules that inductor has laid out for a graph, so that one that is known to keep a budget is found again.

`layouts.add(layout)`; `layouts.of(graph, pins)`

A refusal names a budget that one of these schedules keeps. Whoever then asks for that budget gets a plan made anew,
which inductor may lay out larger than planned: the schedule that the refusal went by has to be at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rematch.graph import Graph, Schedule

_MOST = 16  # for each graph
_Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """A schedule of one graph, found by `solver`.

    beyond_bytes: its measured peak less the predicted one; None if it was not measured.
    """

    fingerprint: str
    pins: tuple[str, ...]
    schedule: Schedule
    solver: str
    beyond_bytes: int | None = None

    @property
    def is_measured(self) -> bool:
        """Whether a step of it was."""
        return self.beyond_bytes is not None


class Layouts:
    """Those of all graphs, the last one last."""

    def __init__(self) -> None:
        self._known: dict[_Key, list[Layout]] = {}
        self._searched: set[_Key] = set()

    def of(self, graph: Graph, pins: tuple[str, ...]) -> tuple[Layout, ...]:
        """Those of one graph."""
        return tuple(self._known.get((graph.fingerprint, pins), ()))

    def measured(self, layout: Layout) -> int | None:
        """The bytes beyond its prediction that are known of this schedule."""
        same = self._same(layout)
        return None if same is None else same.beyond_bytes

    def add(self, layout: Layout) -> None:
        """Keep a layout. What was measured of it before stays if it says nothing new."""
        same = self._same(layout)
        if same is not None and not layout.is_measured:
            layout = replace(layout, beyond_bytes=same.beyond_bytes)
        key = layout.fingerprint, layout.pins
        others = [known for known in self._known.get(key, ()) if known is not same]
        self._known[key] = [*others, layout][-_MOST:]

    def _same(self, layout: Layout) -> Layout | None:
        known = self._known.get((layout.fingerprint, layout.pins), ())
        return next((other for other in known if other.schedule == layout.schedule), None)

    def remember(self, layouts: Iterable[Layout]) -> None:
        """Take over what another process knows, unless it is known here."""
        for layout in layouts:
            if self._same(layout) is None:
                self.add(layout)

    def first_search(self, graph: Graph, pins: tuple[str, ...]) -> bool:
        """Whether nobody has looked for the smallest one of this graph yet; from now on somebody has."""
        key = graph.fingerprint, pins
        first = key not in self._searched
        self._searched.add(key)
        return first
