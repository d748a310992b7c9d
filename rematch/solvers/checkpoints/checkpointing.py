"""Checkpoint policies: keep some forward operators' values, drop the others, compute them again segment by segment.

`checkpoint_policy(graph, every_sqrt(forward_ops(graph)))`

P. Jain et al., "Checkmate" (MLSys 2020), Table 1 and appendix B, after T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training
Deep Nets with Sublinear Memory Cost" (2016). Checkpoints cut the forward pass into segments. The forward pass drops
what is no checkpoint when it has used it. When the backward pass comes to a segment, the segment is computed again in
one stage, and its values stay until the backward pass has used them. What lies behind the last checkpoint is never
dropped: the backward pass begins there, and all of it would have to be back at that moment.

Which checkpoints to choose among candidates is up to two rules of Chen et al., sqrt(n) and greedy; which operators are
candidates is what `chen`, `articulation` and `linearized` differ in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from math import isqrt

import numpy as np

from rematch.graph import Graph, Phase
from rematch.graph.model import Bools, Ints, Longs
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.common.forward_pass import forward_ops
from rematch.solvers.common.policy import fastest_policy
from rematch.solvers.common.precedence import Precedence

_SEGMENT_SIZES = 100  # that the search over b tries


class CheckpointSolver(Solver):
    """Choose checkpoints among candidates; the fastest choice within the budget wins."""

    def candidates(self, graph: Graph) -> Ints:
        """Operators that may be checkpoints, in default order."""
        return forward_ops(graph)

    @abstractmethod
    def choices(self, graph: Graph, candidates: Ints) -> Iterator[list[int]]:
        """Sets of checkpoints to try."""

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        graph = problem.graph
        policies = (checkpoint_policy(graph, chosen) for chosen in self.choices(graph, self.candidates(graph)))
        return fastest_policy(problem, policies, self.name, deadline, on_progress)


class SqrtSolver(CheckpointSolver):
    """Keep the ends of about sqrt(n) segments of equally many candidates; nothing to search."""

    def choices(self, graph: Graph, candidates: Ints) -> Iterator[list[int]]:
        yield every_sqrt(candidates)


class GreedySolver(CheckpointSolver):
    """Keep a candidate after every b bytes, for many b."""

    def choices(self, graph: Graph, candidates: Ints) -> Iterator[list[int]]:
        return greedy_segments(graph, candidates)


def checkpoint_policy(graph: Graph, checkpoints: Sequence[int]) -> Bools:
    """What to keep if the values of `checkpoints`, forward operators, are kept and the others computed again."""
    a = graph.arrays
    p = Precedence.of(graph)
    is_forward = _of_forward(graph)
    forward = (a.producer >= 0) & is_forward[a.producer]
    chosen = np.zeros(len(graph.ops), dtype=np.bool_)
    chosen[list(checkpoints)] = True
    segment: Longs = np.cumsum(chosen[a.order])[a.position] - chosen  # of each operator: checkpoints before it
    dropped = forward & ~chosen[a.producer] & (segment[a.producer] < chosen.sum())
    until = np.where(chosen[a.producer] & forward, len(graph.ops), p.wanted_until)
    stages = np.arange(len(graph.ops) + 1)[:, None]
    kept = ~dropped & (stages <= until)
    in_forward = last_use_in_forward(p)
    reopened = _first_use_of_segment(p, is_forward, segment, dropped)[segment[a.producer]]
    kept |= dropped & (stages <= np.where(in_forward >= reopened, until, in_forward))
    kept |= dropped & (stages > reopened) & (stages <= until)
    return np.asarray(kept)


def _of_forward(graph: Graph) -> Bools:
    return np.array([op.phase is Phase.FORWARD for op in graph.ops], dtype=np.bool_)


def last_use_in_forward(p: Precedence) -> Longs:
    """Per value, the last position up to which the forward pass itself reads it; the loss is the end of that."""
    a = p.graph.arrays
    is_forward = _of_forward(p.graph)
    last = p.made_at.astype(np.int64)
    reads = is_forward[p.reader] | (p.reader == a.loss)
    np.maximum.at(last, p.read[reads], a.position[p.reader[reads]])
    return last


def _first_use_of_segment(p: Precedence, is_forward: Bools, segment: Longs, dropped: Bools) -> Longs:
    """Per segment, the first position of the backward pass that reads one of its dropped values."""
    a = p.graph.arrays
    first = np.full(int(segment.max(initial=0)) + 1, len(p.graph.ops), dtype=np.int64)
    reads = ~is_forward[p.reader] & (p.reader != a.loss) & dropped[p.read]
    np.minimum.at(first, segment[a.producer[p.read[reads]]], a.position[p.reader[reads]])
    return first


def every_sqrt(candidates: Ints) -> list[int]:
    """Chen et al.'s sqrt(n): the ends of about sqrt(n) segments of equally many candidates."""
    size = max(1, isqrt(len(candidates)))
    return [int(op) for op in candidates[size - 1 :: size]]


def greedy_segments(graph: Graph, candidates: Ints) -> Iterator[list[int]]:
    """Chen et al.'s greedy for each segment size b: the next candidate after b bytes is a checkpoint.

    From the largest b, which needs no checkpoint at all, to the smallest, each set of checkpoints once.
    """
    a = graph.arrays
    made_bytes = np.zeros(len(graph.ops), dtype=np.int64)
    made = np.flatnonzero(a.producer >= 0)
    np.add.at(made_bytes, a.producer[made], a.size[made])
    ops = forward_ops(graph)
    total = int(made_bytes[ops].sum())
    possible = np.isin(ops, candidates)
    seen: set[tuple[int, ...]] = set()
    for step in range(_SEGMENT_SIZES, -1, -1):
        chosen = _greedy(ops, made_bytes, possible, total * step // _SEGMENT_SIZES)
        if tuple(chosen) not in seen:
            seen.add(tuple(chosen))
            yield chosen


def _greedy(ops: Ints, made_bytes: Longs, possible: Bools, segment_bytes: int) -> list[int]:
    chosen: list[int] = []
    filled = 0
    for op, candidate in zip(ops.tolist(), possible.tolist(), strict=True):
        filled += int(made_bytes[op])
        if candidate and filled > segment_bytes:
            chosen.append(op)
            filled = 0
    return chosen
