"""Independent segments: the parts of a graph that can be computed again by themselves, from one vertex to another.

`branches(dag, Segment.whole(dag))`

Feng & Huang (CVPR 2021), definition 1: a segment s_ij has one vertex i that all of it comes from and one vertex j that
all of it leads to, and none of its inner vertices has an edge to the outside. The edge from i to j may be part of it
(`direct`) or not.

Their algorithm 2 tests each pair of vertices in turn for a segment between them. Seen as an undirected graph with one
more edge from the sink to the source, the whole is biconnected, and the segments between i and j are the pieces that
come off when i and j are taken away. So we take away each vertex once and look for cut vertices in what is left, which
finds the segments of all pairs in O(|V| |E|) instead of O(|V|^2 |E|), and keeps of each inner vertex the largest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from rematch.errors import GraphError
from rematch.graph.model import Floats, Longs, compressed_rows
from rematch.solvers.base import Deadline

_VERTICES_AT_A_TIME = 64  # taken away between two looks at the clock


@dataclass(frozen=True, eq=False)
class Dag:
    """A forward pass: vertices in topological order, of which the first is the only source and the last the only sink.

    `readers[v]` are the vertices that read v.
    """

    size_bytes: Longs
    seconds: Floats
    readers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        count = len(self.readers)
        if count < 2 or len(self.size_bytes) != count or len(self.seconds) != count:
            raise GraphError(f"{count} vertices with {len(self.size_bytes)} sizes; at least 2 of each are needed")
        for vertex, readers in enumerate(self.readers):
            if vertex < count - 1 and not readers:
                raise GraphError(f"vertex {vertex} has no reader; only the last one, {count - 1}, is a sink")
            if not all(vertex < reader < count for reader in readers):
                raise GraphError(f"a reader of vertex {vertex} is not behind it; number vertices in topological order")
        for vertex, read in enumerate(self.reads[1:], start=1):
            if not read:
                raise GraphError(f"vertex {vertex} reads nothing; only vertex 0 is a source")

    @staticmethod
    def of(
        sizes: Sequence[int], edges: Iterable[tuple[int, int]] | None = None, seconds: Sequence[float] | None = None
    ) -> Dag:
        """From sizes and edges, without edges a linear graph; each vertex takes a second unless `seconds` are given."""
        readers: list[set[int]] = [set() for _ in sizes]
        for vertex, reader in pairwise(range(len(sizes))) if edges is None else edges:
            readers[vertex].add(reader)
        return Dag(
            np.asarray(sizes, dtype=np.int64),
            np.ones(len(sizes)) if seconds is None else np.asarray(seconds, dtype=np.float64),
            tuple(tuple(sorted(row)) for row in readers),
        )

    def __len__(self) -> int:
        return len(self.readers)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """The vertices that each vertex reads."""
        rows: list[list[int]] = [[] for _ in self.readers]
        for vertex, readers in enumerate(self.readers):
            for reader in readers:
                rows[reader].append(vertex)
        return tuple(map(tuple, rows))


@dataclass(frozen=True)
class Segment:
    """An independent segment by its ends and the vertices between them, in topological order."""

    source: int
    target: int
    inside: tuple[int, ...]
    direct: bool = False  # whether the edge from the source to the target is part of it

    @staticmethod
    def whole(dag: Dag) -> Segment:
        last = len(dag) - 1
        return Segment(0, last, tuple(range(1, last)), last in dag.readers[0])

    def bytes_inside(self, dag: Dag) -> int:
        """The paper's l(s_ij): what computing it again holds besides its ends."""
        return int(dag.size_bytes[list(self.inside)].sum())


def segments_between(dag: Dag, checkpoints: Collection[int]) -> list[Segment]:
    """The segments that `checkpoints`, the first and last vertex among them, leave to be computed again.

    `GraphError` if what lies between checkpoints is not independent.
    """
    kept = set(checkpoints)
    found = []
    for inside in _connected(dag, [vertex for vertex in range(len(dag)) if vertex not in kept]):
        sources = {read for vertex in inside for read in dag.reads[vertex]} & kept
        targets = {reader for vertex in inside for reader in dag.readers[vertex]} & kept
        if len(sources) != 1 or len(targets) != 1:
            raise GraphError(
                f"vertex {inside[0]} and what it is tied to lie between checkpoints {sorted(sources | targets)}; "
                "a segment has one source and one target"
            )
        found.append(Segment(sources.pop(), targets.pop(), inside))
    return found


def loss_bytes(dag: Dag, checkpoints: Collection[int]) -> int:
    """Objective (1): all checkpoints, and the largest segment between them."""
    largest = max((segment.bytes_inside(dag) for segment in segments_between(dag, checkpoints)), default=0)
    return int(dag.size_bytes[list(checkpoints)].sum()) + largest


def branches(dag: Dag, segment: Segment) -> list[Segment]:
    """Algorithm 3: the parts of a segment that only its ends tie together, the edge between these left out."""
    return [Segment(segment.source, segment.target, inside) for inside in _connected(dag, segment.inside)]


def _connected(dag: Dag, vertices: Sequence[int]) -> list[tuple[int, ...]]:
    """Sets of `vertices` that are tied together by edges among them."""
    unseen = set(vertices)
    found = []
    for first in vertices:
        if first not in unseen:
            continue
        unseen.remove(first)
        reached = [first]
        for vertex in reached:
            for neighbour in (*dag.readers[vertex], *dag.reads[vertex]):
                if neighbour in unseen:
                    unseen.remove(neighbour)
                    reached.append(neighbour)
        found.append(tuple(sorted(reached)))
    return found


def splitting_vertices(dag: Dag, segment: Segment) -> tuple[int, ...]:
    """Vertices that every path through the segment passes: those that no edge of it jumps over."""
    if segment.direct:
        return ()
    inside = set(segment.inside)
    reach = max((reader for reader in dag.readers[segment.source] if reader in inside), default=segment.target)
    found = []
    for vertex in segment.inside:
        if reach <= vertex:
            found.append(vertex)
        reach = max(reach, dag.readers[vertex][-1])
    return tuple(found)


def split_at(dag: Dag, segment: Segment, points: Sequence[int]) -> list[Segment]:
    """The segments from each splitting vertex to the next; those that are a single edge have nothing inside."""
    ends = (segment.source, *points, segment.target)
    cuts = [-1, *(bisect_left(segment.inside, point) for point in points), len(segment.inside)]
    return [
        Segment(source, target, segment.inside[start + 1 : end], target in dag.readers[source])
        for (source, target), (start, end) in zip(pairwise(ends), pairwise(cuts), strict=True)
    ]


def largest_segments(dag: Dag, segment: Segment, deadline: Deadline | None = None) -> list[Segment]:
    """Algorithm 4: the largest segments inside one that neither branches nor has splitting vertices.

    No two of them share an inner vertex (lemma 6). When `deadline` expires those found so far are returned, of which
    some may be part of a larger one.
    """
    from rematch.solvers.feng_huang import kernels

    vertices = (segment.source, *segment.inside, segment.target)
    pointer, neighbours = compressed_rows(_undirected(dag, vertices))
    largest = np.zeros(len(vertices), dtype=np.int32)
    ends = np.full((2, len(vertices)), -1, dtype=np.int32)
    for first in range(0, len(vertices), _VERTICES_AT_A_TIME):
        if deadline is not None and deadline.expired:
            break
        last = min(len(vertices), first + _VERTICES_AT_A_TIME)
        kernels.find_largest_segments(pointer, neighbours, first, last, largest, ends)
    members: dict[tuple[int, int], list[int]] = {}
    for inner in np.flatnonzero(largest).tolist():
        members.setdefault((int(ends[0, inner]), int(ends[1, inner])), []).append(inner)
    return [
        Segment(
            vertices[source],
            vertices[target],
            tuple(vertices[inner] for inner in inside),
            direct=vertices[target] in dag.readers[vertices[source]],
        )
        for (source, target), inside in members.items()
        if len(inside) == largest[inside[0]]
    ]


def _undirected(dag: Dag, vertices: Sequence[int]) -> list[list[int]]:
    """Neighbours within a segment, by rank; its ends are tied together, as if by all that lies outside."""
    rank = {vertex: index for index, vertex in enumerate(vertices)}
    rows: list[list[int]] = [[] for _ in vertices]
    for vertex, index in rank.items():
        for reader in dag.readers[vertex]:
            if reader in rank:
                rows[index].append(rank[reader])
                rows[rank[reader]].append(index)
    rows[0].append(len(vertices) - 1)
    rows[-1].append(0)
    return rows
