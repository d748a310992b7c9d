"""Solving the relaxation, lifting its points and looking more closely where they break, against the ground truth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from rematch.graph import Graph, Op, Schedule, Value, baseline, simulate
from rematch.graph.generators import chain, gpt, random_layered
from rematch.solvers import BoundScope, Deadline, Problem, Progress, Status, solve
from rematch.solvers.common.highs import Minimum, minimise
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.default.epoch_model import EpochModel, Refinement
from rematch.solvers.default.epochs import (
    BrokenPlace,
    Epochs,
    broken_places,
    closest_new_moment,
    first_moments,
    lift,
    more_moments,
    refine,
    relax_epochs,
    search_epochs,
)
from rematch.solvers.incumbent import Incumbent
from tests.examples import examples
from tests.problems import (
    changed_resident,
    check_against_truth,
    fewest_seconds,
    held_for_the_loss,
    peak_bytes,
    tiny_problems,
)
from tests.solvers.default.test_epoch_model import refinements


@given(tiny_problems(), st.integers(1, 8))
@examples(150)
def test_never_claims_more_than_the_truth(problem: Problem, moments: int) -> None:
    check_against_truth(problem, solve(problem, Epochs(moments=moments), time_limit=5.0))


@given(tiny_problems(), st.data())
@examples(150)
def test_a_lifted_point_is_a_schedule_that_costs_what_the_program_says(problem: Problem, data: st.DataObject) -> None:
    """Unless something runs twice in its own first epoch, which may be in vain and is then left out."""
    graph = problem.graph
    model = EpochModel(Precedence.of(graph), problem.budget_bytes, data.draw(refinements(graph)))
    found = minimise(model.program, deadline=Deadline())
    if found.point is None:
        return
    schedule = lift(model, found.point)
    seen = simulate(graph, schedule).checked()
    assert tuple(dict.fromkeys(schedule.ops.tolist())) == graph.order
    extra_percent = 100.0 * (seen.seconds - graph.baseline_seconds) / (graph.baseline_seconds or 1.0)
    assert extra_percent <= found.objective + 1e-5
    assert model.twice or extra_percent == pytest.approx(found.objective, abs=1e-5)


@given(tiny_problems(), st.data())
@examples(100)
def test_a_lifted_schedule_within_the_budget_is_optimal(problem: Problem, data: st.DataObject) -> None:
    model = EpochModel(Precedence.of(problem.graph), problem.budget_bytes, data.draw(refinements(problem.graph)))
    found = minimise(model.program, deadline=Deadline())
    if found.point is None or broken_places(problem, lift(model, found.point)):
        return
    assert simulate(problem.graph, lift(model, found.point)).seconds == pytest.approx(fewest_seconds(problem))


@pytest.mark.parametrize("percent", [90, 70, 50])
def test_proves_the_optimum_of_training_graphs(percent: int) -> None:
    graph = chain(20)
    problem = Problem(graph, peak_bytes(graph) * percent // 100)
    solution = solve(problem, Epochs())
    assert (solution.status, solution.bound_scope) == (Status.OPTIMAL, BoundScope.DEFAULT_ORDER)
    assert solution.schedule is not None
    assert solution.lower_bound_seconds == pytest.approx(simulate(graph, solution.schedule).seconds)
    assert solution.lower_bound_seconds > graph.baseline_seconds


def test_an_impossible_budget_is_proved_so() -> None:
    """x and y cannot be made again, so both are alive beside z."""
    ops = (
        Op("x", 1.0, (), (0,), once=True),
        Op("y", 1.0, (), (1,), once=True),
        Op("z", 1.0, (), (2,)),
        Op("end", 1.0, (0, 1), ()),
    )
    graph = Graph(ops, (Value("x", 4), Value("y", 4), Value("z", 2)))
    solution = solve(Problem(graph, 9), Epochs())
    assert (solution.status, solution.schedule, solution.lower_bound_seconds) == (Status.INFEASIBLE, None, None)


@pytest.mark.parametrize("problem", [held_for_the_loss(), changed_resident()], ids=["loss", "update"])
def test_computes_again_before_the_loss_or_an_update_what_is_needed_after_it(problem: Problem) -> None:
    solution = solve(problem, Epochs(), time_limit=5.0)
    assert fewest_seconds(problem) == 6.0
    assert (solution.status, solution.lower_bound_seconds) == (Status.OPTIMAL, pytest.approx(6.0))


def test_a_budget_that_fits_needs_no_program() -> None:
    graph = chain(20)
    heard: list[Progress] = []
    solution = solve(Problem(graph, peak_bytes(graph)), Epochs(), on_progress=heard.append)
    assert (solution.status, solution.schedule) == (Status.OPTIMAL, baseline(graph))
    assert not any("columns" in progress.message for progress in heard)


def test_the_same_problem_twice_gives_the_same_schedule() -> None:
    graph = gpt(layers=2)
    problem = Problem(graph, peak_bytes(graph) * 60 // 100)
    first, second = (solve(problem, Epochs()) for _ in range(2))
    assert first.schedule is not None
    assert first.schedule == second.schedule


def test_schedules_over_the_budget_are_handed_on() -> None:
    """Local search repairs them; so they are valid, over the budget, and none is offered as a solution."""
    graph = gpt(layers=2)
    problem = Problem(graph, peak_bytes(graph) * 40 // 100)
    lifted: list[Schedule] = []
    incumbent = Incumbent(problem, Deadline(20.0), lambda progress: None)
    search_epochs(incumbent, moments=1, on_lift=lifted.append)
    assert lifted
    assert all(peak_bytes(graph, schedule) > problem.budget_bytes for schedule in lifted)


@given(tiny_problems())
@examples(100)
def test_the_linear_relaxation_never_claims_more_than_the_truth(problem: Problem) -> None:
    incumbent = Incumbent(problem, Deadline(5.0), lambda progress: None)
    relax_epochs(incumbent)
    check_against_truth(problem, incumbent.solution("epochs"))


def test_the_linear_relaxation_bounds_and_hands_on_what_nearly_keeps_the_budget() -> None:
    graph = gpt(layers=24)
    problem = Problem(graph, peak_bytes(graph) // 2)
    lifted: list[Schedule] = []
    incumbent = Incumbent(problem, Deadline(60.0), lambda progress: None)
    relax_epochs(incumbent, on_lift=lifted.append)
    found = solve(problem, "anneal", iterations=200_000).schedule
    assert found is not None
    best_percent = 100.0 * (simulate(graph, found).seconds / graph.baseline_seconds - 1.0)
    assert 0.9 * best_percent < incumbent.bound_percent <= best_percent + 1e-5
    assert lifted
    assert all(1.0 < peak_bytes(graph, schedule) / problem.budget_bytes <= 1.05 for schedule in lifted)


def test_the_linear_relaxation_ends_when_the_incumbent_is_close() -> None:
    graph = gpt(layers=8)
    problem = Problem(graph, peak_bytes(graph) // 2)
    best = solve(problem, "anneal", iterations=200_000).schedule
    assert best is not None
    heard: list[Progress] = []
    incumbent = Incumbent(problem, Deadline(60.0), heard.append)
    incumbent.offer(best, "known")
    relax_epochs(incumbent)
    assert sum("linear relaxation" in progress.message for progress in heard) == 1


def test_a_program_too_large_for_whole_numbers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rematch.solvers.default.epochs._MOST_COLUMNS", 100)
    graph = gpt(layers=4)
    heard: list[Progress] = []
    incumbent = Incumbent(Problem(graph, peak_bytes(graph) // 2), Deadline(60.0), heard.append)
    search_epochs(incumbent)
    assert [progress.solver for progress in heard] == ["epochs"]
    assert "columns are too many" in heard[0].message


def test_first_moments_lie_where_memory_is_over_the_budget_and_take_in_the_peak() -> None:
    graph = chain(20)
    problem = Problem(graph, peak_bytes(graph) // 2)
    schedule = baseline(graph)
    memory = simulate(graph, schedule).timeline_bytes[schedule.steps >= 0]
    for count in (1, 3, 6):
        moments = first_moments(problem, count)
        assert len(moments) == count
        assert list(moments) == sorted(set(moments))
        assert all(memory[moment] > problem.budget_bytes for moment in moments)
        assert int(memory.argmax()) in moments
    assert first_moments(Problem(graph, peak_bytes(graph)), 6) == ()


def test_broken_places_are_told_worst_first_with_their_stage() -> None:
    """x (4) is made, used for y (1), gone beside z (8), made again before it is read with z: 4 + 8 + 1 there."""
    ops = (Op("x", 1.0, (), (0,)), Op("y", 1.0, (0,), (1,)), Op("z", 1.0, (1,), (2,)), Op("w", 1.0, (0, 2), (3,)))
    graph = Graph(ops, (Value("x", 4), Value("y", 1), Value("z", 8), Value("w", 1)))
    schedule = Schedule.from_ops(graph, [0, 1, 2, 0, 3])
    assert broken_places(Problem(graph, 13), schedule) == []
    assert broken_places(Problem(graph, 8), schedule) == [
        BrokenPlace(5, 3, 3, True),
        BrokenPlace(4, 3, 0, False),
        BrokenPlace(1, 2, 2, True),
    ]


def test_refines_the_worst_place_by_a_moment_and_others_by_rows_before_moments() -> None:
    worst, other, again = BrokenPlace(9, 4, 7, True), BrokenPlace(7, 8, 8, True), BrokenPlace(5, 6, 2, False)
    once = refine(Refinement((1,)), [worst, other, again], 10)
    assert once == Refinement((1, 4), stages=frozenset({8}), repeats=frozenset({(2, 6)}))
    twice = refine(once, [again, other], 10)
    assert twice == Refinement((1, 4, 6, 8), repeats=once.repeats)
    assert refine(twice, [], 10) == twice


@pytest.mark.parametrize(
    ("moments", "stage", "expected"),
    [({1, 5}, 3, [3]), ({1, 3}, 3, [2]), ({2, 3}, 3, [1]), ({0}, 0, [1]), ({1}, 4, [3]), ({0, 1, 2, 3}, 2, [])],
)
def test_the_closest_new_moment(moments: set[int], stage: int, expected: list[int]) -> None:
    assert closest_new_moment(moments, stage, 4) == expected


@pytest.mark.parametrize(
    ("tight", "broken", "idle", "expected"),
    [
        ([], [], set(), (500,)),
        ([], [500, 510, 900], {900}, (500, 510)),  # all that is not idle is close: the worst
        ([], [700, 710, 720, 300], set(), (300, 500, 700)),  # one of a crowd
        ([100, 101, 110, 120], [], set(), (100, 110, 120, 500)),  # which do not come in crowds
        ([100, 110], [700, 300], set(), (100, 110, 500, 700)),  # in turns
    ],
)
def test_new_moments_of_the_relaxation(
    tight: list[int], broken: list[int], idle: set[int], expected: tuple[int, ...]
) -> None:
    places = [[BrokenPlace(1, stage, stage, True) for stage in stages] for stages in (tight, broken)]
    assert more_moments((500,), *places, idle, 1000) == expected


def test_a_stopped_deadline_ends_the_search_with_a_valid_bound() -> None:
    graph = gpt(layers=4)
    problem = Problem(graph, peak_bytes(graph) * 40 // 100)
    deadline = Deadline()
    incumbent = Incumbent(
        problem, deadline, lambda progress: deadline.stop() if "columns" in progress.message else None
    )
    search_epochs(incumbent)
    best = solve(problem, "anneal", iterations=50_000).schedule
    assert best is not None
    assert incumbent.schedule is None
    assert graph.baseline_seconds <= incumbent.bound_seconds <= simulate(graph, best).seconds
    assert not math.isinf(incumbent.bound_seconds)


def test_the_linear_relaxation_chooses_moments_at_which_memory_has_a_price() -> None:
    """With them alone the bound is the same, and far above that of moments spread over the graph."""
    graph = random_layered(60, seed=1)
    problem = Problem(graph, peak_bytes(graph) * 8 // 10)
    precedence = Precedence.of(graph)

    def relaxed(refinement: Refinement) -> tuple[EpochModel, Minimum]:
        model = EpochModel(precedence, problem.budget_bytes, refinement)
        return model, minimise(model.program, deadline=Deadline(), relaxed=True)

    incumbent = Incumbent(problem, Deadline(60.0), lambda progress: None)
    chosen = relax_epochs(incumbent)
    model, found = relaxed(Refinement(chosen, suffixes=True))
    assert found.bound == pytest.approx(incumbent.bound_percent)
    assert found.prices is not None
    assert (abs(found.prices[model.memory_rows]) > 1e-6).all()
    assert found.bound > 2.0 * relaxed(Refinement(first_moments(problem, 6)))[1].bound

    heard: list[Progress] = []
    search = Incumbent(problem, Deadline(3.0), heard.append)
    search.raise_bound(found.bound, "known")
    search_epochs(search, chosen=chosen)
    rounds = [progress.message for progress in heard if "rows" in progress.message]
    assert rounds[0].startswith(f"{len(chosen)} moments, 0 stages, 0 repeats and suffixes")
