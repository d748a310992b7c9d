"""The division tree: how the independent segments of a graph nest.

`divide(dag).nodes[0]` is the whole graph.

Feng & Huang (CVPR 2021). A segment is *linear* if it has splitting vertices, which every path passes: its parts lie
between them. Else it *branches* if its ends are all that ties its parts together. Else it is *complicated*: its parts
are the largest segments inside it, and the vertices where these meet are its connecting vertices. Parts are divided in
turn until nothing is left inside. The division of each segment is unique, and complete: each segment of the graph lies
within one part, is a run of parts of a linear one, or some parts of a branching one. (It is the tree of triconnected
components of the graph with an edge from sink to source: series, parallel and rigid.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rematch.solvers.base import Deadline
from rematch.solvers.feng_huang.segments import Dag, Segment, branches, largest_segments, split_at, splitting_vertices


class Kind(Enum):
    LINEAR = "linear"
    BRANCH = "branch"
    COMPLICATED = "complicated"


@dataclass(frozen=True)
class DivisionNode:
    """A segment, its splitting or connecting vertices, and its parts that have something inside, by number.

    A linear one names the part of each gap between its points and ends, -1 where that is a single edge.
    """

    segment: Segment
    kind: Kind
    points: tuple[int, ...]
    children: tuple[int, ...]


@dataclass(frozen=True)
class DivisionTree:
    """Nodes from the whole graph down: children have higher numbers than their parents."""

    dag: Dag
    nodes: tuple[DivisionNode, ...]


def divide(dag: Dag, deadline: Deadline | None = None) -> DivisionTree:
    """The division tree of a graph; from `deadline` on, segments are divided into their vertices."""
    whole = Segment.whole(dag)
    segments = [whole] if whole.inside else []
    nodes = []
    for segment in segments:  # grows by the parts of each
        kind, points, parts = division(dag, segment, deadline)
        children = []
        for part in parts:
            children.append(len(segments) if part.inside else -1)
            if part.inside:
                segments.append(part)
        nodes.append(DivisionNode(segment, kind, points, tuple(children)))
    return DivisionTree(dag, tuple(nodes))


def division(
    dag: Dag, segment: Segment, deadline: Deadline | None = None
) -> tuple[Kind, tuple[int, ...], list[Segment]]:
    """A segment's kind, its splitting or connecting vertices, and its parts, of which only a linear one names edges."""
    if deadline is not None and deadline.expired:
        return Kind.COMPLICATED, segment.inside, []
    points = splitting_vertices(dag, segment)
    if points:
        return Kind.LINEAR, points, split_at(dag, segment, points)
    parts = branches(dag, segment)
    if segment.direct or len(parts) > 1:
        return Kind.BRANCH, (), parts
    parts = largest_segments(dag, segment, deadline)
    covered = {vertex for part in parts for vertex in part.inside}
    return Kind.COMPLICATED, tuple(vertex for vertex in segment.inside if vertex not in covered), parts
