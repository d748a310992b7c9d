"""What holds the memory at each moment of a schedule, by module, in as many samples as a picture can show.

`timeline(graph, schedule).samples[0].held_bytes`

Values of forward and backward count for the module whose operators make them, with numbers in its path as `*`, so that
repeated blocks count together. Parameters, other residents, gradients and workspace are groups of their own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rematch.graph import Compute, Fetch, Graph, Offload, Schedule, baseline
from rematch.graph.model import Floats, Longs
from rematch.graph.simulate import computation_edges

PARAMETERS, RESIDENTS, GRADIENTS, WORKSPACE = "parameters", "other residents", "gradients", "workspace"
OTHER_MODULES, NO_MODULE = "other modules", "outside of submodules"
_MOST_MODULES = 7  # that colours can tell apart
_HEAVY = 0.1  # of all modules' share, above which a module is shown by its parts
MOST_SAMPLES = 700


@dataclass(frozen=True)
class Sample:
    """A stretch of a schedule, shown by the computation in it that takes the most memory."""

    start_seconds: float
    end_seconds: float
    op: int
    again: bool  # it had run before
    recomputes: bool  # some computation of the stretch had run before
    total_bytes: int
    held_bytes: tuple[int, ...]  # by group; together the total


@dataclass(frozen=True)
class Timeline:
    """The memory of a schedule over time."""

    groups: tuple[str, ...]
    samples: tuple[Sample, ...]
    seconds: float


def timeline(graph: Graph, schedule: Schedule, most_samples: int = MOST_SAMPLES) -> Timeline:
    """Follow `schedule`, which must be valid, and sum up what is alive."""
    names = _group_of_values(graph)
    groups = _ordered(set(names), graph)
    held = _held(graph, schedule, [groups.index(name) for name in names], len(groups))
    ops = schedule.ops
    edges = computation_edges(graph, schedule)
    if not edges[-1]:  # of a graph without times, each computation is one unit wide
        edges = np.arange(len(ops) + 1, dtype=np.float64)
    seconds = float(edges[-1])
    again = np.ones(len(ops), dtype=np.bool_)
    again[np.unique(ops, return_index=True)[1]] = False
    totals = held.sum(axis=1)
    samples = []
    for members in _stretches((edges[:-1] + edges[1:]) / 2, seconds, most_samples):
        at = members.start + int(totals[members].argmax())
        row = held[at].tolist()
        samples.append(
            Sample(
                start_seconds=float(edges[members.start]),
                end_seconds=float(edges[members.stop]),
                op=int(ops[at]),
                again=bool(again[at]),
                recomputes=bool(again[members].any()),
                total_bytes=sum(row),
                held_bytes=tuple(row),
            )
        )
    return Timeline(groups, tuple(samples), seconds)


def module_pattern(path: str) -> str:
    """`module_pattern("h.3.mlp") == "h.*.mlp"`"""
    return re.sub(r"\d+", "*", path)


def _stretches(middles: Floats, seconds: float, most: int) -> list[slice]:
    """Neighbours that fall into the same of `most` equal shares of the time."""
    count = len(middles)
    if count <= most:
        return [slice(index, index + 1) for index in range(count)]
    share = np.minimum((middles / seconds * most).astype(np.int64), most - 1)
    starts = [0, *(np.flatnonzero(np.diff(share)) + 1).tolist(), count]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def _held(graph: Graph, schedule: Schedule, group_of: Sequence[int], groups: int) -> Longs:
    """Bytes by computation and group."""
    size = [value.size_bytes for value in graph.values]
    now = np.zeros(groups, dtype=np.int64)
    for index, value in enumerate(graph.values):
        if value.resident:
            now[group_of[index]] += size[index]
    rows = np.zeros((len(schedule.ops), groups), dtype=np.int64)
    alive: set[int] = set()
    row = 0
    for step in schedule:
        if not isinstance(step, Compute):
            if not isinstance(step, Offload):
                now[group_of[step.value]] += size[step.value] if isinstance(step, Fetch) else -size[step.value]
                alive ^= {step.value}
            continue
        op = graph.ops[step.op]
        for output in op.outputs:
            now[group_of[output]] += size[output]
        rows[row] = now
        rows[row, groups - 1] += op.workspace_bytes
        row += 1
        for output in op.outputs:  # one that was there already counts twice until its maker ends
            if output in alive:
                now[group_of[output]] -= size[output]
            alive.add(output)
    return rows


def _group_of_values(graph: Graph) -> list[str]:
    """For each value the name of its group, the same for all schedules of a graph."""
    weights = _byte_computations(graph, baseline(graph))
    producer = graph.arrays.producer.tolist()
    paths: dict[int, str] = {}
    fixed: dict[int, str] = {}
    for index, value in enumerate(graph.values):
        if value.resident:
            fixed[index] = PARAMETERS if value.role == PARAMETERS else RESIDENTS
        elif value.role == GRADIENTS:
            fixed[index] = GRADIENTS
        else:
            paths[index] = module_pattern(graph.ops[producer[index]].module_path)
    weight_of: dict[str, int] = defaultdict(int)
    for index, path in paths.items():
        weight_of[path] += weights[index]
    shown = modules_shown(weight_of)
    return [fixed[index] if index in fixed else shown[paths[index]] for index in range(len(graph.values))]


def _byte_computations(graph: Graph, schedule: Schedule) -> list[int]:
    """For each value its bytes times the computations it is alive for."""
    weights = [0] * len(graph.values)
    since: dict[int, int] = {}
    now = 0
    for step in schedule.steps.tolist():
        if step < 0:
            value = ~step
            weights[value] += (now - since.pop(value)) * graph.values[value].size_bytes
        else:
            for output in graph.ops[step].outputs:
                since.setdefault(output, now)
            now += 1
    for value, start in since.items():
        weights[value] += (now - start) * graph.values[value].size_bytes
    return weights


def modules_shown(weights: Mapping[str, int | float], most: int = _MOST_MODULES) -> dict[str, str]:
    """For each module path the one that stands for it: heavy ones are split into their parts, light ones joined."""
    shown = dict.fromkeys(weights, "")
    whole: set[str] = set()  # that cannot be split
    while True:
        totals = _totals(shown, weights)
        heavy = [name for name in totals if name not in whole and totals[name] > _HEAVY * sum(totals.values())]
        if not heavy:
            break
        for name in heavy:
            split = {path: _one_deeper(path, name) for path, shown_by in shown.items() if shown_by == name}
            if set(split.values()) == {name}:
                whole.add(name)
            shown.update(split)
    totals = _totals(shown, weights)
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    kept = set(ranked if len(ranked) <= most else ranked[: most - 1])
    return {path: (name or NO_MODULE) if name in kept else OTHER_MODULES for path, name in shown.items()}


def _totals(shown: Mapping[str, str], weights: Mapping[str, int | float]) -> dict[str, int | float]:
    totals: dict[str, int | float] = defaultdict(int)
    for path, name in shown.items():
        totals[name] += weights[path]
    return totals


def _one_deeper(path: str, ancestor: str) -> str:
    """`_one_deeper("h.*.mlp.act", "h") == "h.*"`"""
    depth = len(ancestor.split(".")) + 1 if ancestor else 1
    return ".".join(path.split(".")[:depth])


def _ordered(names: Iterable[str], graph: Graph) -> tuple[str, ...]:
    """Residents first, then modules in the order in which they first run, workspace last."""
    first: dict[str, int] = {}
    for position, op in enumerate(graph.order):
        first.setdefault(module_pattern(graph.ops[op].module_path), position)
    ends = {PARAMETERS: -3, RESIDENTS: -2, GRADIENTS: -1, OTHER_MODULES: len(graph.ops)}

    def place(name: str) -> tuple[int, str]:
        inside = [at for path, at in first.items() if path == name or path.startswith(f"{name}.")]
        return ends.get(name, min(inside, default=0)), name

    return (*sorted(names, key=place), WORKSPACE)
