"""The best schedule made of the recomputations of all that hierarchies propose.

`unite(incumbent, proposals, by="hiremate", threads=2)`

The paper's answer is the fastest proposal; this step is ours. An option is a group of recomputations, so that proposals
leave memory unused and recompute more, and earlier, than the budget asks for. `common.union` takes the groups apart:
its program chooses among the recomputations of all proposals one by one, and recomputes no operator that no proposal
does. There are several pools of proposals:

1. pruned to the budget, each recomputation as late as possible, and at any other time at which it is wanted;
2. the same at these times alone;
3. with the times that pieces chose, and with what pruning took away, one proposal after the other, the fastest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rematch.graph import Schedule
from rematch.graph.model import Ints
from rematch.solvers.common.pruning import as_late_as_possible, in_default_order, in_turn, pruned
from rematch.solvers.common.union import best_of_union
from rematch.solvers.incumbent import Incumbent


@dataclass(frozen=True)
class Pool:
    """Sequences whose recomputations may be used, at the times they have or at any."""

    sequences: tuple[Ints, ...]
    at_any_time: bool = False


def unite(incumbent: Incumbent, proposals: Sequence[Ints], *, by: str, threads: int) -> None:
    """Offer the best schedule of each pool; the pool of all times has a thread to itself, if there are two."""
    if incumbent.over or not proposals:
        return
    first, *others = _pools(incumbent, proposals)
    if threads == 1:
        _solve_in_turn(incumbent, [first, *others], by)
        return
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(_solve, incumbent, first, incumbent.deadline.remaining, by)
        _solve_in_turn(incumbent, others, by)
        running.result()


def _pools(incumbent: Incumbent, proposals: Sequence[Ints]) -> list[Pool]:
    graph, budget_bytes = incumbent.problem.graph, incumbent.problem.budget_bytes
    whole = [in_turn(graph, in_default_order(graph, ops)) for ops in proposals]
    short = [pruned(graph, ops, budget_bytes, keep_first=True) for ops in whole]
    late = [as_late_as_possible(graph, ops) for ops in short]
    seconds = graph.arrays.seconds
    fastest = sorted(range(len(short)), key=lambda number: float(seconds[short[number]].sum()))
    return [
        Pool(tuple(late), at_any_time=True),
        Pool(tuple(late)),
        Pool((*late, *short)),
        *(Pool((*late, as_late_as_possible(graph, whole[number]))) for number in fastest),
    ]


def _solve_in_turn(incumbent: Incumbent, pools: Sequence[Pool], by: str) -> None:
    """One pool after the other, each with half of the time that is left and the last with all of it."""
    for number, pool in enumerate(pools):
        if incumbent.over:
            return
        _solve(incumbent, pool, incumbent.deadline.remaining / min(2, len(pools) - number), by)


def _solve(incumbent: Incumbent, pool: Pool, seconds: float, by: str) -> None:
    graph, best = incumbent.problem.graph, incumbent.schedule
    found = best_of_union(
        incumbent.problem,
        pool.sequences,
        deadline=incumbent.deadline.within(seconds),
        known=None if best is None else in_default_order(graph, best.ops),
        at_any_time=pool.at_any_time,
    )
    if found is not None:
        times = ", at any time" if pool.at_any_time else ""
        incumbent.offer(Schedule.from_ops(graph, found), f"{by}, union of {len(pool.sequences)}{times}")
