"""The best schedule made of the recomputations of all that hierarchies propose.

`unite(incumbent, proposals, anywhere=recomputed, by="hiremate", threads=2)`

The paper's answer is the fastest proposal; this step is ours. An option is a group of recomputations, so that proposals
leave memory unused and recompute more, and earlier, than the budget asks for. `common.union` takes the groups apart:
its program chooses among the recomputations of all proposals one by one, and recomputes no operator that no proposal
and no option of a piece does. There are several pools:

1. proposals pruned to the budget, each recomputation as late as possible, and at any other time at which it is wanted;
2. the same, and whenever it is wanted what any option of a piece recomputes (`anywhere`), so that there may be an
   answer even without proposals;
3. the same proposals at these times alone;
4. with what pruning took away, one proposal after the other, the fastest first: small programs, often solved in a
   second;
5. with the times that pieces chose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from rematch.graph import Schedule
from rematch.graph.model import Ints
from rematch.solvers.common.pruning import as_late_as_possible, in_default_order, in_turn, pruned
from rematch.solvers.common.union import best_of_union
from rematch.solvers.incumbent import Incumbent


@dataclass(frozen=True)
class Pool:
    """Sequences whose recomputations may be used, and operators that may be recomputed whenever they are wanted."""

    sequences: tuple[Ints, ...]
    anywhere: frozenset[int] = frozenset()


def unite(incumbent: Incumbent, proposals: Sequence[Ints], *, anywhere: Collection[int], by: str, threads: int) -> None:
    """Offer the best schedule of each pool; those of all times have a thread to themselves, if there are two."""
    if incumbent.over:
        return
    pools = _pools(incumbent, proposals, anywhere)
    if threads == 1:
        _solve_in_turn(incumbent, pools, by)
        return
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(_solve_in_turn, incumbent, [pool for pool in pools if pool.anywhere], by)
        _solve_in_turn(incumbent, [pool for pool in pools if not pool.anywhere], by)
        running.result()


def _pools(incumbent: Incumbent, proposals: Sequence[Ints], anywhere: Collection[int]) -> list[Pool]:
    graph, budget_bytes = incumbent.problem.graph, incumbent.problem.budget_bytes
    whole = [in_turn(graph, in_default_order(graph, ops)) for ops in proposals]
    short = [pruned(graph, ops, budget_bytes, keep_first=True) for ops in whole]
    late = [as_late_as_possible(graph, ops) for ops in short]
    seconds = graph.arrays.seconds
    fastest = sorted(range(len(short)), key=lambda number: float(seconds[short[number]].sum()))
    recomputed = frozenset[int]().union(*map(_repeated, late))
    pools = [
        Pool(tuple(late), recomputed),
        Pool(tuple(late), recomputed.union(anywhere)),
        Pool(tuple(late)),
        *(Pool((*late, as_late_as_possible(graph, whole[number]))) for number in fastest),
        Pool((*late, *short)),
    ]
    return [pool for pool in pools if pool.sequences or pool.anywhere]


def _solve_in_turn(incumbent: Incumbent, pools: Sequence[Pool], by: str) -> None:
    """One pool after the other, each with half of the time that is left and the last with all of it.

    They join the best schedule known. As long as a round has made that faster, and has left time, there is another.
    """
    faster = True
    while faster and not incumbent.over:
        known_seconds = incumbent.seconds
        for number, pool in enumerate(pools):
            if incumbent.over:
                return
            _solve(incumbent, pool, incumbent.deadline.remaining / min(2, len(pools) - number), by)
        faster = incumbent.seconds < known_seconds


def _solve(incumbent: Incumbent, pool: Pool, seconds: float, by: str) -> None:
    graph, best = incumbent.problem.graph, incumbent.schedule
    improvements = best_of_union(
        incumbent.problem,
        pool.sequences,
        deadline=incumbent.deadline.within(seconds),
        known=None if best is None else in_default_order(graph, best.ops),
        anywhere=pool.anywhere,
    )
    times = ", at any time" if pool.anywhere else ""
    for found in improvements:
        incumbent.offer(Schedule.from_ops(graph, found), f"{by}, union of {len(pool.sequences)}{times}")


def _repeated(ops: Ints) -> set[int]:
    """Which operators run more than once."""
    operators, counts = np.unique(ops, return_counts=True)
    return set(operators[counts > 1].tolist())
