"""Graphs of models at any size, traced once and kept in a folder, and budgets as shares of their activations.

`Library(Path("graphs"), "V100").graph("unet")`, and `budget_bytes(graph, 50)` for half of its activations.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import rematch
from rematch.graph import Graph, baseline, simulate
from rematch.graph.formats import load_graph, save_graph
from rematch.solvers.minimum import surely_needed_bytes

if TYPE_CHECKING:
    from models import Case  # imports torch, which planning does not need


@dataclass(frozen=True)
class Library:
    """The models' graphs, each traced when it is first asked for."""

    folder: Path
    device: str
    with_loss: bool = False  # traced with the case's own loss instead of the module alone

    def graph(self, name: str) -> Graph:
        """The graph of a model of the tables, at the paper's size."""
        path = self._path(name)
        return load_graph(path).graph if path.exists() else self.graph_of(_table_cases()[name])

    def graph_of(self, case: Case) -> Graph:
        path = self._path(case.name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            save_graph(self._traced(case), path)
        return load_graph(path).graph

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}-{self.device.lower()}.json"

    def _traced(self, case: Case) -> Graph:
        print(f"tracing {case.name} ...", file=sys.stderr, flush=True)
        if self.with_loss:
            traced = rematch.trace(case.build(), case.sample(), loss=case.loss, device=self.device)
        else:
            traced = module_alone(rematch.trace(case.build(), case.sample(), device=self.device))
        return replace(traced, name=case.name)


def _table_cases() -> dict[str, Case]:
    from models import small_five, twelve

    return {**twelve("paper"), **small_five("paper")}


def module_alone(graph: Graph) -> Graph:
    """Without what a loss that nobody gave was assumed to need."""
    ops = (replace(op, workspace_bytes=0) if index == graph.loss else op for index, op in enumerate(graph.ops))
    return replace(graph, ops=tuple(ops))


def without_gradients(graph: Graph) -> Graph:
    """As if memory for what must be alive at the end had been allocated before."""
    values = (replace(value, size_bytes=0) if i in graph.targets else value for i, value in enumerate(graph.values))
    return replace(graph, values=tuple(values))


def plain_peak_bytes(graph: Graph) -> int:
    return simulate(graph, baseline(graph)).peak_bytes


def budget_bytes(graph: Graph, percent: float) -> int:
    """What is resident, and a share of the rest of the peak without recomputation."""
    return graph.resident_bytes + int((plain_peak_bytes(graph) - graph.resident_bytes) * percent / 100)


def spread_percents(graph: Graph, count: int, *, most: int = 90, least: int = 35) -> list[int]:
    """`count` budgets spread evenly from `most` down to `least`, or to what is surely needed."""
    needed = surely_needed_bytes(graph) - graph.resident_bytes
    floor = max(least, 2 + -(-100 * needed // (plain_peak_bytes(graph) - graph.resident_bytes)))
    return [round(most - step * (most - floor) / (count - 1)) for step in range(count)]
