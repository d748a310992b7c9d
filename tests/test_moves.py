"""Plans that move values to host memory: what solvers may say of them, their files, texts and pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rematch import Plan
from rematch.cli import app
from rematch.errors import FormatError
from rematch.graph import (
    Compute,
    Fetch,
    Free,
    Graph,
    Link,
    Offload,
    Schedule,
    baseline,
    load_graph,
    save_graph,
    simulate,
)
from rematch.graph.generators import chain
from rematch.graph.traffic import busy_shares, total_seconds, traffic
from rematch.report.link_html import said
from rematch.report.page import page
from rematch.report.timeline import timeline
from rematch.solvers import Problem, Solution, Status, solve
from rematch.solvers.base import BoundScope


@pytest.fixture
def graph() -> Graph:
    return replace(chain(layers=3), link=Link(1e9, 1e9, host_bytes=2**40))


@pytest.fixture
def schedule(graph: Graph) -> Schedule:
    """The first activation leaves, is freed after its last use in forward, and comes back for its backward."""
    steps = list(baseline(graph))
    moved = graph.ops[0].outputs[0]
    readers = [at for at, step in enumerate(steps) if isinstance(step, Compute) and moved in graph.ops[step.op].inputs]
    first, last = readers[0], readers[-1]
    return Schedule.of([steps[0], Offload(moved), *steps[1 : first + 1], Free(moved), *steps[first + 1 : last],
                        Fetch(moved), *steps[last:]])  # fmt: skip


@pytest.fixture
def plan(graph: Graph, schedule: Schedule) -> Plan:
    problem = Problem(graph, simulate(graph, schedule).checked().peak_bytes)
    return Plan.from_solution(problem, Solution(schedule, Status.FEASIBLE, "by hand"))


def test_text_page_picture_and_file_tell_what_moves(graph: Graph, plan: Plan, tmp_path: Path) -> None:
    assert plan.moved is not None and plan.moved.stall_seconds > 0
    size = graph.values[graph.ops[0].outputs[0]].size_bytes
    assert (plan.moved.values, plan.moved.out_bytes, plan.moved.in_bytes, plan.moved.host_bytes) == (1, *[size] * 3)
    assert f"moves   {str(plan.moved)[:4]}" in str(plan)
    assert re.search(r"link +[0-9.]+ % +of a step waits.*busy out .* in .*host memory", str(plan))
    plan.report(tmp_path / "plan.html")
    shown = (tmp_path / "plan.html").read_text()
    for part in (str(plan.moved), said(traffic(graph, plan.schedule)), 'class="lane out"', 'class="host"'):
        assert part in shown
    assert 'class="lane' not in baseline_page(graph)
    for draw in (plan.plot_schedule, plan.plot_memory):
        draw(tmp_path / "plan.svg")
        picture = (tmp_path / "plan.svg").read_text()
        assert all(f"<!-- {text} -->" in picture for text in ("out", "back", "waits", "in host memory"))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    older = {key: entry for key, entry in plan.to_data().items() if key != "moved"}
    assert Plan.from_json(older, "an older file") == replace(plan, moved=None)
    with pytest.raises(FormatError, match="negative"):
        Plan.from_json({**plan.to_data(), "moved": {**plan.to_data()["moved"], "in_bytes": -1}}, "a broken file")


def baseline_page(graph: Graph) -> str:
    return page(Plan.from_solution(Problem(graph, 2**60), Solution(baseline(graph), Status.FEASIBLE, "by hand")))


def test_traffic_is_what_the_oracle_timed(graph: Graph, schedule: Schedule, plan: Plan) -> None:
    seen, link = simulate(graph, schedule), traffic(graph, schedule)
    size = graph.values[graph.ops[0].outputs[0]].size_bytes
    assert [span.end - span.begin for span in (*link.out, *link.back)] == pytest.approx([size / 1e9] * 2)
    assert total_seconds(link.waits) == pytest.approx(seen.stall_seconds)
    assert link.seconds == seen.seconds and link.host == ((0.0, 0), (link.out[0].begin, size))
    shares = busy_shares(link.back, np.array([0.0, link.back[0].begin, link.back[0].end, seen.seconds]))
    assert shares.tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert plan.moved is not None
    busy = plan.moved.out_busy, plan.moved.in_busy, plan.moved.stalled
    assert [len(shares) for shares in busy] == [len(plan.timeline_bytes)] * 3
    assert all(any(shares) and max(shares) <= 100 for shares in busy)
    assert all(f"\n  {name} " in str(plan) for name in ("out", "in", "waits"))


def test_the_memory_over_time_is_that_of_the_oracle(graph: Graph, schedule: Schedule) -> None:
    seen, found = simulate(graph, schedule), timeline(graph, schedule)
    assert [sample.total_bytes for sample in found.samples] == seen.timeline_bytes[schedule.steps >= 0].tolist()
    assert found.samples[-1].end_seconds == seen.seconds


def test_the_command_line_links_a_graph_and_checks_a_plan(graph: Graph, plan: Plan, tmp_path: Path) -> None:
    unlinked, linked, saved = (str(tmp_path / name) for name in ("graph.json", "linked.json", "plan.json"))
    save_graph(replace(graph, link=None), unlinked)
    plan.save(saved)
    made = CliRunner().invoke(app, ["link", unlinked, "1GB/s", "--host", "1TiB", "-o", linked])
    assert "link       954 MiB/s  out, 954 MiB/s in, to 1.00 TiB of host memory" in made.stdout
    assert load_graph(linked).graph == graph
    assert str(plan.moved) in CliRunner().invoke(app, ["check", saved, linked]).stdout
    refused = CliRunner().invoke(app, ["check", saved, unlinked])
    assert refused.exit_code == 2 and "has no link" in refused.stderr
    share = CliRunner().invoke(app, ["link", unlinked, "1GB/s", "--host", "50%", "-o", linked])
    assert share.exit_code == 2 and "nothing to take it of" in share.stderr
    CliRunner().invoke(app, ["link", unlinked, "h200", "--host", "1TiB", "-o", linked])
    assert load_graph(linked).graph.link == Link(55e9, 55e9, 2**40)
    unknown = CliRunner().invoke(app, ["link", unlinked, "55GB", "--host", "1TiB", "-o", linked])
    assert unknown.exit_code == 2 and "unknown device '55GB'" in unknown.stderr
    both = CliRunner().invoke(app, ["link", unlinked, "h200", "--back", "1GB/s", "--host", "1TiB", "-o", linked])
    assert both.exit_code == 2 and "--back" in both.stderr


def test_solvers_that_move_nothing_prove_nothing_of_schedules_that_do(graph: Graph) -> None:
    peak = simulate(graph, baseline(graph)).peak_bytes
    assert solve(Problem(graph, peak), "exhaustive").bound_scope is BoundScope.ANY_ORDER  # nothing beats once each
    assert solve(Problem(graph, int(0.8 * peak)), "exhaustive").bound_scope is BoundScope.NOTHING_MOVES
    assert solve(Problem(graph, 1), "exhaustive").bound_scope is BoundScope.NOTHING_MOVES
