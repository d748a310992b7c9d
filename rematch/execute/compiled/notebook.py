"""What was decided for a graph, on disk, so that another process need not solve or measure again.

`Notebook(key).note(around, note)` and, in another process, `Notebook(key).read(around)`

Inductor keeps compiled graphs on disk and does not ask for a partition again; the plan behind it is here. So are the
schedules that were tried for a graph, whatever the budget was: a refusal names a budget that one of them keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

from rematch.cache import RecordFolder
from rematch.capture.cost import describe
from rematch.planning.compiled import Around
from rematch.planning.layouts import Layout
from rematch.planning.plan import Plan
from rematch.records import from_json
from rematch.units import format_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Note:
    """A decision: the plan, whether torch's own partition runs, and the figures that measuring is judged by."""

    plan: Plan
    by_torch: bool
    predicted_bytes: int
    asked_bytes: int
    lost_bytes: int = 0


@dataclass(frozen=True)
class Tried:
    """The schedules that inductor has laid out for a graph, for any budget."""

    layouts: tuple[Layout, ...] = ()


def graph_key(module: GraphModule, example_inputs: Sequence[Any], identity: object) -> str:
    """What tells apart graphs that Dynamo traced, and the circumstances they are compiled under."""
    inputs = [describe(given) if isinstance(given, torch.Tensor) else repr(given) for given in example_inputs]
    return "\n".join([module.code, *inputs, repr(identity), torch.__version__])


class Notebook:
    """The notes of one graph, one for each state of knowledge that it was compiled with.

    `key` is of the graph and all circumstances, `any_budget` leaves out those that only decide which plan is chosen.
    """

    def __init__(self, key: str, any_budget: str) -> None:
        self._key = key
        self._any_budget = any_budget
        self._tried = _folder("compiled-tried", Tried)
        self._notes = _folder("compiled", Note)
        self._settled = _folder("compiled-settled", Around)

    @property
    def settled(self) -> Around | None:
        """What measuring has found out, if it came to an end."""
        return self._settled.get(self._key)

    def settle(self, around: Around) -> None:
        """Start with this the next time."""
        self._settled.put(self._key, around)

    @property
    def tried(self) -> tuple[Layout, ...]:
        """Schedules that were tried for the graph."""
        return (self._tried.get(self._any_budget) or Tried()).layouts

    def note_tried(self, layouts: tuple[Layout, ...]) -> None:
        """Have them at hand the next time."""
        if layouts:
            self._tried.put(self._any_budget, Tried(layouts))

    def read(self, around: Around) -> Note | None:
        return self._notes.get(f"{self._key}\n{around}")

    def note(self, around: Around, note: Note) -> None:
        label = f"{note.plan.graph_ops} operators, budget {format_bytes(note.asked_bytes)}, compiled"
        self._notes.put(f"{self._key}\n{around}", note, label)


def _folder(name: str, kind: type[T]) -> RecordFolder[T]:
    return RecordFolder(name, decode=partial(from_json, kind))
