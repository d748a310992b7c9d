"""Equal blocks: found and translated whatever their numbers, told apart by all that a schedule depends on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rematch.errors import ScheduleError
from rematch.graph import Graph, Op, Phase, Schedule, Value, simulate
from rematch.graph.generators import gpt
from rematch.solvers.hiremate import make_partitioner
from rematch.solvers.hiremate.canonical import equal_blocks, translate
from tests.strategies import graphs, renumbered, sequences, side_by_side


def forward_only(graph: Graph) -> Graph:
    ops = tuple(replace(op, phase=Phase.FORWARD) for op in graph.ops)
    return replace(graph, ops=ops, held=frozenset(), recompute_after_loss=False)


@given(graphs(), st.integers(2, 4), st.data())
def test_copies_are_equal_and_the_schedule_of_one_serves_all(graph: Graph, copies: int, data: st.DataObject) -> None:
    single = side_by_side(forward_only(graph), 1)
    count = len(single.ops)
    numbers = data.draw(st.permutations(range(copies * count)))
    many = renumbered(side_by_side(single, copies), numbers)
    blocks = [tuple(numbers[copy * count : (copy + 1) * count]) for copy in range(copies)]
    (alike,) = equal_blocks(many, blocks)
    assert alike.members == tuple(blocks)

    schedule = Schedule.from_ops(single, data.draw(sequences(single)))
    steps = [numbers[step] if step >= 0 else step for step in schedule.steps.tolist()]
    first = Schedule(np.array(steps, dtype=np.int32))
    assert translate(many, first, alike.representative, alike.representative) == first
    parts = [translate(many, first, alike.representative, member).steps for member in alike.members]
    together = simulate(many, Schedule(np.concatenate(parts))).checked()
    assert together.seconds == copies * simulate(single, schedule).checked().seconds


def test_parts_of_a_gpt_fall_into_few_classes() -> None:
    graph = gpt(layers=24)
    parts = [part.forward for part in make_partitioner("hpartition").partition(graph).walk() if not part.is_layer]
    classes = equal_blocks(graph, parts)
    assert max(len(alike.members) for alike in classes) >= 22
    assert sorted(member for alike in classes for member in alike.members) == sorted(parts)


def test_keys_are_the_same_in_other_graphs_and_differ_between_classes() -> None:
    keys = [
        {len(alike.members): alike.key for alike in equal_blocks(graph, blocks_of(graph))}
        for graph in (two_blocks(), renumbered(two_blocks(), list(range(6))[::-1]))
    ]
    assert keys[0] == keys[1]
    odd = changed(two_blocks(), 1, seconds=2.0)
    assert len({alike.key for alike in equal_blocks(odd, blocks_of(odd))}) == 2


def two_blocks() -> Graph:
    """Two blocks of two forward operators and a backward one that reads what the first makes and a gradient.

    Value 0 is a resident, 9 the gradient that comes in. Operators are numbered in default order.
    """
    values = (Value("w", 4, resident=True), *(Value(f"v{i}", 8) for i in range(1, 7)))

    def forward(block: int, reads: int) -> list[Op]:
        made = 2 * block + 1
        one = Op(f"{block}.one", 1.0, (reads, 0), (made,), class_key="one")
        return [one, Op(f"{block}.two", 1.0, (made,), (made + 1,), class_key="two")]

    def backward(block: int, gradient: int) -> Op:
        back = Op(f"{block}.back", 1.0, (2 * block + 1,), (gradient,), class_key="back")
        return replace(back, phase=Phase.BACKWARD)

    return Graph((*forward(0, 0), *forward(1, 0), backward(1, 5), backward(0, 6)), values)


def blocks_of(graph: Graph) -> list[tuple[int, ...]]:
    """The operators of each block in default order, which its name tells."""
    return [tuple(op for op in graph.order if graph.ops[op].name.startswith(f"{block}.")) for block in (0, 1)]


def changed(graph: Graph, index: int, **changes: object) -> Graph:
    ops = list(graph.ops)
    ops[index] = replace(ops[index], **changes)  # type: ignore[arg-type]
    return replace(graph, ops=tuple(ops))


def with_reader(graph: Graph, value: int, phase: Phase) -> Graph:
    """One more operator at the end, outside both blocks."""
    return replace(graph, ops=(*graph.ops, Op("reader", 1.0, (value,), (), phase=phase)), order=(*graph.order, 6))


def test_equal_without_changes() -> None:
    assert len(equal_blocks(two_blocks(), blocks_of(two_blocks()))) == 1


@pytest.mark.parametrize(
    "graph",
    [
        changed(two_blocks(), 1, class_key="other code"),
        changed(two_blocks(), 1, seconds=2.0),
        changed(two_blocks(), 1, workspace_bytes=1),
        changed(two_blocks(), 1, once=True),
        changed(two_blocks(), 1, inputs=(1, 1)),
        changed(two_blocks(), 5, inputs=(2,)),
        replace(two_blocks(), targets=frozenset({2})),
        replace(two_blocks(), values=(*two_blocks().values[:2], Value("v2", 9), *two_blocks().values[3:])),
        with_reader(two_blocks(), 2, Phase.FORWARD),
        with_reader(two_blocks(), 2, Phase.BACKWARD),
    ],
)
def test_whatever_a_schedule_depends_on_tells_blocks_apart(graph: Graph) -> None:
    assert len(equal_blocks(graph, blocks_of(graph))) == 2


def test_used_outside_before_or_after_the_loss_is_not_the_same() -> None:
    before = with_reader(two_blocks(), 2, Phase.FORWARD)
    both = replace(before, ops=(*before.ops, Op("late", 1.0, (4,), (), phase=Phase.BACKWARD)), order=(*before.order, 7))
    assert len(equal_blocks(both, blocks_of(both))) == 2
    alike = changed(both, 7, phase=Phase.FORWARD)
    assert len(equal_blocks(alike, blocks_of(alike))) == 1


def test_a_mutation_outside_that_ends_the_window_of_one_block_tells_them_apart() -> None:
    """An operator outside changes the resident after both blocks or between them."""

    def mutated(place: int) -> Graph:
        graph = two_blocks()
        mutation = Op("mutation", 1.0, (), (), once=True, mutates=(0,))
        order = (*graph.order[:place], 6, *graph.order[place:])
        return replace(graph, ops=(*graph.ops, mutation), order=order)

    assert len(equal_blocks(mutated(6), blocks_of(mutated(6)))) == 1
    assert len(equal_blocks(mutated(1), blocks_of(mutated(1)))) == 2


def test_what_is_not_of_the_block_cannot_be_translated() -> None:
    graph = two_blocks()
    one, other = blocks_of(graph)
    with pytest.raises(ScheduleError, match=r"operator '1\.one'"):
        translate(graph, Schedule(np.array([0, other[0]], dtype=np.int32)), one, other)
    with pytest.raises(ScheduleError, match="value 'v4'"):
        translate(graph, Schedule(np.array([~4], dtype=np.int32)), one, other)
    with pytest.raises(ScheduleError, match="3 operators cannot be one of 2"):
        translate(graph, Schedule(np.array([0], dtype=np.int32)), one, other[:2])
