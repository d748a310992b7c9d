"""A graph as DOT text, for Graphviz to draw.

`write_text("graph.dot", to_dot(graph, schedule))`, then `dot -Tsvg graph.dot`.

The forward pass runs down the left, the backward pass back up the right, so that an operator stands next to its own
backward.
Edges carry the size of the value; what is resident is left out. Operators that must run once have a dashed border,
those that make a target a double one. With a schedule, operators that it computes again stand out and say how often.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rematch.graph.model import Graph, Longs, Phase
from rematch.graph.schedule import Schedule
from rematch.units import format_bytes, printable

_FILL = {Phase.FORWARD: "#d6e6f4", Phase.LOSS: "#e3e3e3", Phase.BACKWARD: "#fbe3c8"}
_RECOMPUTED_BORDER = "#c4361f"


def to_dot(graph: Graph, schedule: Schedule | None = None) -> str:
    """DOT for the whole graph; `schedule` marks what is recomputed."""
    ops = graph.order if schedule is None else schedule.ops
    counts = np.bincount(np.asarray(ops, dtype=np.int64), minlength=len(graph.ops))
    lines = [
        f"digraph {quoted(graph.name or 'graph')} {{",
        f"  label={quoted(_caption(graph, counts))}; labelloc=t; fontname=Helvetica; newrank=true;",
        "  node [shape=box, style=filled, fontname=Helvetica, fontsize=11, margin=0.08, height=0.3];",
        '  edge [fontname=Helvetica, fontsize=9, color="#8a8a8a", fontcolor="#5a5a5a", arrowsize=0.6];',
        *_cluster(graph, counts, Phase.FORWARD),
        *_cluster(graph, counts, Phase.BACKWARD),
        *(f"  {_node(graph, counts, op)}" for op in graph.order if graph.ops[op].phase is Phase.LOSS),
        *_edges(graph),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _caption(graph: Graph, counts: Longs) -> str:
    parts = [graph.name or "graph", f"{len(graph.ops)} operators"]
    if graph.resident_bytes:
        parts.append(f"{format_bytes(graph.resident_bytes)} resident")
    if counts.max(initial=0) > 1:
        parts.append(f"{np.count_nonzero(counts > 1)} recomputed")
    return ", ".join(parts)


def _cluster(graph: Graph, counts: Longs, phase: Phase) -> Iterator[str]:
    members = [op for op in graph.order if graph.ops[op].phase is phase]
    if not members:
        return
    yield f'  subgraph cluster_{phase.value} {{ label={phase.value}; color="#c8c8c8"; fontcolor="#5a5a5a";'
    for op in members:
        yield f"    {_node(graph, counts, op)}"
    yield "  }"


def _node(graph: Graph, counts: Longs, index: int) -> str:
    op, count = graph.ops[index], int(counts[index])
    attributes = {
        "label": quoted(f"{op.name}\n\N{MULTIPLICATION SIGN} {count}" if count > 1 else op.name),
        "fillcolor": quoted(_FILL[op.phase]),
    }
    if count > 1:
        attributes |= {"color": quoted(_RECOMPUTED_BORDER), "penwidth": "2.5"}
    if graph.arrays.once[index]:
        attributes["style"] = quoted("filled,dashed")
    if graph.targets.intersection(op.outputs):
        attributes["peripheries"] = "2"
    return f"o{index} [{', '.join(f'{key}={text}' for key, text in attributes.items())}];"


def _edges(graph: Graph) -> Iterator[str]:
    for index in graph.order:
        for value in dict.fromkeys(graph.ops[index].inputs):
            producer = int(graph.arrays.producer[value])
            if producer >= 0:
                yield f"  {_edge(graph, producer, index, format_bytes(graph.values[value].size_bytes))}"


def _edge(graph: Graph, producer: int, reader: int, label: str) -> str:
    """An edge that points down in the forward pass, up in the backward pass, and ranks nothing between the two."""
    backward = [graph.ops[op].phase is not Phase.FORWARD for op in (producer, reader)]
    if all(backward):
        return f"o{reader} -> o{producer} [dir=back, label={quoted(label)}];"
    joins_passes = graph.ops[reader].phase is Phase.BACKWARD
    return f"o{producer} -> o{reader} [label={quoted(label)}{', constraint=false' if joins_passes else ''}];"


def quoted(text: str) -> str:
    """A DOT string of any text."""
    readable = "\n".join(printable(line) for line in text.split("\n"))
    escaped = readable.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
