"""Plans that were made before, kept on disk: the next start of the same training neither records nor solves.

`cache = PlanCache.of(settings); cache.put(key, StoredPlan(plan, step)); cache.get(key)`

A stored plan comes with its graph, so that it can be checked against the budget as it is now, and with what the tape
engine made of it. Whoever uses it runs the same operators as before; if the module does something else after all, the
tape parts from the plan and the module is recorded and planned as without a cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from rematch.cache import RecordFolder
from rematch.capture.recorded_graph import StepGraph
from rematch.errors import FormatError
from rematch.graph.formats import graph_from_data, graph_to_data
from rematch.planning.plan import Plan
from rematch.planning.settings import Settings
from rematch.records import from_json, to_json
from rematch.solvers.base import Solver
from rematch.units import format_bytes

_SWITCH = "REMATCH_PLAN_CACHE"  # the environment variable that says "off" for all
_OFF = ("0", "off", "no", "false")
NOTE = "plan: from the cache of an earlier start; cache=False plans anew"


@dataclass(frozen=True)
class StoredPlan:
    """A plan and its graph. `tape` is the tape engine's form of the schedule as JSON, if that runs it."""

    plan: Plan
    step: StepGraph
    tape: Any = None


class PlanCache:
    """The plans on disk."""

    def __init__(self) -> None:
        self.folder = RecordFolder("plans", encode=_encode, decode=_decode)

    @staticmethod
    def of(settings: Settings) -> PlanCache | None:
        """The cache, unless the user or the environment switched it off, or a solver object wants to be asked."""
        off = os.environ.get(_SWITCH, "").strip().lower() in _OFF
        return None if off or not settings.cache or isinstance(settings.solver, Solver) else PlanCache()

    def get(self, key: str) -> StoredPlan | None:
        return self.folder.get(key)

    def forget(self, key: str) -> None:
        """Delete a plan that turned out wrong."""
        self.folder.delete(key)

    def put(self, key: str, stored: StoredPlan) -> None:
        figures = stored.plan.figures
        what = f"{stored.plan.graph_name}, {stored.plan.graph_ops} operators"
        self.folder.put(key, stored, f"{what}, budget {format_bytes(figures.budget_bytes)}, {stored.plan.engine}")


@dataclass(frozen=True)
class _Row:
    """What a file holds beside the plan and the graph, which have formats of their own. The device is the reader's."""

    root_bytes: int
    roots: int
    has_loss: bool


def _encode(stored: StoredPlan) -> Any:
    step = stored.step
    row = _Row(step.root_bytes, step.roots, step.has_loss)
    return {
        "step": to_json(row),
        "graph": graph_to_data(step.graph),
        "plan": stored.plan.to_data(),
        "tape": stored.tape,
    }


def _decode(data: Any) -> StoredPlan:
    if not isinstance(data, dict) or not isinstance(data.get("graph"), dict):
        raise FormatError("it is no plan with its graph")
    row = from_json(_Row, data.get("step"), "step")
    graph = graph_from_data(data["graph"])
    plan = Plan.from_json(data.get("plan"), "plan")
    step = StepGraph(graph, torch.device("cpu"), row.root_bytes, row.roots, row.has_loss)
    return StoredPlan(plan, step, data.get("tape"))
