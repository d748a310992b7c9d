"""Plans: made from solutions, saved and loaded, checked against graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rematch.errors import FormatError, ScheduleError
from rematch.graph import Graph, Phase, Schedule, baseline, simulate
from rematch.graph.generators import chain
from rematch.planning.plan import Figures, Plan
from rematch.solvers.base import BoundScope, Problem, Progress, Solution, Status


@pytest.fixture
def graph() -> Graph:
    return chain(layers=4, seed=1)


@pytest.fixture
def problem(graph: Graph) -> Problem:
    return Problem(graph, simulate(graph, baseline(graph)).peak_bytes)


@pytest.fixture
def solution(graph: Graph) -> Solution:
    """Layer 1 is computed again right before the backward pass."""
    order = list(graph.order)
    schedule = Schedule.from_ops(graph, [*order[:5], 1, *order[5:]])
    return Solution(
        schedule,
        Status.FEASIBLE,
        "by hand",
        lower_bound_seconds=graph.baseline_seconds,
        bound_scope=BoundScope.ANY_ORDER,
        solve_seconds=0.5,
        log=(Progress(0.1, "by hand", "found", best_seconds=1.0), Progress(0.2, "by hand", "tired")),
    )


@pytest.fixture
def plan(problem: Problem, solution: Solution) -> Plan:
    return Plan.from_solution(problem, solution)


def test_figures_are_those_of_the_oracle(graph: Graph, problem: Problem, plan: Plan) -> None:
    seen = simulate(graph, plan.schedule)
    f = plan.figures
    assert (f.peak_bytes, f.seconds, f.computes) == (seen.peak_bytes, seen.seconds, len(graph.ops) + 1)
    assert (f.baseline_peak_bytes, f.baseline_seconds) == (problem.budget_bytes, graph.baseline_seconds)
    assert f.overhead_pct == pytest.approx(100 * graph.ops[1].seconds / graph.baseline_seconds)
    assert f.lower_bound_pct == 0.0
    assert f.gap_pct == f.overhead_pct


def test_what_is_not_known_is_none(problem: Problem) -> None:
    f = Figures.of(problem, Solution(None, Status.NOT_FOUND, "nobody", feasible_from_bytes=7))
    assert (f.peak_bytes, f.seconds, f.computes, f.overhead_pct, f.lower_bound_pct, f.gap_pct) == (None,) * 6
    assert f.feasible_from_bytes == 7


def test_a_graph_that_takes_no_time_has_no_percentages(graph: Graph) -> None:
    instant = replace(graph, ops=tuple(replace(op, seconds=0.0) for op in graph.ops))
    f = Figures.of(Problem(instant, 2**40), Solution(baseline(instant), Status.OPTIMAL, "x", lower_bound_seconds=0.0))
    assert (f.overhead_pct, f.lower_bound_pct, f.gap_pct) == (None, None, None)


def test_says_what_is_recomputed(graph: Graph, plan: Plan) -> None:
    (entry,) = plan.recomputed
    assert (entry.name, entry.phase, entry.extra_runs) == ("layer1", Phase.FORWARD, 1)
    assert entry.extra_seconds == graph.ops[1].seconds


def test_a_solution_without_schedule_makes_no_plan(problem: Problem) -> None:
    with pytest.raises(ScheduleError, match=r"'nobody' has no schedule for 'chain 4 training'.*infeasible"):
        Plan.from_solution(problem, Solution(None, Status.INFEASIBLE, "nobody"))


def test_saved_and_loaded_is_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_save_leaves_the_old_file(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    broken = replace(plan, figures=replace(plan.figures, seconds=float("nan")))
    with pytest.raises(ValueError, match="JSON"):
        broken.save(path)
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "is not a plan"),
        ({"version": 2}, "version 2, this rematch reads version 1"),
        ({"schedule": "abc"}, "schedule should be a list"),
        ({"timeline_bytes": [-1]}, "a number of bytes is negative or beyond"),
        ({"timeline_bytes": [2**62]}, "a number of bytes is negative or beyond"),
        ({"graph_ops": -1}, "a time or a count is negative"),
        ({"graph_ops": None}, "plan.json: graph_ops should be a whole number, not null"),
    ],
)
def test_refuses_what_is_not_a_plan(plan: Plan, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FormatError, match=said) as caught:
        Plan.load(path)
    assert "plan.json" in str(caught.value)


def test_refuses_a_plan_with_a_part_missing(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    del data["figures"]["solver"]
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match='figures has no "solver"'):
        Plan.load(path)


def test_refuses_a_plan_without_the_figures_of_its_schedule(plan: Plan, tmp_path: Path) -> None:
    replace(plan, figures=replace(plan.figures, seconds=None)).save(tmp_path / "plan.json")
    with pytest.raises(FormatError, match=r"plan.json: figures has no peak, seconds or computes"):
        Plan.load(tmp_path / "plan.json")


def test_holds_for_its_graph_whatever_the_times(graph: Graph, plan: Plan) -> None:
    slower = replace(graph, ops=tuple(replace(op, seconds=3 * op.seconds) for op in graph.ops))
    assert plan.check(graph).peak_bytes == plan.figures.peak_bytes
    assert plan.check(slower).seconds == pytest.approx(3 * plan.figures.seconds)


def test_refuses_another_graph_and_says_how_it_differs(graph: Graph, plan: Plan) -> None:
    with pytest.raises(ScheduleError, match="had 9 operators, 'chain 5 training' has 11"):
        plan.check(chain(layers=5))
    with pytest.raises(ScheduleError, match="differ in names, sizes"):
        plan.check(chain(layers=4, seed=2))


def test_refuses_a_schedule_that_does_not_hold(graph: Graph, plan: Plan) -> None:
    with pytest.raises(ScheduleError, match="'layer0' never runs"):
        replace(plan, schedule=Schedule([])).check(graph)
    with pytest.raises(ScheduleError, match="does not keep its budget"):
        replace(plan, figures=replace(plan.figures, budget_bytes=1)).check(graph)


def test_prints_as_text(plan: Plan) -> None:
    assert "chain 4 training" in str(plan)
