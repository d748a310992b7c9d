"""The model of CUDA's allocator, and plans for which it has a place."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rematch.errors import BudgetInfeasible
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
    simulate,
)
from rematch.planning.cuda_allocator import Allocator, Conditions, OutOfMemory, Requests, fits, least_cap, requests_of
from rematch.planning.places import Places
from rematch.planning.planner import Planner, tightest
from rematch.planning.settings import Settings
from tests.examples import examples

MIB = 2**20


def test_a_hole_between_blocks_is_no_place_for_a_larger_one() -> None:
    for expandable, needed in ((False, 90), (True, 80)):
        allocator = Allocator(90 * MIB, expandable=expandable)
        first, second = allocator.allocate(30 * MIB), allocator.allocate(20 * MIB)
        allocator.free(first)
        allocator.allocate(40 * MIB)  # beside the hole of 30, of which a page of 20 can be given back
        assert allocator.mapped_bytes == needed * MIB
        allocator.free(second)


def test_smaller_pages_lose_less_in_holes() -> None:
    for page_mib, needed in ((20, 60), (12, 36)):
        allocator = Allocator(80 * MIB, segment=page_mib * MIB)
        blocks = [allocator.allocate(size * MIB) for size in (12, 24, 12)]
        allocator.free(blocks[1])
        allocator.make_room(allocator.cap_bytes - needed * MIB)
        assert allocator.mapped_bytes <= needed * MIB


def test_pages_that_expand_serve_what_is_left_of_one_however_little() -> None:
    for expandable, needed in ((True, 36 * MIB), (False, (24 + 14) * MIB)):
        allocator = Allocator(60 * MIB, expandable=expandable, segment=12 * MIB)
        allocator.allocate(23 * MIB + MIB // 2)
        allocator.allocate(12 * MIB + MIB // 4)
        assert allocator.mapped_bytes == needed


def test_the_peak_of_requests_counts_what_is_there_all_the_time() -> None:
    step = (("a", 30 * MIB), ("b", 20 * MIB), ("a", None), ("c", 25 * MIB), ("b", None))
    assert Requests((5 * MIB,), step).peak_bytes == 55 * MIB
    assert Requests((5 * MIB,), (*step, ("d", 40 * MIB))).peak_bytes == 70 * MIB


def test_what_is_free_goes_back_to_the_driver_only_at_the_cap() -> None:
    for expandable in (False, True):
        allocator = Allocator(100 * MIB, expandable=expandable)
        allocator.free(allocator.allocate(60 * MIB))
        assert allocator.mapped_bytes == 60 * MIB
        allocator.allocate(80 * MIB)
        assert allocator.mapped_bytes <= 100 * MIB
        with pytest.raises(OutOfMemory):
            allocator.allocate(40 * MIB)


def test_idle_blocks_of_others_segments_are_used_and_never_given_back() -> None:
    for expandable in (False, True):
        allocator = Allocator(60 * MIB, expandable=expandable)
        allocator.share([8 * MIB, 12 * MIB])
        small = allocator.allocate(7 * MIB)
        assert allocator.mapped_bytes == 20 * MIB
        allocator.allocate(40 * MIB)
        assert allocator.mapped_bytes == 60 * MIB
        allocator.free(small)
        with pytest.raises(OutOfMemory):
            allocator.allocate(13 * MIB)
        allocator.allocate(12 * MIB)


@examples(150)
@given(
    st.lists(st.tuples(st.integers(1, 64 * MIB), st.booleans(), st.integers(0, 10)), min_size=1, max_size=60),
    st.booleans(),
    st.integers(64, 2048),
)
def test_blocks_never_overlap_and_mapped_memory_covers_them(
    requests: list[tuple[int, bool, int]], expandable: bool, cap_mib: int
) -> None:
    allocator = Allocator(cap_mib * MIB, expandable=expandable)
    held = []
    for size_bytes, frees, which in requests:
        try:
            held.append(allocator.allocate(size_bytes))
        except OutOfMemory:
            break
        assert held[-1].size >= size_bytes
        if frees:
            allocator.free(held.pop(which % len(held)))
        assert sum(block.size for block in held) <= allocator.mapped_bytes <= allocator.cap_bytes
        for pool in {id(block.pool): block.pool for block in held}.values():
            spans = sorted((block.address, block.address + block.size) for block in held if block.pool is pool)
            assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    for block in held:
        allocator.free(block)
    for pool in (allocator._small, allocator._large):
        pool.give_back()
    assert allocator.mapped_bytes == 0


def chain(layers: int, sizes_mib: tuple[int, ...]) -> Graph:
    """Forward and backward of a chain whose layers save two tensors of uneven sizes."""
    values: list[Value] = [Value("x", 8 * MIB, resident=True)]
    ops: list[Op] = []
    inputs, saved = 0, []
    for layer in range(layers):
        values += [
            Value(f"inner{layer}", sizes_mib[layer % len(sizes_mib)] * MIB),
            Value(f"out{layer}", 30 * MIB),
        ]
        inner, out = len(values) - 2, len(values) - 1
        ops += [
            Op(f"up{layer}", 1e-3, (inputs,), (inner,), phase=Phase.FORWARD),
            Op(f"down{layer}", 2e-3, (inner,), (out,), phase=Phase.FORWARD),
        ]
        saved.append((inputs, inner, out))
        inputs = out
    values.append(Value("loss", 30 * MIB))
    ops.append(Op("loss", 1e-4, (inputs,), (len(values) - 1,), phase=Phase.LOSS))
    tangent = len(values) - 1
    for layer, (before, inner, _) in reversed(list(enumerate(saved))):
        values += [Value(f"d_inner{layer}", values[inner].size_bytes), Value(f"d_out{layer}", 30 * MIB)]
        ops += [
            Op(f"down{layer}.grad", 2e-3, (tangent, inner), (len(values) - 2,), phase=Phase.BACKWARD),
            Op(f"up{layer}.grad", 1e-3, (len(values) - 2, before), (len(values) - 1,), phase=Phase.BACKWARD),
        ]
        tangent = len(values) - 1
    return Graph(tuple(ops), tuple(values), targets=frozenset({tangent}), name="chain")


def test_a_schedule_needs_at_least_its_peak_and_everything_fits_at_the_least_cap() -> None:
    graph = chain(12, (70, 45, 25))
    for expandable in (False, True):
        requests, conditions = requests_of(graph, baseline(graph)), Conditions(expandable=expandable)
        cap_bytes = least_cap(requests, conditions)
        assert cap_bytes >= requests.peak_bytes == simulate(graph, baseline(graph)).peak_bytes
        assert fits(requests, cap_bytes, conditions)
        assert not fits(requests, int(0.9 * cap_bytes), conditions)


def test_plans_for_a_card_leave_room_for_what_is_free_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(16, (70, 45, 25))
    monkeypatch.setattr("rematch.planning.places.has_expandable_segments", lambda: False)
    monkeypatch.setattr("rematch.planning.places.idle_blocks", lambda device: [])
    budget_bytes = int(0.6 * simulate(graph, baseline(graph)).peak_bytes)

    def needed(device: str) -> int:
        planner = Planner(Settings(budget=budget_bytes, time_limit=5.0, progress=False))
        plan = planner.plan(graph, torch.device(device), engine="tape")
        assert plan.figures.budget_bytes <= budget_bytes
        return least_cap(requests_of(graph, plan.schedule), Conditions(expandable=False))

    assert needed("cpu") > budget_bytes, "the test needs a schedule that leaves holes"
    assert needed("cuda") <= budget_bytes


def test_a_schedule_that_computes_nothing_needs_what_is_resident() -> None:
    graph = Graph((), (Value("x", 5 * MIB, resident=True),), name="empty")
    assert least_cap(requests_of(graph, Schedule(np.zeros(0, dtype=np.int64)))) >= 5 * MIB


def test_what_is_fetched_needs_a_place_and_what_has_left_needs_none() -> None:
    values = tuple(Value(name, 60 * MIB) for name in ("a", "b", "c"))
    ops = (Op("make a", 1.0, (), (0,)), Op("make b", 1.0, (), (1,)), Op("make c", 1.0, (0,), (2,)))
    graph = Graph(ops, values, link=Link(1e9, 1e9, host_bytes=2**30))
    away = Schedule.of([Compute(0), Offload(0), Free(0), Compute(1), Free(1), Fetch(0), Compute(2)])
    assert least_cap(requests_of(graph, away)) == 120 * MIB
    back = Schedule.of([*list(away)[:4], Fetch(0), Free(1), Compute(2)])
    assert least_cap(requests_of(graph, back)) == 120 * MIB
    kept = Schedule.of([Compute(0), Offload(0), Free(0), Compute(1), Fetch(0), Compute(2)])
    assert least_cap(requests_of(graph, kept)) == 180 * MIB


def test_a_schedule_that_fits_the_card_may_take_longer_than_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(16, (70, 45, 25))
    budget_bytes = int(0.6 * simulate(graph, baseline(graph)).peak_bytes)
    lean_bytes = int(0.86 * budget_bytes)

    class Roomy:
        """Has room for lean schedules only."""

        def __init__(self, *_: object) -> None:
            pass

        def needed_bytes(self, graph: Graph, schedule: Schedule) -> int:
            return budget_bytes if self.suffice(graph, schedule, budget_bytes) else 2 * budget_bytes

        def suffice(self, graph: Graph, schedule: Schedule, _: int) -> bool:
            return simulate(graph, schedule).peak_bytes <= lean_bytes

    monkeypatch.setattr("rematch.planning.planner.Places", Roomy)
    monkeypatch.setattr("rematch.planning.planner._MOST_FOR_PLACES", 0.0)
    planner = Planner(Settings(budget=budget_bytes, time_limit=5.0, progress=False))
    plan = planner.plan(graph, torch.device("cuda"), engine="tape")
    assert simulate(graph, plan.schedule).peak_bytes <= lean_bytes


def test_room_that_a_tighter_plan_leaves_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(16, (70, 45, 25))
    budget_bytes = int(0.6 * simulate(graph, baseline(graph)).peak_bytes)
    monkeypatch.setattr("rematch.planning.placing._ROUNDS", 0)
    monkeypatch.setattr("rematch.planning.placing._MOST_DROPPED", 0)
    tight = 0.93

    class Roomy:
        """Has room for schedules below those of the first search for less, and above those of the second."""

        def __init__(self, *_: object) -> None:
            pass

        def needed_bytes(self, graph: Graph, schedule: Schedule) -> int:
            return 2 * budget_bytes

        def suffice(self, graph: Graph, schedule: Schedule, cap_bytes: int) -> bool:
            assert cap_bytes == budget_bytes
            return simulate(graph, schedule).peak_bytes <= tight * budget_bytes

    monkeypatch.setattr("rematch.planning.planner.Places", Roomy)
    planner = Planner(Settings(budget=budget_bytes, time_limit=5.0, progress=False))
    plan = planner.plan(graph, torch.device("cuda"), engine="tape")
    assert 0.905 * budget_bytes < simulate(graph, plan.schedule).peak_bytes <= tight * budget_bytes


def test_a_refusal_names_what_the_engines_own_order_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(12, (70, 45, 25))
    monkeypatch.setattr("rematch.planning.places.idle_blocks", lambda device: [])
    whole_bytes = simulate(graph, baseline(graph)).peak_bytes

    def named(adapted: Callable[[Schedule], Schedule] | None) -> int:
        planner = Planner(Settings(budget=whole_bytes // 50, time_limit=1.0, progress=False))
        with pytest.raises(BudgetInfeasible) as refusal:
            planner.plan(graph, torch.device("cuda"), engine="tape", adapted=adapted)
        return refusal.value.feasible_from_bytes or 0

    assert named(None) < whole_bytes <= named(lambda _: baseline(graph))  # an engine that keeps everything


def test_a_refusal_names_what_the_most_compact_schedule_near_the_smallest_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = chain(12, (70, 45, 25))
    monkeypatch.setattr("rematch.planning.places.idle_blocks", lambda device: [])
    smallest, peak_bytes = tightest(graph, 0)
    needed = {
        schedule.steps.tobytes(): 2 * peak_bytes + number * MIB
        for number, schedule in enumerate((baseline(graph), smallest))
    }

    def needed_bytes(_: Places, graph: Graph, schedule: Schedule) -> int:
        return needed.get(schedule.steps.tobytes(), 2 * peak_bytes - MIB)

    monkeypatch.setattr(Places, "needed_bytes", needed_bytes)
    planner = Planner(Settings(budget=peak_bytes // 50, time_limit=1.0, progress=False))
    with pytest.raises(BudgetInfeasible) as refusal:
        planner.plan(graph, torch.device("cuda"), engine="tape")
    assert refusal.value.feasible_from_bytes == 2 * peak_bytes - MIB


def test_requests_are_what_an_engine_asks_for() -> None:
    """Nothing for what is there all the time or still there, and workspaces for as long as their operators run."""
    values = (Value("x", 5 * MIB, resident=True), Value("a", 3 * MIB), Value("b", 2 * MIB), Value("none", 0))
    ops = (Op("make a", 1.0, (0,), (1,), workspace_bytes=MIB), Op("make b", 1.0, (1,), (2, 3)))
    graph = Graph(ops, values)
    twice = Schedule.of([Compute(0), Compute(0), Compute(1), Free(1), Compute(0)])
    used = [("workspace", MIB), ("workspace", None)]
    assert requests_of(graph, twice) == Requests(
        (5 * MIB,), ((1, 3 * MIB), *used, *used, (2, 2 * MIB), (1, None), (1, 3 * MIB), *used)
    )


def test_segments_that_are_there_count_and_serve_requests() -> None:
    requests = Requests((30 * MIB,), (("a", 20 * MIB), ("b", 10 * MIB)))
    for expandable in (False, True):
        shared = Conditions(expandable=expandable, segment=2 * MIB, idle=(20 * MIB,))
        assert fits(requests, 60 * MIB, shared) and not fits(requests, 59 * MIB, shared)
        for step in ((), requests.step[:1]):  # what is mapped already may be too much, whatever is asked for
            assert not fits(Requests((30 * MIB,), step), 49 * MIB, shared)
            assert fits(Requests((30 * MIB,), step), 50 * MIB, shared)


def test_requests_meet_an_allocator_as_conditions_say() -> None:
    requests = Requests((), (("a", 25 * MIB),))
    for conditions, needed in (
        (Conditions(segment=12 * MIB), 36),
        (Conditions(segment=20 * MIB), 40),
        (Conditions(expandable=False, segment=12 * MIB), 26),
    ):
        assert fits(requests, needed * MIB, conditions) and not fits(requests, needed * MIB - 1, conditions)
