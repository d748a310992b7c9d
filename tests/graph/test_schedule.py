"""Schedules: frees by liveness, the array form, equality."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rematch.errors import ScheduleError
from rematch.graph import Compute, Free, Graph, Op, Schedule, Value, baseline
from tests.reference import loss_of
from tests.strategies import graphs, sequences


@given(st.data(), graphs())
def test_from_ops_frees_each_value_directly_after_its_last_use(data: st.DataObject, graph: Graph) -> None:
    """Every copy of a value is freed right after the last computation that reads or makes it, unless it must stay."""
    sequence = data.draw(sequences(graph))
    freed_after = _freed_after_each_computation(Schedule.from_ops(graph, sequence))
    assert freed_after == [sorted(values) for values in _expected_frees(graph, sequence)]


def _freed_after_each_computation(schedule: Schedule) -> list[list[int]]:
    freed: list[list[int]] = []
    for step in schedule:
        if isinstance(step, Compute):
            freed.append([])
        else:
            freed[-1].append(step.value)
    return freed


def _expected_frees(graph: Graph, sequence: list[int]) -> list[list[int]]:
    """For each copy of each value: last event that uses it, unless it must stay."""
    frees: list[list[int]] = [[] for _ in sequence]
    loss = loss_of(graph)
    loss_event = sequence.index(loss) if loss is not None else len(sequence)
    for op in range(len(graph.ops)):
        made = [event for event, ran in enumerate(sequence) if ran == op]
        for value in graph.ops[op].outputs:
            for start, end in zip(made, [*made[1:], len(sequence)], strict=True):
                stays = end == len(sequence) and value in graph.targets
                if value in graph.held:  # alive at the loss, and then until it is replaced
                    stays |= end > loss_event
                uses = [event for event in range(start + 1, end) if value in graph.ops[sequence[event]].inputs]
                if not stays:
                    frees[max([start, *uses])].append(value)
    return frees


@given(st.data(), graphs())
def test_array_form_round_trip(data: st.DataObject, graph: Graph) -> None:
    sequence = data.draw(sequences(graph))
    schedule = Schedule.from_ops(graph, sequence)
    assert Schedule.of(schedule) == schedule
    assert hash(Schedule.of(schedule)) == hash(schedule)
    assert schedule.ops.tolist() == sequence
    assert len(list(schedule)) == len(schedule)


def test_differs_from_other_schedules_and_things() -> None:
    schedule = Schedule.of([Compute(0), Free(0)])
    assert schedule != Schedule.of([Compute(0)])
    assert schedule != [0, -1]


def test_is_not_changed_through_its_source_or_its_steps() -> None:
    source = np.array([0, 1], dtype=np.int32)
    schedule = Schedule(source)
    source[0] = 5
    assert schedule.steps.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        schedule.steps[0] = 5


def test_baseline_follows_the_default_order() -> None:
    graph = Graph((Op("b", 1.0, (1,), (0,)), Op("a", 1.0, (), (1,))), (Value("y", 1), Value("x", 1)), order=(1, 0))
    assert list(baseline(graph)) == [Compute(1), Compute(0), Free(0), Free(1)]


@pytest.mark.parametrize("ops", [[2], [-1]])
def test_from_ops_refuses_unknown_operators(ops: list[int]) -> None:
    graph = Graph((Op("a", 1.0, (), ()), Op("b", 1.0, (), ())), ())
    with pytest.raises(ScheduleError, match="numbered 0 to 1"):
        Schedule.from_ops(graph, ops)


def test_refuses_a_table_of_steps() -> None:
    with pytest.raises(ScheduleError, match="2 dimensions"):
        Schedule(np.zeros((2, 2), dtype=np.int32))
