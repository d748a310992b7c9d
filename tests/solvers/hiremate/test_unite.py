"""Recomputations of several proposals in one schedule."""

from __future__ import annotations

import pytest

from rematch.graph import Schedule
from rematch.graph.generators import unet
from rematch.solvers import Deadline, Problem, solve
from rematch.solvers.base import ignore_progress
from rematch.solvers.common.forward_pass import forward_ops
from rematch.solvers.common.pruning import offer_in_default_order
from rematch.solvers.hiremate.unite import unite
from rematch.solvers.incumbent import Incumbent
from tests.problems import peak_bytes


@pytest.mark.parametrize("threads", [1, 2])
def test_united_proposals_are_faster_than_each(threads: int) -> None:
    graph = unet(depth=3)
    problem = Problem(graph, peak_bytes(graph) * 6 // 10)
    schedules = [solve(problem, solver, time_limit=20.0).schedule for solver in ("twremat", "pwremat")]
    proposals = [schedule.ops for schedule in schedules if isinstance(schedule, Schedule)]
    incumbent = Incumbent(problem, Deadline(15.0), ignore_progress)
    for ops in proposals:
        offer_in_default_order(incumbent, ops, "proposal")
    apart = incumbent.seconds
    unite(incumbent, proposals, anywhere=(), by="test", threads=threads)
    assert len(proposals) == 2 and incumbent.seconds < apart


def test_what_options_recompute_is_enough_where_no_proposal_keeps_the_budget() -> None:
    graph = unet(depth=3)
    problem = Problem(graph, peak_bytes(graph) * 6 // 10)
    for anywhere in ([], list(forward_ops(graph))):
        incumbent = Incumbent(problem, Deadline(15.0), ignore_progress)
        unite(incumbent, [], anywhere=anywhere, by="test", threads=2)
        assert (incumbent.schedule is not None) == bool(anywhere)
