"""What the searches share: which schedules and bounds it takes, and when it says that the search is over."""

from __future__ import annotations

import math
import random
import threading

import pytest

from rematch.graph import Graph, Op, Schedule, Value, baseline, simulate
from rematch.solvers import BoundScope, Deadline, Problem, Progress, Status
from rematch.solvers.incumbent import Incumbent
from tests.problems import peak_bytes

# a and b are made, b is read, then a: computing a again lowers the peak from 10 to 7 and costs 25 %.
GRAPH = Graph(
    ops=(
        Op("make a", 1.0, (), (0,)),
        Op("make b", 1.0, (), (1,)),
        Op("read b", 1.0, (1,), (2,)),
        Op("read a", 1.0, (0, 2), (3,)),
    ),
    values=(Value("a", 5), Value("b", 4), Value("c", 1), Value("d", 1)),
    targets=frozenset({3}),
)
AGAIN = Schedule.from_ops(GRAPH, [0, 1, 2, 0, 3])
TWICE_AGAIN = Schedule.from_ops(GRAPH, [0, 1, 2, 0, 0, 3])
BROKEN = Schedule(AGAIN.steps[1:])  # frees a before it is made


def incumbent(
    budget: int = 9, *, deadline: Deadline | None = None, heard: list[Progress] | None = None, **options: float
) -> Incumbent:
    log: list[Progress] = [] if heard is None else heard
    return Incumbent(Problem(GRAPH, budget), deadline or Deadline(), log.append, **options)


def test_the_example_is_what_it_says() -> None:
    assert (peak_bytes(GRAPH), peak_bytes(GRAPH, AGAIN)) == (10, 7)
    assert (GRAPH.baseline_seconds, simulate(GRAPH, AGAIN).seconds) == (4.0, 5.0)
    assert not simulate(GRAPH, BROKEN).valid


def test_takes_only_valid_faster_schedules_within_the_budget() -> None:
    best = incumbent()
    assert not best.offer(baseline(GRAPH), "over the budget")
    assert not best.offer(BROKEN, "broken")
    assert (best.schedule, best.seconds, best.overhead_percent) == (None, math.inf, math.inf)
    assert best.offer(TWICE_AGAIN, "slow")
    assert best.offer(AGAIN, "faster")
    assert not best.offer(AGAIN, "no faster")
    assert not best.offer(TWICE_AGAIN, "slower")
    assert (best.schedule, best.seconds) == (AGAIN, 5.0)
    assert best.overhead_percent == pytest.approx(25.0)


def test_a_schedule_that_fills_the_budget_exactly_is_taken() -> None:
    assert incumbent(peak_bytes(GRAPH, AGAIN)).offer(AGAIN, "exact")
    assert not incumbent(peak_bytes(GRAPH, AGAIN) - 1).offer(AGAIN, "one byte over")


def test_the_bound_only_rises_and_never_above_the_schedule() -> None:
    best = incumbent()
    assert best.bound_percent == 0.0
    best.raise_bound(10.0, "lp")
    best.raise_bound(5.0, "weaker")
    assert best.bound_percent == pytest.approx(10.0)
    best.offer(AGAIN, "search")
    best.raise_bound(40.0, "cut-off above the schedule")
    assert best.bound_seconds == best.seconds == 5.0


def test_is_closed_when_the_bound_meets_the_schedule() -> None:
    best = incumbent()
    best.offer(AGAIN, "search")
    best.raise_bound(24.9, "lp")
    assert not best.closed
    assert not best.over
    best.raise_bound(25.0, "milp")
    assert best.closed
    assert best.over
    solution = best.solution("test")
    assert (solution.status, solution.schedule) == (Status.OPTIMAL, AGAIN)
    assert (solution.lower_bound_seconds, solution.bound_scope) == (5.0, BoundScope.DEFAULT_ORDER)


def test_bounds_and_proofs_are_of_the_scope_they_were_made_for() -> None:
    best = incumbent(scope=BoundScope.STAGES)
    best.raise_bound(10.0, "milp")
    assert best.solution("test").bound_scope is BoundScope.STAGES
    best.prove_infeasible("milp")
    assert best.solution("test").bound_scope is BoundScope.STAGES
    best.prove_infeasible("largest operator", BoundScope.ANY_ORDER)
    assert best.solution("test").bound_scope is BoundScope.ANY_ORDER


def test_what_needs_no_recomputation_is_optimal_in_any_order() -> None:
    best = incumbent(10)
    best.offer(baseline(GRAPH), "noremat")
    solution = best.solution("test")
    assert best.closed
    assert (solution.status, solution.bound_scope) == (Status.OPTIMAL, BoundScope.ANY_ORDER)
    assert solution.lower_bound_seconds == GRAPH.baseline_seconds


def test_a_gap_ends_the_search_but_proves_nothing() -> None:
    best = incumbent(gap=10.0)
    best.offer(AGAIN, "search")
    assert not best.over
    assert best.reason == ""
    best.raise_bound(16.0, "lp")
    assert best.over
    assert best.reason == "good enough: within 9.00 points of the bound"
    solution = best.solution("test")
    assert solution.status is Status.FEASIBLE
    assert solution.lower_bound_seconds == pytest.approx(4.64)


class ClockAt(Deadline):
    """A deadline whose clock is moved by hand."""

    now = 0.0

    @property
    def elapsed(self) -> float:
        return self.now


def test_what_is_left_to_gain_is_weighed_against_the_wait() -> None:
    """One second is left to gain in each of 10,000 steps; half of the time without progress, a tenth of it."""
    for gap in (0.1, 0.0):
        clock = ClockAt()
        best = incumbent(gap=gap, deadline=clock)
        clock.now = 600.0
        best.offer(AGAIN, "search")
        clock.now = 1_199.0
        assert not best.over
        clock.now = 1_201.0
        assert best.over == (gap > 0.0)
        assert best.reason.startswith("good enough: the 25.00 points") == (gap > 0.0)


def test_a_proof_that_there_is_no_schedule() -> None:
    best = incumbent(5)
    assert not best.closed
    best.prove_infeasible("milp")
    solution = best.solution("test")
    assert best.over
    assert (solution.status, solution.schedule, solution.lower_bound_seconds) == (Status.INFEASIBLE, None, None)


def test_nothing_found_and_nothing_proved_is_not_found() -> None:
    deadline = Deadline()
    best = incumbent(5, deadline=deadline)
    assert not best.over
    deadline.stop()
    assert best.over
    assert not best.closed
    assert best.solution("test").status is Status.NOT_FOUND


def test_gives_up_early_only_without_a_schedule() -> None:
    best = incumbent(give_up_seconds=-1.0)
    assert best.over
    best.offer(AGAIN, "search")
    assert not best.over


def test_tells_what_happened_and_by_whom() -> None:
    heard: list[Progress] = []
    best = incumbent(heard=heard)
    best.raise_bound(5.0, "epochs")
    best.offer(AGAIN, "anneal")
    best.offer(TWICE_AGAIN, "not better, so not told")
    best.tell("auto", "hello")
    assert [progress.solver for progress in heard] == ["epochs", "anneal", "auto"]
    assert [progress.best_seconds for progress in heard] == [None, 5.0, 5.0]
    assert all(progress.bound_seconds == pytest.approx(4.2) for progress in heard)
    assert heard[-1].message == "hello"


def test_a_graph_without_time_can_be_closed() -> None:
    graph = Graph((Op("a", 0.0, (), (0,)), Op("b", 0.0, (0,), ())), (Value("x", 1),))
    best = Incumbent(Problem(graph, 1), Deadline(), lambda progress: None)
    assert best.offer(baseline(graph), "noremat")
    assert best.closed
    assert best.solution("test").status is Status.OPTIMAL


def test_threads_that_offer_and_prove_at_the_same_time_leave_the_best_of_all() -> None:
    """Each thread offers slower and slower schedules and weaker and weaker bounds, in its own random order."""
    schedules = [Schedule.from_ops(GRAPH, [0, 1, 2, *[0] * times, 3]) for times in range(1, 30)]
    heard: list[Progress] = []
    best = incumbent(heard=heard)
    ready = threading.Barrier(4)

    def work(seed: int) -> None:
        order = list(range(len(schedules)))
        random.Random(seed).shuffle(order)
        ready.wait()
        for index in order:
            best.offer(schedules[index], str(seed))
            best.raise_bound(24.0 - index / 10, str(seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (best.schedule, best.seconds) == (schedules[0], 5.0)
    assert best.bound_percent == pytest.approx(24.0)
    told = [progress.best_seconds for progress in heard if progress.best_seconds is not None]
    assert told == sorted(told, reverse=True)
