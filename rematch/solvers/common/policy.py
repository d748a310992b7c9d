"""A schedule from a policy of what to keep: given S, the optimal R. Shared by LP rounding and all simple heuristics.

`schedule_keeping(graph, kept)` computes, in every stage, only what the stage needs and does not find in memory.

After P. Jain et al., "Checkmate" (MLSys 2020): algorithm 2 and appendix B. S[t,v] says that value v is in memory when
stage t begins; stage t ends with the first computation at position t, and one more stage follows the last. With S
fixed, every entry of R is either needed or not, and one walk back through each stage fills in those that are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rematch.graph import Graph, Schedule
from rematch.graph.model import Bools
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution
from rematch.solvers.incumbent import Incumbent

_ENTRIES_PER_SECOND = 15_000_000  # of stages times values: a policy is filled in without interruption
_MOST_ENTRIES = 400_000_000  # a byte each, in several arrays


def schedule_keeping(graph: Graph, kept: Bools) -> Schedule:
    """The fastest schedule whose stages begin with `kept[stage, value]` in memory, of n + 1 stages.

    What cannot be computed again, and held values from the loss on, are kept where the policy drops them.
    """
    from rematch.solvers.common import policy_kernels

    a = graph.arrays
    stages = np.arange(len(graph.ops) + 1)[:, None]
    possible = (a.producer >= 0) & (stages > a.position[a.producer])
    complete = kept & possible
    if a.loss >= 0:
        complete |= possible & a.held & (stages > a.position[a.loss])
    reads = policy_kernels.Reads(*(getattr(a, field) for field in policy_kernels.Reads._fields))
    runs = policy_kernels.fill_recomputations(complete, reads)
    return Schedule.from_ops(graph, a.order[np.nonzero(runs[:, a.order])[1]])


def fastest_policy(
    problem: Problem, policies: Iterable[Bools], solver: str, deadline: Deadline, on_progress: OnProgress
) -> Solution:
    """The fastest schedule within the budget of those that `policies` lead to, as far as there is time for them."""
    incumbent = Incumbent(problem, deadline, on_progress)
    entries = len(problem.graph.ops) * len(problem.graph.values)
    waiting = iter(policies)
    while not incumbent.over:
        if entries > min(_MOST_ENTRIES, _ENTRIES_PER_SECOND * deadline.remaining):
            incumbent.tell(solver, f"no room or time for a policy of {entries:,} stages times values")
            break
        kept = next(waiting, None)
        if kept is None:
            break
        incumbent.offer(schedule_keeping(problem.graph, kept), solver)
    return incumbent.solution(solver)
