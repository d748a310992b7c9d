"""Feng & Huang: the division tree on the paper's lemmas, checkpoints against all sets of them, valid schedules."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rematch.errors import GraphError
from rematch.graph import Graph, Op, Phase, Simulation, Value, simulate
from rematch.graph.generators import FAMILIES, chain, gpt, training_graph, unet
from rematch.solvers import Deadline, Problem, Status, solve
from rematch.solvers.base import ignore_progress
from rematch.solvers.common.forward_pass import forward_ops
from rematch.solvers.feng_huang import kernels
from rematch.solvers.feng_huang.checkpoints import CheckpointSearch, best_checkpoints
from rematch.solvers.feng_huang.division_tree import DivisionNode, DivisionTree, Kind, divide, division
from rematch.solvers.feng_huang.forward import KEPT, Reading, readings
from rematch.solvers.feng_huang.linear import Line
from rematch.solvers.feng_huang.reforward import Reforward
from rematch.solvers.feng_huang.segments import Dag, Segment, largest_segments, loss_bytes, segments_between
from rematch.solvers.feng_huang.within_budget import FastestCheckpoints
from rematch.solvers.incumbent import Incumbent
from tests.examples import examples
from tests.problems import changed_resident, check_against_truth, held_for_the_loss, peak_bytes, tiny_problems

EXAMPLE = (10, 8, 9, 6, 7, 10)  # figure 2 of the supplement


@st.composite
def dags(draw: st.DrawFn, max_vertices: int = 9) -> Dag:
    """Random graphs with one source and one sink, from nearly linear to dense."""
    count = draw(st.integers(2, max_vertices))
    edges = set()
    for vertex in range(1, count):
        edges |= {(read, vertex) for read in draw(st.sets(st.integers(0, vertex - 1), min_size=1, max_size=3))}
    for vertex in range(count - 1):
        if not any(read == vertex for read, _ in edges):
            edges.add((vertex, draw(st.integers(vertex + 1, count - 1))))
    sizes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return Dag.of(sizes, edges)


def all_segments(dag: Dag) -> set[tuple[int, int, frozenset[int]]]:
    """Definition 1, pair by pair and set by set: ends and inner vertices of every segment with something inside."""
    found = set()
    for source, target in combinations(range(len(dag)), 2):
        others = [vertex for vertex in range(len(dag)) if vertex not in (source, target)]
        for count in range(1, len(others) + 1):
            for inside in combinations(others, count):
                if is_segment(dag, source, target, set(inside)):
                    found.add((source, target, frozenset(inside)))
    return found


def is_segment(dag: Dag, source: int, target: int, inside: set[int]) -> bool:
    """All of it comes from the source, leads to the target, and is tied to nothing else."""
    return all(
        {*dag.reads[vertex]} <= inside | {source}
        and {*dag.readers[vertex]} <= inside | {target}
        and dag.reads[vertex]
        and dag.readers[vertex]
        for vertex in inside
    )


def as_triple(segment: Segment) -> tuple[int, int, frozenset[int]]:
    return segment.source, segment.target, frozenset(segment.inside)


def least_loss_bytes(dag: Dag) -> int:
    """Objective (1) over all sets of checkpoints that leave independent segments."""
    inner = range(1, len(dag) - 1)
    losses = []
    for count in range(len(dag) - 1):
        for chosen in combinations(inner, count):
            try:
                losses.append(loss_bytes(dag, {0, len(dag) - 1, *chosen}))
            except GraphError:
                continue
    return min(losses)


def edges_of(dag: Dag, segment: Segment) -> set[tuple[int, int]]:
    vertices = {segment.source, segment.target, *segment.inside}
    among = {(v, reader) for v in vertices for reader in dag.readers[v] if reader in vertices}
    return among if segment.direct else among - {(segment.source, segment.target)}


def test_the_supplements_example() -> None:
    dag = Dag.of(EXAMPLE)
    assert loss_bytes(dag, (0, 2, 5)) == 42
    assert best_checkpoints(divide(dag)).loss_bytes == 42
    assert best_checkpoints(divide(dag)).vertices == (0, 2, 5)


def test_the_supplements_accessibility_graph() -> None:
    """Figure 3, C = 8: besides each vertex's neighbours only the first and third, and third and fifth are tied."""
    line = Line.of(EXAMPLE[1:-1], [1.0] * 4)
    first = np.zeros(len(line), dtype=np.int64)
    kernels.accessible_from(line.bytes_before, line.bytes_behind, 0, len(line), 8, first)
    edges = {(source, target) for target in range(len(line)) for source in range(first[target], target)}
    assert edges - set(pairwise(range(6))) == {(0, 2), (2, 4), (3, 5)}


@given(dags(), st.integers(0, 40))
def test_a_term_has_the_cheapest_checkpoints_of_no_larger_segments(dag: Dag, term: int) -> None:
    search = CheckpointSearch(divide(dag))
    chosen = search.checkpoints(term)
    assert {0, len(dag) - 1} <= set(chosen)
    assert all(segment.bytes_inside(dag) <= term for segment in segments_between(dag, chosen))
    spent, lost = search.costs(np.array([term]))
    assert spent[0] == dag.size_bytes[list(chosen[1:-1])].sum()
    assert lost[0] == pytest.approx(len(dag) - len(chosen))
    for count in range(len(dag) - 1):
        for inner in combinations(range(1, len(dag) - 1), count):
            if dag.size_bytes[list(inner)].sum() < spent[0]:
                try:
                    segments = segments_between(dag, {0, len(dag) - 1, *inner})
                except GraphError:
                    continue
                assert any(segment.bytes_inside(dag) > term for segment in segments)


@given(dags())
@examples(300)
def test_no_set_of_checkpoints_has_less_loss(dag: Dag) -> None:
    assert best_checkpoints(divide(dag)).loss_bytes == least_loss_bytes(dag)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=11))
def test_linear_graphs_are_one_linear_segment(sizes: list[int]) -> None:
    tree = divide(Dag.of(sizes))
    if len(sizes) == 2:
        assert tree.nodes == ()
    else:
        (node,) = tree.nodes
        assert (node.kind, node.points) == (Kind.LINEAR, tuple(range(1, len(sizes) - 1)))
    assert best_checkpoints(tree).loss_bytes == least_loss_bytes(Dag.of(sizes))


@given(dags(max_vertices=8))
def test_every_node_of_the_tree_is_an_independent_segment(dag: Dag) -> None:
    truth = all_segments(dag)
    for node in divide(dag).nodes:
        assert as_triple(node.segment) in truth


@given(dags(max_vertices=8))
def test_a_division_has_every_edge_and_inner_vertex_once(dag: Dag) -> None:
    tree = divide(dag)
    for node in tree.nodes:
        members = members_of(tree, node)
        edges = [edge for member in members for edge in edges_of(dag, member)]
        assert sorted(edges) == sorted(edges_of(dag, node.segment))
        inside = [*node.points, *(vertex for member in members for vertex in member.inside)]
        assert sorted(inside) == list(node.segment.inside)


def members_of(tree: DivisionTree, node: DivisionNode) -> list[Segment]:
    """The members of a node's division as the paper counts them: edges that are in no child are members, too."""
    children = [tree.nodes[child].segment for child in node.children if child >= 0]
    covered = {edge for child in children for edge in edges_of(tree.dag, child)}
    edges = edges_of(tree.dag, node.segment) - covered
    return children + [Segment(source, target, (), direct=True) for source, target in sorted(edges)]


@given(dags(max_vertices=8))
@examples(200)
def test_the_division_is_complete(dag: Dag) -> None:
    """2.3: no segment lies across members, except runs of a linear one's and unions of a branching one's."""
    tree = divide(dag)
    for source, target, inside in all_segments(dag):
        node = tree.nodes[0]
        while (deeper := child_around(tree, node, inside)) is not None:
            node = deeper
        if node.kind is Kind.COMPLICATED:
            assert (source, target, inside) == as_triple(node.segment)
        elif node.kind is Kind.BRANCH:
            assert (source, target) == (node.segment.source, node.segment.target)
        else:
            assert {source, target} <= {node.segment.source, node.segment.target, *node.points}


def child_around(tree: DivisionTree, node: DivisionNode, inside: frozenset[int]) -> DivisionNode | None:
    children = (tree.nodes[child] for child in node.children if child >= 0)
    return next((child for child in children if inside <= set(child.segment.inside)), None)


@given(dags(max_vertices=9))
@examples(200)
def test_lemmas_5_to_7_on_complicated_segments(dag: Dag) -> None:
    tree = divide(dag)
    complicated = [node for node in tree.nodes if node.kind is Kind.COMPLICATED]
    truth = all_segments(dag) if complicated else set()
    for node in complicated:
        members = members_of(tree, node)
        assert len(members) > 2  # lemma 7
        for point in node.points:  # lemma 5
            assert sum(point in (member.source, member.target) for member in members) >= 3
        for member in members:  # lemma 6, with the definition: the largest segments are the members
            for other in truth:
                within = other[2] < set(node.segment.inside) and other[2] >= set(member.inside) and member.inside
                assert not within or other == as_triple(member)


@given(dags(max_vertices=8), st.data())
def test_the_division_is_unique(dag: Dag, data: st.DataObject) -> None:
    """Another topological order of the same graph, with its tree named back, has the same tree."""
    order = data.draw(topological_orders(dag))
    number = {vertex: index for index, vertex in enumerate(order)}
    edges = [(number[vertex], number[reader]) for vertex in range(len(dag)) for reader in dag.readers[vertex]]
    other = divide(Dag.of([int(dag.size_bytes[vertex]) for vertex in order], edges))
    assert shape(divide(dag), list(range(len(dag)))) == shape(other, order)


@st.composite
def topological_orders(draw: st.DrawFn, dag: Dag) -> list[int]:
    order: list[int] = []
    while len(order) < len(dag):
        ready = [v for v in range(len(dag)) if v not in order and set(dag.reads[v]) <= set(order)]
        order.append(draw(st.sampled_from(ready)))
    return order


def shape(tree: DivisionTree, name: list[int]) -> set[tuple[Kind, int, int, frozenset[int], frozenset[int]]]:
    return {
        (
            node.kind,
            name[node.segment.source],
            name[node.segment.target],
            frozenset(name[vertex] for vertex in node.segment.inside),
            frozenset(name[point] for point in node.points),
        )
        for node in tree.nodes
    }


def figure_4() -> Dag:
    """i, k, t, j, with a vertex on each of five ways: i-k, i-t, k-t, k-j and t-j."""
    ways = {(0, 2): 1, (0, 5): 4, (2, 5): 3, (2, 7): 6, (5, 7): None}
    edges = [edge for (a, b), via in ways.items() for edge in ([(a, b)] if via is None else [(a, via), (via, b)])]
    return Dag.of([1] * 8, edges)


def test_figure_4_is_complicated_and_folds_into_five_segments() -> None:
    dag = figure_4()
    tree = divide(dag)
    root = tree.nodes[0]
    assert (root.kind, root.points) == (Kind.COMPLICATED, (2, 5))
    assert {(member.source, member.target) for member in members_of(tree, root)} == {
        (0, 2), (0, 5), (2, 5), (2, 7), (5, 7),
    }  # fmt: skip


def test_without_time_complicated_segments_fall_apart_into_vertices() -> None:
    dag = figure_4()
    gone = Deadline(0.0)
    assert largest_segments(dag, Segment.whole(dag), gone) == []
    assert division(dag, Segment.whole(dag), gone)[1] == (1, 2, 3, 4, 5, 6)
    assert best_checkpoints(divide(dag, gone)).loss_bytes >= best_checkpoints(divide(dag)).loss_bytes


def test_residual_blocks_branch_inside_a_line() -> None:
    """0 - (1 - 2) + skip - 3 - (4 - 5) + skip - 6."""
    dag = Dag.of([1] * 7, [(0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (4, 5), (5, 6), (3, 6)])
    kinds = [(node.kind, node.points) for node in divide(dag).nodes]
    assert kinds == [
        (Kind.LINEAR, (3,)), (Kind.BRANCH, ()), (Kind.BRANCH, ()), (Kind.LINEAR, (1, 2)), (Kind.LINEAR, (4, 5)),
    ]  # fmt: skip


def test_deep_nesting_needs_no_deep_recursion() -> None:
    """Each vertex is tied to the one that mirrors it: what lies inside can be cut only where all outside is kept."""
    half = sys.getrecursionlimit()  # libraries raise it
    edges = [*pairwise(range(2 * half)), *((v, 2 * half - 1 - v) for v in range(half - 1))]
    tree = divide(Dag.of([1] * (2 * half), edges))
    assert best_checkpoints(tree).loss_bytes == 2 * half


def test_many_terms_are_solved_without_solving_each() -> None:
    """Halving the range of C gives what solving every C gives."""
    rng = np.random.default_rng(0)
    search = CheckpointSearch(divide(Dag.of(rng.integers(1, 1000, 40).tolist())))
    terms = search.max_terms()
    spent, lost = search.costs(terms)
    one_by_one = [search.costs(terms[index : index + 1]) for index in range(len(terms))]
    assert spent.tolist() == [int(alone[0]) for alone, _ in one_by_one]
    assert lost.tolist() == pytest.approx([float(alone[0]) for _, alone in one_by_one])


def test_when_the_time_is_over_only_the_first_and_last_terms_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at the clock little is done, so that a busy machine does not make the search overrun."""
    tree = divide(Dag.of(np.random.default_rng(0).integers(1, 1000, 40).tolist()))
    terms = CheckpointSearch(tree).max_terms()
    spent, lost = CheckpointSearch(tree).costs(terms)
    known, _ = CheckpointSearch(tree, Deadline(0.0)).costs(terms)
    assert known.tolist() == [spent[0]] * (len(terms) - 1) + [spent[-1]]
    monkeypatch.setattr("rematch.solvers.feng_huang.checkpoints._WORK_AT_ONCE", 1)
    in_parts = CheckpointSearch(tree).costs(terms)
    assert np.array_equal(in_parts[0], spent)
    assert np.array_equal(in_parts[1], lost)


def test_more_terms_than_can_be_looked_for_are_spread_over_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    dag = Dag.of(range(1, 60))
    exact = best_checkpoints(divide(dag)).loss_bytes
    monkeypatch.setattr("rematch.solvers.feng_huang.checkpoints._MOST_TERMS", 50)
    assert len(CheckpointSearch(divide(dag)).max_terms()) <= 60
    assert exact <= best_checkpoints(divide(dag)).loss_bytes <= 1.1 * exact


def test_with_little_work_allowed_the_checkpoints_are_valid_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    dag = Dag.of(range(1, 60))
    exact = best_checkpoints(divide(dag)).loss_bytes
    monkeypatch.setattr("rematch.solvers.feng_huang.checkpoints._MOST_WORK", 10 * len(dag))
    assert exact <= best_checkpoints(divide(dag)).loss_bytes < int(dag.size_bytes.sum())


@pytest.mark.parametrize(
    ("sizes", "edges", "match"),
    [
        ([1], [], "at least 2"),
        ([1, 1, 1], [(0, 2)], "vertex 1 has no reader"),
        ([1, 1, 1], [(1, 2), (0, 2)], "vertex 1 reads nothing"),
        ([1, 1, 1], [(0, 1), (1, 2), (2, 1)], "topological order"),
    ],
)
def test_refuses_graphs_without_one_source_and_one_sink(
    sizes: list[int], edges: list[tuple[int, int]], match: str
) -> None:
    with pytest.raises(GraphError, match=match):
        Dag.of(sizes, edges)


def test_refuses_checkpoints_that_leave_no_independent_segments() -> None:
    with pytest.raises(GraphError, match=r"lie between checkpoints \[0, 2, 7\]"):
        segments_between(figure_4(), (0, 2, 7))


@given(tiny_problems(), st.booleans())
@examples(300)
def test_never_claims_more_than_the_truth(problem: Problem, memory_alone: bool) -> None:
    check_against_truth(problem, solve(problem, "feng_huang", memory_alone=memory_alone))


@pytest.mark.parametrize("problem", [held_for_the_loss(), changed_resident()])
def test_held_and_changed_values_are_left_where_they_are(problem: Problem) -> None:
    check_against_truth(problem, solve(problem, "feng_huang"))


CHENS = ("ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy")


@pytest.mark.parametrize(
    "graph", [gpt(layers=1), unet(depth=1, convolutions=1), chain(layers=20)], ids=lambda graph: graph.name
)
def test_never_slower_than_chens_heuristics(graph: Graph) -> None:
    """At the peaks that these have by themselves, so that there is always something to compare with."""
    for name in CHENS:
        theirs = solve(Problem(graph, peak_bytes(graph) * 9 // 10), name)
        assert theirs.schedule is not None
        seen = simulate(graph, theirs.schedule)
        ours = solve(Problem(graph, seen.peak_bytes), "feng_huang")
        assert ours.schedule is not None
        assert simulate(graph, ours.schedule).seconds <= seen.seconds * (1 + 1e-9)


def blocks(seed: int) -> Graph:
    """A training step of 11 operators in single layers, residual blocks and pairs of branches."""
    rng = random.Random(seed)
    reads: list[tuple[int, ...]] = [()]
    while len(reads) < 11:
        end = len(reads)
        kinds: list[list[tuple[int, ...]]] = [
            [(end - 1,)],
            [(end - 1,), (end,), (end - 1, end + 1)],
            [(end - 1,), (end,), (end - 1,), (end + 2,), (end + 1, end + 3)],
        ]
        reads += rng.choice([kind for kind in kinds if end + len(kind) <= 11])
    ops = tuple(Op(f"o{i}", rng.uniform(0.1, 1.0), read, (i,)) for i, read in enumerate(reads))
    return training_graph(Graph(ops, tuple(Value(f"v{i}", rng.randint(1, 100)) for i in range(11))))


@pytest.mark.parametrize("seed", range(8))
def test_the_best_set_of_checkpoints_on_small_graphs(seed: int) -> None:
    """At three budgets that some set of checkpoints needs, of 8 graphs."""
    graph = blocks(seed)
    (reading,) = readings(graph)
    points = sorted((seen.peak_bytes, seen.seconds) for seen in all_schedules(graph, reading))
    for budget in {points[len(points) * share // 100][0] for share in (2, 15, 50)}:
        found = solve(Problem(graph, budget), "feng_huang", time_limit=30.0).schedule
        assert found is not None
        best = min(seconds for peak, seconds in points if peak <= budget)
        assert simulate(graph, found).seconds == pytest.approx(best)


@given(tiny_problems())
@examples(100)
def test_branch_and_bound_rules_out_nothing_that_is_better(problem: Problem) -> None:
    graph = problem.graph
    again = Reforward(graph)
    for reading in readings(graph):
        if len(reading.dag) > 9:
            continue
        incumbent = Incumbent(problem, Deadline(), ignore_progress)
        assert FastestCheckpoints(incumbent, reading, divide(reading.dag), again).search() or incumbent.closed
        fitting = (
            seen.seconds
            for seen in all_schedules(graph, reading)
            if seen.valid and seen.peak_bytes <= problem.budget_bytes
        )
        assert incumbent.seconds <= min(fitting, default=math.inf) + 1e-6 * graph.baseline_seconds


def all_schedules(graph: Graph, reading: Reading) -> Iterator[Simulation]:
    """What every set of checkpoints leads to that leaves independent segments."""
    again, last = Reforward(graph), len(reading.dag) - 1
    for bits in range(1 << (last - 1)):
        kept = [0, *(vertex for vertex in range(1, last) if bits >> (vertex - 1) & 1), last]
        try:
            segments = reading.segment_of_ops(graph, kept)
        except GraphError:
            continue
        yield simulate(graph, again.schedule(segments))


def test_it_keeps_budgets_that_nothing_but_recomputation_can() -> None:
    graph = gpt(layers=6)
    assert solve(Problem(graph, peak_bytes(graph) // 3), "feng_huang", time_limit=2.0).status is Status.FEASIBLE


def test_memory_alone_gives_the_published_checkpoints() -> None:
    graph = chain(layers=40)
    problem = Problem(graph, peak_bytes(graph) // 2)
    alone = solve(problem, "feng_huang", memory_alone=True)
    fastest = solve(problem, "feng_huang", time_limit=2.0)
    assert alone.schedule is not None
    assert fastest.schedule is not None
    (reading,) = readings(graph)
    kept = best_checkpoints(divide(reading.dag)).vertices
    expected = Reforward(graph).schedule(reading.segment_of_ops(graph, kept))
    assert alone.schedule == expected
    assert simulate(graph, fastest.schedule).seconds < simulate(graph, expected).seconds


def test_each_dropped_operator_runs_once_more_and_the_last_segment_stays() -> None:
    graph = chain(layers=9)
    (reading,) = readings(graph)
    kept = [0, 3, 6, 10]  # vertex v is operator v - 1
    schedule = Reforward(graph).schedule(reading.segment_of_ops(graph, kept))
    assert simulate(graph, schedule).checked().counts[:9].tolist() == [2, 2, 1, 2, 2, 1, 1, 1, 1]


def test_branches_are_computed_again_one_after_the_other() -> None:
    """stem - (a | b) - join: the branch that the backward pass comes to later is dropped until then."""
    reads: list[tuple[int, ...]] = [(), (0,), (1,), (0,), (3,), (2, 4), (5,), (6,)]
    forward = Graph(
        tuple(Op(f"o{i}", 1.0, read, (i,)) for i, read in enumerate(reads)), tuple(Value(f"v{i}", 1) for i in range(8))
    )
    graph = training_graph(forward)
    (reading,) = readings(graph)
    segment = reading.segment_of_ops(graph, (0, 1, 6, 9))
    assert segment[1] == segment[2] != segment[3] == segment[4]
    schedule = Reforward(graph).schedule(segment)
    assert simulate(graph, schedule).checked().counts[:8].tolist() == [1, 2, 2, 2, 2, 1, 1, 1]
    again = schedule.ops.tolist()[9:]
    assert [op for op in again if op in (1, 2, 3, 4)] == [3, 4, 1, 2]


def side_by_side() -> Graph:
    """Layers x0 - x1 - x2 - x3, weights cast for each but the first, a mask for x1 and x3, a statistic on x2's side."""
    layers, mask, casts, statistic = (0, 3, 5, 7), 1, {3: 2, 5: 4, 7: 6}, 8
    inputs: dict[int, tuple[int, ...]] = {0: (), mask: (), statistic: (5,), **dict.fromkeys(casts.values(), ())}
    for before, layer in pairwise(layers):
        inputs[layer] = (before, casts[layer], *((mask,) if layer in (3, 7) else ()))
    ops = tuple(Op(f"o{i}", 1.0, inputs[i], (i,)) for i in range(9))
    order = (0, 1, 2, 3, 4, 5, 8, 6, 7)
    return training_graph(Graph(ops, tuple(Value(f"v{i}", 1) for i in range(9)), order=order))


def test_the_core_has_what_hangs_on_one_vertex_folded_in_and_keeps_the_rest() -> None:
    attached, core = readings(side_by_side())
    assert len(attached.dag) == 11
    assert [sorted(members) for members in core.members] == [[], [0], [2, 3], [4, 5, 8], [6, 7], []]
    assert core.dag.size_bytes.tolist() == [0, 1, 2, 3, 2, 0]
    assert [node.kind for node in divide(core.dag).nodes] == [Kind.LINEAR]
    segment = core.segment_of_ops(side_by_side(), (0, 3, 5))
    assert segment[1] == KEPT
    assert segment[0] == segment[2] == segment[3] != segment[6]


def test_what_cannot_leave_weighs_nothing() -> None:
    ops = (
        Op("a", 1.0, (), (0,)),
        Op("b", 1.0, (0,), (1,), once=True),
        Op("c", 1.0, (1,), (2,)),
        Op("d", 1.0, (2,), (3,)),
        Op("loss", 1.0, (3,), (4,), phase=Phase.LOSS),
        Op("back", 1.0, (4, 0, 1, 2), (5,), phase=Phase.BACKWARD),
    )
    values = tuple(Value(f"v{index}", 7) for index in range(6))
    graph = Graph(ops, values, targets=frozenset({2, 5}), held=frozenset({3}))
    (reading,) = readings(graph)
    assert reading.dag.size_bytes.tolist() == [0, 7, 0, 0, 0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_reading_of_every_family_gives_valid_schedules(family: str) -> None:
    graph = FAMILIES[family]()
    for reading in readings(graph):
        check_reading(graph, reading)


def check_reading(graph: Graph, reading: Reading) -> None:
    members = [op for ops in reading.members for op in ops]
    assert len(members) == len(set(members))
    assert set(members) <= set(forward_ops(graph).tolist())
    again = Reforward(graph)
    search = CheckpointSearch(divide(reading.dag))
    for checkpoints in list(search.curve())[::20]:
        simulate(graph, again.schedule(reading.segment_of_ops(graph, checkpoints))).checked()
