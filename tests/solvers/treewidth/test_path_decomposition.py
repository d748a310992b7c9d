"""Path decompositions and spines: valid on every graph, as narrow as theorem 8 says, and the lemmas of section A.2."""

from __future__ import annotations

import random
from itertools import pairwise, permutations

import pytest
from hypothesis import given, strategies as st

from rematch.solvers.base import Deadline
from rematch.solvers.treewidth.path_decomposition import (
    PathDecomposition,
    Spine,
    decomposition_along,
    greedy_order,
    path_decomposition,
    shrunk,
    spine_along,
    tied_along,
    undirected,
    with_spine,
)
from rematch.solvers.treewidth.tree_decomposition import fault
from tests.narrow import folded, narrow, readers_of
from tests.solvers.treewidth.paths import as_tree

Readers = list[list[int]]


@st.composite
def dags(draw: st.DrawFn, max_vertices: int = 12) -> Readers:
    """Any directed acyclic graph, each vertex named by its place in a topological order."""
    count = draw(st.integers(1, max_vertices))
    return [
        sorted(draw(st.sets(st.integers(vertex + 1, count - 1), max_size=4))) if vertex + 1 < count else []
        for vertex in range(count)
    ]


@st.composite
def decomposed(draw: st.DrawFn) -> tuple[Readers, PathDecomposition]:
    """A graph with a decomposition of it, the narrowest we find or any other."""
    readers = draw(dags())
    if draw(st.booleans()):
        return readers, path_decomposition(readers)
    return readers, decomposition_along(undirected(readers), draw(st.permutations(range(len(readers)))))


@st.composite
def spined(draw: st.DrawFn) -> tuple[Readers, Spine]:
    readers, decomposition = draw(decomposed())
    if draw(st.booleans()):
        return readers, with_spine(readers, decomposition)
    return readers, spine_along(range(len(readers)), decomposition)


def check_decomposition(readers: Readers, decomposition: PathDecomposition) -> None:
    assert fault(as_tree([frozenset(bag) for bag in decomposition.bags]), undirected(readers)) is None
    assert decomposition.covers(readers)
    assert decomposition.largest_bag == max(map(len, decomposition.bags))
    assert decomposition.width == decomposition.largest_bag - 1


@given(decomposed())
def test_decompositions_are_valid_and_shrunk(case: tuple[Readers, PathDecomposition]) -> None:
    readers, decomposition = case
    check_decomposition(readers, decomposition)
    assert len(decomposition.bags) <= len(readers)
    for one, other in pairwise(map(set, decomposition.bags)):
        assert not one <= other
        assert not other <= one


@given(dags(), st.data())
def test_shrinking_keeps_the_width_of_any_intervals(readers: Readers, data: st.DataObject) -> None:
    bag = st.integers(0, 6)
    intervals = [sorted(data.draw(st.tuples(bag, bag))) for _ in readers]
    loose = PathDecomposition(*(tuple(ends) for ends in zip(*intervals, strict=True)))
    tight = shrunk(loose)
    assert tight.largest_bag == loose.largest_bag
    assert len(tight.bags) <= len(readers)
    for one in range(len(readers)):
        for other in range(one):
            assert tight.share_bag(one, other) == loose.share_bag(one, other)


def test_a_pair_in_no_bag_is_found() -> None:
    apart = PathDecomposition((0, 1), (0, 1))
    assert apart.covers([[], []])
    assert not apart.covers([[1], []])


@given(dags(max_vertices=6))
def test_never_below_the_pathwidth_and_seldom_above(readers: Readers) -> None:
    """The best of all orders is the pathwidth (Kinnersley); on tiny graphs the greedy ones are at most one off."""
    neighbours = undirected(readers)
    pathwidth = min(decomposition_along(neighbours, order).width for order in permutations(range(len(readers))))
    assert pathwidth <= path_decomposition(readers).width <= pathwidth + 1


@pytest.mark.parametrize(
    ("readers", "width"),
    [
        ([[]], 0),
        ([[], [], []], 0),
        ([[1], [2], [3], []], 1),
        ([[1, 2, 3, 4, 5], [], [], [], [], []], 1),
        ([[1, 2, 3], [2, 3], [3], []], 3),
        (readers_of(folded(passes=1, places=40)), 1),
        (readers_of(folded(passes=2, places=40)), 2),
        (readers_of(folded(passes=3, places=40)), 3),
    ],
    ids=["vertex", "apart", "path", "star", "clique", "line", "there and back", "and there again"],
)
def test_known_widths_are_found(readers: Readers, width: int) -> None:
    assert path_decomposition(readers).width == width


def test_a_graph_without_vertices() -> None:
    nothing = path_decomposition([])
    assert nothing.bags == ()
    assert nothing.width == -1
    assert with_spine([], nothing).order == ()
    assert spine_along([], nothing).order == ()


@given(spined())
def test_a_spine_is_a_topological_order_whose_neighbours_share_a_bag(case: tuple[Readers, Spine]) -> None:
    readers, spine = case
    check_decomposition(readers, spine.decomposition)
    place = {vertex: index for index, vertex in enumerate(spine.order)}
    assert sorted(place) == list(range(len(readers)))
    assert all(place[vertex] < place[reader] for vertex, row in enumerate(readers) for reader in row)
    assert all(spine.decomposition.share_bag(one, other) for one, other in pairwise(spine.order))


@given(decomposed())
def test_a_spine_at_most_doubles_the_bags(case: tuple[Readers, PathDecomposition]) -> None:
    """Theorem 8."""
    readers, decomposition = case
    assert with_spine(readers, decomposition).decomposition.largest_bag <= 2 * decomposition.width + 3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_spine_at_most_doubles_the_bags_of_long_graphs(width: int, seed: int) -> None:
    readers = narrow(200, width, random.Random(seed))
    decomposition = path_decomposition(readers)
    spine = with_spine(readers, decomposition)
    check_decomposition(readers, spine.decomposition)
    assert spine.decomposition.largest_bag <= 2 * decomposition.width + 3


def test_a_vertex_that_reaches_further_than_its_maker_waits() -> None:
    """As printed, algorithm 2 goes u, v, x and then asks for an edge from x to w, which are in no bag together."""
    u, v, x, w = range(4)
    readers = [[v], [x], [], []]
    decomposition = PathDecomposition(first=(0, 1, 9, 5), last=(5, 10, 10, 6))
    assert decomposition.covers(readers)
    assert not decomposition.share_bag(x, w)
    spine = with_spine(readers, decomposition)
    assert spine.order == (u, w, v, x)
    assert spine.decomposition == decomposition  # every neighbour is met without a detour


@given(dags())
def test_tied_graphs_are_in_one_piece(readers: Readers) -> None:
    tied = tied_along(range(len(readers)), readers)
    assert all(set(row) <= set(more) for row, more in zip(readers, tied, strict=True))
    neighbours, reached = undirected(tied), [0]
    for vertex in reached:
        reached += [other for other in neighbours[vertex] if other not in reached]
    assert sorted(reached) == list(range(len(readers)))
    pieces = 1 + sum(map(len, tied)) - sum(map(len, readers))
    assert pieces == sum(path.isdisjoint(range(vertex)) for vertex, path in enumerate(pieces_of(readers)))


def pieces_of(readers: Readers) -> list[set[int]]:
    """Per vertex, all that edges tie it to, directly or not."""
    pieces: list[set[int]] = [{vertex} for vertex in range(len(readers))]
    for vertex, row in enumerate(readers):
        for reader in row:
            joined = pieces[vertex] | pieces[reader]
            for member in joined:
                pieces[member] = joined
    return pieces


def test_a_spine_along_an_order_stays_narrow_on_a_graph_in_pieces() -> None:
    """A path of 0, 2, 4, ... and single vertices in between."""
    readers = [[vertex + 2] if vertex % 2 == 0 and vertex < 98 else [] for vertex in range(100)]
    order = range(100)
    assert spine_along(order, path_decomposition(readers)).decomposition.largest_bag > 10
    assert spine_along(order, path_decomposition(tied_along(order, readers))).decomposition.largest_bag <= 3


def last_of(spine: Spine) -> list[int]:
    """Per bag, the place in the spine of its last vertex."""
    place = {vertex: index for index, vertex in enumerate(spine.order)}
    return [max(place[vertex] for vertex in bag) for bag in spine.decomposition.bags]


@given(spined())
def test_between_two_bags_the_spine_passes_every_bag(case: tuple[Readers, Spine]) -> None:
    """Lemma 9."""
    _, spine = case
    path = spine.decomposition
    for start, vertex in enumerate(spine.order):
        passed: set[int] = set()
        for other in spine.order[start:]:
            passed.update(range(path.first[other], path.last[other] + 1))
            low = min(path.first[vertex], path.first[other])
            high = max(path.last[vertex], path.last[other])
            assert set(range(low, high + 1)) <= passed


@given(spined())
def test_the_last_vertices_of_bags_rise_to_the_final_one_and_fall(case: tuple[Readers, Spine]) -> None:
    """Lemma 10."""
    _, spine = case
    last = last_of(spine)
    peak = last.index(len(spine.order) - 1)
    assert last[: peak + 1] == sorted(last[: peak + 1])
    assert last[peak:] == sorted(last[peak:], reverse=True)


@given(spined(), st.data())
def test_away_from_the_final_vertex_bags_lose_one(case: tuple[Readers, Spine], data: st.DataObject) -> None:
    """Lemma 11: of the bags from k to l, beyond the final vertex, with only the vertices before the last of bag l."""
    _, spine = case
    place = {vertex: index for index, vertex in enumerate(spine.order)}
    bags, last = spine.decomposition.bags, last_of(spine)
    peak = last.index(len(spine.order) - 1)
    far = data.draw(st.integers(peak, len(bags) - 1))
    near = data.draw(st.integers(peak, far))
    rest = [{place[vertex] for vertex in bag if place[vertex] < last[far]} for bag in bags[near : far + 1]]
    assert all(len(left) < len(bag) for left, bag in zip(rest, bags[near : far + 1], strict=True))
    left_over = sorted(set().union(*rest))  # has a spine of its own, if vertices of one end bag count as tied
    for one, other in pairwise(left_over):
        assert any({one, other} <= bag for bag in rest)


def test_an_expired_deadline_ends_the_order_at_hand_as_vertices_are_numbered() -> None:
    readers = [[1, 4], [2], [3], [], [5], []]
    neighbours = undirected(readers)
    assert greedy_order(neighbours, 4) != [4, 0, 1, 2, 3, 5]
    assert greedy_order(neighbours, 4, Deadline(0.0)) == [4, 0, 1, 2, 3, 5]
    assert path_decomposition(readers, Deadline(0.0)).covers(readers)
