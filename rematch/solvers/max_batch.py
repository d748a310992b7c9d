"""The largest batch that can be trained within a memory budget, with any solver.

`max_batch(graph, budget_bytes, captured=16).batch`

P. Jain et al., "Checkmate" (MLSys 2020), section 6.4: the largest batch for which there is a schedule within the budget
that costs at most one more forward pass (10). The paper makes the batch B a variable of its program, which becomes
quadratic: B times M_i stands where M_i was. We search over the batch instead: the graph at another batch is the same
graph with other sizes (`graph.transforms.with_batch`).

Both find the same B, if the solver is exact. Let F(B) be the schedules that the program admits at B. What a schedule
holds at any moment is a sum of sizes, each of which is constant or grows with B, so its peak does not fall as B grows;
whether it keeps (10) does not depend on B, since the costs of both sides are the same at each B, or grow alike. So F(B)
contains F(B + 1), the B with schedules are 1, 2, ..., B*, and halving an interval that has B* in it ends at B*, which
is the program's maximum. Whatever fits without recomputation is a lower end of the interval that needs no solver, and
what a single operator or the targets need is an upper one. With `close_enough` above 0 the search ends earlier.

A solver that finds nothing for a batch has not proved that there is nothing, unless it says so: `impossible_from` is
the smallest batch that is proved to be too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rematch.graph import Graph, Phase, Schedule, baseline, simulate
from rematch.graph.transforms import with_batch
from rematch.solvers.base import DEFAULT_SOLVER, Problem, Solver, Status, solve
from rematch.solvers.minimum import surely_needed_bytes

_LARGEST = 2**30  # samples: where nothing grows with the batch, it stops here
_ROUNDING = 1e-9  # sums of the same times in another order


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch found, with its schedule (None for a batch of 0: not even one sample fits)."""

    batch: int
    schedule: Schedule | None
    without_recomputation: int  # the largest batch that fits without
    impossible_from: int | None  # the smallest batch proved to be too large


def max_batch(
    graph: Graph,
    budget_bytes: int,
    *,
    captured: int = 1,
    solver: str | Solver = DEFAULT_SOLVER,
    extra_forward_passes: float | None = 1.0,
    close_enough: float = 0.01,
    time_limit: float = 20.0,
    **options: Any,
) -> MaxBatch:
    """Search for the largest batch; `graph` was captured at a batch of `captured`.

    `extra_forward_passes` bounds the extra time, None leaves it open. The search ends when the batch is known up to a
    share of `close_enough`; each batch that is tried takes the solver up to `time_limit` seconds.
    """
    return search_batches(
        lambda batch: with_batch(graph, batch, captured=captured),
        budget_bytes,
        solver=solver,
        extra_forward_passes=extra_forward_passes,
        close_enough=close_enough,
        time_limit=time_limit,
        **options,
    )


def search_batches(
    at: Callable[[int], Graph],
    budget_bytes: int,
    *,
    solver: str | Solver = DEFAULT_SOLVER,
    extra_forward_passes: float | None = 1.0,
    close_enough: float = 0.01,
    time_limit: float = 20.0,
    **options: Any,
) -> MaxBatch:
    """As `max_batch`, for any way to know the graph `at` a batch."""
    fits = _largest(lambda batch: surely_needed_bytes(at(batch)) <= budget_bytes)
    plain = _largest(lambda batch: simulate(at(batch), baseline(at(batch))).peak_bytes <= budget_bytes)
    best, schedule = plain, baseline(at(plain)) if plain else None
    too_large = impossible = fits + 1
    while too_large - best > max(1, close_enough * best):
        batch = (best + too_large) // 2
        problem = Problem(at(batch), budget_bytes)
        limit = most_seconds(problem.graph, extra_forward_passes)
        solution = solve(problem, solver, time_limit=time_limit, enough_seconds=limit, **options)
        if solution.schedule is not None and simulate(problem.graph, solution.schedule).seconds <= limit:
            best, schedule = batch, solution.schedule
        else:
            too_large = batch
            bound = solution.lower_bound_seconds
            if solution.status is Status.INFEASIBLE or (bound is not None and bound > limit):
                impossible = batch
        if solution.interrupted:
            break
    return MaxBatch(best, schedule, plain, impossible if impossible <= _LARGEST else None)


def most_seconds(graph: Graph, extra_forward_passes: float | None) -> float:
    """(10): the time without recomputation and so many more forward passes; infinite for None."""
    if extra_forward_passes is None:
        return math.inf
    forward = sum(op.seconds for op in graph.ops if op.phase is Phase.FORWARD)
    return (graph.baseline_seconds + extra_forward_passes * forward) * (1.0 + _ROUNDING)


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number up to the limit for which `fits` is true, if it is true up to some number; 0 if never."""
    low, high = 0, 1
    while high <= _LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low, _LARGEST)
