"""The hunt for schedules that CUDA's allocator has places for."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from rematch.graph import Compute, Fetch, Free, Graph, Link, Offload, Op, Schedule, Value, baseline, simulate
from rematch.planning import placing, planner
from rematch.planning.placing import Hunt, with_what_fits
from rematch.planning.plan import Plan
from rematch.planning.settings import Settings
from rematch.solvers import Deadline, OnProgress, Problem, Solution, Solver, Status
from rematch.solvers.base import make_solver, solve
from tests.planning.test_cuda_allocator import MIB, chain

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def few_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that the clock never ends a round."""
    monkeypatch.setattr(placing, "_MOVES", (2000, 4000))
    monkeypatch.setattr(placing, "_ROUNDS", 4)
    monkeypatch.setattr(planner, "_MINIMUM_SECONDS", 1.0)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return chain(16, (70, 45, 25))


@pytest.fixture(scope="module")
def budget_bytes(graph: Graph) -> int:
    return int(0.6 * simulate(graph, baseline(graph)).peak_bytes)


@dataclass
class Asked(Solver):
    """Greedy, with a memory of the budgets and times it was given and of what it found."""

    name = "asked"
    requires = "nothing"
    budgets: list[int] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    found: list[Schedule] = field(default_factory=list)
    stopped_at: int = 99  # the search that a signal comes in

    def applicable(self, problem: Problem) -> bool:
        return True

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        self.budgets.append(problem.budget_bytes)
        self.limits.append(deadline.remaining)
        if len(self.budgets) == self.stopped_at:
            signal.raise_signal(signal.SIGINT)
        solution = make_solver("greedy").solve(problem, deadline=Deadline(), on_progress=on_progress)
        assert solution.schedule is not None
        self.found.append(solution.schedule)
        return solution


Suffices = Callable[[Schedule], bool]


def planned(
    graph: Graph,
    budget_bytes: int,
    solver: Solver,
    suffices: Suffices,
    monkeypatch: pytest.MonkeyPatch,
    adapted: Callable[[Schedule], Schedule] | None = None,
    needed: float = 1.05,
) -> Plan:
    """A plan for a card whose allocator has places for what `suffices`."""

    class Scattered:
        def __init__(self, *_: object) -> None:
            pass

        def needed_bytes(self, graph: Graph, schedule: Schedule) -> int:
            return int((0.99 if suffices(schedule) else needed) * budget_bytes)

        def suffice(self, graph: Graph, schedule: Schedule, cap_bytes: int) -> bool:
            return suffices(schedule)

    monkeypatch.setattr(planner, "Places", Scattered)
    settings = Settings(budget=budget_bytes, solver=solver, time_limit=100.0, progress=False)
    return planner.Planner(settings).plan(graph, CUDA, engine="tape", adapted=adapted)


def solution(schedule: Schedule) -> Solution:
    return Solution(schedule, Status.FEASIBLE, "given")


def greedy(graph: Graph, budget_bytes: int) -> Solution:
    return solve(Problem(graph, budget_bytes), "greedy")


def is_lucky(schedule: Schedule) -> bool:
    """Whether the allocator has places for a schedule, which is a matter of luck."""
    return zlib.crc32(schedule.steps.tobytes()) % 3 == 0


def test_a_schedule_near_those_that_searches_find_may_have_a_place_where_none_of_them_has(
    graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = Asked()
    plan = planned(graph, budget_bytes, solver, lambda schedule: schedule not in solver.found, monkeypatch)
    first, *others = (simulate(graph, schedule).seconds for schedule in solver.found)
    assert plan.schedule not in solver.found
    assert plan.figures.solver == "greedy, then a search for places"
    assert plan.figures.peak_bytes is not None and plan.figures.peak_bytes <= plan.figures.budget_bytes
    assert simulate(graph, plan.schedule).seconds < min(others, default=2 * first)


def test_the_fastest_of_those_that_have_a_place_is_taken(graph: Graph, budget_bytes: int) -> None:
    first, fast, slow, slower = (greedy(graph, int(share * budget_bytes)) for share in (1.0, 0.85, 0.75, 0.65))
    judged: list[Schedule] = []

    def seconds_of(schedule: Schedule) -> float | None:
        judged.append(schedule)
        return None if schedule == first.schedule else simulate(graph, schedule).seconds

    found = iter((slow, fast, slower))
    hunt = Hunt(Problem(graph, budget_bytes), first, lambda *_: next(found), seconds_of, time_limit=9.0, near=False)
    hunt.run()
    assert hunt.best is fast
    assert judged == [first.schedule, slow.schedule, fast.schedule], "slower ones need not be judged"


def test_of_those_that_are_made_of_one_the_fastest_that_has_a_place_is_taken(
    graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "_ROUNDS", 0)
    monkeypatch.setattr(placing, "_MOST_DROPPED", 0)
    lean = greedy(graph, int(0.7 * budget_bytes))
    problem = Problem(graph, budget_bytes)
    filled_up_to = (budget_bytes * part // 100 for part in range(70, 101))
    room_bytes = int(0.9 * budget_bytes)
    made = [with_what_fits(replace(problem, budget_bytes=up_to), lean.schedule) for up_to in filled_up_to]  # type: ignore[arg-type]
    fitting = [simulate(graph, one).seconds for one in made if simulate(graph, one).peak_bytes <= room_bytes]

    def judged(schedule: Schedule) -> float | None:
        seen = simulate(graph, schedule)
        return seen.seconds if seen.peak_bytes <= room_bytes else None

    hunt = Hunt(problem, lean, lambda *_: None, judged, time_limit=9.0)
    hunt.run()
    assert hunt.best is not None and hunt.best.schedule is not None
    assert simulate(graph, hunt.best.schedule).seconds <= min(fitting) < simulate(graph, lean.schedule).seconds  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_plan(graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (planned(graph, budget_bytes, Asked(), is_lucky, monkeypatch) for _ in range(2))
    assert one.schedule == other.schedule


def test_local_search_makes_others_of_what_was_found_the_same_for_the_same_seed(
    graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = greedy(graph, budget_bytes)

    def judged(seed: int) -> list[bytes]:
        tried: list[bytes] = []
        hunt = Hunt(
            Problem(graph, budget_bytes),
            first,
            lambda *_: None,
            lambda schedule: tried.append(schedule.steps.tobytes()),  # type: ignore[func-returns-value]
            time_limit=100.0,
            excess=0.1,
            seed=seed,
        )
        hunt.run()
        assert len(set(tried)) == len(tried), "none is judged twice"
        return tried

    one, same, other = judged(1), judged(1), judged(2)
    assert one == same and one != other
    monkeypatch.setattr(placing, "_ROUNDS", 0)
    assert set(judged(1)) < set(one)


def test_all_searches_for_places_together_have_less_than_three_times_the_limit(
    graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[float] = []
    found_range = planner.budget_range

    def budget_range(graph: Graph, seconds: float) -> planner.BudgetRange:
        asked_for.append(seconds)
        return found_range(graph, min(seconds, 0.5))

    monkeypatch.setattr(planner, "budget_range", budget_range)
    monkeypatch.setattr(planner, "_MINIMUM_SECONDS", 1e6)
    monkeypatch.setattr(planner, "_TIGHTEST", {})
    for needed in (1.05, 1.4):  # enough is never found; or not within what is left to the allocator at most
        solver = Asked()
        plan = planned(graph, budget_bytes, solver, lambda schedule: False, monkeypatch, needed=needed)
        first, *others = solver.limits
        assert len(others) >= 3 and max(others) < 0.5 * first
        rest = placing._EXPLORING * (len(others) + 1) + placing._DROPPING
        assert sum(others) + rest * first < 3.0 * first
        assert plan.schedule in solver.found or plan.figures.solver == planner.SMALLEST
    assert len(asked_for) == 1 and asked_for[0] <= 50.0


def test_nothing_more_is_searched_for_once_a_schedule_with_a_place_is_as_fast(
    graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "_CLOSE", 1.0)
    solver = Asked()
    planned(graph, budget_bytes, solver, lambda schedule: schedule not in solver.found, monkeypatch)
    assert len(solver.found) == 1


def test_a_signal_ends_the_hunt_and_the_plan_says_so(
    graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stopped_at in (1, 2):
        solver = Asked(stopped_at=stopped_at)
        plan = planned(graph, budget_bytes, solver, lambda schedule: False, monkeypatch)
        assert len(solver.found) == stopped_at
        assert any("a signal ended the search" in note for note in plan.notes)
        assert plan.schedule in solver.found


def test_a_schedule_has_a_place_only_as_it_is_run(
    graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    solver = Asked()

    def as_run(schedule: Schedule) -> Schedule:
        return baseline(graph) if schedule in solver.found else schedule

    plan = planned(graph, budget_bytes, solver, lambda schedule: True, monkeypatch, adapted=as_run)
    assert plan.figures.peak_bytes is not None and plan.figures.peak_bytes <= plan.figures.budget_bytes
    assert "more than the budget" not in caplog.text
    assert plan.figures.solver.endswith("then a search for places")


@pytest.mark.parametrize(("room_ms", "left_out"), [(2.5, 1), (3.5, 2), (5.5, 3)])
def test_single_recomputations_are_left_out_where_there_is_room(
    room_ms: float, left_out: int, graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bytes there is room for all of them, by places for those of few operators only: dearest first."""
    monkeypatch.setattr(placing, "_ROUNDS", 0)
    fast, slow = (greedy(graph, int(share * budget_bytes)) for share in (1.0, 0.8))
    assert slow.schedule is not None
    monkeypatch.setattr(placing, "with_what_fits", lambda problem, schedule: schedule)
    slow_seconds = simulate(graph, slow.schedule).seconds

    def judged(schedule: Schedule) -> float | None:
        seconds = simulate(graph, schedule).seconds
        return seconds if slow_seconds - room_ms * 1e-3 < seconds else None  # an operator takes 1 or 2 ms

    hunt = Hunt(Problem(graph, budget_bytes), fast, lambda *_: slow, judged, time_limit=100.0)
    hunt.run()
    assert hunt.best is not None and hunt.best.schedule is not None
    assert simulate(graph, hunt.best.schedule).seconds == pytest.approx(slow_seconds - int(room_ms) * 1e-3)
    assert len(hunt.best.schedule.ops) == len(slow.schedule.ops) - left_out


def test_where_a_smaller_budget_is_too_small_the_next_is_halfway_back(graph: Graph, budget_bytes: int) -> None:
    asked: list[float] = []

    def searched(problem: Problem, seconds: float) -> Solution | None:
        asked.append(problem.budget_bytes / budget_bytes)
        return None if len(asked) == 1 else solution(baseline(graph))

    problem = Problem(graph, budget_bytes)
    Hunt(problem, solution(baseline(graph)), searched, lambda _: None, time_limit=9.0, excess=0.12, near=False).run()
    assert asked == pytest.approx([0.96, 0.98, 0.96, 0.94, 0.92])


def test_with_pins_only_what_was_searched_for_is_judged(graph: Graph, budget_bytes: int) -> None:
    problem, least = Problem(graph, budget_bytes), greedy(graph, budget_bytes)
    judged: list[Schedule] = []
    hunt = Hunt(problem, least, lambda *_: least, judged.append, time_limit=9.0, near=False)  # type: ignore[arg-type]
    hunt.run()
    assert judged == [least.schedule]


def test_nothing_is_made_of_a_schedule_that_moves_values() -> None:
    values = tuple(Value(name, 60 * MIB) for name in ("a", "b", "c"))
    ops = (Op("make a", 1.0, (), (0,)), Op("make b", 1.0, (), (1,)), Op("make c", 1.0, (0,), (2,)))
    graph = Graph(ops, values, link=Link(1e9, 1e9, host_bytes=2**30))
    away = Schedule.of([Compute(0), Offload(0), Free(0), Compute(1), Free(1), Fetch(0), Compute(2), Compute(1)])
    for seconds in (None, 100.0):
        tried: list[Schedule] = []

        def judged(schedule: Schedule, seconds: float | None = seconds, tried: list[Schedule] = tried) -> float | None:
            tried.append(schedule)
            return seconds

        Hunt(Problem(graph, 500 * MIB), solution(away), lambda *_: None, judged, time_limit=9.0).run()
        assert tried == [away]


@pytest.mark.parametrize("ends", ["by a signal", "in time"])
def test_nothing_more_is_judged_once_the_hunt_has_ended(
    ends: str, graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Schedule] = []

    def judged(schedule: Schedule) -> None:
        tried.append(schedule)
        hunt.interrupt()

    monkeypatch.setattr(placing, "TOGETHER", 0.0 if ends == "in time" else 1.0)
    hunt = Hunt(
        Problem(graph, budget_bytes), greedy(graph, budget_bytes), lambda *_: None, judged, time_limit=9.0, excess=0.1
    )
    hunt.run()
    assert len(tried) == (ends == "by a signal") and hunt.interrupted is bool(tried)


def test_a_signal_between_searches_ends_the_hunt_too(
    graph: Graph, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Schedule] = []

    def suffices(schedule: Schedule) -> bool:
        tried.append(schedule)
        if len(tried) == 3:  # the first is judged before the hunt
            signal.raise_signal(signal.SIGINT)
        return False

    solver = Asked()
    plan = planned(graph, budget_bytes, solver, suffices, monkeypatch)
    assert any("a signal ended the search" in note for note in plan.notes)
    assert len(solver.found) == 1 and plan.schedule in solver.found
