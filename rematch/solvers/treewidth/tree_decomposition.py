"""Tree decompositions: what they are, whether one is right, and how one becomes small.

`TreeDecomposition((frozenset({0, 1}), frozenset({1, 2})), ((0, 1),)).width == 1`

R. Kumar, M. Purohit, Z. Svitkina, E. Vee, J. Wang, "Efficient Rematerialization for Deep Networks" (NeurIPS 2019),
section 2.2, lemma 1, theorem 2. The vertices of a computation are its operators, and two are neighbours if one reads
what the other makes; residents tie nothing together. A decomposition of a graph that falls apart is one tree all the
same: its parts are joined by edges between bags that have nothing in common.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rematch.graph import Graph

Neighbours = Sequence[Collection[int]]
Bag = frozenset[int]
Edge = tuple[int, int]


@dataclass(frozen=True)
class TreeDecomposition:
    """Bags of vertices, and the edges of a tree on the bags, as pairs of their numbers."""

    bags: tuple[Bag, ...]
    edges: tuple[Edge, ...]

    @property
    def width(self) -> int:
        """One less than the size of the largest bag; -1 without vertices."""
        return max(map(len, self.bags), default=0) - 1

    def neighbours(self) -> list[list[int]]:
        """Per bag, the bags it is tied to."""
        tied: list[list[int]] = [[] for _ in self.bags]
        for one, other in self.edges:
            tied[one].append(other)
            tied[other].append(one)
        return tied


def operator_neighbours(graph: Graph) -> list[set[int]]:
    """Per operator, those that read what it makes and those that make what it reads."""
    a = graph.arrays
    neighbours: list[set[int]] = [set() for _ in graph.ops]
    for value, maker in enumerate(a.producer.tolist()):
        for reader in a.users_of(value).tolist():
            neighbours[maker].add(reader)
            neighbours[reader].add(maker)
    return neighbours


def fault(decomposition: TreeDecomposition, neighbours: Neighbours) -> str | None:
    """What makes this no tree decomposition of the graph, in words; None if nothing does."""
    bags, count = decomposition.bags, len(neighbours)
    strange = next((vertex for bag in bags for vertex in bag if not 0 <= vertex < count), None)
    if strange is not None:
        return f"vertex {strange} is in a bag, but the graph has {count} vertices"
    if not _is_tree(len(bags), decomposition.edges):
        return f"{len(decomposition.edges)} edges on {len(bags)} bags are no tree"
    bags_of: list[list[int]] = [[] for _ in neighbours]
    for index, bag in enumerate(bags):
        for vertex in bag:
            bags_of[vertex].append(index)
    links = [0] * count  # edges of the tree between two bags that both have the vertex
    for one, other in decomposition.edges:
        for vertex in bags[one] & bags[other]:
            links[vertex] += 1
    for vertex, near in enumerate(neighbours):
        if not bags_of[vertex]:
            return f"vertex {vertex} is in no bag"
        if links[vertex] != len(bags_of[vertex]) - 1:  # in a tree: as many as it takes to hold them together
            return f"the bags of vertex {vertex} do not hang together"
        together = set().union(*(bags[index] for index in bags_of[vertex]))
        for other in near:
            if other not in together:
                return f"neighbours {vertex} and {other} are in no bag together"
    return None


def _is_tree(count: int, edges: Sequence[Edge]) -> bool:
    sets = _DisjointSets(count)
    joins = [0 <= one < count and 0 <= other < count and sets.join(one, other) for one, other in edges]
    return all(joins) and len(edges) == max(0, count - 1)


class _DisjointSets:
    """Union-find; `join(child, parent)` keeps the parent's representative."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def find(self, item: int) -> int:
        above = self._above
        while above[item] != item:
            above[item] = above[above[item]]
            item = above[item]
        return item

    def join(self, child: int, parent: int) -> bool:
        """Whether they were apart before."""
        one, other = self.find(child), self.find(parent)
        self._above[one] = other
        return one != other


def shrunk(decomposition: TreeDecomposition) -> TreeDecomposition:
    """Lemma 1: neighbouring bags of which one contains the other become one, so that no more bags than vertices stay.

    One pass is enough: a pair that cannot be merged now cannot be merged later.
    """
    bags = decomposition.bags
    sets = _DisjointSets(len(bags))
    kept: list[Edge] = []
    for edge in decomposition.edges:
        one, other = map(sets.find, edge)
        if bags[one] <= bags[other]:
            sets.join(one, other)
        elif bags[other] <= bags[one]:
            sets.join(other, one)
        else:
            kept.append(edge)
    number = {old: new for new, old in enumerate(index for index in range(len(bags)) if sets.find(index) == index)}
    edges = ((number[sets.find(one)], number[sets.find(other)]) for one, other in kept)
    return TreeDecomposition(tuple(bags[index] for index in number), tuple(edges))


def balanced_bag(tree: Sequence[Sequence[int]], weights: Sequence[float]) -> int:
    """Jordan's separator: a node whose removal leaves parts of at most half the weight each.

    `tree` has the neighbours of each node, and no weight is negative.
    """
    order, parent = _outwards(tree)
    below = list(weights)
    heaviest = [0.0] * len(tree)  # of the parts away from the root that the removal of a node leaves
    for node in reversed(order[1:]):
        below[parent[node]] += below[node]
        heaviest[parent[node]] = max(heaviest[parent[node]], below[node])
    total = below[order[0]]
    return min(order, key=lambda node: (max(heaviest[node], total - below[node]), node))


def _outwards(tree: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """The nodes from node 0 outwards, and the node through which each is reached."""
    order, parent = [0], [-1] * len(tree)
    for node in order:
        for other in tree[node]:
            if other != parent[node]:
                parent[other] = node
                order.append(other)
    return order, parent
