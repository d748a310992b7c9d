"""Rounding of the relaxation: never below the truth, never over budget, and near the optimum on training graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rematch.errors import SolverError
from rematch.graph import Graph, Op, Schedule, Value, simulate
from rematch.graph.generators import FAMILIES, chain
from rematch.graph.matrices import to_matrices
from rematch.solvers import BoundScope, Deadline, Problem, Status, solve
from rematch.solvers.checkmate.rounding import Rounding, two_phase_roundings, without_spare_runs
from rematch.solvers.common.policy import schedule_keeping
from tests.examples import examples
from tests.problems import peak_bytes, tiny_problems
from tests.staged import check_against_staged_truth, fewest_staged_seconds
from tests.strategies import graphs, sequences


@given(tiny_problems(), st.booleans(), st.booleans(), st.sampled_from((None, 0.0, 0.1)))
@examples(150)
def test_never_claims_more_than_the_truth(
    problem: Problem, randomized: bool, prune: bool, epsilon: float | None
) -> None:
    solver = Rounding(epsilon=epsilon, randomized=randomized, samples=5, prune=prune)
    check_against_staged_truth(problem, solve(problem, solver, time_limit=5.0), fewest_staged_seconds(problem))


@pytest.mark.parametrize(("family", "options"), [("chain", {"layers": 12}), ("feed_forward", {"layers": 6})])
@pytest.mark.parametrize("percent", [80, 60])
def test_is_near_the_optimum(family: str, options: dict[str, int], percent: int) -> None:
    graph = FAMILIES[family](**options)
    problem = Problem(graph, peak_bytes(graph) * percent // 100)
    best, rounded = solve(problem, "checkmate"), solve(problem, "rounding")
    assert best.schedule is not None
    assert rounded.schedule is not None
    assert rounded.bound_scope is BoundScope.STAGES
    ratio = simulate(graph, rounded.schedule).seconds / simulate(graph, best.schedule).seconds
    assert 1.0 - 1e-9 <= ratio <= 1.06


def test_randomized_rounding_depends_on_its_seed_only() -> None:
    graph = chain(layers=14)
    problem = Problem(graph, peak_bytes(graph) * 45 // 100)
    same = [solve(problem, Rounding(randomized=True, epsilon=0.1, prune=False, seed=1)).schedule for _ in range(2)]
    assert same[0] == same[1]


def test_appendix_d_compares_roundings_of_one_relaxation() -> None:
    """Of a chain at 0.9 of its budget: rounded at a half it keeps the budget and costs less than at random."""
    graph = chain(layers=12)
    budget = peak_bytes(graph) * 7 // 10
    found = two_phase_roundings(Problem(graph, budget), samples=20, deadline=Deadline())
    assert found is not None
    at_half, at_random = simulate(graph, found[0]), [simulate(graph, schedule) for schedule in found[1]]
    assert at_half.valid and all(seen.valid for seen in at_random)
    assert at_half.peak_bytes <= budget
    assert at_half.seconds < np.mean([seen.seconds for seen in at_random])
    assert two_phase_roundings(Problem(graph, peak_bytes(graph) // 20), deadline=Deadline()) is None


@pytest.mark.parametrize("percent", [75, 60, 45])
def test_searching_for_epsilon_is_worth_it(percent: int) -> None:
    graph = chain(layers=14)
    problem = Problem(graph, peak_bytes(graph) * percent // 100)
    searched, fixed = (solve(problem, Rounding(epsilon=epsilon)).schedule for epsilon in (None, 0.1))
    assert searched is not None
    assert fixed is None or simulate(graph, searched).seconds <= simulate(graph, fixed).seconds


def test_an_impossible_budget_is_proved_to_be_so() -> None:
    graph = chain(layers=6)
    solution = solve(Problem(graph, graph.largest_op_bytes - 1), "rounding")
    assert (solution.status, solution.bound_scope) == (Status.INFEASIBLE, BoundScope.ANY_ORDER)


def test_epsilon_is_a_share() -> None:
    with pytest.raises(SolverError, match=r"epsilon=1.0 is not in \[0, 1\)"):
        Rounding(epsilon=1.0)


@given(graphs(), st.data())
@examples(200)
def test_any_policy_leads_to_a_schedule(graph: Graph, data: st.DataObject) -> None:
    stages = len(graph.ops) + 1
    bits = data.draw(st.lists(st.booleans(), min_size=stages * len(graph.values), max_size=stages * len(graph.values)))
    kept = np.array(bits, dtype=np.bool_).reshape(stages, len(graph.values))
    schedule = schedule_keeping(graph, kept)
    assert simulate(graph, schedule).valid
    assert tuple(dict.fromkeys(schedule.ops.tolist())) == graph.order


@given(tiny_problems(), st.data())
@examples(100)
def test_the_optimal_r_computes_no_more_than_another_schedule_with_that_s(
    problem: Problem, data: st.DataObject
) -> None:
    """Take S of some schedule of stages: what is made from S alone keeps its peak in check and is no slower."""
    graph = problem.graph
    staged = schedule_keeping(graph, data.draw(_policies(graph)))
    S = to_matrices(graph, staged).S
    kept = np.zeros((len(graph.ops) + 1, len(graph.values)), dtype=np.bool_)
    kept[-1] = graph.arrays.target | graph.arrays.held
    kept[: len(S)] = S
    again = schedule_keeping(graph, kept)
    assert simulate(graph, again).seconds <= simulate(graph, staged).seconds + 1e-9
    assert (to_matrices(graph, again).S[: len(S)] <= S).all()


def _policies(graph: Graph) -> st.SearchStrategy[np.ndarray]:
    shape = (len(graph.ops) + 1, len(graph.values))
    return st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).random(shape) < 0.5)


def test_keeping_nothing_computes_everything_anew_in_every_stage() -> None:
    values = tuple(Value(f"v{i}", 1) for i in range(3))
    graph = Graph(tuple(Op(f"o{i}", 1.0, (i - 1,) if i else (), (i,)) for i in range(3)), values)
    assert schedule_keeping(graph, np.zeros((4, 3), dtype=np.bool_)).ops.tolist() == [0, 0, 1, 0, 1, 2]
    assert schedule_keeping(graph, np.ones((4, 3), dtype=np.bool_)).ops.tolist() == [0, 1, 2]


@given(tiny_problems(), st.data())
@examples(100)
def test_pruning_keeps_the_budget_and_leaves_nothing_in_vain(problem: Problem, data: st.DataObject) -> None:
    graph = problem.graph
    schedule = Schedule.from_ops(graph, data.draw(sequences(graph)))
    problem = Problem(graph, simulate(graph, schedule).peak_bytes)
    shorter = without_spare_runs(problem, schedule, Deadline())
    seen = simulate(graph, shorter).checked()
    assert seen.peak_bytes <= problem.budget_bytes
    assert seen.seconds <= simulate(graph, schedule).seconds
    assert without_spare_runs(Problem(graph, 10**9), schedule, Deadline()).ops.tolist() == list(
        dict.fromkeys(schedule.ops.tolist())
    )
