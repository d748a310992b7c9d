"""Graphs as files: our own JSON, which keeps everything, and the JSON of the collected benchmark graphs.

`load_graph("gpt.json").graph`

Our own form is `{"format": "rematch-graph", "version": 1, "name", "values": [...], "ops": [...], "targets", "held",
"order"}`; its rows have the fields of `Value` and `Op`, those at their default left out. The benchmark form is
`{"nodes": [{"id", "name", "time", "memory", "backward", "workspace"}], "edges": [[source, sink]], "order", "outputs",
"time_unit"}` with one value per node, named as the node. What a file leaves open, and how it was taken, is told
in `Loaded.notes`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any

from rematch.errors import FormatError, GraphError
from rematch.files import collector_paused, read_json, write_text
from rematch.graph.model import Graph, Op, Phase, Value

FORMAT = "rematch-graph"
VERSION = 1

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_FIXED_MEMORY = ("constant_memory", "fixed_memory", "param_memory")


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
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "values": [_VALUE.write(value) for value in graph.values],
        "ops": [_OP.write(op) for op in graph.ops],
        "targets": sorted(map(int, graph.targets)),
        "held": sorted(map(int, graph.held)),
        "order": list(map(int, graph.order)),
    }


def graph_from_data(data: Mapping[str, Any]) -> Graph:
    """The graph that `graph_to_data` described."""
    if data.get("format") != FORMAT:
        raise FormatError(f'its "format" is {data.get("format")!r}; a graph has {FORMAT!r}')
    version = data.get("version")
    if version != VERSION:
        newer = type(version) is int and version > VERSION
        advice = "; it was written by a newer rematch, upgrade to read it" if newer else ""
        raise FormatError(f"its version is {version!r}; this rematch reads version {VERSION}{advice}")
    return Graph(
        ops=tuple(Op(**row) for row in _rows(data, "ops", _OP)),
        values=tuple(Value(**row) for row in _rows(data, "values", _VALUE)),
        targets=frozenset(_entry(data, "targets", _indices)),
        held=frozenset(_entry(data, "held", _indices)),
        order=_entry(data, "order", _indices),
        name=_entry(data, "name", _text),
    )


def _from_benchmark(data: Mapping[str, Any], plain: bool) -> tuple[Graph, list[str]]:
    nodes = [{**_NODE.defaults, **row} for row in _rows(data, "nodes", _NODE)]
    index = {node["id"]: i for i, node in enumerate(nodes)}
    if len(index) < len(nodes):
        raise FormatError(f'the {len(nodes)} entries of "nodes" have only {len(index)} different ids')
    inputs: list[dict[int, None]] = [{} for _ in nodes]  # a dict per node: distinct, in the order of the edges
    for source, sink in _entry(data, "edges", _pairs):
        inputs[_known(index, sink, "edges")][_known(index, source, "edges")] = None
    unit = data.get("time_unit")
    scale = _SECONDS.get(unit, 1.0) if isinstance(unit, str) else 1.0
    values = [Value(node["name"], node["memory"]) for node in nodes]
    values += [Value(key, _entry(data, key, _whole), resident=True) for key in _FIXED_MEMORY if key in data]
    graph = Graph(
        ops=tuple(
            Op(
                name=node["name"],
                seconds=node["time"] * scale,
                inputs=tuple(inputs[i]),
                outputs=(i,),
                workspace_bytes=max(0, node["workspace"]),
                phase=Phase.BACKWARD if node["backward"] else Phase.FORWARD,
            )
            for i, node in enumerate(nodes)
        ),
        values=tuple(values),
        targets=frozenset(_known(index, node, "outputs") for node in _entry(data, "outputs", _indices, ())),
        order=tuple(_known(index, node, "order") for node in _entry(data, "order", _indices, ())),
        name=_entry(data, "name", _text, ""),
    )
    return graph, [*_time_notes(unit), *([] if plain else _workspace_notes(nodes))]


def _time_notes(unit: object) -> list[str]:
    if unit in _SECONDS:
        return []
    given = "no unit of time is given" if unit is None else f"times are in {unit!r}"
    return [f"{given}; the numbers are taken as seconds"]


def _workspace_notes(nodes: list[dict[str, Any]]) -> list[str]:
    negative = [node for node in nodes if node["workspace"] < 0]
    if not negative:
        return []
    first = negative[0]
    return [
        f"{len(negative)} of {len(nodes)} operators have a negative workspace, taken as 0 "
        f"(the first is {first['name']!r} with {first['workspace']} bytes)"
    ]


def _plain(graph: Graph) -> Graph:
    return replace(
        graph,
        ops=tuple(replace(op, workspace_bytes=0) for op in graph.ops),
        values=tuple(replace(value, size_bytes=0) if value.resident else value for value in graph.values),
        targets=frozenset(),
        held=frozenset(),
    )


# Reading: a reader returns what it was given in the right type, or raises _Mismatch with what it had wanted.


class _Mismatch(Exception):
    pass


_Reader = Callable[[Any], Any]


def _text(given: Any) -> str:
    if type(given) is not str:
        raise _Mismatch("text")
    return given


def _flag(given: Any) -> bool:
    if type(given) is not bool:
        raise _Mismatch("true or false")
    return given


def _whole(given: Any) -> int:
    if type(given) is not int:
        raise _Mismatch("a whole number")
    return given


def _number(given: Any) -> float:
    if type(given) not in (int, float):
        raise _Mismatch("a number")
    try:
        return float(given)
    except OverflowError:
        raise _Mismatch("a number below 1e308") from None


def _number_or_null(given: Any) -> float | None:
    return None if given is None else _number(given)


def _list(given: Any) -> list[Any]:
    if type(given) is not list:
        raise _Mismatch("a list")
    return given


def _indices(given: Any) -> tuple[int, ...]:
    if type(given) is not list or set(map(type, given)) - {int}:
        raise _Mismatch("a list of whole numbers")
    return tuple(given)


def _pairs(given: Any) -> list[list[int]]:
    if type(given) is not list or not all(type(pair) is list and len(pair) == 2 for pair in given):
        raise _Mismatch("a list of pairs")
    for pair in given:
        _indices(pair)
    return given


def _phase(given: Any) -> Phase:
    try:
        return Phase(given)
    except ValueError:
        raise _Mismatch(" or ".join(repr(phase.value) for phase in Phase)) from None


@dataclass(frozen=True)
class _Fields:
    """The fields of a row: how each is read, and what those that may be left out are then."""

    readers: dict[str, _Reader]
    defaults: dict[str, Any]
    others_allowed: bool = False

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(self.readers.keys() - self.defaults.keys())

    def read(self, given: Any) -> dict[str, Any]:
        """The fields that are given."""
        if type(given) is not dict:
            raise FormatError(f"must be an object, not {_shown(given)}")
        if not self.required <= given.keys():
            raise FormatError(f'has no "{min(self.required - given.keys())}"')
        row = {}
        for name, entry in given.items():
            if name in self.readers:
                try:
                    row[name] = self.readers[name](entry)
                except _Mismatch as wanted:
                    raise FormatError(f'"{name}" must be {wanted}, not {_shown(entry)}') from None
            elif not self.others_allowed:
                raise FormatError(f'has an unknown field "{name}"')
        return row

    def write(self, record: Value | Op) -> dict[str, Any]:
        """The fields that are not at their default."""
        row = {}
        for name in self.readers:
            entry = getattr(record, name)
            if name in self.required or entry != self.defaults[name]:
                row[name] = _as_json(entry)
        return row


def _fields_of(kind: type[Value] | type[Op], **readers: _Reader) -> _Fields:
    return _Fields(readers, {field.name: field.default for field in fields(kind) if field.default is not MISSING})


_VALUE = _fields_of(Value, name=_text, size_bytes=_whole, resident=_flag, role=_text)
_OP = _fields_of(
    Op,
    name=_text,
    seconds=_number,
    inputs=_indices,
    outputs=_indices,
    workspace_bytes=_whole,
    phase=_phase,
    once=_flag,
    mutates=_indices,
    module_path=_text,
    class_key=_text,
    flops=_number_or_null,
)
_NODE = _Fields(
    {"id": _whole, "name": _text, "time": _number, "memory": _whole, "backward": _flag, "workspace": _whole},
    defaults={"backward": False, "workspace": 0},
    others_allowed=True,
)


def _rows(data: Mapping[str, Any], key: str, row_fields: _Fields) -> Iterator[dict[str, Any]]:
    for number, given in enumerate(_entry(data, key, _list)):
        try:
            yield row_fields.read(given)
        except FormatError as error:
            named = f" ({given['name']!r})" if isinstance(given, dict) and isinstance(given.get("name"), str) else ""
            raise FormatError(f"{key}[{number}]{named} {error}") from error


def _entry(data: Mapping[str, Any], key: str, reader: _Reader, default: Any = MISSING) -> Any:
    """A top-level entry of the file, which must be there unless it has a default."""
    if key not in data:
        if default is MISSING:
            raise FormatError(f'has no "{key}"')
        return default
    try:
        return reader(data[key])
    except _Mismatch as wanted:
        raise FormatError(f'"{key}" must be {wanted}, not {_shown(data[key])}') from None


def _known(index: Mapping[int, int], node: int, key: str) -> int:
    if node not in index:
        raise FormatError(f'"{key}" names node {node}, which is not among "nodes"')
    return index[node]


def _as_json(entry: Any) -> Any:
    if isinstance(entry, tuple):
        return list(entry)
    return entry.value if isinstance(entry, Phase) else entry


def _shown(given: Any) -> str:
    """What stands in the file, cut short."""
    text = json.dumps(given)
    return text if len(text) <= 40 else f"{text[:40]}..."
