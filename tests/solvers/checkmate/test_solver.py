"""Checkmate's program: exact among schedules of stages, in both forms and for all that graphs can have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import rematch
from rematch.errors import SolverError
from rematch.graph import Graph, Op, Schedule, Value, baseline, simulate
from rematch.graph.generators import chain, gpt, random_layered
from rematch.graph.transforms import with_flop_costs
from rematch.solvers import BoundScope, Deadline, Problem, Progress, Status, solve
from rematch.solvers.checkmate.model import CheckmateModel
from rematch.solvers.checkmate.solver import MOST_UNPARTITIONED, Checkmate, integrality_gap, unit_chain
from rematch.solvers.common.backends import _NEEDS, BACKENDS, require_backend
from rematch.solvers.common.highs import minimise
from rematch.solvers.exhaustive import min_budget
from tests.examples import examples
from tests.problems import changed_resident, fewest_seconds, held_for_the_loss, peak_bytes, tiny_problems
from tests.staged import check_against_staged_truth, fewest_staged_seconds
from tests.strategies import sequences


@given(tiny_problems())
@examples(200)
def test_finds_the_fastest_schedule_of_stages_or_proves_that_there_is_none(problem: Problem) -> None:
    solution = solve(problem, Checkmate(), time_limit=30.0)
    truth = fewest_staged_seconds(problem)
    assert solution.status is (Status.INFEASIBLE if truth is None else Status.OPTIMAL)
    check_against_staged_truth(problem, solution, truth)


@given(tiny_problems(max_ops=5, max_layers=2))
@examples(150)
def test_the_unpartitioned_form_does_so_among_any_stages(problem: Problem) -> None:
    solution = solve(problem, Checkmate(form="unpartitioned"), time_limit=60.0)
    truth = fewest_staged_seconds(problem, partitioned=False)
    assert solution.status is (Status.INFEASIBLE if truth is None else Status.OPTIMAL)
    if solution.schedule is not None:
        close = 1e-7 * problem.graph.baseline_seconds
        assert simulate(problem.graph, solution.schedule).seconds == pytest.approx(truth, abs=close)


@given(tiny_problems(), st.booleans())
@examples(100)
def test_the_papers_form_of_frees_has_the_same_optimum(problem: Problem, split: bool) -> None:
    found = minimise(CheckmateModel(problem.graph, problem.budget_bytes, split=split).program, deadline=Deadline())
    truth = fewest_staged_seconds(problem)
    assert found.infeasible == (truth is None)
    if truth is not None and problem.graph.baseline_seconds:
        assert found.objective / 100.0 * problem.graph.baseline_seconds == pytest.approx(truth)


@pytest.mark.parametrize("problem", [held_for_the_loss(), changed_resident()])
def test_computes_again_before_it_is_too_late(problem: Problem) -> None:
    """Without partition nothing is computed again: first computations may wait for each other."""
    for form, seconds in (("partitioned", 6.0), ("unpartitioned", 5.0)):
        solution = solve(problem, "checkmate", form=form)
        assert solution.schedule is not None
        assert simulate(problem.graph, solution.schedule).seconds == seconds


def test_one_output_may_be_computed_again_for_the_sake_of_another() -> None:
    """The large sibling must not count as alive to the end of the stage: it is freed at once."""
    values = tuple(Value(name, size) for name, size in (("small", 1), ("large", 6), ("wide", 8), ("end", 1)))
    ops = (
        Op("both", 1.0, (), (0, 1)),
        Op("use large", 1.0, (1,), ()),
        Op("wide", 1.0, (), (2,)),
        Op("use wide", 1.0, (2,), ()),
        Op("use small", 1.0, (0,), (3,)),
    )
    problem = Problem(Graph(ops, values), 8)
    solution = solve(problem, "checkmate")
    assert (solution.status, solution.lower_bound_seconds) == (Status.OPTIMAL, pytest.approx(6.0))


def test_the_integrality_gaps_are_those_of_the_paper() -> None:
    """Appendix A: frontier-advancing stages reduce it from 21.56 to 1.18 on 8 layers at a budget of 4."""
    partitioned, unpartitioned = (
        integrality_gap(unit_chain(), 4, form, deadline=Deadline(60.0)) for form in ("partitioned", "unpartitioned")
    )
    assert (partitioned.optimum, unpartitioned.optimum) == pytest.approx((26.0, 26.0))
    assert round(partitioned.ratio, 2) == 1.18
    assert round(unpartitioned.ratio, 2) == 21.56


def test_splitting_hazards_and_limiting_ends_of_stages_tightens_the_relaxation() -> None:
    graph = chain(layers=12)
    budget = peak_bytes(graph) // 2
    tight, loose = (
        minimise(CheckmateModel(graph, budget, split=split).program, deadline=Deadline(), relaxed=True).bound
        for split in (True, False)
    )
    assert tight > loose + 0.1


@given(tiny_problems(), st.data())
@examples(100)
def test_stages_that_need_no_account_change_nothing(problem: Problem, data: st.DataObject) -> None:
    """The relaxation with the recurrence in some stages, and in those only that it breaks, equals the whole one."""
    whole = minimise(CheckmateModel(problem.graph, problem.budget_bytes).program, deadline=Deadline(), relaxed=True)
    accounted = frozenset(data.draw(st.sets(st.integers(0, len(problem.graph.ops)))))
    while True:
        model = CheckmateModel(problem.graph, problem.budget_bytes, accounted=accounted)
        found = minimise(model.program, deadline=Deadline(), relaxed=True)
        broken = model.unaccounted(found.point, problem.budget_bytes) if found.point is not None else frozenset()
        assert not broken & accounted
        if not broken:
            break
        accounted |= broken
    assert found.infeasible == whole.infeasible
    assert whole.infeasible or found.bound == pytest.approx(whole.bound, abs=1e-4)


@given(tiny_problems(), st.booleans(), st.data())
@examples(100)
def test_a_start_is_a_point_of_the_program(problem: Problem, partitioned: bool, data: st.DataObject) -> None:
    """Any schedule, with a budget that holds it whatever its stages' order: fixing its columns leaves a point."""
    graph = problem.graph
    schedule = Schedule.from_ops(graph, data.draw(sequences(graph)))
    model = CheckmateModel(graph, 10**6, partitioned=partitioned)
    start = model.start(schedule)
    if start is None:
        in_order = tuple(dict.fromkeys(schedule.ops.tolist())) == graph.order
        assert not (partitioned and in_order)
        return
    for column, value in start.items():
        model.program.rows(np.array([[column]], dtype=np.int32), 1.0, lower=value, upper=value)
    found = minimise(model.program, deadline=Deadline())
    assert found.point is not None
    assert simulate(graph, model.schedule(found.point)).valid


def test_a_start_that_no_stages_can_express_is_returned_if_nothing_beats_it() -> None:
    """Making left and right again one after the other fits; a stage in default order would have both at once."""
    ops = (
        Op("left", 1.0, (), (0,)),
        Op("right", 1.0, (), (1,)),
        Op("shrink left", 1.0, (0,), (2,)),
        Op("shrink right", 1.0, (1,), (3,)),
        Op("large", 1.0, (), (4,)),
        Op("shrink large", 1.0, (4,), (5,)),
        Op("join", 1.0, (2, 3, 5), (6,)),
    )
    values = tuple(Value(f"v{i}", size) for i, size in enumerate((5, 5, 3, 3, 11, 1, 1)))
    graph = Graph(ops, values)
    start = Schedule.from_ops(graph, [0, 1, 2, 3, 4, 5, 0, 2, 1, 3, 6])
    problem = Problem(graph, simulate(graph, start).checked().peak_bytes)
    assert fewest_seconds(problem) == simulate(graph, start).seconds
    assert fewest_staged_seconds(problem) is None
    alone, started = solve(problem, "checkmate"), solve(problem, "checkmate", start=start)
    assert (alone.status, alone.bound_scope) == (Status.INFEASIBLE, BoundScope.STAGES)
    assert (started.schedule, started.bound_scope) == (start, BoundScope.STAGES)


def test_a_start_is_improved_on() -> None:
    graph = chain(layers=8)
    problem = Problem(graph, peak_bytes(graph) * 60 // 100)
    optimal = solve(problem, "checkmate")
    assert (optimal.status, optimal.bound_scope) == (Status.OPTIMAL, BoundScope.STAGES)
    again = solve(problem, "checkmate", start=solve(problem, "anneal", iterations=500).schedule)
    assert again.lower_bound_seconds == pytest.approx(optimal.lower_bound_seconds)
    assert any(progress.solver == "start" for progress in again.log)
    best = solve(problem, "checkmate", start=optimal.schedule)
    assert (best.schedule, best.status) == (optimal.schedule, Status.OPTIMAL)


def test_ends_at_the_deadline_with_the_bound_it_has() -> None:
    graph = gpt(layers=2)
    solution = solve(Problem(graph, peak_bytes(graph) * 60 // 100), "checkmate", time_limit=1.0, start=baseline(graph))
    assert solution.status in (Status.NOT_FOUND, Status.FEASIBLE, Status.OPTIMAL)
    assert solution.lower_bound_seconds is not None


def test_bounds_are_reported_as_they_rise() -> None:
    told: list[Progress] = []
    graph = chain(layers=10)
    solve(Problem(graph, peak_bytes(graph) // 2), "checkmate", on_progress=told.append)
    assert any("columns" in progress.message for progress in told)
    assert told[-1].bound_seconds == pytest.approx(told[-1].best_seconds)


def test_refuses_unknown_forms_and_backends_and_large_unpartitioned_programs() -> None:
    with pytest.raises(SolverError, match="did you mean 'partitioned'"):
        Checkmate(form="partitoned")
    with pytest.raises(SolverError, match="unknown backend 'glpk'"):
        Checkmate(backend="glpk")
    graph = chain(layers=MOST_UNPARTITIONED)
    with pytest.raises(SolverError, match="at most 1,500 operators, or 40 for the unpartitioned form"):
        solve(Problem(graph, peak_bytes(graph)), "checkmate", form="unpartitioned")


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"highs"}))
def test_other_backends_agree_with_highs(backend: str) -> None:
    try:
        require_backend(backend)
    except SolverError:
        pytest.skip(f"{_NEEDS[backend]} is not installed (and a licence is needed, for Gurobi); install it to run this")
    graph = chain(layers=6)
    for percent in (80, 60):
        problem = Problem(graph, peak_bytes(graph) * percent // 100)
        ours, theirs = (solve(problem, "checkmate", backend=name) for name in ("highs", backend))
        assert theirs.status is ours.status is Status.OPTIMAL
        assert theirs.lower_bound_seconds == pytest.approx(ours.lower_bound_seconds, rel=1e-6)
    layered = random_layered(nodes=12, seed=2)
    hopeless = Problem(layered, min_budget(layered, "default") - 1)
    assert solve(hopeless, "checkmate", backend=backend).status is Status.INFEASIBLE


def test_a_missing_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematch.solvers.common.backends.find_spec", lambda name: None)
    graph = chain(layers=2)
    with pytest.raises(SolverError, match="needs gurobipy, which is not installed"):
        solve(Problem(graph, peak_bytes(graph)), "checkmate", backend="gurobi")


def test_floating_point_operations_of_a_captured_module_as_costs() -> None:
    """Section 4.10: what is recomputed then is what takes few operations, however long it takes."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())]
    graph = with_flop_costs(rematch.trace(nn.Sequential(*layers), torch.rand(512, 32), device="V100"))
    products = [op for op in graph.ops if "mm" in op.name]
    assert products and min(op.seconds for op in products) == 2 * 512 * 32 * 32
    solution = solve(Problem(graph, peak_bytes(graph) * 9 // 10), "checkmate", time_limit=20.0)
    assert solution.schedule is not None
    extra = simulate(graph, solution.schedule).seconds - graph.baseline_seconds
    assert 0 < extra < min(op.seconds for op in products)
