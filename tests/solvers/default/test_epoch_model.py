"""The relaxation against the ground truth: whatever it looks at, its bound is never above the fastest schedule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rematch.graph import Graph
from rematch.solvers import Deadline, Problem
from rematch.solvers.common.highs import minimise
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.default.epoch_model import EpochModel, Refinement
from tests.examples import examples
from tests.problems import changed_resident, fewest_seconds, held_for_the_loss, tiny_problems

TOLERANCE = 1e-5  # percent of the time without recomputation; the program is solved to 1e-6


def bound_percent(problem: Problem, refinement: Refinement, *, relaxed: bool = False) -> float:
    """What the relaxation proves: extra time in percent, infinite if there is no schedule."""
    program = EpochModel(Precedence.of(problem.graph), problem.budget_bytes, refinement).program
    found = minimise(program, deadline=Deadline(), relaxed=relaxed)
    assert found.finished or program.column_count == 0
    return math.inf if found.infeasible else found.bound


def least_percent(problem: Problem) -> float:
    """The truth: extra time of the fastest schedule in default order, in percent, infinite if there is none."""
    seconds = fewest_seconds(problem)
    if seconds is None:
        return math.inf
    baseline = problem.graph.baseline_seconds
    return 100.0 * (seconds - baseline) / (baseline or 1.0)


@st.composite
def refinements(draw: st.DrawFn, graph: Graph) -> Refinement:
    """Any moments, stages and repeats, those that cannot be among them."""
    count = len(graph.ops)
    positions = st.integers(0, count - 1)
    return Refinement(
        moments=tuple(sorted(draw(st.sets(positions, min_size=1, max_size=6)))),
        stages=frozenset(draw(st.sets(positions, max_size=4))),
        repeats=frozenset(draw(st.sets(st.tuples(positions, st.integers(0, count)), max_size=6))),
        suffixes=draw(st.booleans()),
    )


def everything(graph: Graph, *, suffixes: bool = True) -> Refinement:
    """All moments and all repeats: as much as the relaxation can see."""
    count = len(graph.ops)
    repeats = frozenset((op, stage) for op in range(count) for stage in range(count + 1))
    return Refinement(tuple(range(count)), repeats=repeats, suffixes=suffixes)


@given(tiny_problems(), st.data())
@examples(300)
def test_no_refinement_proves_more_than_the_truth(problem: Problem, data: st.DataObject) -> None:
    refinement = data.draw(refinements(problem.graph))
    linear, whole = (bound_percent(problem, refinement, relaxed=relaxed) for relaxed in (True, False))
    assert linear <= whole + TOLERANCE
    assert whole <= least_percent(problem) + TOLERANCE


@given(tiny_problems(), st.booleans())
@examples(100)
def test_seeing_everything_still_proves_no_more_than_the_truth(problem: Problem, suffixes: bool) -> None:
    assert bound_percent(problem, everything(problem.graph, suffixes=suffixes)) <= least_percent(problem) + TOLERANCE


@pytest.mark.parametrize("problem", [held_for_the_loss(), changed_resident()], ids=["loss", "update"])
def test_seeing_everything_proves_what_one_recomputation_costs(problem: Problem) -> None:
    assert bound_percent(problem, everything(problem.graph)) == pytest.approx(20.0)


@given(tiny_problems(), st.data())
@examples(100)
def test_looking_more_closely_never_proves_less(problem: Problem, data: st.DataObject) -> None:
    fine = data.draw(refinements(problem.graph))
    whole = bound_percent(problem, fine)
    for coarser in (replace(fine, stages=frozenset()), replace(fine, repeats=frozenset()), Refinement(fine.moments)):
        assert bound_percent(problem, coarser) <= whole + TOLERANCE


@given(tiny_problems(), st.data())
@examples(100)
def test_suffixes_are_implied_for_whole_numbers_only(problem: Problem, data: st.DataObject) -> None:
    plain = replace(data.draw(refinements(problem.graph)), suffixes=False)
    tight = replace(plain, suffixes=True)
    assert bound_percent(problem, tight) == pytest.approx(bound_percent(problem, plain), abs=TOLERANCE)
    linear = [bound_percent(problem, refinement, relaxed=True) for refinement in (plain, tight)]
    assert linear[0] <= linear[1] + TOLERANCE


@given(tiny_problems(), st.data())
@examples(100)
def test_another_moment_never_proves_less(problem: Problem, data: st.DataObject) -> None:
    few = Refinement(data.draw(refinements(problem.graph)).moments)
    more = Refinement(tuple(sorted({*few.moments, data.draw(st.integers(0, len(problem.graph.ops) - 1))})))
    assert bound_percent(problem, few) <= bound_percent(problem, more) + TOLERANCE
