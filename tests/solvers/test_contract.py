"""What every solver promises, for every registered solver and every family of graphs."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest

from rematch.errors import SolverError
from rematch.graph import Graph, Op, Value, simulate
from rematch.graph.generators import FAMILIES
from rematch.solvers import Problem, Progress, Solution, Solver, Status, make_solver, solve, solver_class, solver_names
from rematch.solvers.exhaustive import MOST_OPERATORS
from tests.problems import peak_bytes

SMALL: dict[str, dict[str, Any]] = {
    "chain": {"layers": 6},
    "feed_forward": {"layers": 3},
    "gpt": {"layers": 1},
    "encoder_decoder": {"encoder_layers": 1, "decoder_layers": 1},
    "unet": {"depth": 1, "convolutions": 1},
    "random_layered": {"nodes": 12},
}
GRAPHS = {family: FAMILIES[family](**options) for family, options in SMALL.items()}
# Options with which a solver of its own accord stops before the deadline and gives the same result every time.
REPEATABLE: dict[str, dict[str, Any]] = {
    "anneal": {"iterations": 2000},
    "auto": {"threads": 1, "iterations": 20_000, "gap": 0.0},
    "moccasin": {"workers": 1},
    "hiremate": {"workers": 1, "solvers": ("hilp",), "options": 3, "budget_shares": (1.0,)},
}


def solver_of(name: str) -> Solver:
    return make_solver(name, **REPEATABLE.get(name, {}))


def small_problem(family: str, percent: int) -> Problem:
    return Problem(GRAPHS[family], peak_bytes(GRAPHS[family]) * percent // 100)


def content(problem: Problem) -> bytes:
    """All that a solver could change; not what the graph itself remembers of what it was asked."""
    graph = problem.graph
    return pickle.dumps(
        (problem.budget_bytes, graph.ops, graph.values, graph.targets, graph.held, graph.order, graph.arrays)
    )


def test_every_family_is_here() -> None:
    assert SMALL.keys() == FAMILIES.keys()


@pytest.mark.parametrize("percent", [90, 60, 40])
@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("name", solver_names())
def test_a_result_keeps_the_budget_and_claims_what_it_can(name: str, family: str, percent: int) -> None:
    """`solve` itself puts the schedule before the oracle."""
    problem, solver = small_problem(family, percent), solver_of(name)
    before = content(problem)
    if not solver.applicable(problem):
        with pytest.raises(SolverError, match=f"does not apply to .*needs {solver.requires}"):
            solve(problem, solver)
        return
    solution = solve(problem, solver, time_limit=0.5)
    assert content(problem) == before
    assert solution.solver == name
    check_claims(problem, solution)


def check_claims(problem: Problem, solution: Solution) -> None:
    has_schedule = solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert (solution.schedule is not None) == has_schedule
    if solution.schedule is None:
        return
    seen = simulate(problem.graph, solution.schedule).checked()
    assert seen.peak_bytes <= problem.budget_bytes
    assert solution.lower_bound_seconds is not None
    close = 1e-7 * problem.graph.baseline_seconds
    assert problem.graph.baseline_seconds - close <= solution.lower_bound_seconds <= seen.seconds + close
    assert solution.status is Status.FEASIBLE or solution.lower_bound_seconds >= seen.seconds - close


@pytest.mark.parametrize("percent", [90, 70])
@pytest.mark.parametrize("name", solver_names())
def test_a_result_recomputes_after_the_loss_only_and_keeps_the_order_of_random_operators(
    name: str, percent: int
) -> None:
    """`solve` puts the schedule before the oracle, which knows both rules."""
    for family in ("gpt", "unet", "chain"):
        graph = GRAPHS[family]
        graph = replace(graph, ops=tuple(replace(op, random=index % 3 == 0) for index, op in enumerate(graph.ops)))
        for restricted in (graph, replace(graph, recompute_after_loss=True)):
            problem, solver = Problem(restricted, peak_bytes(graph) * percent // 100), solver_of(name)
            if solver.applicable(problem):
                check_claims(problem, solve(problem, solver, time_limit=0.3))


@pytest.mark.parametrize("name", solver_names())
def test_the_same_seed_gives_the_same_schedule(name: str) -> None:
    for family in ("chain", "gpt"):
        problem, solver = small_problem(family, 80), solver_of(name)
        if solver.applicable(problem):
            first, second = (solve(problem, solver) for _ in range(2))
            assert (first.schedule, first.status) == (second.schedule, second.status)
            assert first.lower_bound_seconds == second.lower_bound_seconds


@pytest.mark.parametrize("name", solver_names())
def test_returns_without_any_time(name: str) -> None:
    graphs = (FAMILIES["gpt"](layers=2), FAMILIES["chain"](layers=20), FAMILIES["random_layered"](MOST_OPERATORS))
    problems = (Problem(graph, peak_bytes(graph) * 60 // 100) for graph in graphs)
    problem = next(problem for problem in problems if make_solver(name).applicable(problem))
    check_claims(problem, solve(problem, name, time_limit=0.0))


@pytest.mark.parametrize("name", solver_names())
def test_takes_graphs_without_operators_values_or_time(name: str) -> None:
    nothing = Graph((), ())
    no_values = Graph((Op("a", 1.0, (), ()),), ())
    no_time = Graph((Op("a", 0.0, (), (0,)), Op("b", 0.0, (0,), ())), (Value("x", 3),))
    for graph in (nothing, no_values, no_time):
        problem = Problem(graph, peak_bytes(graph))
        solution = solve(problem, name, time_limit=1.0)
        assert solution.schedule is not None
        check_claims(problem, solution)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("name", "number"), [("anneal", signal.SIGINT), ("auto", signal.SIGTERM)])
def test_the_first_interrupt_ends_the_search_with_the_best_so_far(name: str, number: signal.Signals) -> None:
    """The signal arrives once a schedule is known; without it the search would go on to its limit of minutes."""
    graph = FAMILIES["random_layered"](nodes=100)
    problem = Problem(graph, peak_bytes(graph) * 80 // 100)
    sent = threading.Event()

    def interrupt_when_found(progress: Progress) -> None:
        if progress.best_seconds is not None and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    solution = solve(problem, name, time_limit=600.0, on_progress=interrupt_when_found)
    assert sent.is_set()
    assert solution.status is Status.FEASIBLE
    assert solution.interrupted
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("name", solver_names())
def test_says_what_it_is(name: str) -> None:
    cls = solver_class(name)
    assert cls.name == name
    assert isinstance(cls.paper, str)
    assert make_solver(name) == make_solver(name)  # frozen dataclasses: options decide
