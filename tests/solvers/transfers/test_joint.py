"""Keep, recompute or move: the bound and the schedules against every schedule of tiny graphs, and each part alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from rematch.graph import Compute, Fetch, Free, Graph, Link, Offload, Op, Phase, Schedule, Value, baseline, simulate
from rematch.graph.generators import gpt
from rematch.graph.schedule import Step
from rematch.solvers import Problem, Status, solve
from rematch.solvers.base import BoundScope, Deadline
from rematch.solvers.common.highs import minimise
from rematch.solvers.common.local_search import LocalSearch
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.default.epochs import first_moments
from rematch.solvers.transfers.choosing import Choice
from rematch.solvers.transfers.fetchable import Fetchable
from rematch.solvers.transfers.joint_model import JointModel
from rematch.solvers.transfers.placing import placed
from rematch.solvers.transfers.waiting import waits
from tests.examples import examples
from tests.reference import Broken, State, advance, finished
from tests.strategies import graphs, sequences


@dataclass(frozen=True)
class Moment:
    """A state, and how long from now until each direction is free and each copy has ended."""

    state: State = field(default_factory=State)
    out_lag: float = 0.0
    in_lag: float = 0.0
    departs: tuple[tuple[int, float], ...] = ()
    arrives: tuple[tuple[int, float], ...] = ()

    def later(self, seconds: float, state: State) -> Moment:
        def after(lags: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
            return tuple((value, lag - seconds) for value, lag in lags if lag > seconds)

        out_lag, in_lag = max(0.0, self.out_lag - seconds), max(0.0, self.in_lag - seconds)
        return Moment(state, out_lag, in_lag, after(self.departs), after(self.arrives))


def least_makespan(graph: Graph, budget_bytes: int) -> float | None:
    """The time of the fastest schedule in default order by trying every step in every moment; None if there is none."""
    ties = count()
    queue: list[tuple[float, int, Moment | None]] = [(0.0, next(ties), Moment())]
    settled = set()
    while queue:
        now, _, moment = heappop(queue)
        if moment is None:
            return now
        if moment in settled:
            continue
        settled.add(moment)
        if finished(graph, moment.state):
            heappush(queue, (now + max(moment.out_lag, moment.in_lag), next(ties), None))
        for step in _steps(graph, moment.state):
            try:
                state, memory = advance(graph, moment.state, step)
            except Broken:
                continue
            if memory <= budget_bytes:
                waited, following = _after(graph, moment, step, state)
                heappush(queue, (now + waited, next(ties), following))
    return None


def _steps(graph: Graph, state: State) -> list[Step]:
    moved = [value for value in state.alive if value not in state.hosted]
    ops = [op for op in range(len(graph.ops)) if op in state.run or op == graph.order[len(state.run)]]
    gone = [value for value in state.hosted if value not in state.alive]
    return [*map(Free, state.alive), *map(Compute, ops), *map(Offload, moved), *map(Fetch, gone)]


def _after(graph: Graph, moment: Moment, step: Step, state: State) -> tuple[float, Moment]:
    """How much later the step has ended (a copy: begun), and what is then."""
    departs, arrives = dict(moment.departs), dict(moment.arrives)
    match step:
        case Offload(value):
            lag = moment.out_lag + graph.values[value].size_bytes / graph.link.out_bytes_per_second
            return 0.0, replace(moment, state=state, out_lag=lag, departs=(*moment.departs, (value, lag)))
        case Fetch(value):
            begin = max(moment.in_lag, departs.get(value, 0.0))
            lag = begin + graph.values[value].size_bytes / graph.link.in_bytes_per_second
            return 0.0, replace(moment, state=state, in_lag=lag, arrives=(*moment.arrives, (value, lag)))
        case Free(value):
            waited = max(departs.get(value, 0.0), arrives.get(value, 0.0))
        case Compute(op):
            read = {*graph.ops[op].inputs, *(graph.held if graph.ops[op].phase is Phase.LOSS else ())}
            made = graph.ops[op].outputs
            begin = max([0.0, *(arrives.get(v, 0.0) for v in (*read, *made)), *(departs.get(v, 0.0) for v in made)])
            waited = begin + graph.ops[op].seconds
    return waited, moment.later(waited, state)


@st.composite
def linked_problems(draw: st.DrawFn) -> Problem:
    """Two layers forward and back, each read by its backward, with a link and a budget that asks for something."""
    sizes, seconds = st.integers(1, 4), st.integers(0, 4).map(float)
    stays = draw(st.sampled_from((None, 0, 1)))
    values = tuple(Value(f"v{index}", draw(sizes), movable=index != stays) for index in range(5))
    skip = (0,) if draw(st.booleans()) else ()
    read = ((), (0,), (1, *skip), (1, 2), (0, 3))
    phases = (Phase.FORWARD, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.BACKWARD)
    workspace = st.sampled_from((0, 0, 2))
    ops = tuple(
        Op(f"o{i}", draw(seconds), read[i], (i,), draw(workspace), phase=phases[i], random=draw(st.booleans()))
        for i in range(5)
    )
    speeds = st.sampled_from((1.0, 2.0, 4.0))
    graph = Graph(
        ops,
        values,
        targets=frozenset(draw(st.sets(st.sampled_from((3, 4))))),
        held=frozenset({1} if draw(st.booleans()) else ()),
        recompute_after_loss=draw(st.booleans()),
        link=Link(draw(speeds), draw(speeds), draw(st.sampled_from((3, 40)))),
    )
    least = max(graph.largest_op_bytes, graph.end_bytes)
    return Problem(graph, draw(st.integers(least, max(least, simulate(graph, baseline(graph)).peak_bytes - 1))))


@examples(15)
@given(linked_problems(), st.sets(st.integers(0, 4), min_size=1, max_size=3), st.booleans())
def test_no_schedule_is_faster_than_the_relaxation(problem: Problem, moments: set[int], whole: bool) -> None:
    graph = problem.graph
    model = JointModel(Precedence.of(graph), problem.budget_bytes, sorted(moments))
    relaxed = len(moments) > 1 or not whole  # only with one moment do whole numbers leave it a relaxation
    found = minimise(model.program, deadline=Deadline(20), relaxed=relaxed)
    fastest = least_makespan(graph, problem.budget_bytes)
    if fastest is None:
        return
    assert not found.infeasible
    if graph.baseline_seconds > 0:
        assert found.bound <= (fastest / graph.baseline_seconds - 1.0) * 100.0 + 1e-6


@given(linked_problems())
@examples(6)
def test_moving_never_makes_a_plan_slower_than_recomputation_alone(problem: Problem) -> None:
    joint, alone = (solve(one, "auto", time_limit=0.5, seed=3) for one in (problem, problem.without_link()))
    if alone.schedule is not None:
        assert joint.schedule is not None
        slowest = simulate(problem.graph, alone.schedule).seconds
        assert simulate(problem.graph, joint.schedule).checked().seconds <= slowest + 1e-9


@examples(6)
@given(linked_problems())
def test_auto_says_nothing_that_is_not_so(problem: Problem) -> None:
    found = solve(problem, "auto", time_limit=0.3)
    fastest = least_makespan(problem.graph, problem.budget_bytes)
    if found.status is Status.INFEASIBLE:
        assert fastest is None
    if fastest is not None and found.lower_bound_seconds is not None:
        assert found.lower_bound_seconds <= fastest * (1 + 1e-6) + 1e-9
    if found.schedule is not None:
        assert fastest is not None
        assert simulate(problem.graph, found.schedule).checked().seconds >= fastest - 1e-9


@examples(50)
@given(st.data(), graphs(max_ops=5))
def test_placing_keeps_schedules_valid_and_within_the_budget(data: st.DataObject, graph: Graph) -> None:
    graph = replace(graph, link=Link(2.0, 2.0, host_bytes=100))
    a = graph.arrays
    movable = [value for value in range(len(graph.values)) if a.producer[value] >= 0 and a.producer[value] != a.loss]
    assume(movable)
    moved = data.draw(st.sets(st.sampled_from(movable), min_size=1))
    fetchable = Fetchable.of(graph, dict.fromkeys(moved, 1.0))
    sequence = data.draw(sequences(fetchable.reduced))
    reduced = Schedule.from_ops(fetchable.reduced, sequence)
    steps = fetchable.steps_of(reduced)
    plain = simulate(graph, Schedule.of(steps)).checked()
    better = simulate(graph, placed(Problem(graph, plain.peak_bytes), steps)).checked()
    assert better.peak_bytes <= plain.peak_bytes
    assert better.host_bytes <= plain.host_bytes


@examples(50)
@given(st.data(), graphs(max_ops=5))
def test_whatever_is_chosen_can_be_lifted(data: st.DataObject, graph: Graph) -> None:
    a = graph.arrays
    movable = [value for value in range(len(graph.values)) if a.producer[value] >= 0 and a.producer[value] != a.loss]
    assume(movable)
    moment = data.draw(st.integers(0, len(graph.ops) - 1))
    moved = data.draw(st.sets(st.sampled_from(movable)))
    again = [op for op in range(len(graph.ops)) if a.position[op] <= moment and a.first_stage[op] <= a.last_stage[op]]
    chosen = data.draw(st.sets(st.sampled_from(again))) if again else set()
    fetchable = Fetchable.of(graph, dict.fromkeys((v for v in moved if a.position[a.producer[v]] <= moment), 1.0))
    lifted = fetchable.lifted(sorted(chosen), moment)
    runs = simulate(fetchable.reduced, lifted).checked().counts
    assert all(runs[op] == 1 + (op in chosen or op >= len(graph.ops)) for op in range(len(runs)))


@pytest.fixture
def problem() -> Problem:
    graph = replace(gpt(layers=3), link=Link(55e9, 55e9, host_bytes=2**40))
    return Problem(graph, simulate(graph, baseline(graph)).peak_bytes // 2)


def test_moving_is_faster_than_recomputation_alone_and_bounded(problem: Problem) -> None:
    alone = solve(problem, "anneal", iterations=60_000)
    joint = solve(problem, "auto", time_limit=6.0, threads=1)
    assert alone.schedule is not None and joint.schedule is not None and joint.lower_bound_seconds is not None
    seen = simulate(problem.graph, joint.schedule)
    assert seen.host_bytes > 0
    assert joint.lower_bound_seconds <= seen.seconds < simulate(problem.graph, alone.schedule).seconds
    assert joint.lower_bound_seconds > problem.graph.baseline_seconds
    assert joint.bound_scope is BoundScope.DEFAULT_ORDER


def test_starts_from_what_other_rounds_and_methods_ran(problem: Problem) -> None:
    graph = problem.graph
    moved = [v for v, value in enumerate(graph.values) if value.name.endswith("attention.softmax")]
    fetchable, fewer = (Fetchable.of(graph, dict.fromkeys(some, 1e-5)) for some in (moved, moved[1:]))
    search = LocalSearch(Problem(fetchable.reduced, problem.budget_bytes))
    search.run(20_000)
    assert search.best is not None
    runs = fetchable.runs_of(search.best)
    assert any(run < 0 for run in runs)
    again = fetchable.start_from(runs)
    assert again is not None and fetchable.runs_of(again) == runs
    other = fewer.start_from(runs)
    assert other is not None and ~moved[0] not in fewer.runs_of(other)
    assert simulate(graph, Schedule.of(fewer.steps_of(other))).valid
    swapped = [runs[1], runs[0], *runs[2:]]  # first computations in another order
    assert fetchable.start_from(swapped) is None


def test_lifting_costs_what_the_relaxation_says(problem: Problem) -> None:
    """Up to what rounding changes, and within a budget that is larger by as much."""
    graph = problem.graph
    model = JointModel(Precedence.of(graph), problem.budget_bytes, first_moments(problem, 1))
    bound = minimise(model.program, deadline=Deadline(20), relaxed=True).bound
    choice = Choice(problem, seed=0)
    chosen = choice.next(Deadline(20))
    fetchable = Fetchable.of(graph, dict.fromkeys(chosen.moved, 0.0))
    lifted = simulate(fetchable.reduced, fetchable.lifted(chosen.again, choice.moment)).checked()
    assert chosen.moved and chosen.again
    assert (lifted.seconds / graph.baseline_seconds - 1.0) * 100.0 == pytest.approx(bound, abs=1.0)
    assert lifted.peak_bytes < 1.1 * problem.budget_bytes


def test_of_equal_blocks_the_early_ones_move_but_not_always_the_same() -> None:
    graph = replace(gpt(layers=12), link=Link(25e9, 25e9, host_bytes=2**40))
    choice = Choice(Problem(graph, simulate(graph, baseline(graph)).peak_bytes // 2), seed=0)
    a = graph.arrays
    moved = [choice.next(Deadline(20)).moved for _ in range(4)]
    centres = [np.average(a.position[a.producer[values]], weights=a.size[values]) for values in moved]
    assert len(set(map(tuple, moved))) == 4
    assert np.mean(centres) < 0.4 * choice.moment


def test_a_link_without_host_memory_is_as_none(problem: Problem) -> None:
    nowhere = replace(problem, graph=replace(problem.graph, link=Link(55e9, 55e9, host_bytes=0)))
    model = JointModel(Precedence.of(nowhere.graph), problem.budget_bytes, (47,))
    linked = JointModel(Precedence.of(problem.graph), problem.budget_bytes, (47,))
    without, with_link = (minimise(m.program, deadline=Deadline(20), relaxed=True).bound for m in (model, linked))
    assert without > with_link + 0.1


def test_copies_are_placed_beside_computation(problem: Problem) -> None:
    moved = [v for v, value in enumerate(problem.graph.values) if value.name == "h.0.attention.softmax"]
    fetchable = Fetchable.of(problem.graph, dict.fromkeys(moved, 1e-5))
    search = LocalSearch(Problem(fetchable.reduced, problem.budget_bytes))
    search.run(40_000)
    assert search.best is not None
    steps = fetchable.steps_of(search.best)
    waiting = simulate(problem.graph, Schedule.of(steps)).checked()
    schedule = placed(problem, steps)
    waited = sum(wait.seconds for wait in waits(problem.graph, Schedule.of(steps)))
    assert waited == pytest.approx(waiting.stall_seconds)
    assert simulate(problem.graph, schedule).checked().stall_seconds < 0.2 * waiting.stall_seconds


def test_waits_name_the_copies_that_kept_the_link_busy() -> None:
    values = (Value("a", 4), Value("b", 4), Value("c", 1))
    ops = (Op("a", 1.0, (), (0,)), Op("b", 1.0, (), (1,)), Op("c", 1.0, (0, 1), (2,)))
    graph = Graph(ops, values, link=Link(4.0, 1.0, host_bytes=8))
    steps = [Compute(0), Offload(0), Compute(1), Offload(1), Free(0), Free(1), Fetch(0), Fetch(1), Compute(2)]
    assert list(waits(graph, Schedule.of(steps))) == [(1.0, Offload, [0, 1]), (8.0, Fetch, [0, 1])]
