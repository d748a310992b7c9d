"""Moccasin's retention intervals: exact round trips, and intervals that are no schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rematch.errors import ScheduleError
from rematch.graph import Compute, Free, Graph, Op, Schedule, Value, baseline
from rematch.graph.generators import chain
from rematch.graph.intervals import Retention, from_intervals, to_intervals
from tests.strategies import graphs, sequences


@given(st.data(), graphs())
def test_schedule_to_intervals_and_back(data: st.DataObject, graph: Graph) -> None:
    schedule = Schedule.from_ops(graph, data.draw(sequences(graph)))
    assert from_intervals(graph, to_intervals(graph, schedule)) == schedule


@given(st.data(), graphs())
def test_intervals_to_schedule_and_back(data: st.DataObject, graph: Graph) -> None:
    """Also for values that are retained longer than anybody needs them."""
    intervals = list(to_intervals(graph, Schedule.from_ops(graph, data.draw(sequences(graph)))))
    for index, interval in enumerate(intervals):
        again = (other.start for other in intervals[index + 1 :] if other.op == interval.op)
        latest = next(again, len(intervals))
        longer = tuple(data.draw(st.integers(end, latest)) for end in interval.ends)
        intervals[index] = replace(interval, ends=longer)
    shuffled = data.draw(st.permutations(intervals))
    assert to_intervals(graph, from_intervals(graph, shuffled)) == tuple(intervals)


def test_chain_by_hand() -> None:
    graph = chain(2)
    schedule = Schedule.from_ops(graph, [0, 1, 2, 3, 0, 4])
    assert to_intervals(graph, schedule) == (
        Retention(op=0, start=0, ends=(1,)),
        Retention(op=1, start=1, ends=(5,)),
        Retention(op=2, start=2, ends=(3,)),
        Retention(op=3, start=3, ends=(5,)),
        Retention(op=0, start=4, ends=(5,)),
        Retention(op=4, start=5, ends=(5,)),
    )


@pytest.fixture
def pair() -> Graph:
    """The second operator reads the first of two outputs; the target is never freed."""
    ops = (Op("f", 1.0, (), (0, 1)), Op("g", 1.0, (0,), (2,)))
    return Graph(ops, (Value("x", 1), Value("y", 1), Value("z", 1)), frozenset({2}))


def test_an_end_past_the_last_event_is_never_freed(pair: Graph) -> None:
    assert to_intervals(pair, baseline(pair)) == (Retention(0, 0, (1, 0)), Retention(1, 1, (2,)))


def test_a_value_replaced_while_alive_ends_where_the_next_starts(pair: Graph) -> None:
    schedule = Schedule.of([Compute(0), Free(1), Compute(0), Free(1), Compute(1), Free(0)])
    intervals = to_intervals(pair, schedule)
    assert intervals[0] == Retention(0, 0, (1, 0))
    assert from_intervals(pair, intervals) == schedule


@pytest.mark.parametrize(
    ("intervals", "words"),
    [
        ([Retention(0, 0, (1, 0)), Retention(1, 2, (3,))], "no interval, or more than one, starts at event 1"),
        ([Retention(0, 0, (1, 0)), Retention(1, 0, (1,))], "no interval, or more than one, starts at event 0"),
        ([Retention(7, 0, ())], "operator 7, which does not exist"),
        ([Retention(0, 0, (1,))], "'f' at event 0 has 1 ends for 2 outputs"),
        ([Retention(0, 0, (9, 0)), Retention(1, 1, (2,))], "'f' at event 0 ends at 9, not from 0 to 2"),
        ([Retention(0, 0, (-1, 0)), Retention(1, 1, (2,))], "ends at -1"),
        (
            [Retention(0, 0, (2, 0)), Retention(0, 1, (2, 1)), Retention(1, 2, (3,))],
            "'x' is retained from 0 to 2, beyond 1 where its next interval starts",
        ),
        ([Retention(0, 0, (0, 0)), Retention(1, 1, (2,))], "'g' reads 'x', which is not alive"),
        ([], "never runs"),
    ],
)
def test_intervals_that_are_no_schedule(pair: Graph, intervals: list[Retention], words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_intervals(pair, intervals)
    assert words in str(caught.value)


def test_broken_schedules_are_refused(pair: Graph) -> None:
    with pytest.raises(ScheduleError, match="'g' reads 'x'"):
        to_intervals(pair, Schedule.of([Compute(1)]))
