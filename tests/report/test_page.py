"""The HTML page of a plan: what it says, that it is whole, and that no name can break out of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rematch.errors import FormatError, ScheduleError
from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.graph.generators import chain, gpt
from rematch.planning.plan import Figures, Plan
from rematch.report.page import page, verdict
from rematch.solvers.base import BoundScope, Problem, Solution, Status, solve

VOID = {"meta", "path", "br"}


class Tags(HTMLParser):
    """Every tag is closed in turn; collects what refers to somewhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.open == []
    return tags


def plan_of(graph: Graph, share: float = 0.6) -> Plan:
    problem = Problem(graph, int(share * simulate(graph, baseline(graph)).peak_bytes))
    return Plan.from_solution(problem, solve(problem, "greedy", time_limit=5.0), ("a note",), "tape")


def points(plan: Plan) -> list[Figures]:
    """Figures at three budgets: one with a bound, one without, and one that was not found to work."""
    f = plan.figures
    found = replace(f, budget_bytes=2 * f.budget_bytes, seconds=1.1 * f.baseline_seconds, lower_bound_seconds=None)
    return [f, found, replace(f, budget_bytes=f.budget_bytes // 2, seconds=None)]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(gpt(layers=3))


def test_one_page_that_needs_nothing_else(plan: Plan, tmp_path: Path) -> None:
    plan.report(tmp_path / "plan.html", trade_off=points(plan))
    text = (tmp_path / "plan.html").read_text()
    tags = parsed(text)
    assert tags.references == []
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert 'name="viewport"' in text and "prefers-color-scheme:dark" in text
    said = " ".join(tags.texts)
    for part in ("Memory over time", "Schedule", "Where the extra time goes", "Trade-off", "How good it is", "a note"):
        assert part in said
    assert "h.*.attention" in said
    assert text.count('class="spot"') == 2


def test_what_the_script_reads_is_what_the_oracle_says(plan: Plan) -> None:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page(plan), flags=re.DOTALL)
    views = json.loads(data)["views"]
    assert max(sum(row) for row in views["plan"]["held"]) == plan.figures.peak_bytes
    assert max(sum(row) for row in views["plain"]["held"]) == plan.figures.baseline_peak_bytes


def test_no_name_breaks_out(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(1)">&amp;\u2028'
    graph = gpt(layers=2)
    ops = tuple(replace(op, name=f"{evil}{i}", module_path=f"{evil}.{i}") for i, op in enumerate(graph.ops))
    plan = plan_of(replace(graph, ops=ops, name=evil))
    text = page(replace(plan, notes=(evil,)).with_graph(plan.graph))
    tags = parsed(text)
    assert tags.references == []
    assert text.count("<script") == 2
    assert "<img" not in text
    assert "<img" not in plan._repr_html_()


def test_large_and_empty_graphs(tmp_path: Path) -> None:
    large = gpt(layers=160)
    plan = Plan.from_solution(Problem(large, 2**60), Solution(baseline(large), Status.FEASIBLE, "by hand"))
    assert len(page(plan)) < 2_000_000
    for graph in (Graph((), ()), chain(layers=1)):
        kept = Solution(baseline(graph), Status.OPTIMAL, "by hand", lower_bound_seconds=graph.baseline_seconds)
        parsed(page(Plan.from_solution(Problem(graph, 2**60), kept)))


def test_a_loaded_plan_is_shown_without_its_graph_and_drawn_with_it(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.graph is None and loaded == plan
    assert "came without its graph" in page(loaded)
    with pytest.raises(ScheduleError, match="with_graph"):
        loaded.plot_memory(tmp_path / "a.png")
    with pytest.raises(ScheduleError, match="another graph"):
        loaded.with_graph(gpt(layers=2))
    assert plan.graph is not None
    assert page(loaded.with_graph(plan.graph)) == page(plan)


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_pictures_of_a_plan(plan: Plan, name: str, magic: bytes, tmp_path: Path) -> None:
    plan.plot_memory(tmp_path / f"memory-{name}")
    plan.plot_schedule(tmp_path / f"schedule-{name}")
    memory, schedule = ((tmp_path / f"{what}-{name}").read_bytes() for what in ("memory", "schedule"))
    assert memory.startswith(magic) and schedule.startswith(magic)
    assert len(schedule) > len(memory)


def test_it_is_written_whole_or_not_at_all(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot write"):
        plan.report(tmp_path / "missing" / "plan.html")


def test_a_plan_shows_no_arrays(plan: Plan) -> None:
    assert repr(plan).startswith("<Plan for 'gpt 3'")
    assert len(repr(plan)) < 250
    shown = plan._repr_html_()
    parsed(shown)
    assert "<svg" in shown and "<script" not in shown and "id=" not in shown
    assert ":root" not in shown, "the notebook's own style stays"


def test_what_is_proved_is_said_in_words(plan: Plan) -> None:
    f = replace(plan.figures, status=Status.OPTIMAL, lower_bound_seconds=plan.figures.seconds)
    assert "Proved optimal" in verdict(f)
    f = replace(f, status=Status.FEASIBLE, lower_bound_seconds=f.baseline_seconds, bound_scope=BoundScope.STAGES)
    assert f"at most {f.overhead_pct:.2f} points" in verdict(f)
    assert BoundScope.STAGES.value in verdict(f)
    assert "no lower bound" in verdict(replace(f, lower_bound_seconds=None))


def test_everything_kept() -> None:
    graph = gpt(layers=2)
    text = page(Plan.from_solution(Problem(graph, 2**60), Solution(baseline(graph), Status.FEASIBLE, "by hand")))
    assert "Nothing is computed again" in text
    assert 'data-view="plain"' not in text


def test_a_schedule_of_ones_own_is_drawn() -> None:
    graph = gpt(layers=2)
    problem = Problem(graph, 2**60)
    again = Schedule.from_ops(graph, [graph.order[0], *graph.order])
    shown = page(Plan.from_solution(problem, Solution(again, Status.FEASIBLE, "by hand")))
    assert 'class="cell repeated"' in shown
