"""Balanced separators of a tree decomposition, one inside the other: the skeleton of TWRemat's recursion.

`separate(decomposition, first=(loss,)).parts[0].separator`

Kumar et al. (NeurIPS 2019), lemma 3 and algorithm 1: a bag whose removal leaves parts with at most half of the bags
separates the graph; its vertices leave all other bags, and each part is separated in the same way. Made once, so that
the recursion, which visits a part many times, never looks for a separator again.

Two things are done at every level that the paper does only at the top, or leaves out: bags that lost their vertices
are merged as in lemma 1, and a part is cut where neighbouring bags no longer share a vertex, for nothing ties the two
sides together. Both only make parts smaller. Half is measured in bags and, where vertices have weights, in equal
measure by weight: w(bag) = 1 / bags + weight / total weight, so that there are still at most log2(bags) + 2 levels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from rematch.solvers.treewidth.tree_decomposition import Bag, TreeDecomposition, balanced_bag, shrunk


@dataclass(frozen=True)
class Separation:
    """Vertices without which a part of the graph falls into `parts`, each separated again."""

    separator: frozenset[int]
    bags: int
    parts: tuple[Separation, ...]

    @cached_property
    def piece_of(self) -> dict[int, int]:
        """Per vertex beyond the separator, the number of its part."""
        return {vertex: index for index, part in enumerate(self.parts) for vertex in part.vertices}

    @cached_property
    def vertices(self) -> frozenset[int]:
        return self.separator.union(*(part.vertices for part in self.parts))


def separate(
    decomposition: TreeDecomposition,
    first: Collection[int] = (),
    weights: Sequence[float] = (),
    check: Callable[[], None] = lambda: None,
) -> Separation:
    """Separate the graph by the vertices `first`, then each part by a balanced bag; without weights balance bags.

    `check` is called again and again and may raise.
    """
    scale = len(decomposition.bags) / (sum(weights) or 1.0)
    scaled = [scale * weight for weight in weights]  # once for all levels: what halves at each is then the same measure
    parts = [_separated(part, scaled, check) for part in _parts_without(decomposition, frozenset(first))]
    if not first and len(parts) == 1:
        return parts[0]
    return Separation(frozenset(first), sum(part.bags for part in parts) + bool(first), tuple(parts))


def _separated(part: TreeDecomposition, weights: Sequence[float], check: Callable[[], None]) -> Separation:
    check()
    bag = part.bags[balanced_bag(part.neighbours(), _bag_weights(part.bags, weights))]
    inner = _parts_without(part, bag)
    return Separation(bag, len(part.bags), tuple(_separated(piece, weights, check) for piece in inner))


def _bag_weights(bags: Sequence[Bag], weights: Sequence[float]) -> list[float]:
    """One for each bag, and the weights of the vertices that no bag before it has."""
    if not weights:
        return [1.0] * len(bags)
    own, seen = [], set[int]()
    for bag in bags:
        own.append(1.0 + sum(weights[vertex] for vertex in bag - seen))
        seen |= bag
    return own


def _parts_without(decomposition: TreeDecomposition, gone: Bag) -> list[TreeDecomposition]:
    """What is left of a decomposition without some vertices: a shrunk tree for each part that hangs together."""
    bags = [bag - gone for bag in decomposition.bags]
    neighbours = decomposition.neighbours()
    found = [not bag for bag in bags]
    parts = []
    for start in range(len(bags)):
        if found[start]:
            continue
        found[start] = True
        members, edges = [start], []
        for index, member in enumerate(members):
            for other in neighbours[member]:
                if not found[other] and bags[member] & bags[other]:
                    found[other] = True
                    edges.append((index, len(members)))
                    members.append(other)
        parts.append(shrunk(TreeDecomposition(tuple(bags[member] for member in members), tuple(edges))))
    return parts
