"""Retention intervals against the ground truth of tiny graphs, the oracle, and the paper's own choices."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rematch.errors import ScheduleError, SolverError
from rematch.graph import Graph, Op, Schedule, Value, baseline, simulate
from rematch.graph.generators import chain, gpt, random_layered
from rematch.solvers import BoundScope, Problem, Progress, Solution, Status, solve
from rematch.solvers.exhaustive import Exhaustive
from rematch.solvers.moccasin.model import Events, FreeEvents, RetentionModel, StagedEvents, without_vain
from rematch.solvers.moccasin.solver import Moccasin, ModelSize, WholeCosts
from tests.examples import examples
from tests.problems import changed_resident, held_for_the_loss, peak_bytes, tiny_problems
from tests.strategies import graphs, sequences, staged_sequences

ENOUGH: dict[str, Any] = {"computations": 5, "passes": 4, "workers": 1}  # for any schedule of a tiny graph


def seconds_of(problem: Problem, solution: Solution) -> float | None:
    return None if solution.schedule is None else simulate(problem.graph, solution.schedule).checked().seconds


def check_equals_truth(problem: Problem, solver: Moccasin) -> None:
    found, truth = solve(problem, solver), solve(problem, Exhaustive(order=solver.order))
    assert found.status is truth.status
    assert seconds_of(problem, found) == seconds_of(problem, truth)
    assert found.lower_bound_seconds == pytest.approx(truth.lower_bound_seconds)


@given(tiny_problems(), st.sampled_from(("greedy", "phase 1")))
@examples(150)
def test_with_enough_computations_and_passes_the_default_order_is_exact(problem: Problem, begin: Any) -> None:
    check_equals_truth(problem, Moccasin(begin=begin, **ENOUGH))


@given(tiny_problems(max_ops=6, max_layers=2), st.sampled_from(("greedy", "phase 1")))
@examples(150)
def test_with_enough_computations_any_order_is_exact(problem: Problem, begin: Any) -> None:
    check_equals_truth(problem, Moccasin(order="any", computations=4, workers=1, begin=begin))


@given(tiny_problems(max_ops=5, max_layers=2), st.sampled_from(("any", "default")))
@examples(60)
def test_reservoirs_say_the_same_as_literals(problem: Problem, order: Any) -> None:
    first, second = (
        solve(problem, Moccasin(order=order, precedences=precedences, workers=1))
        for precedences in ("literals", "reservoir")
    )
    assert first.status is second.status
    assert seconds_of(problem, first) == seconds_of(problem, second)


@given(tiny_problems(), st.integers(1, 3))
@examples(100)
def test_with_fewer_computations_never_below_the_truth_and_says_what_it_looked_at(problem: Problem, limit: int) -> None:
    solution = solve(problem, Moccasin(computations=limit, workers=1))
    truth = solve(problem, Exhaustive(order="default"))
    seconds, fewest = seconds_of(problem, solution), seconds_of(problem, truth)
    assert solution.status in (Status.OPTIMAL, Status.INFEASIBLE)
    assert seconds is None or (fewest is not None and seconds >= fewest)
    more_than_the_truth = seconds != fewest
    assert not more_than_the_truth or solution.bound_scope in (BoundScope.LIMITED, BoundScope.STAGES)


def lines_of(graph: Graph, schedule: Schedule, order: str) -> tuple[Events, list[int]]:
    """A line of events with room for the schedule, and how often it computes each operator."""
    limits = [1 + schedule.ops.tolist().count(op) for op in range(len(graph.ops))]
    limits = [1 if graph.arrays.once[op] else limit for op, limit in enumerate(limits)]
    if order == "any":
        return FreeEvents(graph, limits), limits
    staged = StagedEvents(graph)
    return staged, [min(limit, 1 + len(staged.slots(op, 1))) for op, limit in enumerate(limits)]


def fits_as_hinted(graph: Graph, schedule: Schedule, order: str, budget_bytes: int) -> bool:
    """Whether the model, with every variable fixed to what the schedule says, has a solution within the budget."""
    from ortools.sat.python import cp_model

    events, limits = lines_of(graph, schedule, order)
    model = RetentionModel(graph, events, limits)
    model.limit_memory(budget_bytes, budget_bytes)
    assert model.hint(schedule)
    assert len(model.program.proto.solution_hint.vars) >= len(model.program.proto.variables) - 2  # less the constants
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.fix_variables_to_their_hinted_value = True
    if solver.solve(model.program) == cp_model.INFEASIBLE:
        return False
    assert model.sequence(solver.value) == schedule.ops.tolist()
    return True


@given(graphs(), st.sampled_from(("any", "default")), st.data())
@examples(100)
def test_the_model_sees_the_peak_that_the_oracle_sees(graph: Graph, order: str, data: st.DataObject) -> None:
    sequence = data.draw(sequences(graph) if order == "any" else staged_sequences(graph))
    schedule = without_vain(graph, Schedule.from_ops(graph, sequence))
    seen = simulate(graph, schedule).checked()
    assert fits_as_hinted(graph, schedule, order, seen.peak_bytes)
    if seen.peak_bytes > graph.resident_bytes:
        assert not fits_as_hinted(graph, schedule, order, seen.peak_bytes - 1)


def test_a_graph_that_needs_more_than_one_pass() -> None:
    """b (by way of the big x) and c are made from a, are both gone beside y, and are read at the end.

    a fits beside x, but not beside x and b, so that before the end it is made twice: a x b, then a c.
    """
    sizes = {"a": 4, "x": 6, "b": 1, "c": 1, "y": 10, "d": 1}
    reads = {"a": (), "x": (0,), "b": (1,), "c": (0,), "y": (), "d": (2, 3)}
    ops = tuple(Op(name, 1.0, reads[name], (index,)) for index, name in enumerate(sizes))
    problem = Problem(Graph(ops, tuple(Value(name, size) for name, size in sizes.items())), 10)
    one, two = (solve(problem, Moccasin(computations=9, passes=passes, workers=1)) for passes in (1, 2))
    truth = solve(problem, Exhaustive(order="default"))
    assert (one.status, one.bound_scope) == (Status.INFEASIBLE, BoundScope.STAGES)
    assert two.status is truth.status is Status.OPTIMAL
    assert seconds_of(problem, two) == seconds_of(problem, truth)
    kept = solve(problem, Moccasin(computations=9, start=truth.schedule, workers=1))
    assert (kept.status, kept.bound_scope, kept.schedule) == (Status.OPTIMAL, BoundScope.STAGES, truth.schedule)


@pytest.mark.parametrize("problem", [held_for_the_loss(), changed_resident()], ids=["loss", "update"])
def test_computes_again_before_the_loss_or_an_update_what_is_needed_after_it(problem: Problem) -> None:
    for order in ("default", "any"):
        check_equals_truth(problem, Moccasin(order=order, computations=3, workers=1))


def test_limits_of_each_operator_are_kept() -> None:
    """Only what is allowed twice is computed twice, and with nothing allowed there is nothing to find."""
    graph = chain(6)
    problem = Problem(graph, peak_bytes(graph) * 80 // 100)
    free = solve(problem, Moccasin(workers=1, begin="phase 1"))
    assert free.schedule is not None
    counts = simulate(graph, free.schedule).counts.tolist()
    assert max(counts) == 2
    as_found = solve(problem, Moccasin(computations_of_each=tuple(counts), workers=1, begin="phase 1"))
    assert as_found.schedule is not None
    assert simulate(graph, as_found.schedule).counts.tolist() == counts
    nothing = solve(problem, Moccasin(computations=1, workers=1, begin="phase 1"))
    assert (nothing.status, nothing.bound_scope) == (Status.INFEASIBLE, BoundScope.LIMITED)


def test_starts_from_a_given_schedule_and_makes_room_for_it() -> None:
    """A limit of 1 allows no recomputation at all; what the start computes again it may."""
    graph = random_layered(nodes=40, seed=1)
    problem = Problem(graph, peak_bytes(graph) * 80 // 100)
    start = solve(problem, "anneal", iterations=2_000).schedule
    assert start is not None
    heard: list[Progress] = []
    solution = solve(problem, Moccasin(computations=1, start=start, workers=1), on_progress=heard.append)
    assert (heard[0].solver, heard[0].best_seconds) == ("start", simulate(graph, start).seconds)
    assert not any("phase 1" in progress.message for progress in heard)
    assert solution.schedule is not None
    assert (simulate(graph, solution.schedule).counts <= simulate(graph, start).counts).all()
    assert simulate(graph, solution.schedule).seconds <= simulate(graph, start).seconds


def test_a_start_over_the_budget_is_repaired_by_phase_1() -> None:
    graph = gpt(layers=1)
    problem = Problem(graph, peak_bytes(graph) * 80 // 100)
    heard: list[Progress] = []
    solution = solve(problem, Moccasin(start=baseline(graph), workers=1), on_progress=heard.append)
    assert solution.status is Status.OPTIMAL
    phases = [progress.message.split(":")[0] for progress in heard if "phase" in progress.message]
    assert phases == ["phase 1", "phase 2"]


def test_a_start_in_another_order_is_refused() -> None:
    ops = (Op("a", 1.0, (), (0,)), Op("b", 1.0, (), (1,)), Op("c", 1.0, (), (2,)), Op("d", 1.0, (0, 1), (3,)))
    graph = Graph(ops, tuple(Value(name, size) for name, size in zip("abcd", (2, 2, 4, 2), strict=True)))
    other = Schedule.from_ops(graph, [1, 0, 2, 3])
    with pytest.raises(ScheduleError, match="default order"):
        solve(Problem(graph, 7), Moccasin(start=other))
    assert solve(Problem(graph, 7), Moccasin(start=other, order="any")).status is Status.OPTIMAL


def test_the_log_is_a_curve_that_falls() -> None:
    graph = random_layered(nodes=60, seed=2)
    problem = Problem(graph, peak_bytes(graph) * 85 // 100)
    solution = solve(problem, Moccasin(workers=1), time_limit=20.0)
    best = [progress.best_seconds for progress in solution.log if progress.best_seconds is not None]
    bounds = [progress.bound_seconds for progress in solution.log if progress.bound_seconds is not None]
    assert len(set(best)) > 1
    assert best == sorted(best, reverse=True)
    assert bounds == sorted(bounds)
    assert best[-1] == seconds_of(problem, solution)


@pytest.mark.usefixtures("default_signals")
def test_an_interrupt_ends_a_search_that_is_under_way() -> None:
    """The search is in compiled code then, which does not listen."""
    graph = random_layered(nodes=200, seed=3)
    problem = Problem(graph, peak_bytes(graph) * 75 // 100)
    sent = threading.Event()

    def interrupt_when_searching(progress: Progress) -> None:
        if "phase" in progress.message and not sent.is_set():
            sent.set()
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    solution = solve(problem, Moccasin(), time_limit=600.0, on_progress=interrupt_when_searching)
    assert sent.is_set()
    assert solution.status in (Status.FEASIBLE, Status.NOT_FOUND)


def test_the_model_grows_with_computations_as_table_1_says() -> None:
    """A slot and, for what weighs, an end and a length for each computation; literals add some for each reading."""
    graph = random_layered(nodes=50, seed=1)
    events = StagedEvents(graph)
    weighing = sum(value.size_bytes > 0 for value in graph.values)

    def size(limit: int, precedences: Any) -> ModelSize:
        limits = [min(limit, 1 + len(events.slots(op, 1))) for op in range(len(graph.ops))]
        return ModelSize.of(RetentionModel(graph, events, limits, precedences))

    once, twice = size(1, "reservoir"), size(2, "reservoir")
    assert (once.booleans, once.integers) == (0, 2 * weighing)
    assert twice.booleans <= 50
    assert twice.integers <= 4 * weighing + 50
    assert size(2, "literals").booleans > twice.booleans


def test_what_is_computed_in_vain_is_left_out() -> None:
    """y is read from its last copy only, and x was made again for the copy before alone."""
    ops = (Op("x", 1.0, (), (0,)), Op("y", 1.0, (0,), (1,)), Op("z", 1.0, (1,), (2,)))
    graph = Graph(ops, (Value("x", 2), Value("y", 2), Value("z", 1)))
    assert without_vain(graph, Schedule.from_ops(graph, [0, 1, 0, 1, 2, 0, 1, 0])) == Schedule.from_ops(
        graph, [0, 1, 0, 1, 2]
    )
    assert without_vain(graph, baseline(graph)) == baseline(graph)


@given(graphs())
def test_whole_costs_are_exact_for_whole_times(graph: Graph) -> None:
    costs = WholeCosts.of(graph, [2] * len(graph.ops))
    for op, cost in zip(graph.ops, costs.of_op, strict=True):
        assert costs.percent(cost) == pytest.approx(100.0 * op.seconds / (graph.baseline_seconds or 1.0))


def test_whole_costs_of_other_times_never_promise_more_than_they_are() -> None:
    graph = gpt(layers=1)
    costs = WholeCosts.of(graph, [2] * len(graph.ops))
    everything = costs.percent(sum(costs.of_op))
    assert 100.0 - 1e-6 < everything <= 100.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passes": 0}, "passes=0"),
        ({"workers": 0}, "workers=0"),
        ({"seed": -1}, "seed=-1"),
        ({"computations": 0}, "computations=0"),
        ({"computations_of_each": (2, 0)}, "computations=0"),
        ({"order": "random"}, "unknown order of solver 'moccasin' 'random'"),
        ({"precedences": "none"}, "unknown precedences of solver 'moccasin' 'none'"),
        ({"begin": "nowhere"}, "unknown begin of solver 'moccasin' 'nowhere'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SolverError, match=message):
        Moccasin(**options)


def test_limits_for_another_graph() -> None:
    graph = chain(4)
    problem = Problem(graph, peak_bytes(graph) * 80 // 100)
    with pytest.raises(SolverError, match=r"has 3 numbers, but .* has 9 operators"):
        solve(problem, Moccasin(computations_of_each=(2, 2, 2)))
