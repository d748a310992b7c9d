"""POET's program: never faster than the best schedule, within the budget, and aware of what a copy costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from rematch.errors import SolverError
from rematch.graph import Graph, Link, Offload, baseline, simulate
from rematch.graph.generators import chain, gpt
from rematch.solvers import Problem, Status, make_solver, solve
from rematch.solvers.poet import MOST_OPERATORS
from tests.examples import examples
from tests.solvers.transfers.test_joint import least_makespan, linked_problems


@examples(8)
@given(linked_problems())
def test_never_faster_than_the_best_schedule_and_never_over_the_budget(problem: Problem) -> None:
    found = solve(problem, "poet", time_limit=5.0)
    fastest = least_makespan(problem.graph, problem.budget_bytes)
    if found.status is Status.INFEASIBLE:
        assert fastest is None
    if found.schedule is not None:
        seen = simulate(problem.graph, found.schedule).checked()
        assert seen.peak_bytes <= problem.budget_bytes
        assert fastest is not None and seen.seconds >= fastest - 1e-9


def tight(graph: Graph, share: float, speed: float) -> Problem:
    linked = replace(graph, link=Link(speed, speed, host_bytes=2**40))
    return Problem(linked, int(share * simulate(linked, baseline(linked)).peak_bytes))


def test_fast_links_page_and_slow_ones_recompute() -> None:
    for speed, moves in ((1e15, True), (1e6, False)):
        problem = tight(chain(layers=5), 0.7, speed)
        found = solve(problem, "poet", time_limit=20.0)
        assert found.schedule is not None
        assert found.schedule.moves is moves
        assert (len(found.schedule.ops) > len(problem.graph.ops)) is not moves
        alone = solve(problem.without_link(), "checkmate", time_limit=20.0)
        assert alone.schedule is not None
        slowest = simulate(problem.graph, alone.schedule).seconds
        assert simulate(problem.graph, found.schedule).seconds <= slowest * (1 + 1e-6)


def test_copies_that_count_for_less_are_used_more() -> None:
    problem = tight(chain(layers=5), 0.7, 2e10)
    moved = []
    for weight in (1.0, 0.0):
        found = solve(problem, "poet", time_limit=20.0, copy_weight=weight)
        assert found.schedule is not None
        moved.append(sum(isinstance(step, Offload) for step in found.schedule))
    assert moved[0] < moved[1]


def test_what_it_cannot_do_is_refused_in_words() -> None:
    large = gpt(layers=14)
    assert len(large.ops) > MOST_OPERATORS
    with pytest.raises(SolverError, match=f"at most {MOST_OPERATORS} operators"):
        solve(Problem(large, 2**60), "poet")
    with pytest.raises(SolverError, match="copy_weight of 0 to 1"):
        make_solver("poet", copy_weight=2.0)
