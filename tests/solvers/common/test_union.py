"""Runs of several schedules in one: never slower than any of them, and as fast as can be with these runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rematch.graph import Graph, Op, Schedule, Value, simulate
from rematch.graph.generators import unet
from rematch.graph.model import Ints
from rematch.solvers import Deadline, Problem, solve
from rematch.solvers.common import union as module
from rematch.solvers.common.pruning import as_late_as_possible, in_default_order, in_turn, pruned
from rematch.solvers.common.union import stages_of
from tests.examples import examples
from tests.problems import peak_bytes, tiny_problems
from tests.strategies import sequences


def best_of_union(problem: Problem, sequences: Sequence[Ints], **options: Any) -> Ints | None:
    """The last and fastest of what is found."""
    found = list(module.best_of_union(problem, sequences, **options))
    times = [seconds_of(problem, runs) for runs in found]
    assert times == sorted(times, reverse=True)
    return found[-1] if found else None


def seconds_of(problem: Problem, sequence: Ints) -> float:
    """The time of a sequence that the oracle finds valid and within the budget."""
    seen = simulate(problem.graph, Schedule.from_ops(problem.graph, sequence)).checked()
    assert seen.peak_bytes <= problem.budget_bytes
    return seen.seconds


def test_the_best_of_both_is_taken() -> None:
    """Each schedule recomputes one of two values early and the slow one late; together the quick one twice."""
    ops = (
        Op("a", 3.0, (), (0,)),
        Op("b", 1.0, (), (1,)),
        Op("large", 1.0, (), (2,)),
        Op("use", 1.0, (0, 1), ()),
        Op("large too", 1.0, (), (3,)),
        Op("use too", 1.0, (0, 1), ()),
    )
    values = (Value("a", 2), Value("b", 2), Value("large", 4), Value("large too", 4))
    problem = Problem(Graph(ops, values), 6)
    one = np.array([0, 1, 2, 1, 3, 4, 0, 5], dtype=np.int32)
    other = np.array([0, 1, 2, 0, 3, 4, 1, 5], dtype=np.int32)
    assert seconds_of(problem, one) == seconds_of(problem, other) == 12.0
    best = best_of_union(problem, [one, other], deadline=Deadline(), known=one)
    assert best is not None and best.tolist() == [0, 1, 2, 1, 3, 4, 1, 5]
    assert best_of_union(problem, [one, best], deadline=Deadline(), known=best) is None


def test_recomputations_at_other_times_are_found_where_they_are_wanted() -> None:
    """The schedule recomputes too early for the budget; the first computation that reads the value comes later."""
    ops = (
        Op("a", 1.0, (), (0,)),
        Op("b", 1.0, (0,), (1,)),
        Op("large", 1.0, (), (2,)),
        Op("large too", 1.0, (), (3,)),
        Op("use", 1.0, (1,), ()),
    )
    values = (Value("a", 1), Value("b", 2), Value("large", 4), Value("large too", 4))
    problem = Problem(Graph(ops, values), 5)
    early = np.array([0, 1, 2, 0, 1, 3, 4], dtype=np.int32)
    assert best_of_union(problem, [early], deadline=Deadline()) is None
    found = best_of_union(problem, [early], deadline=Deadline(), anywhere={0, 1})
    assert found is not None and found.tolist() == [0, 1, 2, 3, 1, 4]  # a is kept, b is not
    found = best_of_union(problem, [], deadline=Deadline(), anywhere={0, 1})
    assert found is not None and found.tolist() == [0, 1, 2, 3, 1, 4]  # no schedule is needed for that
    assert best_of_union(problem, [], deadline=Deadline(), anywhere={0}) is None


def test_recomputations_move_to_where_they_are_needed_and_take_theirs_along() -> None:
    ops = (
        Op("a", 1.0, (), (0,)),
        Op("b", 1.0, (0,), (1,)),
        Op("c", 1.0, (), (2,)),
        Op("other", 1.0, (2,), (3,)),
        Op("use", 1.0, (1, 3), (4,)),
    )
    graph = Graph(ops, tuple(Value(name, 1) for name in "abcde"))
    early = np.array([0, 1, 2, 0, 1, 2, 3, 4], dtype=np.int32)
    assert as_late_as_possible(graph, early).tolist() == [0, 1, 2, 2, 3, 0, 1, 4]


@examples(100)
@given(tiny_problems(), st.data())
def test_as_late_as_possible_keeps_rules_and_adds_nothing(problem: Problem, data: st.DataObject) -> None:
    graph = problem.graph
    drawn = np.array(data.draw(sequences(graph, max_extra=6)), dtype=np.int32)
    given_runs = in_turn(graph, in_default_order(graph, drawn))
    late = as_late_as_possible(graph, given_runs)
    seen = simulate(graph, Schedule.from_ops(graph, late)).checked()
    assert (seen.counts <= np.bincount(given_runs, minlength=len(graph.ops))).all()
    assert late[np.sort(np.unique(late, return_index=True)[1])].tolist() == list(graph.order)


@examples(60)
@given(tiny_problems(), st.data())
def test_all_runs_of_an_optimal_schedule_are_found_again(problem: Problem, data: st.DataObject) -> None:
    """Whatever else is in the union, no rule is broken, and nothing slower than the optimum in it is returned."""
    graph = problem.graph
    truth = solve(problem, "exhaustive", order="default")
    if truth.schedule is None:
        return
    optimal = truth.schedule.ops
    stages = stages_of(graph, optimal)
    once_a_stage = sum(map(len, stages)) == len(optimal) - len(graph.ops)
    drawn = np.array(data.draw(sequences(graph, max_extra=6)), dtype=np.int32)
    other = in_turn(graph, in_default_order(graph, drawn))
    for anywhere in (range(len(graph.ops)), ()):
        found = best_of_union(problem, [optimal, other], deadline=Deadline(), anywhere=anywhere)
        if found is not None:
            assert seconds_of(problem, found) >= simulate(graph, truth.schedule).seconds - 1e-9
    if once_a_stage and found is not None:
        assert seconds_of(problem, found) <= simulate(graph, truth.schedule).seconds * (1 + 1e-4)


def test_large_unions_are_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = (Op("a", 1.0, (), (0,)), Op("b", 1.0, (0,), (1,)))
    problem = Problem(Graph(ops, (Value("a", 1), Value("b", 1))), 2)
    twice = np.array([0, 0, 1], dtype=np.int32)
    found = best_of_union(problem, [twice], deadline=Deadline())
    assert found is not None and found.tolist() == [0, 1]
    monkeypatch.setattr(module, "_MOST_TERMS", 1)
    assert best_of_union(problem, [twice], deadline=Deadline()) is None


def test_what_two_methods_propose_is_faster_together() -> None:
    graph = unet(depth=3)
    problem = Problem(graph, peak_bytes(graph) * 6 // 10)
    proposals = []
    for solver in ("twremat", "pwremat"):
        schedule = solve(problem, solver, time_limit=20.0).schedule
        assert schedule is not None
        ordered = in_turn(graph, in_default_order(graph, schedule.ops))
        proposals.append(pruned(graph, ordered, problem.budget_bytes, keep_first=True))
    fastest = min(proposals, key=lambda ops: seconds_of(problem, ops))
    together = best_of_union(problem, proposals, deadline=Deadline(20.0), known=fastest)
    assert together is not None
    assert seconds_of(problem, together) < seconds_of(problem, fastest)
