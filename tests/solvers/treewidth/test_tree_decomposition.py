"""Tree decompositions are valid, as narrow as they should be where that is known, and separate evenly."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import log2

import pytest
from hypothesis import given, strategies as st

from rematch.graph import Graph
from rematch.graph.generators import FAMILIES, gpt
from rematch.solvers.treewidth.elimination import Heuristic, decompose
from rematch.solvers.treewidth.separators import Separation, separate
from rematch.solvers.treewidth.tree_decomposition import (
    TreeDecomposition,
    balanced_bag,
    fault,
    operator_neighbours,
    shrunk,
)
from tests.solvers.treewidth.paths import as_tree
from tests.strategies import graphs

HEURISTICS: tuple[Heuristic, ...] = ("min-fill", "min-degree")
Undirected = list[set[int]]


def undirected(count: int, edges: list[tuple[int, int]]) -> Undirected:
    neighbours: Undirected = [set() for _ in range(count)]
    for one, other in edges:
        neighbours[one].add(other)
        neighbours[other].add(one)
    return neighbours


@st.composite
def any_graphs(draw: st.DrawFn, max_vertices: int = 14) -> Undirected:
    count = draw(st.integers(0, max_vertices))
    pairs = list(combinations(range(count), 2))
    return undirected(count, draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else [])


@st.composite
def trees(draw: st.DrawFn, max_vertices: int = 30) -> Undirected:
    count = draw(st.integers(2, max_vertices))
    return undirected(count, [(vertex, draw(st.integers(0, vertex - 1))) for vertex in range(1, count)])


@st.composite
def series_parallel(draw: st.DrawFn, max_steps: int = 20) -> Undirected:
    """From one edge: put a vertex on an edge, or beside it."""
    edges = [(0, 1)]
    for vertex in range(2, 2 + draw(st.integers(1, max_steps))):
        one, other = edges[draw(st.integers(0, len(edges) - 1))]
        if draw(st.booleans()):
            edges.remove((one, other))
        edges += [(one, vertex), (vertex, other)]
    return undirected(max(map(max, edges)) + 1, edges)


def degeneracy(neighbours: Undirected) -> int:
    """No decomposition is narrower than the largest of smallest degrees of any subgraph."""
    left, highest = {vertex: set(near) for vertex, near in enumerate(neighbours)}, -1
    while left:
        vertex = min(left, key=lambda vertex: len(left[vertex]))
        highest = max(highest, len(left[vertex]))
        for other in left.pop(vertex):
            left[other].discard(vertex)
    return highest


@given(any_graphs(), st.sampled_from(HEURISTICS), st.sampled_from((0, 10, 10**9)))
def test_decompositions_are_valid_even_with_little_work(
    neighbours: Undirected, heuristic: Heuristic, most_work: int
) -> None:
    found = decompose(neighbours, heuristic, most_work)
    assert fault(found, neighbours) is None
    assert degeneracy(neighbours) <= found.width <= len(neighbours) - 1
    assert len(found.bags) <= max(1, len(neighbours))


@given(any_graphs(), st.sampled_from(HEURISTICS))
def test_eliminations_take_the_cheapest_vertex_by_the_heuristics_own_measure(
    neighbours: Undirected, heuristic: Heuristic
) -> None:
    """Counted anew at every step, the width of the first tie's order is what the incremental counts arrive at."""
    left, largest = {vertex: set(near) for vertex, near in enumerate(neighbours)}, 0

    def missing(vertex: int) -> int:
        return sum(other not in left[one] for one, other in combinations(left[vertex], 2))

    while len(left) > largest:
        measure = (
            (lambda v: (missing(v), len(left[v]), v)) if heuristic == "min-fill" else (lambda v: (len(left[v]), v))
        )
        vertex = min(left, key=measure)
        near = left.pop(vertex)
        largest = max(largest, len(near) + 1)
        for one in near:
            left[one] = (left[one] | near) - {one, vertex}
    assert decompose(neighbours, heuristic).width == largest - 1


@given(trees(), st.sampled_from(HEURISTICS))
def test_trees_have_width_one(neighbours: Undirected, heuristic: Heuristic) -> None:
    assert decompose(neighbours, heuristic).width == 1


@given(series_parallel(), st.sampled_from(HEURISTICS))
def test_series_parallel_graphs_have_width_two_at_most(neighbours: Undirected, heuristic: Heuristic) -> None:
    assert decompose(neighbours, heuristic).width == degeneracy(neighbours) <= 2


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_a_clique_is_one_bag_and_a_cycle_has_width_two(heuristic: Heuristic) -> None:
    clique = undirected(6, list(combinations(range(6), 2)))
    assert decompose(clique, heuristic).bags == (frozenset(range(6)),)
    assert decompose(undirected(9, [*pairwise(range(9)), (8, 0)]), heuristic).width == 2


def test_min_fill_finds_what_min_degree_misses() -> None:
    neighbours = operator_neighbours(gpt(layers=2))
    assert decompose(neighbours).width < decompose(neighbours, "min-degree").width


@given(any_graphs(max_vertices=10), st.data())
def test_the_checker_finds_what_is_missing(neighbours: Undirected, data: st.DataObject) -> None:
    found = decompose(neighbours)
    assert fault(found, [*neighbours, set()]) == f"vertex {len(neighbours)} is in no bag"
    if neighbours and neighbours[-1]:
        assert "vertex" in (fault(found, neighbours[:-1]) or "")
    apart = [(v, w) for v, w in combinations(range(len(neighbours)), 2) if not any({v, w} <= bag for bag in found.bags)]
    if apart:
        one, other = data.draw(st.sampled_from(apart))
        tied = undirected(len(neighbours), [(one, other)])
        assert fault(found, tied) == f"neighbours {one} and {other} are in no bag together"


def test_the_checker_wants_one_tree_in_which_vertices_hang_together() -> None:
    line = undirected(3, [(0, 1), (1, 2)])
    bags = (frozenset({0, 1}), frozenset({1, 2}))
    assert fault(TreeDecomposition(bags, ((0, 1),)), line) is None
    assert fault(TreeDecomposition(bags, ()), line) == "0 edges on 2 bags are no tree"
    assert fault(TreeDecomposition((*bags, bags[0]), ((0, 1), (1, 0))), line) == "2 edges on 3 bags are no tree"
    assert fault(TreeDecomposition(bags, ((0, 7),)), line) == "1 edges on 2 bags are no tree"
    torn = TreeDecomposition((bags[0], frozenset({2}), bags[1]), ((0, 1), (1, 2)))
    assert fault(torn, line) == "the bags of vertex 1 do not hang together"


@given(any_graphs(), st.data())
def test_shrinking_keeps_width_and_validity_and_leaves_no_bag_inside_its_neighbour(
    neighbours: Undirected, data: st.DataObject
) -> None:
    """Padded with copies and halves of its own bags, a decomposition shrinks back to no more bags than vertices."""
    found = decompose(neighbours)
    bags, edges = list(found.bags), list(found.edges)
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(bags) - 1))
        edges.append((at, len(bags)))
        bags.append(frozenset(sorted(bags[at])[:: data.draw(st.integers(1, 2))]))
    small = shrunk(TreeDecomposition(tuple(bags), tuple(edges)))
    assert fault(small, neighbours) is None
    assert small.width == found.width
    assert len(small.bags) <= max(1, len(neighbours))
    assert all(
        small.bags[one] - small.bags[other] and small.bags[other] - small.bags[one] for one, other in small.edges
    )


def test_a_path_is_a_tree() -> None:
    line = undirected(4, list(pairwise(range(4))))
    assert fault(as_tree([frozenset(pair) for pair in pairwise(range(4))]), line) is None


@given(trees(), st.data())
def test_jordans_separator_leaves_no_more_than_half(neighbours: Undirected, data: st.DataObject) -> None:
    count = len(neighbours)
    weights = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    tree = [sorted(near) for near in neighbours]
    centre = balanced_bag(tree, [float(weight) for weight in weights])
    left = set(range(count)) - {centre}
    while left:
        part = [left.pop()]
        for node in part:
            near = neighbours[node] & left
            left -= near
            part += near
        assert 2 * sum(weights[node] for node in part) <= sum(weights)


def levels(part: Separation) -> int:
    return 1 + max(map(levels, part.parts), default=0)


def check_separates(part: Separation, neighbours: Undirected) -> None:
    pieces = [piece.vertices for piece in part.parts]
    assert sum(map(len, pieces)) + len(part.separator) == len(part.vertices)  # nothing twice
    for piece, inner in zip(pieces, part.parts, strict=True):
        assert inner.bags < part.bags
        outside = part.vertices - part.separator - piece
        assert all(not neighbours[vertex] & outside for vertex in piece)
        assert all(part.piece_of[vertex] == pieces.index(piece) for vertex in piece)
        check_separates(inner, neighbours)


@given(any_graphs(), st.booleans(), st.data())
def test_separations_part_the_graph_level_by_level(neighbours: Undirected, weighted: bool, data: st.DataObject) -> None:
    count = len(neighbours)
    first = data.draw(st.frozensets(st.integers(0, count - 1), max_size=2)) if count else frozenset()
    weights = [float(data.draw(st.integers(0, 100))) for _ in neighbours] if weighted else []
    found = decompose(neighbours)
    whole = separate(found, first, weights)
    assert whole.vertices == frozenset(range(count))
    assert first <= whole.separator or not first
    check_separates(whole, neighbours)
    assert levels(whole) <= log2(max(1, len(found.bags))) + 3 + bool(first)


def test_without_weights_every_part_has_at_most_half_of_the_bags() -> None:
    def check(part: Separation) -> None:
        for inner in part.parts:
            assert 2 * inner.bags <= part.bags
            check(inner)

    check(separate(decompose(operator_neighbours(gpt(layers=4)))))


def test_weights_move_the_separator_to_where_the_weight_is() -> None:
    line = as_tree([frozenset(pair) for pair in pairwise(range(101))])
    assert separate(line).separator == {49, 50}
    heavy_end = [1000.0 if vertex > 90 else 0.0 for vertex in range(101)]
    assert min(separate(line, weights=heavy_end).separator) > 70


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_every_family_is_decomposed(family: str, heuristic: Heuristic) -> None:
    neighbours = operator_neighbours(FAMILIES[family]())
    assert fault(decompose(neighbours, heuristic), neighbours) is None


@given(graphs())
def test_neighbours_are_those_that_share_a_value(graph: Graph) -> None:
    for one, other in combinations(range(len(graph.ops)), 2):
        first, second = graph.ops[one], graph.ops[other]
        share = set(first.outputs) & set(second.inputs) or set(second.outputs) & set(first.inputs)
        assert (other in operator_neighbours(graph)[one]) == bool(share)
