"""Hierarchies: every operator once, convex parts, limits kept; H-Partition piece by piece against brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, strategies as st

from rematch.errors import SolverError
from rematch.graph import Graph, Op, Phase, Schedule, Value, simulate
from rematch.graph.generators import chain, encoder_decoder, gpt
from rematch.solvers.hiremate import (
    Part,
    Partitioner,
    check_partition,
    hpartition,
    make_partitioner,
    partition,
    partitioner_names,
    register_partitioner,
)
from rematch.solvers.hiremate.hpartition import HPartition
from tests.strategies import graphs, plain_graphs, renumbered

SMALL_LIMITS = st.builds(
    lambda lower, more, alpha, mirrored: HPartition(lower + more, lower, alpha, mirrored=mirrored),
    st.integers(2, 5),
    st.integers(0, 3),
    st.sampled_from((0.0, 0.5, 1.0)),
    st.booleans(),
)
LARGER = graphs(max_ops=20) | plain_graphs(max_ops=20)


def brute_dependencies(graph: Graph) -> dict[int, set[int]]:
    """All forward operators that must come before each, directly or not, from the words of the model alone."""
    forward = [op for op in graph.order if graph.ops[op].phase is Phase.FORWARD]
    needs: dict[int, set[int]] = {}
    for place, op in enumerate(forward):
        direct = {other for other in forward[:place] if must_follow(graph, other, op)}
        needs[op] = direct.union(*(needs[other] for other in direct))
    return needs


def must_follow(graph: Graph, early: int, late: int) -> bool:
    """Whether the later one reads what the earlier makes, both run once, or one mutates what the other reads."""
    one, other = graph.ops[early], graph.ops[late]
    return (
        bool(set(one.outputs) & set(other.inputs))
        or (one.once and other.once)
        or bool(set(one.mutates) & set(other.inputs))
        or bool(set(one.inputs) & set(other.mutates))
    )


def assert_convex(graph: Graph, root: Part) -> None:
    """Definition A.1, part by part: no path leaves a part and comes back."""
    needs = brute_dependencies(graph)
    for part in root.walk():
        inside = set(part.forward)
        for op in inside:
            for between in needs[op] - inside:
                assert not needs[between] & inside


def in_hierarchical_order(root: Part) -> list[int]:
    return [op for part in root.walk() if not part.children for op in part.forward]


@given(LARGER, SMALL_LIMITS)
def test_hpartition_cuts_into_convex_parts_within_the_limits(graph: Graph, partitioner: HPartition) -> None:
    root = partitioner.partition(graph)
    check_partition(graph, root)
    assert_convex(graph, root)
    assert root.width <= partitioner.most_top
    assert all(part.width <= partitioner.most_lower for part in root.walk() if part is not root)


@given(LARGER, SMALL_LIMITS)
def test_the_oracle_accepts_running_part_after_part(graph: Graph, partitioner: HPartition) -> None:
    """But for the turns of first runs that keep the default order, which schedules made from parts are given later."""
    graph = replace(graph, ops=tuple(replace(op, random=False) for op in graph.ops), recompute_after_loss=False)
    sequence = in_hierarchical_order(partitioner.partition(graph))
    rest = [op for op in graph.order if graph.ops[op].phase is not Phase.FORWARD]
    simulate(graph, Schedule.from_ops(graph, [*sequence, *rest])).checked()


@given(LARGER, SMALL_LIMITS, st.data())
def test_the_hierarchy_depends_on_the_default_order_not_on_numbers(
    graph: Graph, partitioner: HPartition, data: st.DataObject
) -> None:
    numbers = data.draw(st.permutations(range(len(graph.ops))))
    other = partitioner.partition(renumbered(graph, numbers))
    assert renamed(partitioner.partition(graph), numbers) == other


def renamed(part: Part, numbers: Sequence[int]) -> Part:
    return Part(tuple(numbers[op] for op in part.forward), tuple(renamed(child, numbers) for child in part.children))


def test_layers_of_a_gpt_become_parts() -> None:
    graph = gpt(layers=24)
    root = HPartition().partition(graph)
    assert root.depth == 2
    names = [{graph.ops[op].module_path.rpartition(".")[0] for op in part.forward} for part in root.children]
    whole_layers = [found for part, found in zip(root.children, names, strict=True) if len(part.forward) == 15]
    assert len(whole_layers) >= 22


def test_tails_keep_the_levels_of_an_encoder_decoder_few() -> None:
    graph = encoder_decoder(40, 40)
    assert HPartition().partition(graph).depth < HPartition(mirrored=False).partition(graph).depth


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_wide_graph_takes_few_levels(mirrored: bool) -> None:
    """One operator feeds hundreds that feed one: candidates all hold the first or the last."""
    width = 300
    ops = [Op("first", 1.0, (), (0,)), *(Op(f"m{i}", 1.0, (0,), (i,)) for i in range(1, width))]
    ops.append(Op("last", 1.0, tuple(range(1, width)), (width,)))
    graph = Graph(tuple(ops), tuple(Value(f"v{i}", 1) for i in range(width + 1)))
    root = HPartition(most_top=8, most_lower=6, mirrored=mirrored).partition(graph)
    check_partition(graph, root)
    assert root.depth <= 6


def test_operators_tied_to_no_other_join_their_neighbours() -> None:
    """Every third operator of a chain is a counter that reads and feeds nothing; alone, they would fill the top."""
    ops: list[Op] = []
    last: tuple[int, ...] = ()
    for i in range(90):
        counter = i % 3 == 2
        ops.append(Op(f"{'counter' if counter else 'o'}{i}", 1.0, () if counter else last, (i,)))
        last = last if counter else (i,)
    graph = Graph(tuple(ops), tuple(Value(f"v{i}", 1 if i % 3 == 2 else 8) for i in range(90)))
    root = HPartition(most_top=12, most_lower=9).partition(graph)
    check_partition(graph, root)
    assert root.depth == 2
    assert not any(graph.ops[part.forward[0]].name.startswith("counter") for part in root.children)


def test_loners_join_the_node_they_follow_as_far_as_there_is_room() -> None:
    def level_of(before: list[list[int]]) -> hpartition._Level:
        sets: list[set[int]] = [set() for _ in before]
        parts = [Part((node,)) for node in range(len(before))]
        return hpartition._Level(parts, before, hpartition._reversed_edges(before), sets, sets)

    tied = level_of([[], [], [1], [], [], [], [], [2]])  # 1 -> 2 -> 7; 0, 3, 4, 5 and 6 are loners
    assert list(hpartition._with_loners(tied, 20)) == [frozenset({0, 1}), frozenset({2, 3, 4, 5, 6})]
    assert list(hpartition._with_loners(tied, 6)) == [frozenset({0, 1}), frozenset({2, 3, 4})]
    assert list(hpartition._with_loners(level_of([[], [], []]), 20)) == []


def test_levels_can_be_limited() -> None:
    graph = chain(layers=400)
    assert HPartition(most_top=5, most_lower=5).partition(graph).depth > 3
    limited = HPartition(most_top=5, most_lower=5, most_levels=3).partition(graph)
    assert limited.depth == 3 and limited.width > 5
    assert HPartition(most_levels=1).partition(graph) == Part(tuple(range(400)))


def test_the_least_memory_is_cut_first() -> None:
    sizes = (9, 9, 1, 9, 9, 1, 9, 9, 1)
    ops = tuple(Op(f"o{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(9))
    graph = Graph(ops, tuple(Value(f"v{i}", size) for i, size in enumerate(sizes)), targets=frozenset({8}))
    for mirrored in (False, True):
        root = HPartition(most_top=3, most_lower=3, mirrored=mirrored).partition(graph)
        assert [part.forward for part in root.children] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]


def test_alpha_weighs_what_is_inside_a_node() -> None:
    """The smallest interface holds nine operators in ten; with alpha it costs more than a wider one around few."""
    level = hpartition._Level(
        parts=[Part(tuple(range(9))), Part((9,)), Part((10,))],
        before=[[], [0], [1]], after=[[1], [2], []], reads=[set(), {0}, {1}], makes=[{0}, {1}, {2}],
    )  # fmt: skip
    groups = hpartition._Groups(level, hpartition._Values([4, 5, 1], [False, False, True]))
    assert groups.score(frozenset({0, 1}), 0.0) == 5
    assert groups.score(frozenset({0, 1}), 1.0) == 5 * 5
    assert groups.score(frozenset({1, 2}), 0.0) == groups.score(frozenset({1, 2}), 1.0) == 5


@st.composite
def dags(draw: st.DrawFn, most: int = 9) -> list[list[int]]:
    """Direct predecessors of nodes numbered in topological order."""
    return [
        sorted(draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else []
        for node in range(draw(st.integers(1, most)))
    ]


def reach(before: list[list[int]], without: int | None = None) -> list[bool]:
    """Which nodes can be reached from the entries on paths that avoid one node."""
    found: list[bool] = []
    for node, others in enumerate(before):
        found.append(node != without and (not others or any(found[other] for other in others)))
    return found


@given(dags())
def test_a_of_x_is_the_closest_node_that_all_paths_pass(before: list[list[int]]) -> None:
    for node, ancestor in enumerate(hpartition._common_ancestors(before)):
        passed = [other for other in range(node) if not reach(before, without=other)[node]]
        assert ancestor == (passed[-1] if passed else None)


def test_common_ancestors_in_a_deep_tree() -> None:
    """Two long branches that join, then again: jumps of all lengths."""
    before: list[list[int]] = [[]]
    for _ in range(20):
        top = len(before) - 1
        for start in (top, top):
            before += [[start], *([len(before) + i] for i in range(36))]
        before.append([len(before) - 38, len(before) - 1])
    expected = [other[0] if len(other) == 1 else node - 75 for node, other in enumerate(before) if other]
    assert hpartition._common_ancestors(before)[1:] == expected


def descendants(before: list[list[int]], head: int) -> set[int]:
    found = {head}
    for node, others in enumerate(before):
        if found.intersection(others):
            found.add(node)
    return found


def is_headed(before: list[list[int]], members: frozenset[int]) -> bool:
    """Property 1; the artificial common ancestor of all is the head None."""
    for head in (None, *range(len(before))):
        enters_by_head = all(
            other in members or other == head for node in members if node != head for other in before[node]
        )
        if enters_by_head and (head is None or members <= descendants(before, head)):
            return True
    return False


def turned(before: list[list[int]]) -> list[list[int]]:
    last = len(before) - 1
    return [[last - other for other in others] for others in reversed(hpartition._reversed_edges(before))]


@given(dags(), st.integers(2, 6))
def test_candidates_are_headed_and_so_are_unions_of_those_that_meet(before: list[list[int]], most: int) -> None:
    """Property 1 and theorem A.4, in both directions."""
    last = len(before) - 1
    mirrored = hpartition._mirrored_candidates(hpartition._reversed_edges(before), most)
    for edges, candidates in (
        (before, set(hpartition._candidates(before, most))),
        (turned(before), {frozenset(last - node for node in members) for members in mirrored}),
    ):
        assert all(2 <= len(members) <= most and is_headed(edges, members) for members in candidates)
        for one, other in combinations(candidates, 2):
            assert not one & other or is_headed(edges, one | other)


@given(dags())
def test_no_candidate_is_forgotten(before: list[list[int]]) -> None:
    expected = set()
    for node, ancestor in enumerate(hpartition._common_ancestors(before)):
        below = set(range(len(before))) if ancestor is None else descendants(before, ancestor) - {ancestor}
        between = {other for other in below - {node} if node in descendants(before, other)}
        ends = {node} if ancestor is None else {node, ancestor}
        expected |= {frozenset(between | set(chosen)) for size in range(3) for chosen in combinations(ends, size)}
    assert set(hpartition._candidates(before, len(before))) == {members for members in expected if len(members) > 1}


@given(LARGER, st.data())
def test_the_score_of_merged_groups_is_formula_1(graph: Graph, data: st.DataObject) -> None:
    """Merge at random; each time the score of some groups equals that of their nodes, summed value by value."""
    level, values = hpartition._bottom(graph)
    groups = hpartition._Groups(level, values)
    for _ in range(data.draw(st.integers(1, 5))):
        if groups.count == 0:
            return
        members = data.draw(st.frozensets(st.sampled_from(sorted(groups.nodes)), min_size=1))
        ops = {op for group in members for node in groups.nodes[group] for op in level.parts[node].forward}
        assert groups.score(members, 0.5) == border_bytes(graph, ops)
        merged = groups.merge(members)
        assert {groups.of_node[node] for node in groups.nodes[merged]} == {merged}
        assert groups.score(frozenset({merged}), 0.5) == border_bytes(graph, ops)


def border_bytes(graph: Graph, ops: set[int]) -> int:
    forward = {index for index, op in enumerate(graph.ops) if op.phase is not Phase.BACKWARD}
    total = 0
    for value, described in enumerate(graph.values):
        makers = {index for index in forward if value in graph.ops[index].outputs and index != graph.loss}
        readers = {index for index in forward if value in graph.ops[index].inputs}
        kept = value in graph.targets or value in graph.held
        leaves = makers <= ops and (kept or bool(readers - ops))
        enters = not makers <= ops and bool(readers & ops)
        if makers and (leaves or enters):
            total += described.size_bytes
    return total


def groups_word_by_word(graph: Graph, most_top: int, most_lower: int) -> set[frozenset[int]]:
    """Lines 5 to 10 of algorithm 2, loners joined first, sets of nodes throughout, alpha = 0, scores always anew."""
    level, _ = hpartition._bottom(graph)
    ops = [part.forward[0] for part in level.parts]
    groups = {frozenset({node}) for node in range(len(ops))}
    for joined in hpartition._with_loners(level, most_lower):
        groups = {group for group in groups if not group & joined} | {joined}
    candidates = {
        frozenset().union(*(group for group in groups if group & c))
        for c in hpartition._candidates(level.before, most_lower)
    }
    candidates = {c for c in candidates - groups if len(c) <= most_lower}
    while candidates and len(groups) > most_top:
        chosen = min(candidates, key=lambda c: (border_bytes(graph, {ops[node] for node in c}), sorted(c)))
        groups = {group for group in groups if not group & chosen} | {chosen}
        updated = {c | chosen if c & chosen else c for c in candidates - {chosen}}
        candidates = {c for c in updated if len(c) <= most_lower} - {chosen}
    return groups


@given(LARGER, st.integers(2, 6), st.integers(0, 3))
def test_groups_are_those_of_algorithm_2(graph: Graph, most_lower: int, more: int) -> None:
    level, values = hpartition._bottom(graph)
    partitioner = HPartition(most_lower + more, most_lower, alpha=0.0)
    groups = partitioner._grown(level, values, hpartition._candidates(level.before, most_lower))
    found = {frozenset(nodes) for nodes in groups.nodes.values()}
    assert found == groups_word_by_word(graph, most_lower + more, most_lower)


@given(plain_graphs(max_ops=9), st.integers(2, 4))
def test_stretches_are_cut_where_the_fewest_bytes_cross(graph: Graph, most: int) -> None:
    level, values = hpartition._bottom(graph)
    count = len(graph.ops)
    made = list(hpartition._stretches(level, values, most))
    assert [node for stretch in made for node in stretch] == list(range(count))

    def cost(cuts: Sequence[int]) -> tuple[int, int]:
        crossing = [
            sum(graph.values[value].size_bytes for value in range(cut) if any(value in op.inputs for op in later))
            for cut in cuts
            for later in [graph.ops[cut:]]
        ]
        return sum(crossing), len(cuts)

    possible = [
        cuts
        for number in range(count)
        for cuts in combinations(range(1, count), number)
        if all(end - start <= most for start, end in pairwise((0, *cuts, count)))
    ]
    assert cost([stretch.start for stretch in made[1:]]) == min(map(cost, possible))


def test_order_without_data_is_a_dependency() -> None:
    """C.1.2: j -> k, and `late` reads what k changes; {j, late} without k would run before k."""
    values = (Value("buffer", 1, resident=True), Value("j", 1), Value("late", 1))
    ops = (
        Op("j", 1.0, (), (1,)),
        Op("early", 1.0, (0,), ()),
        Op("k", 1.0, (1,), (), once=True, mutates=(0,)),
        Op("late", 1.0, (0, 1), (2,)),
    )
    graph = Graph(ops, values)
    assert partition.dependencies(graph) == {0: [], 1: [], 2: [0, 1], 3: [0, 2]}
    with pytest.raises(SolverError, match="'k' of child 0 needs 'j' of child 1"):
        check_partition(graph, Part((0, 1, 2, 3), (Part((1, 2)), Part((0, 3)))))


@given(LARGER)
def test_dependencies_are_those_of_the_model(graph: Graph) -> None:
    direct = partition.dependencies(graph)
    reached: dict[int, set[int]] = {}
    for op in direct:  # in default order
        reached[op] = set(direct[op]).union(*(reached[other] for other in direct[op]))
    assert reached == brute_dependencies(graph)


def test_residents_join_nothing() -> None:
    """C.1.3: two branches that read one input have no common ancestor but the artificial one."""
    values = (Value("x", 9, resident=True), *(Value(f"v{i}", 1) for i in range(2)))
    graph = Graph((Op("a", 1.0, (0,), (1,)), Op("b", 1.0, (0,), (2,))), values)
    assert partition.dependencies(graph) == {0: [], 1: []}
    level, _ = hpartition._bottom(graph)
    assert level.reads == [set(), set()]


@given(LARGER, st.sampled_from(("flat", "modules", "hpartition")), st.data())
def test_built_in_partitioners_are_valid_on_any_graph(graph: Graph, name: str, data: st.DataObject) -> None:
    paths = st.sampled_from(("", "a", "a.b", "a.c", "a.b.d", "e", ".a."))
    graph = replace(graph, ops=tuple(replace(op, module_path=data.draw(paths)) for op in graph.ops))
    root = make_partitioner(name).partition(graph)
    check_partition(graph, root)
    assert_convex(graph, root)


def test_the_module_tree() -> None:
    graph = gpt(layers=3)
    root = make_partitioner("modules").partition(graph)
    embedding, layers, head = root.children
    assert embedding.is_layer and head.is_layer
    assert [len(layer.forward) for layer in layers.children] == [15, 15, 15]
    assert [[part.width for part in layer.children] for layer in layers.children] == [[9, 6]] * 3


def test_a_module_that_is_called_twice_makes_two_parts() -> None:
    """Otherwise it would come both before and after what runs in between."""
    paths = ("shared", "shared", "between", "shared", "shared")
    ops = tuple(Op(f"o{i}", 1.0, (i - 1,) if i else (), (i,), module_path=path) for i, path in enumerate(paths))
    graph = Graph(ops, tuple(Value(f"v{i}", 1) for i in range(5)))
    root = make_partitioner("modules").partition(graph)
    assert [part.forward for part in root.children] == [(0, 1), (2,), (3, 4)]


def test_a_module_that_is_all_of_another_is_no_level() -> None:
    ops = tuple(Op(f"o{i}", 1.0, (i - 1,) if i else (), (i,), module_path="net.body.inner") for i in range(3))
    graph = Graph(ops, tuple(Value(f"v{i}", 1) for i in range(3)))
    assert make_partitioner("modules").partition(graph) == Part((0, 1, 2))


def test_flat_has_one_level() -> None:
    graph = gpt(layers=2)
    root = make_partitioner("flat").partition(graph)
    assert root.depth == 1 and root.width == 32


def nested(depth: int) -> Iterator[Part]:
    """A chain in which every part holds one operator beside the next part, from the innermost outwards."""
    part = Part((depth,))
    for op in reversed(range(depth)):
        part = Part(tuple(range(op, depth + 1)), (Part((op,)), part))
        yield part


def test_deep_hierarchies_need_no_recursion() -> None:
    depth = 1500
    *_, root = nested(depth)
    graph = Graph(
        tuple(Op(f"o{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(depth + 1)),
        tuple(Value(f"v{i}", 1) for i in range(depth + 1)),
    )
    check_partition(graph, root)
    assert root.depth == depth
    assert in_hierarchical_order(root) == list(range(depth + 1))


@pytest.mark.parametrize(
    ("root", "complaint"),
    [
        (Part((0, 1, 2)), "has 3 operators; it must have the 4 of the forward pass"),
        (Part((1, 0, 2, 3)), "in default order"),
        (Part((0, 1, 2, 3), (Part((0, 1)), Part((2,)))), "from 'o0' to 'o3' have 3 operators"),
        (Part((0, 1, 2, 3), (Part((0, 1)), Part((1, 2, 3)))), "5 operators, 4 of them distinct"),
        (Part((0, 1, 2, 3), (Part((0, 1, 2, 3)), Part(()))), "child 1 of .* at least one"),
        (Part((0, 1, 2, 3), (Part((0, 1)), Part((3, 2)))), "child 1 of .* default order"),
        (Part((0, 1, 2, 3), (Part((0, 2)), Part((1, 3)))), "'o2' of child 0 needs 'o1' of child 1"),
        (Part((0, 1, 2, 3), (Part((2, 3)), Part((0, 1)))), "'o2' of child 0 needs 'o1' of child 1"),
        (
            Part((0, 1, 2, 3), (Part((0,)), Part((1, 2, 3), (Part((1, 3)), Part((2,)))))),
            "3 operators from 'o1' to 'o3'",
        ),
    ],
)
def test_what_cannot_be_run_part_by_part_is_refused(root: Part, complaint: str) -> None:
    ops = tuple(Op(f"o{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(4))
    with pytest.raises(SolverError, match=complaint):
        check_partition(Graph(ops, tuple(Value(f"v{i}", 1) for i in range(4))), root)


@dataclass(frozen=True)
class Halves(Partitioner):
    """A partitioner of someone else."""

    cut_percent: int = 50
    name = "halves"

    def partition(self, graph: Graph) -> Part:
        ops = partition.forward_order(graph)
        cut = len(ops) * self.cut_percent // 100
        return Part(ops, (Part(ops[:cut]), Part(ops[cut:])))


def test_a_partitioner_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition._partitioners, "_added", {})
    register_partitioner(Halves)
    assert partitioner_names()[-1] == "halves"
    graph = chain(layers=10)
    root = make_partitioner("halves", cut_percent=30).partition(graph)
    check_partition(graph, root)
    assert [part.width for part in root.children] == [3, 7]
    with pytest.raises(SolverError, match="registered already"):
        register_partitioner(Halves)
    with pytest.raises(SolverError, match="partitioner 'halves' has no option 'cut'; it has: cut_percent"):
        make_partitioner("halves", cut=3)


def test_unknown_names_and_senseless_limits() -> None:
    with pytest.raises(SolverError, match="unknown partitioner 'module'; did you mean 'modules'"):
        make_partitioner("module")
    with pytest.raises(SolverError, match="most_lower=1 is too small"):
        HPartition(most_lower=1)
    with pytest.raises(SolverError, match="most_top=10 is less than most_lower=20"):
        HPartition(most_top=10)
    with pytest.raises(SolverError, match="most_levels=0"):
        HPartition(most_levels=0)
    with pytest.raises(SolverError, match="alpha=nan"):
        HPartition(alpha=float("nan"))


def test_nothing_to_partition() -> None:
    graph = Graph((), ())
    for name in partitioner_names():
        assert make_partitioner(name).partition(graph) == Part(())
