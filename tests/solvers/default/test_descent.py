"""Local search for falling budgets."""

from __future__ import annotations

import pytest

from rematch.graph import Graph, Op, Value, baseline, simulate
from rematch.graph.generators import chain, random_layered
from rematch.solvers import Deadline, Problem
from rematch.solvers.common.local_search import LocalSearch
from rematch.solvers.default.auto import _Searches
from rematch.solvers.default.descent import Descent
from rematch.solvers.incumbent import Incumbent
from tests.problems import peak_bytes

MOVES = 120_000


@pytest.fixture(scope="module")
def tight() -> Problem:
    graph = random_layered(200, seed=1)
    return Problem(graph, peak_bytes(graph) // 2)


def test_finds_what_a_search_at_the_budget_does_not(tight: Problem) -> None:
    search = LocalSearch(tight, passes=2)
    search.run(MOVES)
    assert search.best is None
    descent = Descent(tight)
    descent.run(MOVES)
    assert descent.found is not None
    assert simulate(tight.graph, descent.found).checked().peak_bytes <= tight.budget_bytes
    assert descent.search().best is not None


def test_auto_descends_when_local_search_finds_nothing(tight: Problem) -> None:
    incumbent = Incumbent(tight, Deadline(), lambda progress: None)
    searches = _Searches(incumbent, seed=0)
    for _ in range(12):
        if incumbent.schedule is None:
            searches.run()
    assert incumbent.schedule is not None


def test_moves_may_be_made_in_parts() -> None:
    graph = random_layered(60, seed=3)
    problem = Problem(graph, peak_bytes(graph) * 6 // 10)
    whole, parts = Descent(problem), Descent(problem)
    whole.run(60_000)
    for _ in range(30):
        parts.run(2_000)
    assert whole.found is not None
    assert whole.found == parts.found


def test_goes_on_from_a_schedule_that_holds_less_memory() -> None:
    graph = chain(20)
    problem = Problem(graph, peak_bytes(graph) // 2)
    descent = Descent(problem)
    descent.adopt(baseline(graph))
    assert descent.found is None
    search = LocalSearch(problem)
    search.run(50_000)
    assert search.best is not None
    descent.adopt(search.best)
    assert descent.found == search.best
    assert descent.finished


def test_ends_where_nothing_can_be_recomputed() -> None:
    ops = (Op("x", 1.0, (), (0,), once=True), Op("y", 1.0, (0,), (1,), once=True))
    graph = Graph(ops, (Value("x", 4), Value("y", 4)))
    descent = Descent(Problem(graph, 7))
    descent.run(MOVES)
    assert descent.finished
    assert descent.found is None
