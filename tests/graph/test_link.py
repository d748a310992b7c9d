"""Values that move to host memory and back: the compiled oracle against the slow reference, by hand, and in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rematch.errors import FormatError, GraphError, ScheduleError
from rematch.graph import (
    Compute,
    Fetch,
    Free,
    Graph,
    Link,
    Offload,
    Op,
    Phase,
    Schedule,
    Value,
    baseline,
    load_graph,
    save_graph,
    simulate,
)
from rematch.graph.formats import graph_from_data, graph_to_data
from rematch.graph.intervals import to_intervals
from rematch.graph.matrices import to_matrices
from rematch.graph.simulate import alive_during, clock
from rematch.graph.transforms import with_flop_costs
from tests.reference import judge
from tests.strategies import graphs, linked, moving_schedules


@given(st.data(), graphs())
def test_agrees_with_reference_on_valid_and_broken_schedules(data: st.DataObject, graph: Graph) -> None:
    graph = data.draw(linked(graph))
    schedule = data.draw(moving_schedules(graph))
    seen, expected = simulate(graph, schedule), judge(graph, schedule)
    assert seen.broken_step == expected.broken_step
    assert seen.seconds == expected.seconds
    assert (seen.peak_bytes, seen.peak_step) == (expected.peak_bytes, expected.peak_step)
    assert seen.timeline_bytes.tolist() == expected.timeline_bytes
    assert seen.counts.tolist() == expected.counts
    assert seen.host_bytes == expected.host_bytes
    assert seen.stall_seconds == seen.seconds - sum(seen.counts * graph.arrays.seconds)


@pytest.fixture
def graph() -> Graph:
    """a (8 bytes) is made first and read last, with two computations of 3 seconds in between."""
    values = (Value("a", 8), Value("b", 2), Value("tangent", 2), Value("gradient", 4))
    ops = (
        Op("first", 1.0, (), (0,)),
        Op("middle", 3.0, (0,), (1,)),
        Op("loss", 3.0, (1,), (2,), phase=Phase.LOSS),
        Op("last", 1.0, (0, 2), (3,), phase=Phase.BACKWARD),
    )
    return Graph(ops, values, targets=frozenset({3}), name="there and back", link=Link(4.0, 2.0, host_bytes=10))


MOVING = [Compute(0), Offload(0), Compute(1), Free(0), Fetch(0), Compute(2), Compute(3)]


def test_copies_run_beside_computations_by_hand(graph: Graph) -> None:
    seen, times = simulate(graph, Schedule.of(MOVING)).checked(), clock(graph, Schedule.of(MOVING))
    assert times.begins.tolist() == [0.0, 1.0, 1.0, 4.0, 4.0, 4.0, 8.0]  # out 1 to 3, in 4 to 8, `last` waits for it
    assert times.ends.tolist() == [1.0, 3.0, 4.0, 4.0, 8.0, 7.0, 9.0]
    assert (seen.seconds, seen.stall_seconds, seen.host_bytes) == (9.0, 1.0, 8)
    assert seen.timeline_bytes.tolist() == [8, 8, 10, 2, 10, 12, 16]
    assert alive_during(graph, Schedule.of(MOVING), 5) == {0: 1, 1: 1, 2: 1}


def test_freeing_waits_for_the_copy_out(graph: Graph) -> None:
    slow = replace(graph, link=Link(1.0, 2.0, host_bytes=8))
    assert clock(slow, Schedule.of(MOVING)).ends[3] == 9.0  # 8 bytes from second 1 on


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([Compute(0), Offload(9)], "value 9 does not exist"),
        ([Compute(0), Fetch(9)], "value 9 does not exist"),
        ([Offload(0)], "step 0 of 1: offloads 'a', which is not alive"),
        ([Compute(0), Offload(0), Offload(0)], "offloads 'a', which is in host memory already"),
        ([Compute(0), Fetch(0)], "fetches 'a', which is not in host memory"),
        ([Compute(0), Offload(0), Fetch(0)], "fetches 'a', which is on the device already"),
        (
            [*MOVING, Offload(3)],
            "offloads 'gradient', which is more than is left of 10 bytes of host memory",
        ),
    ],
)
def test_says_what_breaks_first(graph: Graph, steps: list[Compute | Offload], words: str) -> None:
    seen = simulate(graph, Schedule.of(steps))
    assert seen.broken_step == len(steps) - 1
    assert words in str(seen.error)


def test_an_engine_that_recomputes_after_the_loss_fetches_after_it(graph: Graph) -> None:
    late = replace(graph, recompute_after_loss=True)
    assert "can fetch only after the loss" in str(simulate(late, Schedule.of(MOVING)).error)
    simulate(late, Schedule.of([*MOVING[:4], Compute(2), Fetch(0), Compute(3)])).checked()


def test_what_must_stay_on_the_device_does_not_move(graph: Graph, tmp_path: Path) -> None:
    values = tuple(replace(value, movable=value.name != "a") for value in graph.values)
    staying = replace(graph, values=values)
    seen = simulate(staying, Schedule.of(MOVING))
    assert seen.error == "step 1 of 7: offloads 'a', which must stay on the device"
    assert staying.fingerprint == graph.fingerprint  # so that plans from before anything could move still load
    save_graph(staying, tmp_path / "staying.json")
    assert load_graph(tmp_path / "staying.json").graph == staying


def test_nothing_moves_without_a_link(graph: Graph) -> None:
    seen = simulate(replace(graph, link=None), Schedule.of(MOVING))
    assert "step 1 of 7: offloads 'a', but the graph has no link to host memory" in str(seen.error)


def test_forms_without_moves_refuse_them(graph: Graph) -> None:
    for convert in (to_intervals, to_matrices):
        with pytest.raises(ScheduleError, match="moves values"):
            convert(graph, Schedule.of(MOVING))
    with pytest.raises(GraphError, match="has a link"):
        with_flop_costs(graph)


def test_steps_come_back_from_numbers(graph: Graph) -> None:
    assert list(Schedule.of(MOVING)) == MOVING
    assert Schedule.of(MOVING).ops.tolist() == [0, 1, 2, 3]
    assert Schedule.of(MOVING).moves and not baseline(graph).moves


def test_files_keep_the_link_and_the_fingerprint_does_not_know_it(graph: Graph, tmp_path: Path) -> None:
    save_graph(graph, tmp_path / "linked.json")
    assert load_graph(tmp_path / "linked.json").graph == graph
    unlinked = replace(graph, link=None)
    assert "link" not in graph_to_data(unlinked)
    assert unlinked.fingerprint == graph.fingerprint
    with pytest.raises(FormatError, match="link"):
        graph_from_data({**graph_to_data(graph), "link": {"out_bytes_per_second": "fast"}})


@pytest.mark.parametrize("link", [(0.0, 1.0, 1), (1.0, float("nan"), 1), (1.0, 1.0, -1)])
def test_impossible_links_are_refused(link: tuple[float, float, int]) -> None:
    with pytest.raises(GraphError, match="possible"):
        Link(*link)
