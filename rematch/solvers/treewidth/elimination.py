"""Tree decompositions from an order of elimination: minimum fill-in and minimum degree.

`decompose(operator_neighbours(graph)).width`

H. Bodlaender, A. Koster, "Treewidth computations I. Upper bounds" (Information and Computation 208, 2010), which Kumar
et al. (NeurIPS 2019) use. To eliminate a vertex is to tie its neighbours to one another and take it out; it and its
neighbours are a bag, tied to the bag of the neighbour that goes next. Min-fill takes the vertex that needs the fewest
new ties, min-degree the one with the fewest neighbours, which is worse and quicker.

Counts of missing ties are kept up to date instead of counted anew: taking out a vertex, and each new tie, change them
only for common neighbours. As soon as no more vertices are left than the largest bag has, they are the last bag. So
they are when the work allowed is done, which keeps the time bounded on dense graphs and the decomposition valid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import Literal

from rematch.solvers.treewidth.tree_decomposition import Edge, Neighbours, TreeDecomposition, shrunk

Heuristic = Literal["min-fill", "min-degree"]
MOST_WORK = 100_000_000  # steps of set intersections, about 20 million a second


def decompose(
    neighbours: Neighbours, heuristic: Heuristic = "min-fill", most_work: int = MOST_WORK
) -> TreeDecomposition:
    """A small tree decomposition of a graph, shrunk as in lemma 1."""
    elimination = _MinFill(neighbours) if heuristic == "min-fill" else _MinDegree(neighbours)
    order: list[int] = []
    above: list[frozenset[int]] = []  # per eliminated vertex, its neighbours at that time
    largest = 0
    while len(neighbours) - len(order) > largest and elimination.work <= most_work:
        vertex = elimination.cheapest()
        order.append(vertex)
        above.append(frozenset(elimination.ties[vertex]))
        largest = max(largest, len(above[-1]) + 1)
        elimination.take_out(vertex)
    return shrunk(_tree_of(order, above, len(neighbours)))


def _tree_of(order: list[int], above: list[frozenset[int]], count: int) -> TreeDecomposition:
    """The bag of each eliminated vertex, tied to that of its next neighbour; all that is left is the last bag."""
    last = len(order)
    bag_of = [last] * count
    for index, vertex in enumerate(order):
        bag_of[vertex] = index
    bags = [near | {vertex} for vertex, near in zip(order, above, strict=True)]
    bags.append(frozenset(vertex for vertex in range(count) if bag_of[vertex] == last))
    edges: list[Edge] = [(index, min((bag_of[v] for v in near), default=last)) for index, near in enumerate(above)]
    return TreeDecomposition(tuple(bags), tuple(edges))


class _Elimination(ABC):
    """A graph that loses one vertex after the other, and a queue of what to take next.

    The queue may have outdated entries of a vertex beside its latest; those are passed over.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self.ties = [set(near) for near in neighbours]
        self.work = 0
        self._gone = [False] * len(neighbours)
        self._queue = [(*self._cost(vertex), vertex) for vertex in range(len(neighbours))]
        heapify(self._queue)

    @abstractmethod
    def _cost(self, vertex: int) -> tuple[int, int]:
        """What is smallest for the vertex to take next."""

    @abstractmethod
    def _tie(self, near: set[int]) -> set[int]:
        """Tie vertices to one another; returns all whose cost may have changed."""

    def cheapest(self) -> int:
        while True:
            *cost, vertex = heappop(self._queue)
            if not self._gone[vertex] and tuple(cost) == self._cost(vertex):
                return vertex

    def take_out(self, vertex: int) -> None:
        self._gone[vertex] = True
        near = self.ties[vertex]
        for other in near:
            self._leave(other, vertex)
        for changed in self._tie(near):
            heappush(self._queue, (*self._cost(changed), changed))
        self.ties[vertex] = set()

    def _leave(self, vertex: int, gone: int) -> None:
        self.ties[vertex].remove(gone)


class _MinDegree(_Elimination):
    def _cost(self, vertex: int) -> tuple[int, int]:
        return len(self.ties[vertex]), 0

    def _tie(self, near: set[int]) -> set[int]:
        for vertex in near:
            self.ties[vertex] |= near
            self.ties[vertex].remove(vertex)
            self.work += len(near)
        return near


class _MinFill(_Elimination):
    """`_fill[v]`: pairs of neighbours of v that are not tied."""

    def __init__(self, neighbours: Neighbours) -> None:
        ties = [set(near) for near in neighbours]
        self._fill = [_missing_ties(ties, vertex) for vertex in range(len(ties))]
        super().__init__(neighbours)

    def _cost(self, vertex: int) -> tuple[int, int]:
        return self._fill[vertex], len(self.ties[vertex])

    def _leave(self, vertex: int, gone: int) -> None:
        near = self.ties[vertex]
        self._fill[vertex] -= len(near) - 1 - len(near & self.ties[gone])
        self.work += len(self.ties[gone])
        near.remove(gone)

    def _tie(self, near: set[int]) -> set[int]:
        changed = set(near)
        for one, other in combinations(sorted(near), 2):
            if other not in self.ties[one]:
                changed |= self._tie_pair(one, other)
        self.work += len(near) ** 2
        return changed

    def _tie_pair(self, one: int, other: int) -> set[int]:
        """Returns their common neighbours, each of which has one missing tie less."""
        ties, fill = self.ties, self._fill
        common = ties[one] & ties[other]
        for vertex in common:
            fill[vertex] -= 1
        fill[one] += len(ties[one]) - len(common)
        fill[other] += len(ties[other]) - len(common)
        ties[one].add(other)
        ties[other].add(one)
        self.work += min(len(ties[one]), len(ties[other]))
        return common


def _missing_ties(ties: list[set[int]], vertex: int) -> int:
    near = ties[vertex]
    present = sum(len(near & ties[other]) for other in near) // 2
    return len(near) * (len(near) - 1) // 2 - present
