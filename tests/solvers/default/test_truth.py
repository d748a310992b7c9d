"""The benchmark that sets bounds and schedules beside the ground truth, on a few of its problems."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.truth import CLASSES, check, failures, order_of, problem_of
from rematch.solvers import Problem, Solution, Status, solve
from rematch.solvers.exhaustive import Exhaustive


@pytest.mark.parametrize("kind", CLASSES)
def test_nothing_is_claimed_above_the_truth_and_nothing_feasible_missed(kind: str) -> None:
    counts: Counter[str] = Counter()
    wrong = [failure for number in range(20) for failure in check(number, 1, kind, counts)]
    assert wrong == []
    assert counts["auto: missed"] == counts["parts: missed"] == counts["auto: slower"] == 0
    assert counts["auto: proved"] == counts["problems"]
    assert counts["problems"] > counts["feasible"] > 10


def solved(kind: str) -> tuple[Problem, Solution]:
    """The first problem of a class that has a schedule with recomputation, and the best one."""
    for number in range(100):
        problem = problem_of(number, 0, kind)
        solution = solve(problem, Exhaustive(order=order_of(kind)))
        if (solution.lower_bound_seconds or 0.0) > problem.graph.baseline_seconds:
            return problem, solution
    raise AssertionError("no such problem")


@pytest.mark.parametrize("kind", CLASSES)
def test_wrong_claims_are_told(kind: str) -> None:
    problem, best = solved(kind)
    truth = best.lower_bound_seconds
    assert truth is not None
    assert failures(problem, best, truth) == []
    high = replace(best, status=Status.FEASIBLE, lower_bound_seconds=truth + 1.0)
    assert "above" in failures(problem, high, truth)[0]
    assert failures(problem, Solution(None, Status.INFEASIBLE, "x"), truth) == ["called infeasible, but is not"]
    assert "called optimal, but is not" in failures(problem, best, truth - 1.0)
