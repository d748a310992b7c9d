"""The default solver: against the ground truth, the same every time with one thread, and when it stops."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given

from rematch.graph import Graph, baseline, simulate
from rematch.graph.generators import chain, gpt, random_layered, training_graph
from rematch.solvers import BoundScope, Deadline, Problem, Progress, Solution, Status, solve
from rematch.solvers.default.auto import Auto
from rematch.solvers.exhaustive import min_budget
from tests.examples import examples
from tests.problems import check_against_truth, fewest_seconds, peak_bytes, tiny_problems
from tests.solvers.common.test_local_search import reverse_at_the_end

IN_TURNS = Auto(threads=1, iterations=20_000, gap=0.0)
ITS_PARTS = replace(IN_TURNS, exhaustive=False)  # which search graphs of all sizes
ENOUGH_SECONDS = 5.0  # for a tiny graph, and never needed
NO_SCHEDULE_SECONDS = 0.3  # what is left after the proof is spent on the smallest budget, all of it


def of_baseline(graph: Graph, percent: int) -> Problem:
    return Problem(graph, peak_bytes(graph) * percent // 100)


def seconds_of(problem: Problem, solution: Solution) -> float:
    assert solution.schedule is not None
    return simulate(problem.graph, solution.schedule).checked().seconds


def small_problems(seeds: range) -> Iterator[Problem]:
    """Graphs of 11 or 12 operators with budgets that ask for recomputation and can be kept."""
    for seed in seeds:
        for graph in (chain(5, seed=seed), random_layered(12, 50, seed), training_graph(random_layered(5, 60, seed))):
            smallest, without = min_budget(graph, "default"), peak_bytes(graph)
            if smallest < without:
                yield Problem(graph, random.Random(seed).randrange(smallest, without))


@given(tiny_problems())
@examples(60)
def test_never_claims_more_than_the_truth(problem: Problem) -> None:
    seconds = ENOUGH_SECONDS if fewest_seconds(problem) is not None else NO_SCHEDULE_SECONDS
    check_against_truth(problem, solve(problem, ITS_PARTS, time_limit=seconds))


@given(tiny_problems())
@examples(10)
def test_never_claims_more_than_the_truth_with_two_threads(problem: Problem) -> None:
    check_against_truth(problem, solve(problem, Auto(exhaustive=False), time_limit=0.5))


def test_nearly_always_finds_the_optimum_of_small_graphs() -> None:
    """The rest needs recomputations that no solver looks for: out of default order, or twice, within a stage."""
    found, problems = 0, list(small_problems(range(12)))
    for problem in problems:
        solution = solve(problem, ITS_PARTS, time_limit=ENOUGH_SECONDS)
        found += solution.schedule is not None and seconds_of(problem, solution) == pytest.approx(
            fewest_seconds(problem)
        )
    assert len(problems) > 25
    assert found >= 0.95 * len(problems)


@pytest.mark.parametrize("threads", [1, 2])
def test_takes_what_the_local_search_finds_before_its_first_move(threads: int) -> None:
    """Of the greedy's schedule only what takes no time is needed: leaving out the rest ends the local search."""
    problem = Problem(training_graph(random_layered(5, 60, seed=31)), 14_025)
    assert fewest_seconds(problem) == problem.graph.baseline_seconds
    solution = solve(problem, Auto(threads=threads, iterations=20_000, gap=0.0), time_limit=ENOUGH_SECONDS)
    assert seconds_of(problem, solution) == problem.graph.baseline_seconds


@pytest.mark.parametrize("graph", [chain(20), random_layered(40)], ids=lambda graph: graph.name)
def test_with_one_thread_it_gives_the_same_schedule_every_time(graph: Graph) -> None:
    problem = of_baseline(graph, 80)
    first, second = (solve(problem, IN_TURNS) for _ in range(2))
    assert first.schedule is not None
    assert first.schedule != baseline(graph)
    assert (first.schedule, first.status) == (second.schedule, second.status)
    assert first.lower_bound_seconds == second.lower_bound_seconds


@pytest.mark.parametrize("threads", [1, 2])
def test_proves_the_optimum_of_a_training_graph(threads: int) -> None:
    problem = of_baseline(chain(20), 60)
    solution = solve(problem, Auto(threads=threads, iterations=20_000, gap=0.0))
    assert (solution.status, solution.bound_scope) == (Status.OPTIMAL, BoundScope.DEFAULT_ORDER)
    assert solution.lower_bound_seconds == pytest.approx(seconds_of(problem, solution))
    assert seconds_of(problem, solution) > problem.graph.baseline_seconds


@pytest.mark.parametrize("threads", [1, 2])
def test_a_gap_ends_the_search_without_a_proof(threads: int) -> None:
    """Every schedule is within ten times the time without recomputation of the bound, so the first one will do."""
    problem = of_baseline(chain(20), 60)
    heard: list[Progress] = []
    solution = solve(problem, Auto(threads=threads, gap=1000.0), on_progress=heard.append)
    assert solution.status is Status.FEASIBLE
    assert solution.lower_bound_seconds == problem.graph.baseline_seconds
    assert seconds_of(problem, solution) > problem.graph.baseline_seconds
    assert [progress.solver for progress in heard] == ["greedy", "auto"]
    assert "good enough: within" in heard[-1].message


def test_what_fits_is_optimal_at_once_in_any_order() -> None:
    graph = gpt(layers=2)
    solution = solve(Problem(graph, peak_bytes(graph)), Auto())
    assert (solution.schedule, solution.status, solution.bound_scope) == (
        baseline(graph),
        Status.OPTIMAL,
        BoundScope.ANY_ORDER,
    )


def test_an_impossible_budget_comes_with_the_range_of_possible_ones() -> None:
    graph = chain(5)
    smallest = min_budget(graph, "default")
    solution = solve(Problem(graph, smallest - 1), IN_TURNS, time_limit=2.0)
    assert solution.schedule is None
    assert solution.infeasible_up_to_bytes is not None
    assert solution.feasible_from_bytes is not None
    assert solution.infeasible_up_to_bytes < smallest <= solution.feasible_from_bytes < peak_bytes(graph)
    if solution.status is Status.INFEASIBLE:
        assert solution.infeasible_up_to_bytes == smallest - 1


def test_a_budget_below_one_operator_is_refused_without_search() -> None:
    graph = chain(10)
    solution = solve(Problem(graph, graph.largest_op_bytes - 1), Auto(), time_limit=0.5)
    assert (solution.status, solution.lower_bound_seconds) == (Status.INFEASIBLE, None)
    assert solution.infeasible_up_to_bytes is not None
    assert graph.largest_op_bytes - 1 <= solution.infeasible_up_to_bytes < (solution.feasible_from_bytes or 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_without_time_it_still_returns_what_fits_and_claims_nothing(threads: int) -> None:
    graph = gpt(layers=2)
    fits = solve(Problem(graph, peak_bytes(graph)), Auto(threads=threads), time_limit=0.0)
    assert fits.schedule == baseline(graph)
    tight = solve(of_baseline(graph, 60), Auto(threads=threads), time_limit=0.0)
    assert (tight.schedule, tight.status) == (None, Status.NOT_FOUND)


def test_an_error_in_the_local_search_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("local search")

    monkeypatch.setattr("rematch.solvers.default.auto.LocalSearch", fail)
    with pytest.raises(ZeroDivisionError, match="local search"):
        solve(of_baseline(chain(20), 60), Auto(), time_limit=5.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_log_tells_what_each_part_contributed(threads: int) -> None:
    problem = of_baseline(random_layered(40), 80)
    solution = solve(problem, Auto(threads=threads, iterations=20_000, gap=0.0), time_limit=3.0)
    assert {"greedy", "anneal"} & {progress.solver for progress in solution.log if progress.best_seconds is not None}
    assert "epochs" in {progress.solver for progress in solution.log}
    best = [progress.best_seconds for progress in solution.log if progress.best_seconds is not None]
    assert best == sorted(best, reverse=True)
    assert best[-1] == pytest.approx(seconds_of(problem, solution))


def without_our_own_methods(monkeypatch: pytest.MonkeyPatch, *, lean: str = "") -> Auto:
    """Greedy, local search and relaxation find nothing and prove nothing; of lean schedules there is `lean` alone."""
    for method in {"from_scratch", "frugal_schedule"} - {lean}:
        monkeypatch.setattr(f"rematch.solvers.default.auto.{method}", lambda *problem: None)
    for search in ("relax_epochs", "search_epochs"):
        monkeypatch.setattr(f"rematch.solvers.default.auto.{search}", lambda incumbent, **options: ())
    monkeypatch.setattr(
        "rematch.solvers.default.auto.greedy_schedule", lambda problem, deadline: baseline(problem.graph)
    )
    return Auto(threads=1, iterations=0, gap=0.0)


def test_asks_published_methods_in_turn_until_one_finds_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematch.solvers.default.auto._OTHERS", ("noremat", "twremat", "feng_huang"))
    solution = solve(of_baseline(chain(20), 60), without_our_own_methods(monkeypatch), time_limit=20.0)
    assert solution.schedule is not None
    assert [(progress.solver, progress.best_seconds is None) for progress in solution.log] == [
        ("from scratch", True),
        ("frugal", True),
        ("noremat", True),
        ("twremat", False),
        ("auto", False),
    ]


@pytest.mark.parametrize("name", ["twremat", "feng_huang", "rotor"])
def test_each_method_it_asks_helps_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematch.solvers.default.auto._OTHERS", (name,))
    solution = solve(of_baseline(chain(20), 60), without_our_own_methods(monkeypatch), time_limit=20.0)
    assert [progress.solver for progress in solution.log if progress.best_seconds is not None] == [name, "auto"]


@pytest.mark.parametrize("lean", ["from_scratch", "frugal_schedule"])
def test_lean_schedules_help_out_before_published_methods_do(lean: str, monkeypatch: pytest.MonkeyPatch) -> None:
    solver = without_our_own_methods(monkeypatch, lean=lean)
    solution = solve(of_baseline(chain(20), 60), solver, time_limit=20.0)
    found = {progress.solver for progress in solution.log if progress.best_seconds is not None}
    assert {"from_scratch": "from scratch", "frugal_schedule": "frugal"}[lean] in found
    assert not found & {"twremat", "feng_huang", "rotor"}


def test_asks_no_one_else_once_a_schedule_is_known() -> None:
    solution = solve(of_baseline(chain(20), 60), IN_TURNS)
    assert solution.schedule is not None
    assert {progress.solver for progress in solution.log} <= {"greedy", "anneal", "epochs", "auto"}


def test_stopping_it_returns_the_best_so_far() -> None:
    """As Ctrl-C does: the deadline is stopped from outside once a schedule is there."""
    problem = of_baseline(gpt(layers=4), 40)
    deadline = Deadline()

    def stop_when_found(progress: Progress) -> None:
        if progress.best_seconds is not None:
            deadline.stop()

    solution = Auto().solve(problem, deadline=deadline, on_progress=stop_when_found)
    assert solution.status is Status.FEASIBLE
    assert seconds_of(problem, solution) >= (solution.lower_bound_seconds or 0.0) >= problem.graph.baseline_seconds


@pytest.mark.parametrize("threads", [1, 2])
def test_finds_what_no_single_pass_through_a_stage_can_say(threads: int) -> None:
    solution = solve(reverse_at_the_end(), Auto(threads=threads, iterations=80_000), time_limit=ENOUGH_SECONDS)
    assert solution.schedule is not None


def test_the_exhaustive_search_decides_tiny_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematch.solvers.default.auto._OTHERS", ())
    found = solve(reverse_at_the_end(), without_our_own_methods(monkeypatch), time_limit=5.0)
    assert found.schedule is not None
    assert "exhaustive" in {progress.solver for progress in found.log}
