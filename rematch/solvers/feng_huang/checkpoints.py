"""The cheapest checkpoints for each max term C, and the best over all of them.

`best_checkpoints(divide(dag)).vertices`

Feng & Huang (CVPR 2021), algorithms 5 and 6. For a given C, a segment of at most C bytes needs no checkpoints inside.
A larger one is divided: a linear one along the shortest path over its accessibility graph, of which an edge may also be
a part that is divided itself; of a branching one each branch by itself; of a complicated one all connecting vertices
are checkpoints and each part is solved by itself. Nothing else is possible, because no segment reaches beyond a part
(completeness), so that this minimises objective (1),

    sum of the sizes of all checkpoints + the largest sum of sizes within a segment between checkpoints,

over all sets of checkpoints that leave independent segments; branches between the same two checkpoints are segments of
their own, computed again one after the other. The first and last vertex are always checkpoints.

Of solutions with equally many bytes we take the one with least to compute again, which the paper leaves open. Both only
become less as C grows, so that not all of the O(|V|^2) max terms have to be solved to know them all: what lies between
two equal ones is equal. Where even so there are more than can be solved, the widest ranges of C are halved first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rematch.graph.model import Bools, Floats, Ints, Longs, compressed_rows
from rematch.solvers.base import Deadline
from rematch.solvers.feng_huang.division_tree import DivisionNode, DivisionTree, Kind
from rematch.solvers.feng_huang.linear import Line
from rematch.solvers.feng_huang.segments import loss_bytes

_MOST_TERMS = 2_000_000  # to look for
_MOST_WORK = 100_000_000  # vertices times terms that are solved: about a second
_WORK_AT_ONCE = 2_000_000  # between two looks at the clock


@dataclass(frozen=True)
class Checkpoints:
    """Vertices to keep, the first and last among them, and what objective (1) makes of them."""

    vertices: tuple[int, ...]
    loss_bytes: int


class TreeArrays(NamedTuple):
    """A division tree for compiled code: per node, per child of a node, per position on the line of a linear node."""

    is_linear: Bools
    bytes_inside: Longs
    seconds_inside: Floats
    bytes_of_points: Longs  # of nodes that are not linear
    child_ptr: Ints
    child: Ints  # -1 where a gap of a line is a single edge
    position_ptr: Ints
    bytes_before: Longs
    bytes_behind: Longs
    seconds_before: Floats
    seconds_behind: Floats


class Work(NamedTuple):
    """What compiled code finds out about positions and nodes for one max term."""

    first: Longs
    spent: Longs
    lost: Floats
    queue: Longs
    previous: Longs
    spent_inside: Longs
    lost_inside: Floats
    is_divided: Bools

    @staticmethod
    def of(positions: int, nodes: int) -> Work:
        return Work(
            first=np.zeros(positions, np.int64),
            spent=np.zeros(positions, np.int64),
            lost=np.zeros(positions),
            queue=np.zeros(positions, np.int64),
            previous=np.zeros(positions, np.int64),
            spent_inside=np.zeros(nodes, np.int64),
            lost_inside=np.zeros(nodes),
            is_divided=np.zeros(nodes, np.bool_),
        )


class CheckpointSearch:
    """The cheapest checkpoints of one graph for any max term; with little time, fewer terms are told apart."""

    def __init__(self, tree: DivisionTree, deadline: Deadline | None = None) -> None:
        self._tree = tree
        self._deadline = deadline or Deadline()
        self._lines = [_line(tree, node) for node in tree.nodes if node.kind is Kind.LINEAR]
        self._arrays = _tree_arrays(tree, self._lines)
        self._work = Work.of(len(self._arrays.bytes_before), len(tree.nodes))

    def max_terms(self) -> Longs:
        """All C that can be best, in ascending order. With the first, 0, nothing that weighs anything is dropped."""
        if sum(len(line) ** 2 for line in self._lines) // 2 > _MOST_TERMS:
            whole = int(self._arrays.bytes_inside[0])
            return np.arange(0, whole + 1, max(1, whole // _MOST_TERMS))
        none = np.zeros(1, np.int64)
        return np.sort(np.concatenate((none, self._arrays.bytes_inside, *(line.max_terms() for line in self._lines))))

    def costs(self, terms: Longs) -> tuple[Longs, Floats]:
        """For each C the bytes of the cheapest checkpoints, ends left out, and the seconds to compute again."""
        from rematch.solvers.feng_huang import kernels

        if not self._tree.nodes:
            return np.zeros(len(terms), np.int64), np.zeros(len(terms))
        at_once = max(1, _WORK_AT_ONCE // len(self._tree.dag))
        most = min(len(terms), max(1, _MOST_WORK // len(self._tree.dag)))
        spent, lost = np.empty(len(terms), np.int64), np.empty(len(terms))
        for end in (0, len(terms) - 1):
            spent[end], lost[end] = kernels.solve_term(self._arrays, terms[end], np.inf, self._work)
        ranges, progress = np.zeros((2 * most + 1, 2), np.int64), np.array([0, 1])
        ranges[0] = 0, len(terms) - 1
        while progress[0] < progress[1] and not self._deadline.expired:
            kernels.solve_terms(self._arrays, terms, spent, lost, ranges, progress, at_once, self._work)
        kernels.solve_terms(self._arrays, terms, spent, lost, ranges, progress, 0, self._work)
        return spent, lost

    def checkpoints(self, term: int, price: float = np.inf) -> tuple[int, ...]:
        """The cheapest checkpoints with no segment above `term`, where a byte has a `price` in seconds.

        With an infinite price, the paper's: those of fewest bytes. With a finite one, the seconds to compute again and
        the price of what is kept are least together: a point on the lower convex hull of bytes and seconds.
        """
        from rematch.solvers.feng_huang import kernels

        found = {0, len(self._tree.dag) - 1}
        if self._tree.nodes:
            kernels.solve_term(self._arrays, term, price, self._work)
        waiting = [0] if self._tree.nodes else []
        for number in waiting:  # grows by the children that are solved by themselves
            if self._work.is_divided[number]:
                points, children = self._division(number)
                found.update(points)
                waiting.extend(children)
        return tuple(sorted(found))

    def _division(self, number: int) -> tuple[Sequence[int], Sequence[int]]:
        """The points of a node that are checkpoints, and the children that are solved by themselves."""
        node = self._tree.nodes[number]
        if node.kind is not Kind.LINEAR:
            return node.points, node.children
        start, end = (int(self._arrays.position_ptr[number + step]) for step in (0, 1))
        points, children = [], []
        position = end - 1
        while position > start:
            if position < end - 1:
                points.append(node.points[position - start - 1])
            position = int(self._work.previous[position])
            if position < 0:
                position = ~position
                children.append(node.children[position - start])
        return points, [child for child in children if child >= 0]

    def curve(self) -> Iterator[tuple[int, ...]]:
        """The checkpoints of every C, those with least to compute again first, and each cost once."""
        terms = self.max_terms()
        spent, lost = self.costs(terms)
        _, chosen = np.unique(np.stack((lost, spent.astype(np.float64))), axis=1, return_index=True)
        for index in chosen.tolist():
            yield self.checkpoints(int(terms[index]))

    def spread_terms(self, count: int) -> list[int]:
        """At most `count` different C, from the largest to the smallest."""
        terms = np.unique(self.max_terms())
        return [int(terms[at]) for at in np.unique(np.linspace(0, len(terms) - 1, count).astype(np.int64))[::-1]]


def best_checkpoints(tree: DivisionTree) -> Checkpoints:
    """Algorithm 6: the checkpoints that minimise objective (1)."""
    search = CheckpointSearch(tree)
    terms = search.max_terms()
    spent, lost = search.costs(terms)
    best = int(np.lexsort((lost, spent + terms))[0])
    vertices = search.checkpoints(int(terms[best]))
    return Checkpoints(vertices, loss_bytes(tree.dag, vertices))


def _line(tree: DivisionTree, node: DivisionNode) -> Line:
    """The line of a linear node: its splitting vertices, and what is in the gaps between them."""
    dag = tree.dag
    parts = [list(tree.nodes[child].segment.inside) if child >= 0 else [] for child in node.children]
    points = list(node.points)
    return Line.of(
        dag.size_bytes[points],
        dag.seconds[points],
        [int(dag.size_bytes[part].sum()) for part in parts],
        [float(dag.seconds[part].sum()) for part in parts],
    )


def _tree_arrays(tree: DivisionTree, lines: list[Line]) -> TreeArrays:
    """`lines` are those of linear nodes, in order."""
    dag, nodes = tree.dag, tree.nodes
    is_linear = np.array([node.kind is Kind.LINEAR for node in nodes], dtype=np.bool_)
    lengths = np.zeros(len(nodes) + 1, dtype=np.int32)
    lengths[1:][is_linear] = [len(line) for line in lines]
    child_ptr, child = compressed_rows([node.children for node in nodes])
    return TreeArrays(
        is_linear=is_linear,
        bytes_inside=np.array([node.segment.bytes_inside(dag) for node in nodes], dtype=np.int64),
        seconds_inside=np.array([dag.seconds[list(node.segment.inside)].sum() for node in nodes], dtype=np.float64),
        bytes_of_points=np.array([dag.size_bytes[list(node.points)].sum() for node in nodes], dtype=np.int64),
        child_ptr=child_ptr,
        child=child,
        position_ptr=np.cumsum(lengths, dtype=np.int32),
        bytes_before=np.concatenate((np.zeros(0, np.int64), *(line.bytes_before for line in lines))),
        bytes_behind=np.concatenate((np.zeros(0, np.int64), *(line.bytes_behind for line in lines))),
        seconds_before=np.concatenate((np.zeros(0, np.float64), *(line.seconds_before for line in lines))),
        seconds_behind=np.concatenate((np.zeros(0, np.float64), *(line.seconds_behind for line in lines))),
    )
