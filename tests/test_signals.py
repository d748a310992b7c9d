"""Ctrl-C and SIGTERM end a search with the best it has, in a library call too, and leave handlers of the user alone."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

import pytest

import rematch
from rematch.foresight.tradeoff import pareto_of
from rematch.graph.generators import chain
from rematch.signals import ends_process, signals_end
from rematch.solvers import Deadline, OnProgress, Problem, Progress, Solution, Solver, Status, make_solver, solve
from rematch.solvers.max_batch import max_batch
from tests.modules import Net, batch
from tests.problems import peak_bytes

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@dataclass(frozen=True)
class Signalled(Solver):
    """Finds what greedy does, gets a signal, and searches until it is told to stop."""

    number: int = signal.SIGTERM
    name = "signalled"
    paper = ""

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        found = make_solver("greedy").solve(problem, deadline=deadline, on_progress=on_progress)
        os.kill(os.getpid(), self.number)
        for _ in range(200):
            if deadline.expired:
                return found
            threading.Event().wait(0.05)
        raise AssertionError("the search was not told to stop")


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", SIGNALS)
def test_planning_ends_with_the_best_plan(number: int) -> None:
    before = [signal.getsignal(known) for known in SIGNALS]
    model = rematch.remat(Net(), batch(), budget="80%", solver=Signalled(number), progress=False)
    (plan,) = rematch.plans_of(model)
    assert plan.recomputed
    assert "a signal ended the search" in str(plan)
    assert [signal.getsignal(known) for known in SIGNALS] == before
    model(batch()).sum().backward()


@pytest.mark.usefixtures("default_signals")
def test_a_series_of_searches_ends_too() -> None:
    graph = chain(layers=8)
    curve = pareto_of(graph, ["70%", "80%", "90%"], solver=Signalled())
    assert len(curve.points) == 1
    assert "larger budgets were not tried" in curve.notes[-1]
    found = max_batch(graph, 2 * peak_bytes(graph), captured=4, solver=Signalled(), close_enough=0.0)
    assert found.batch >= found.without_recomputation > 0


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_of_the_user_runs_at_once_and_stays(number: int) -> None:
    seen: list[Any] = []

    def own(number: int, frame: Any) -> None:
        seen.append(number)

    signal.signal(number, own)
    graph = chain(layers=4)
    assert solve(Problem(graph, peak_bytes(graph)), Signalled(number)).interrupted
    assert seen == [number]
    assert signal.getsignal(number) is own


@pytest.mark.usefixtures("default_signals")
def test_what_the_user_has_a_handler_raise_is_raised() -> None:
    class Preempted(Exception):
        pass

    def own(number: int, frame: Any) -> None:
        raise Preempted

    signal.signal(signal.SIGTERM, own)
    with pytest.raises(Preempted):
        solve(Problem(chain(layers=4), 2**40), Signalled())
    assert signal.getsignal(signal.SIGTERM) is own


@pytest.mark.usefixtures("default_signals")
def test_what_is_ignored_stays_ignored_and_what_ends_the_process_waits() -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ends_process(lambda number, frame: pytest.fail("the process should live")))
    with signals_end(lambda: stopped.append(1)):
        os.kill(os.getpid(), signal.SIGINT)
        assert not stopped
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("default_signals")
def test_a_handler_that_is_set_during_a_search_stays() -> None:
    def newer(number: int, frame: Any) -> None:
        pass

    def set_another(progress: Progress) -> None:
        signal.signal(signal.SIGTERM, newer)

    solve(Problem(chain(layers=4), 2**40), "anneal", on_progress=set_another, time_limit=1.0)
    with signals_end(lambda: None):
        signal.signal(signal.SIGTERM, newer)
    assert signal.getsignal(signal.SIGTERM) is newer


def test_other_threads_plan_without_listening() -> None:
    found: list[Solution] = []
    graph = chain(layers=4)
    thread = threading.Thread(target=lambda: found.append(solve(Problem(graph, peak_bytes(graph)), "greedy")))
    thread.start()
    thread.join()
    assert found[0].status is Status.FEASIBLE
