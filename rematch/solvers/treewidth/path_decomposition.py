"""Path decompositions of directed acyclic graphs, and spines along them.

`with_spine(readers, path_decomposition(readers))` where `readers[v]` lists the vertices that an edge leads to from v.

R. Kumar, M. Purohit, Z. Svitkina, E. Vee, J. Wang, "Efficient Rematerialization for Deep Networks" (NeurIPS 2019),
sections A.1 and A.2. A path decomposition is a row of bags such that every vertex is in some of them, all side by side,
and the ends of every edge are together in one. Here it is held as one interval of bags for each vertex, so that the
first rule cannot be broken. A *spine* is a topological order whose neighbours are together in a bag, as if there were
an edge between them.

Decompositions come from orders of the vertices: bag i has the i-th vertex and those before it with an edge to it or
beyond. The best order gives the pathwidth (Kinnersley 1992); we take the best of a few greedy ones.

Spines come from algorithm 2, with one change. As printed it adds an edge from a vertex x to the next vertex w and, so
that both are in a bag, extends the interval of x to the right; but x can lie entirely to the right of w, when an
out-neighbour of u reaches further right than u itself. For u = [0, 5], v = [1, 10], x = [9, 10], w = [5, 6] and edges
u -> v -> x it asks for x -> w. Here such a v waits for the closest vertex on the stack that reaches as far as v does.
Then every vertex processed from u ends within u, what is added to a bag while u is processed is added to bags of u
from left to right, at most one vertex to each, and the bound of theorem 8 holds: bags of 2 pw + 3. (The printed
algorithm also extends the last vertex to the end of u. It is enough to extend it when the next vertex is known.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise

from rematch.solvers.base import Deadline

Readers = Sequence[Collection[int]]

_MOST_CANDIDATES = 64  # for the next vertex of a greedy order


@dataclass(frozen=True)
class PathDecomposition:
    """`first[v]` and `last[v]` are the first and the last bag that vertex v is in."""

    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def entries(self) -> int:
        """Vertices of all bags together."""
        return sum(last - first + 1 for first, last in zip(self.first, self.last, strict=True))

    @cached_property
    def bags(self) -> tuple[tuple[int, ...], ...]:
        """Vertices of each bag, in ascending order."""
        bags: list[list[int]] = [[] for _ in range(max(self.last, default=-1) + 1)]
        for vertex, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            for bag in bags[first : last + 1]:
                bag.append(vertex)
        return tuple(map(tuple, bags))

    @cached_property
    def largest_bag(self) -> int:
        """Vertices in the largest bag, one more than the width."""
        changes = [0] * (max(self.last, default=-1) + 2)
        for first, last in zip(self.first, self.last, strict=True):
            changes[first] += 1
            changes[last + 1] -= 1
        return max(accumulate(changes))

    @property
    def width(self) -> int:
        return self.largest_bag - 1

    def share_bag(self, one: int, other: int) -> bool:
        return max(self.first[one], self.first[other]) <= min(self.last[one], self.last[other])

    def covers(self, readers: Readers) -> bool:
        """Whether the ends of every edge share a bag, which makes this a path decomposition of the graph."""
        return all(self.share_bag(vertex, reader) for vertex, row in enumerate(readers) for reader in row)


@dataclass(frozen=True)
class Spine:
    """A topological order, and a path decomposition in which neighbours of that order share a bag."""

    order: tuple[int, ...]
    decomposition: PathDecomposition


def path_decomposition(readers: Readers, deadline: Deadline | None = None) -> PathDecomposition:
    """The narrowest that a few greedy orders lead to, without bags inside others.

    When the deadline expires, no further order is begun, and the one at hand is ended in the order of the vertices.
    """
    neighbours = undirected(readers)
    best: PathDecomposition | None = None
    for order in _greedy_orders(neighbours, deadline):
        found = decomposition_along(neighbours, order)
        if best is None or found.largest_bag < best.largest_bag:
            best = found
        if deadline is not None and deadline.expired:
            break
    assert best is not None  # there is at least one order
    return best


def undirected(readers: Readers) -> list[list[int]]:
    """Both ends of every edge as neighbours of each other, in ascending order."""
    neighbours: list[set[int]] = [set(row) for row in readers]
    for vertex, row in enumerate(readers):
        for reader in row:
            neighbours[reader].add(vertex)
    return [sorted(row) for row in neighbours]


def decomposition_along(neighbours: Readers, order: Sequence[int]) -> PathDecomposition:
    """Bag i has the i-th vertex of `order`, and of those before it the ones with a neighbour there or beyond."""
    position = _positions(order)
    last = [max([position[vertex], *(position[n] for n in row)]) for vertex, row in enumerate(neighbours)]
    return shrunk(PathDecomposition(tuple(position), tuple(last)))


def _positions(order: Sequence[int]) -> list[int]:
    position = [0] * len(order)
    for index, vertex in enumerate(order):
        position[vertex] = index
    return position


def shrunk(decomposition: PathDecomposition) -> PathDecomposition:
    """Lemma 1 for paths: without bags inside a bag beside them, so that no more bags than vertices are left."""
    ends = sorted(set(decomposition.last))  # where nothing ends, the next bag has all of it
    first = [bisect_left(ends, bag) for bag in decomposition.first]
    last = [bisect_left(ends, bag) for bag in decomposition.last]
    begins = sorted(set(first))  # where nothing begins, the bag before has all of it
    return PathDecomposition(
        tuple(bisect_right(begins, bag) - 1 for bag in first), tuple(bisect_right(begins, bag) - 1 for bag in last)
    )


def _greedy_orders(neighbours: Readers, deadline: Deadline | None) -> Iterator[list[int]]:
    """Orders from the ends of the graph, as far as two walks across it can tell, and from the first and last vertex."""
    if not neighbours:
        yield []
        return
    yield greedy_order(neighbours, 0, deadline)
    one_end = _walk(neighbours, 0)[-1]
    for start in sorted({one_end, _walk(neighbours, one_end)[-1], len(neighbours) - 1} - {0}):
        yield greedy_order(neighbours, start, deadline)


def _walk(neighbours: Readers, start: int) -> list[int]:
    """Vertices in the order in which a breadth-first walk reaches them."""
    found, walk = {start}, [start]
    for vertex in walk:
        new = [other for other in neighbours[vertex] if other not in found]
        found.update(new)
        walk += new
    return walk


def greedy_order(neighbours: Readers, start: int, deadline: Deadline | None = None) -> list[int]:
    """From `start` on, the vertex that leaves the fewest vertices open, which are those with neighbours to come.

    Of several, the one beside an open vertex with the fewest neighbours to come, then the one that brings the fewest
    itself, then the one beside the oldest. Once the deadline has expired, the rest comes as it is numbered.
    """
    to_come = [len(row) for row in neighbours]  # neighbours of each vertex that the order does not have yet
    placed = [False] * len(neighbours)
    open_ones: dict[int, None] = {}  # oldest first
    order: list[int] = []
    unplaced = iter(range(len(neighbours)))

    def candidates() -> Iterator[int]:
        return (other for vertex in open_ones for other in neighbours[vertex] if not placed[other])

    def cost(vertex: int) -> tuple[int, int, int]:
        beside = [to_come[other] for other in neighbours[vertex] if placed[other]]
        return (to_come[vertex] > 0) - beside.count(1), min(beside), to_come[vertex]

    following: int | None = start
    while following is not None:
        placed[following] = True
        order.append(following)
        for other in neighbours[following]:
            to_come[other] -= 1
            if to_come[other] == 0:
                open_ones.pop(other, None)
        if to_come[following] > 0:
            open_ones[following] = None
        following = None
        if deadline is None or not deadline.expired:
            following = min(islice(candidates(), _MOST_CANDIDATES), key=cost, default=None)
        if following is None:
            following = next((vertex for vertex in unplaced if not placed[vertex]), None)
    return order


def tied_along(order: Sequence[int], readers: Readers) -> list[list[int]]:
    """The graph with edges to pieces that nothing ties to the others, from where `order` first comes to them.

    A decomposition would put such a piece anywhere, and a spine along `order` would have to go there and back.
    """
    neighbours = undirected(readers)
    tied = [list(row) for row in readers]
    found: set[int] = set()
    for index, vertex in enumerate(order):
        if vertex not in found:
            found.update(_walk(neighbours, vertex))
            if index:
                tied[order[index - 1]].append(vertex)
    return tied


def spine_along(order: Sequence[int], decomposition: PathDecomposition) -> Spine:
    """Make a given topological order a spine: each vertex is put into bags until it meets the next. Without a bound."""
    first, last = list(decomposition.first), list(decomposition.last)
    for vertex, following in pairwise(order):
        first[vertex] = min(first[vertex], last[following])
        last[vertex] = max(last[vertex], first[following])
    return Spine(tuple(order), PathDecomposition(tuple(first), tuple(last)))


def with_spine(readers: Readers, decomposition: PathDecomposition) -> Spine:
    """Algorithm 2: a spine for a graph of bags of pw + 1 vertices, and bags of at most 2 pw + 3 that it fits."""
    first, reach = decomposition.first, decomposition.last
    last = list(reach)
    unexplored = _in_degrees(readers)
    # Of each vertex being processed, what is to be processed before it is done, as (right end, vertex) in ascending
    # order. At the bottom is the paper's vertex r, which is in every bag and has edges to all others.
    stack = [sorted((reach[vertex], vertex) for vertex, count in enumerate(unexplored) if count == 0)]
    reaches = [-max(reach, default=0)]  # negated: ascending, as nothing on the stack reaches beyond what is below it
    order: list[int] = []
    while stack:
        if not stack[-1]:
            stack.pop()
            reaches.pop()
            continue
        _, vertex = stack[-1].pop(0)
        if order:
            last[order[-1]] = max(last[order[-1]], first[vertex])
        order.append(vertex)
        stack.append([])
        reaches.append(-reach[vertex])
        for reader in readers[vertex]:
            unexplored[reader] -= 1
            if unexplored[reader] == 0:
                closest = bisect_right(reaches, -reach[reader]) - 1
                insort(stack[closest], (reach[reader], reader))
    return Spine(tuple(order), PathDecomposition(first, tuple(last)))


def _in_degrees(readers: Readers) -> list[int]:
    degrees = [0] * len(readers)
    for row in readers:
        for reader in row:
            degrees[reader] += 1
    return degrees
