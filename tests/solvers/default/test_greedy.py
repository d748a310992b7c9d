"""XLA's greedy: what it does by hand on small graphs, and that it never claims more than the truth."""

from __future__ import annotations

import pytest
from hypothesis import given

from rematch.graph import Graph, Op, Value, baseline, simulate
from rematch.graph.generators import chain, gpt
from rematch.solvers import BoundScope, Deadline, Problem, Progress, Status, solve
from rematch.solvers.default.greedy import Greedy, greedy_schedule
from tests.examples import examples
from tests.problems import check_against_truth, peak_bytes, tiny_problems


def two_candidates(first_seconds: float = 1.0, first_bytes: int = 6) -> Graph:
    """a and b wait while the large c is made and shrunk; each can be made again from nothing right before its use."""
    ops = (
        Op("a", first_seconds, (), (0,)),
        Op("b", 2.0, (), (1,)),
        Op("c", 1.0, (), (2,)),
        Op("shrink", 1.0, (2,), (3,)),
        Op("use a", 1.0, (0,), (4,)),
        Op("use b", 1.0, (1,), (5,)),
    )
    sizes = (first_bytes, 4, 20, 1, 1, 1)
    return Graph(ops, tuple(Value(f"v{i}", size) for i, size in enumerate(sizes)), targets=frozenset({3, 4, 5}))


@given(tiny_problems())
@examples(150)
def test_never_claims_more_than_the_truth(problem: Problem) -> None:
    solution = solve(problem, Greedy())
    check_against_truth(problem, solution)
    assert solution.status in (Status.FEASIBLE, Status.NOT_FOUND)


@given(tiny_problems())
@examples(100)
def test_what_it_ends_with_is_a_schedule_in_default_order_even_over_the_budget(problem: Problem) -> None:
    schedule = greedy_schedule(problem, Deadline())
    simulate(problem.graph, schedule).checked()
    assert tuple(dict.fromkeys(schedule.ops.tolist())) == problem.graph.order


def test_recomputes_what_saves_most() -> None:
    graph = two_candidates()
    schedule = greedy_schedule(Problem(graph, 26), Deadline())  # 31 while c is shrunk: a's 6 suffice, b's 4 would not
    assert [graph.ops[op].name for op in schedule.ops] == ["a", "b", "c", "shrink", "a", "use a", "use b"]
    assert peak_bytes(graph, schedule) == 25


@pytest.mark.parametrize(("seconds", "again"), [(1.0, "a"), (3.0, "b")])
def test_of_equal_savings_the_faster_is_recomputed(seconds: float, again: str) -> None:
    graph = two_candidates(first_seconds=seconds, first_bytes=4)
    schedule = greedy_schedule(Problem(graph, 26), Deadline())
    names = [graph.ops[op].name for op in schedule.ops]
    assert (names.count(again), len(names)) == (2, 7)


def test_recomputes_both_where_one_is_not_enough_and_gives_up_where_nothing_helps() -> None:
    graph = two_candidates()
    solution = solve(Problem(graph, 21), Greedy())
    assert solution.schedule is not None
    assert (len(solution.schedule.ops), peak_bytes(graph, solution.schedule)) == (8, 21)
    impossible = solve(Problem(graph, 20), Greedy())
    assert (impossible.status, impossible.schedule) == (Status.NOT_FOUND, None)


def test_what_fits_is_left_alone() -> None:
    graph = chain(10)
    solution = solve(Problem(graph, peak_bytes(graph)), Greedy())
    assert solution.schedule == baseline(graph)
    assert (solution.lower_bound_seconds, solution.bound_scope) == (graph.baseline_seconds, BoundScope.ANY_ORDER)


@pytest.mark.parametrize("percent", [80, 60])
def test_finds_schedules_of_training_graphs(percent: int) -> None:
    graph = gpt(layers=4)
    heard: list[Progress] = []
    solution = solve(Problem(graph, peak_bytes(graph) * percent // 100), Greedy(), on_progress=heard.append)
    assert solution.schedule is not None
    assert [progress.best_seconds for progress in heard] == [simulate(graph, solution.schedule).seconds]


def test_an_expired_deadline_ends_the_walk_at_once() -> None:
    graph = chain(10)
    assert greedy_schedule(Problem(graph, 0), Deadline(0.0)) == baseline(graph)


def test_nothing_is_compiled_after_the_clock_has_started() -> None:
    """Cold code must not use up a short time limit: `prepare` compiles all that a solve calls."""
    from rematch.graph import kernels
    from rematch.solvers.default import greedy_kernels

    compiled = (kernels.simulate_steps, kernels.steps_with_frees, greedy_kernels.largest_saving)
    Greedy().prepare()
    prepared = [list(function.signatures) for function in compiled]
    graph = gpt(layers=2)
    problem = Problem(graph, peak_bytes(graph) * 6 // 10)
    assert simulate(graph, greedy_schedule(problem, Deadline())).counts.max() > 1
    assert [list(function.signatures) for function in compiled] == prepared
