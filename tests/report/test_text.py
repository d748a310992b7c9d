"""What is printed: numbers, bars, summaries and failures."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rematch.graph import Graph, Op, Phase, Schedule, Value, baseline, simulate
from rematch.graph.generators import chain
from rematch.planning.plan import Figures, PeakShare, Plan, Recomputed
from rematch.report.text import (
    describe_failure,
    describe_graph,
    describe_plan,
    sparkline,
)
from rematch.solvers.base import BoundScope, Problem, Progress, Solution, Status
from rematch.solvers.treewidth import width


def recomputing_plan(graph: Graph) -> Plan:
    order = list(graph.order)
    loss = order.index(graph.loss)
    schedule = Schedule.from_ops(graph, [*order[: loss + 1], 0, 1, *order[loss + 1 :]])
    problem = Problem(graph, 2 * simulate(graph, baseline(graph)).peak_bytes)
    solution = Solution(schedule, Status.FEASIBLE, "by hand", lower_bound_seconds=graph.baseline_seconds)
    return Plan.from_solution(problem, solution)


def failure(status: Status, solve_seconds: float = 1.0, **known: int) -> str:
    graph = chain(layers=4)
    problem = Problem(graph, simulate(graph, baseline(graph)).peak_bytes // 2)
    solution = Solution(None, status, "nobody", solve_seconds=solve_seconds, **known)
    return describe_failure(Figures.of(problem, solution), graph.name, time_limit=60.0)


def test_bars_show_the_highest_of_each_share() -> None:
    assert sparkline([0, 8, 0, 4], top=8, width=2) == "█▅"
    assert sparkline([1, 2, 3], top=8) == "▂▃▄"
    assert (sparkline([], top=1), sparkline([1], top=0)) == ("", "")
    assert sparkline([2**60, 2**61], top=2**61) == "▅█"


def test_more_levels_than_bars_keep_their_peak() -> None:
    levels = [0] * 1000
    levels[777] = 9
    shown = sparkline(levels, top=9, width=60)
    assert len(shown) == 60
    assert shown.count("█") == 1
    assert shown[777 * 60 // 1000] == "█"


def test_a_graph_names_its_parts_its_peak_and_its_hungriest_operator() -> None:
    values = (Value("w", 100, resident=True), Value("a", 10), Value("g", 20), Value("d", 5))
    ops = (
        Op("f", 1.0, (0,), (1,)),
        Op("loss", 0.5, (1,), (2,), phase=Phase.LOSS),
        Op("b", 2.0, (1, 2), (3,), workspace_bytes=50, phase=Phase.BACKWARD),
    )
    shown = describe_graph(Graph(ops, values, targets=frozenset({3}), held=frozenset({1}), name="tiny"))
    for part in (
        "tiny",
        "forward 1, loss 1, backward 1",
        "resident 1 (100 B), targets 1 (5 B), held 1 (10 B)",
        "forward 10 B, loss 20 B, backward 5 B",
        "forward 1 s, loss 500 ms, backward 2 s",
        "185 B",
        "while 'b' runs (backward, 3 of 3)",
        "100.0 % of the peak: what 'b' needs by itself",
        "at most: that of a tree decomposition by min-fill",
    ):
        assert part in shown


def test_the_width_is_that_of_the_graph_and_names_how_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three operators each tied to the others have width 2, a chain of operators 1."""
    monkeypatch.setattr(width, "_MIN_FILL_OPERATORS", 3)
    values = tuple(Value(f"v{i}", 1) for i in range(4))
    triangle = Graph((Op("f", 1.0, (), (0,)), Op("g", 1.0, (0,), (1,)), Op("h", 1.0, (0, 1), (2,))), values[:3])
    line = Graph(tuple(Op(f"o{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(4)), values)
    assert re.search(r"width +2 +at most: .* by min-fill", describe_graph(triangle))
    assert re.search(r"width +1 +at most: .* by min-degree", describe_graph(line))


def test_an_empty_graph_is_shown_too() -> None:
    assert "0 B" in describe_graph(Graph((), ()))


def test_a_plan_tells_its_cost_and_its_gap() -> None:
    plan = recomputing_plan(chain(layers=6))
    shown = describe_plan(plan)
    assert "200.0 % of" in shown
    assert "2 of 13 operators recomputed, 2 extra runs" in shown
    assert f"at most {plan.figures.gap_pct:.2f} points from the fastest schedule" in shown
    assert "2 x" in shown and "layer*" in shown


def test_a_plan_shows_the_parts_of_its_peak_and_its_notes() -> None:
    plan = recomputing_plan(chain(layers=6))
    parts = (PeakShare("parameters", 2**29), PeakShare("workspace", 3 * 2**20))
    told = replace(plan, parts=parts, notes=("one", "another"))
    lines = describe_plan(told).splitlines()
    peak = next(number for number, line in enumerate(lines) if line.startswith("  peak"))
    assert lines[peak + 1] == "  parts   parameters 512 MiB, workspace 3.00 MiB"
    assert [line for line in lines if line.startswith("  note")] == ["  note    one", "  note    another"]
    assert "parts" not in describe_plan(replace(plan, parts=()))


def test_a_plan_says_which_method_found_it_and_who_else_was_asked() -> None:
    log = (
        Progress(0.1, "greedy", best_seconds=9.0),
        Progress(0.5, "anneal", best_seconds=7.0),
        Progress(2.0, "epochs", best_seconds=7.0, bound_seconds=6.0),
    )
    plan = recomputing_plan(chain(layers=6))
    found = next(line for line in describe_plan(replace(plan, log=log)).splitlines() if "found" in line)
    assert " ".join(found.split()) == "found by anneal after 500 ms; others: greedy, epochs"
    assert "found" not in describe_plan(replace(plan, log=log[:1]))


def test_an_optimal_plan_and_one_without_bound_say_so() -> None:
    plan = recomputing_plan(chain(layers=6))
    optimal = replace(plan, figures=replace(plan.figures, status=Status.OPTIMAL, bound_scope=BoundScope.ANY_ORDER))
    assert "optimal: no schedule is faster (any order)" in describe_plan(optimal)
    unbounded = replace(plan, figures=replace(plan.figures, lower_bound_seconds=None))
    assert "solver 'by hand' gives none" in describe_plan(unbounded)


def test_only_the_costliest_groups_are_listed() -> None:
    entries = tuple(Recomputed(f"{kind}{i}", "", Phase.FORWARD, 1, 0.1) for kind in "abcdefghij" for i in range(3))
    shown = describe_plan(replace(recomputing_plan(chain(layers=6)), recomputed=entries))
    assert shown.count("3 x") == 8
    assert "and 2 other groups" in shown


def test_a_failure_says_what_is_known_and_what_to_try() -> None:
    proved = failure(Status.INFEASIBLE, infeasible_up_to_bytes=2**20, feasible_from_bytes=3 * 2**20)
    assert "has no schedule within" in proved
    assert "nothing fits up to 1.00 MiB; a schedule is known for 3.00 MiB; try --budget 3145728" in proved
    assert failure(Status.INFEASIBLE).endswith("try a larger --budget")
    assert "none ruled out; try a larger --budget or another --solver" in failure(Status.NOT_FOUND)
    assert "try a larger --budget, a longer --time-limit or another" in failure(Status.NOT_FOUND, solve_seconds=60.1)
    assert "\n" not in proved
