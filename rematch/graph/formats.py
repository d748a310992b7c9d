"""Graphs as files: our own JSON, which keeps everything, and the JSON of the collected benchmark graphs.

`load_graph("gpt.json").graph`

Our own form is `{"format": "rematch-graph", "version": 1, "name", "values": [...], "ops": [...], "targets", "held",
"order"}`, with `"recompute_after_loss": true` where that restricts schedules and `"link"` where values can move to
host memory; its rows have the fields of `Value`, `Op` and `Link`, those at their default left out.

The benchmark form is `{"nodes": [{"id", "name", "time", "memory", "backward", "workspace"}], "edges": [[source,
sink]], "order", "outputs", "time_unit"}` with one value per node, named as the node. What a file leaves open, and how
it was taken, is told in `Loaded.notes`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rematch.errors import FormatError, GraphError
from rematch.files import collector_paused, read_json, write_text
from rematch.graph.link import Link
from rematch.graph.model import Graph, Op, Phase, Value
from rematch.graph.schedule import Schedule
from rematch.records import add_codec, from_json, show_json, to_json

FORMAT = "rematch-graph"
VERSION = 1

add_codec(Schedule, plain=tuple[int, ...], encode=lambda schedule: schedule.steps.tolist(), decode=Schedule)

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Loaded:
    """A graph from a file, and what was changed or assumed on the way in, in words."""

    graph: Graph
    notes: tuple[str, ...] = ()


def load_graph(path: str | os.PathLike[str], *, plain: bool = False) -> Loaded:
    """Read a graph in either form.

    `plain` leaves out workspace, pinned outputs (targets and held values) and fixed memory, as the papers did.
    """
    with collector_paused():  # from here to the graph, with no pass over the JSON in between
        return graph_from_json(read_json(path), str(path), plain=plain)


def graph_from_json(data: Any, where: str, *, plain: bool = False) -> Loaded:
    """The graph that a file's JSON `data` holds, in either form; errors call the file `where`."""
    with collector_paused():
        try:
            graph, notes = _decode(data, plain)
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from error
        except GraphError as error:
            raise GraphError(f"{where}: {error}") from error
        return Loaded(_plain(graph) if plain else graph, tuple(notes))


def _decode(data: Any, plain: bool) -> tuple[Graph, list[str]]:
    if isinstance(data, dict) and "format" in data:
        return graph_from_data(data), []
    if isinstance(data, dict) and {"nodes", "edges"} <= data.keys():
        return _from_benchmark(data, plain)
    raise FormatError(f'is no graph: neither "format": "{FORMAT}" nor "nodes" and "edges" at its top level')


def save_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph in our own form, whole or not at all; `load_graph(path).graph == graph`."""
    text = json.dumps(graph_to_data(graph), separators=(",", ":"), allow_nan=False, default=_from_numpy)
    write_text(path, text + "\n")


def _from_numpy(number: Any) -> Any:
    """A graph may have been made with numpy's numbers, which JSON does not know."""
    return number.item()


def graph_to_data(graph: Graph) -> dict[str, Any]:
    """The graph as what JSON can say."""
    order, targets, held = (tuple(map(int, members)) for members in (graph.order, graph.targets, graph.held))
    file = _GraphFile(
        values=graph.values,
        ops=graph.ops,
        targets=tuple(sorted(targets)),
        held=tuple(sorted(held)),
        order=order,
        name=graph.name,
        recompute_after_loss=graph.recompute_after_loss,
        link=graph.link,
    )
    return {"format": FORMAT, "version": VERSION, **to_json(file, defaults=False)}


def graph_from_data(data: Mapping[str, Any]) -> Graph:
    """The graph that `graph_to_data` described."""
    if data.get("format") != FORMAT:
        raise FormatError(f'its "format" is {show_json(data.get("format"))}; a graph has {FORMAT!r}')
    version = data.get("version")
    if version != VERSION:
        newer = type(version) is int and version > VERSION
        advice = "; it was written by a newer rematch, upgrade to read it" if newer else ""
        raise FormatError(f"its version is {show_json(version)}; this rematch reads version {VERSION}{advice}")
    rest = {key: entry for key, entry in data.items() if key not in ("format", "version")}
    file = from_json(_GraphFile, rest, strict=True)
    targets, held = frozenset(file.targets), frozenset(file.held)
    return Graph(file.ops, file.values, targets, held, file.order, file.name, file.recompute_after_loss, file.link)


@dataclass(frozen=True)
class _GraphFile:
    """Our own form, in the order in which it is written."""

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    targets: tuple[int, ...]
    held: tuple[int, ...]
    order: tuple[int, ...]
    recompute_after_loss: bool = False
    link: Link | None = None


@dataclass(frozen=True)
class _Node:
    """An operator of the benchmark form and the one value it makes."""

    id: int
    name: str
    time: float
    memory: int
    backward: bool = False
    workspace: int = 0


@dataclass(frozen=True)
class _BenchmarkFile:
    nodes: tuple[_Node, ...]
    edges: tuple[tuple[int, int], ...]
    name: str = ""
    order: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    time_unit: str | None = None
    constant_memory: int | None = None
    fixed_memory: int | None = None
    param_memory: int | None = None

    def fixed_values(self) -> list[Value]:
        sizes = {key: getattr(self, key) for key in ("constant_memory", "fixed_memory", "param_memory")}
        return [Value(key, size, resident=True) for key, size in sizes.items() if size is not None]


def _from_benchmark(data: Mapping[str, Any], plain: bool) -> tuple[Graph, list[str]]:
    file = from_json(_BenchmarkFile, data)
    index = {node.id: i for i, node in enumerate(file.nodes)}
    if len(index) < len(file.nodes):
        raise FormatError(f'the {len(file.nodes)} entries of "nodes" have only {len(index)} different ids')
    inputs: list[dict[int, None]] = [{} for _ in file.nodes]  # a dict per node: distinct, in the order of the edges
    for source, sink in file.edges:
        inputs[_known(index, sink, "edges")][_known(index, source, "edges")] = None
    scale = _SECONDS.get(file.time_unit or "", 1.0)
    graph = Graph(
        ops=tuple(
            Op(
                name=node.name,
                seconds=node.time * scale,
                inputs=tuple(inputs[i]),
                outputs=(i,),
                workspace_bytes=max(0, node.workspace),
                phase=Phase.BACKWARD if node.backward else Phase.FORWARD,
            )
            for i, node in enumerate(file.nodes)
        ),
        values=(*(Value(node.name, node.memory) for node in file.nodes), *file.fixed_values()),
        targets=frozenset(_known(index, node, "outputs") for node in file.outputs),
        order=tuple(_known(index, node, "order") for node in file.order),
        name=file.name,
    )
    return graph, [*_time_notes(file.time_unit), *([] if plain else _workspace_notes(file.nodes))]


def _known(index: Mapping[int, int], node: int, key: str) -> int:
    if node not in index:
        raise FormatError(f'"{key}" names node {node}, which is not among "nodes"')
    return index[node]


def _time_notes(unit: str | None) -> list[str]:
    if unit in _SECONDS:
        return []
    given = "no unit of time is given" if unit is None else f"times are in {show_json(unit)}"
    return [f"{given}; the numbers are taken as seconds"]


def _workspace_notes(nodes: Sequence[_Node]) -> list[str]:
    negative = [node for node in nodes if node.workspace < 0]
    if not negative:
        return []
    first = negative[0]
    return [
        f"{len(negative)} of {len(nodes)} operators have a negative workspace, taken as 0 "
        f"(the first is {show_json(first.name)} with {first.workspace} bytes)"
    ]


def _plain(graph: Graph) -> Graph:
    return replace(
        graph,
        ops=tuple(replace(op, workspace_bytes=0) for op in graph.ops),
        values=tuple(replace(value, size_bytes=0) if value.resident else value for value in graph.values),
        targets=frozenset(),
        held=frozenset(),
    )
