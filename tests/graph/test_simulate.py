"""The compiled oracle against the slow reference, and its words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rematch.errors import ScheduleError
from rematch.graph import Compute, Free, Graph, Op, Phase, Schedule, Value, baseline, simulate
from tests.reference import judge
from tests.strategies import graphs, schedules, sequences


@given(st.data(), graphs())
def test_agrees_with_reference_on_valid_and_broken_schedules(data: st.DataObject, graph: Graph) -> None:
    schedule = data.draw(schedules(graph))
    seen, expected = simulate(graph, schedule), judge(graph, schedule)
    assert seen.broken_step == expected.broken_step
    assert seen.valid == (expected.broken_step is None)
    assert seen.seconds == expected.seconds
    assert seen.peak_bytes == expected.peak_bytes
    assert seen.peak_step == expected.peak_step
    assert seen.timeline_bytes.tolist() == expected.timeline_bytes
    assert seen.counts.tolist() == expected.counts


@given(st.data(), graphs())
def test_sequences_the_graph_allows_become_valid_schedules(data: st.DataObject, graph: Graph) -> None:
    sequence = data.draw(sequences(graph))
    seen = simulate(graph, Schedule.from_ops(graph, sequence)).checked()
    assert seen.counts.tolist() == np.bincount(sequence, minlength=len(graph.ops)).tolist()


@pytest.fixture
def graph() -> Graph:
    """weights -> a -> b, c; update mutates the weights; loss on the held c; back reads the tangent and a."""
    values = (
        Value("weights", 100, resident=True),
        Value("a", 10),
        Value("b", 20),
        Value("c", 30),
        Value("tangent", 5),
        Value("gradient", 7),
    )
    ops = (
        Op("read", 1.0, (0,), (1,), workspace_bytes=3),
        Op("split", 2.0, (1,), (2, 3)),
        Op("update", 0.5, (0,), (), once=True, mutates=(0,)),
        Op("loss", 4.0, (3,), (4,), phase=Phase.LOSS),
        Op("back", 8.0, (1, 4), (5,), phase=Phase.BACKWARD),
    )
    return Graph(ops, values, targets=frozenset({5}), held=frozenset({3}), name="small")


def test_baseline_figures_by_hand(graph: Graph) -> None:
    seen = simulate(graph, baseline(graph)).checked()
    steps = ["read", "split", "free b", "update", "loss", "back", "free a", "free tangent"]
    assert seen.timeline_bytes.tolist() == [113, 160, 140, 140, 145, 152, 142, 137]
    assert (seen.peak_bytes, seen.peak_step) == (160, steps.index("split"))
    assert seen.seconds == 15.5
    assert seen.counts.tolist() == [1, 1, 1, 1, 1]


def test_an_output_alive_counts_twice_while_computed_again(graph: Graph) -> None:
    steps = [Compute(0), Compute(0), Free(1)]
    assert simulate(graph, Schedule.of(steps)).timeline_bytes.tolist() == [113, 123, 100]


@pytest.mark.parametrize(
    ("steps", "step", "words"),
    [
        ([Compute(1)], 0, "step 0 of 1: 'split' reads 'a', which is not alive"),
        ([Compute(9)], 0, "operator 9 does not exist"),
        ([Free(9)], 0, "value 9 does not exist"),
        ([Free(0)], 0, "frees 'weights', which is resident"),
        ([Compute(0), Free(1), Free(1)], 2, "frees 'a', which is not alive (freed twice, or never computed)"),
        ([Compute(0), Compute(2), Compute(2)], 2, "'update' runs twice, but it may run only once"),
        ([Compute(0), Compute(1), Compute(3)], 2, "'loss' runs before 'update'"),
        ([Compute(2), Compute(0)], 1, "'read' reads the old contents of what 'update' has changed"),
        ([Compute(op) for op in (0, 1, 2, 3)] + [Free(3)], 4, "frees 'c', which is held from the loss on"),
        ([Compute(op) for op in (0, 1, 2, 3)], 4, "operator 'back' never runs"),
        ([Compute(op) for op in (0, 1, 2, 3, 4)] + [Free(5)], 6, "target 'gradient' is not alive at the end"),
    ],
)
def test_says_what_breaks_first(graph: Graph, steps: list[Compute | Free], step: int, words: str) -> None:
    seen = simulate(graph, Schedule.of(steps))
    assert seen.broken_step == step
    assert words in str(seen.error)
    with pytest.raises(ScheduleError):
        seen.checked()


def test_says_when_a_held_value_is_missing_at_the_loss() -> None:
    values = (Value("x", 1), Value("y", 1), Value("tangent", 1))
    ops = (Op("f", 1.0, (), (0,)), Op("g", 1.0, (), (1,)), Op("loss", 1.0, (0,), (2,), phase=Phase.LOSS))
    graph = Graph(ops, values, held=frozenset({1}))
    seen = simulate(graph, Schedule.of([Compute(0), Compute(2)]))
    assert seen.error == "step 1 of 2: 'loss' is the loss, but held value 'y' is not alive"


def test_says_when_new_contents_are_read_too_early() -> None:
    values = (Value("state", 1, resident=True), Value("y", 1))
    ops = (Op("update", 1.0, (0,), (), once=True, mutates=(0,)), Op("read", 1.0, (0,), (1,)))
    seen = simulate(Graph(ops, values), Schedule.of([Compute(1)]))
    assert "'read' reads what 'update' is to change, which has not run yet" in str(seen.error)


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ((0, 0), "step 1 of 2: 'f' is computed again before the loss"),
        ((1,), "step 0 of 1: 'g' first runs before 'f'; this graph's engine runs all operators first in default order"),
        ((0, 1, 2, 4), "step 3 of 4: 'back g' first runs before 'back f'"),
        ((0, 1, 2, 0, 3, 0, 4), None),
    ],
)
def test_recompute_after_loss_keeps_the_default_order_and_repeats_nothing_before(
    ops: tuple[int, ...], words: str | None
) -> None:
    """f and g, independent of each other; the loss; their backwards."""
    values = tuple(Value(f"v{index}", 1) for index in range(5))
    graph = Graph(
        (
            Op("f", 1.0, (), (0,)),
            Op("g", 1.0, (), (1,)),
            Op("loss", 1.0, (), (2,), phase=Phase.LOSS),
            Op("back f", 1.0, (0, 2), (3,), phase=Phase.BACKWARD),
            Op("back g", 1.0, (1, 2), (4,), phase=Phase.BACKWARD),
        ),
        values,
        recompute_after_loss=True,
    )
    seen = simulate(graph, Schedule.of([Compute(op) for op in ops]))
    assert (seen.error is None) if words is None else words in str(seen.error)


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ((1, 0, 2, 3), "'draw more' first runs before 'draw'; operators that are random or run once keep"),
        ((0, 2, 1, 3), "'loss' first runs before 'draw more'"),
        ((0, 0, 1, 0, 2, 0, 3), None),
    ],
)
def test_random_operators_first_run_in_default_order_and_again_at_will(ops: tuple[int, ...], words: str | None) -> None:
    values = tuple(Value(f"v{index}", 1) for index in range(4))
    graph = Graph(
        (
            Op("draw", 1.0, (), (0,), random=True),
            Op("draw more", 1.0, (), (1,), random=True),
            Op("loss", 1.0, (), (2,), phase=Phase.LOSS),
            Op("back", 1.0, (0, 1, 2), (3,), phase=Phase.BACKWARD),
        ),
        values,
    )
    seen = simulate(graph, Schedule.of([Compute(op) for op in ops]))
    assert (seen.error is None) if words is None else words in str(seen.error)


def test_empty_graph_and_schedule() -> None:
    seen = simulate(Graph((), (Value("x", 5, resident=True),)), Schedule(np.array([], dtype=np.int32))).checked()
    assert (seen.peak_bytes, seen.peak_step, seen.seconds) == (5, None, 0.0)
