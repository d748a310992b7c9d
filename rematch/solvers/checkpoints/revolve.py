"""Griewank and Walther's binomial checkpointing of linear networks, with O(log n) memory: Checkmate's Griewank log n.

`fewest_steps(10, 3)` is 15: ten steps are reversed in 15 when three states may be kept, the first among them.

A. Griewank, A. Walther, "Algorithm 799: Revolve" (ACM Transactions on Mathematical Software 26, 2000), as Table 1 of
P. Jain et al., "Checkmate" (MLSys 2020) has it: a policy for S on linear graphs, followed by the optimal R.

With c checkpoints, n steps are reversed like this: keep one state in between, reverse the part behind it with c - 1
checkpoints, forget it, reverse the part before it with c. beta(c, t) = (c + t choose c) steps can be reversed so that
no step runs more than t times again, and splitting where both parts stay within their beta takes the fewest steps,
which is t n - beta(c + 1, t - 1) for the smallest t with beta(c, t) >= n. It is optimal for unit costs and memory, and
ignores that operators differ (`rotor` does not). We search over c for the fastest schedule within the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

import numpy as np

from rematch.graph import Graph
from rematch.graph.model import Bools, Longs
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.checkpoints.checkpointing import last_use_in_forward
from rematch.solvers.common.forward_pass import forward_ops, is_linear
from rematch.solvers.common.policy import fastest_policy
from rematch.solvers.common.precedence import Precedence


@dataclass(frozen=True)
class Revolve(Solver):
    """Binomial checkpointing with the number of checkpoints that is fastest within the budget."""

    name = "revolve"
    paper = "Griewank and Walther, Algorithm 799: Revolve, ACM TOMS 2000"
    requires = "a linear forward pass, in which each operator reads only the one before it"

    def applicable(self, problem: Problem) -> bool:
        return is_linear(problem.graph)

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        graph = problem.graph
        most = len(forward_ops(graph))
        policies = (revolve_policy(graph, count) for count in range(most, -1, -1))
        return fastest_policy(problem, policies, self.name, deadline, on_progress)


def revolve_policy(graph: Graph, checkpoints: int) -> Bools:
    """What to keep: the states that revolve has when it comes to the last forward operator that is still needed."""
    a = graph.arrays
    p = Precedence.of(graph)
    ops = forward_ops(graph)
    rank = np.full(len(graph.ops), -1, dtype=np.int64)
    rank[ops] = np.arange(len(ops))
    stages = np.arange(len(graph.ops) + 1)[:, None]
    kept = np.asarray(stages <= p.wanted_until)
    of_forward = np.flatnonzero((a.producer >= 0) & (rank[a.producer] >= 0))
    state_of_value = rank[a.producer[of_forward]]
    frontier = _last_still_needed(p, rank)
    states = dict(reversals(len(ops), checkpoints))
    for stage, state in enumerate(frontier.tolist()):
        arrives = state < len(ops) - 1 and stage > 0 and frontier[stage - 1] != state
        present = states.get(state + 1, []) if arrives else [*states.get(state, []), state]
        kept[stage, of_forward] = np.isin(state_of_value, present)
    in_forward = last_use_in_forward(p)
    kept[:, of_forward] |= stages <= in_forward[of_forward]
    return kept


def _last_still_needed(p: Precedence, rank: Longs) -> Longs:
    """Per stage, the rank of the last forward operator whose values this stage or a later one reads."""
    a = p.graph.arrays
    needed = np.full(len(p.graph.ops) + 1, -1, dtype=np.int64)
    makers = a.producer[p.read]
    by_forward = makers >= 0
    np.maximum.at(needed, a.position[p.reader[by_forward]], rank[makers[by_forward]])
    return np.maximum.accumulate(needed[::-1])[::-1]


def reversals(count: int, checkpoints: int) -> Iterator[tuple[int, list[int]]]:
    """For each of `count` states, the last first: the state, and the states that are kept when it is reached."""
    tasks: list[tuple[int, int, int] | int] = [(-1, count - 1, checkpoints)]  # reverse (base, last], or one state
    while tasks:
        task = tasks.pop()
        kept = [other for other in tasks if isinstance(other, int)]
        if isinstance(task, int):
            yield task, [*kept, task]
            continue
        base, last, spare = task
        if base == last:
            continue
        if spare == 0:
            yield last, kept
            tasks.append((base, last - 1, 0))
        else:
            middle = base + _advance(last - base + 1, spare + 1)
            tasks += [(base, middle - 1, spare), middle, (middle, last, spare - 1)]


def _advance(steps: int, checkpoints: int) -> int:
    """How far to go before keeping a state, to reverse `steps` with `checkpoints`, the one at the start included."""
    repeats = max(1, _repeats(steps, checkpoints))
    before = comb(checkpoints + repeats - 1, checkpoints)
    behind = comb(checkpoints + repeats - 2, checkpoints - 1)
    return min(before, steps - behind)


def _repeats(steps: int, checkpoints: int) -> int:
    """How often some step must run: the smallest t for which beta(checkpoints, t) steps are enough."""
    repeats = 0
    while comb(checkpoints + repeats, checkpoints) < steps:
        repeats += 1
    return repeats


def fewest_steps(steps: int, checkpoints: int) -> int:
    """Steps run forward to reverse so many, with so many states kept, the one at the start included."""
    repeats = _repeats(steps, checkpoints)
    return repeats * steps - (comb(checkpoints + repeats, checkpoints + 1) if repeats else 0)
