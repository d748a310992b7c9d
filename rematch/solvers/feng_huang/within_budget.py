"""Branch and bound: the fastest set of checkpoints whose schedule keeps a budget of bytes.

`FastestCheckpoints(incumbent, reading, tree, again).search()`

Feng & Huang (CVPR 2021) minimise memory; a budget and the time to compute segments again are not in the paper, so that
this search is ours. It goes through the sets of checkpoints that their division tree allows: on a line any positions,
of a complicated segment all connecting vertices or none, of a branching one each branch by itself. Parts near the
output are decided first, because the backward pass comes to them first.

Two bounds cut the search short. *Memory*: a dropped value is gone at most from its last use in the forward pass until
its segment is computed again; as long as nothing is decided about a vertex, until the backward pass first reads it. If
the step without recomputation, less all that may be gone, exceeds the budget, no set below fits. *Seconds*: where
memory would exceed the budget if all undecided vertices were kept, some of them must go, and the fraction of them that
frees enough bytes for the fewest seconds (a fractional knapsack) has to be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rematch.graph import Graph, baseline, simulate
from rematch.graph.model import Floats, Ints, Longs
from rematch.solvers.feng_huang.division_tree import DivisionTree, Kind
from rematch.solvers.feng_huang.forward import Reading, may_leave
from rematch.solvers.feng_huang.reforward import Reforward
from rematch.solvers.incumbent import Incumbent

MOST_VERTICES = 250  # of larger graphs, no search ends; the depth of the recursion grows with it
_MOST_BRANCHES = 60_000  # several seconds
_SAME = 1e-9  # of the time without recomputation

Task = tuple[int, int]  # a node of the tree, and the position on its line that is kept; -1: nothing is decided yet


@dataclass(frozen=True, eq=False)
class Lives:
    """What dropping each vertex of a reading frees and costs; stages are positions in the default order.

    `freed_bytes[v, t]`: at stage t, if v is computed again just before the backward pass first reads it.
    `seconds[v]`: of the operators of v that the backward pass reads something of.
    `first_read[v]`: the stage of the first operator of the backward pass that reads something of v.
    """

    freed_bytes: Longs
    seconds: Floats
    first_read: Floats

    @staticmethod
    def of(graph: Graph, reading: Reading, again: Reforward) -> Lives:
        a = graph.arrays
        leaving = may_leave(graph)
        count, stages = len(reading.dag), len(graph.ops)
        freed = np.zeros((count, stages), dtype=np.int64)
        seconds, first_read = np.zeros(count), np.full(count, math.inf)
        for vertex, ops in enumerate(reading.members):
            for op in ops:
                reads = [again.reads_of(int(value)) for value in a.outputs_of(op) if leaving[value]]
                if not any(first < stages for _, first in reads):
                    continue
                seconds[vertex] += a.seconds[op]
                for value, (last, first) in zip((v for v in a.outputs_of(op) if leaving[v]), reads, strict=True):
                    if first < stages:
                        freed[vertex, last + 1 : first] += a.size[value]
                        first_read[vertex] = min(first_read[vertex], first)
        return Lives(freed, seconds, first_read)


class FastestCheckpoints:
    """Offers every set of checkpoints to the incumbent that its bounds do not rule out."""

    def __init__(self, incumbent: Incumbent, reading: Reading, tree: DivisionTree, again: Reforward) -> None:
        graph = incumbent.problem.graph
        plain = baseline(graph)
        count = len(reading.dag)
        self._incumbent, self._reading, self._tree, self._again = incumbent, reading, tree, again
        self._budget = incumbent.problem.budget_bytes
        self._lives = Lives.of(graph, reading, again)
        # What is decided so far: memory with all else kept, what may still go, and segments by (first read, seconds).
        self._memory: Longs = simulate(graph, plain).timeline_bytes[plain.steps >= 0].copy()
        self._may_go: Longs = self._lives.freed_bytes.sum(axis=0)
        self._undecided = np.ones(count, dtype=np.bool_)
        self._kept = np.zeros(count, dtype=np.bool_)
        self._kept[[0, count - 1]] = True
        self._segments: list[tuple[float, float]] = []
        self._cheapest_first: dict[int, Ints] = {}
        self._costs: dict[tuple[int, ...], float] = {}
        self._branches = 0

    def search(self) -> bool:
        """Whether all sets were looked at or ruled out."""
        if len(self._reading.dag) <= MOST_VERTICES:
            self._decide(((0, -1),) if self._tree.nodes else ())
            return not self._stopped
        return False

    @property
    def _stopped(self) -> bool:
        return self._branches > _MOST_BRANCHES or self._incumbent.over

    def _decide(self, tasks: tuple[Task, ...]) -> None:
        """All that can become of `tasks`, the last one first."""
        self._branches += 1
        if self._stopped or self._ruled_out():
            return
        if not tasks:
            self._offer()
            return
        *before, (node, position) = tasks
        rest = tuple(before)
        if position >= 0:
            self._go_back(rest, node, position)
            return
        division = self._tree.nodes[node]
        if division.kind is Kind.LINEAR:
            self._decide((*rest, (node, len(division.points) + 1)))
            return
        parts = tuple((child, -1) for child in division.children)
        if division.kind is Kind.BRANCH:
            self._decide((*rest, *parts))
            return
        self._keeping(division.points, (*rest, *parts))
        self._dropping(division.segment.inside, rest)

    def _go_back(self, rest: tuple[Task, ...], node: int, position: int) -> None:
        """Which position of a line is kept before `position`: the one beside it, or one with a segment between."""
        division = self._tree.nodes[node]
        child = division.children[position - 1]
        inside = list(self._tree.nodes[child].segment.inside) if child >= 0 else []
        for earlier in range(position - 1, -1, -1):
            point = division.points[earlier - 1 : earlier] if earlier else ()
            then = (*rest, (node, earlier)) if earlier else rest
            if earlier == position - 1:
                self._keeping(point, (*then, (child, -1)) if child >= 0 else then)
            else:
                self._keeping(point, then, dropped=inside)
            inside += point
            if earlier:
                gap = division.children[earlier - 1]
                inside += self._tree.nodes[gap].segment.inside if gap >= 0 else ()

    def _keeping(self, points: Sequence[int], tasks: tuple[Task, ...], dropped: Sequence[int] = ()) -> None:
        """Decide `tasks` with `points` kept, and then `dropped` as one segment."""
        rows = list(points)
        freed = self._lives.freed_bytes[rows].sum(axis=0)
        self._undecided[rows], self._kept[rows] = False, True
        self._may_go -= freed
        if dropped:
            self._dropping(dropped, tasks)
        else:
            self._decide(tasks)
        self._may_go += freed
        self._undecided[rows], self._kept[rows] = True, False

    def _dropping(self, inside: Sequence[int], tasks: tuple[Task, ...]) -> None:
        """Decide `tasks` with the vertices `inside` as one segment."""
        rows = list(inside)
        first = float(self._lives.first_read[rows].min())
        undecided = self._lives.freed_bytes[rows].sum(axis=0)
        freed = undecided.copy()
        if first < math.inf:
            freed[int(first) :] = 0
        stays = self._is_surely_first(first, rows)
        self._undecided[rows] = False
        self._may_go -= undecided
        if not stays:
            self._memory -= freed
        self._segments.append((first, 0.0 if stays else self._seconds_of(inside)))
        self._decide(tasks)
        self._segments.pop()
        if not stays:
            self._memory += freed
        self._may_go += undecided
        self._undecided[rows] = True

    def _is_surely_first(self, first: float, rows: list[int]) -> bool:
        """Whether the backward pass comes to this segment before all others, whatever is decided; it then stays."""
        earlier = self._lives.first_read <= first
        earlier[rows] = False
        return not bool((earlier & ~self._kept).any())

    def _seconds_of(self, inside: Sequence[int]) -> float:
        """What it takes to compute a segment again."""
        key = tuple(inside)
        if key not in self._costs:
            ops = sorted(op for vertex in inside for op in self._reading.members[vertex])
            self._costs[key] = self._again.seconds_of(ops)
        return self._costs[key]

    def _ruled_out(self) -> bool:
        """Whether no decision about the rest leads to a faster schedule within the budget."""
        if int((self._memory - self._may_go).max()) > self._budget:
            return True
        graph = self._incumbent.problem.graph
        spent = sum(seconds for _, seconds in self._segments)
        if self._segments:  # one that the backward pass comes to first is not computed again
            first = min(self._segments)[0]
            spent -= max(seconds for at, seconds in self._segments if at == first)
        least = graph.baseline_seconds + spent + self._least_seconds_of_the_rest()
        return least >= self._incumbent.seconds - _SAME * graph.baseline_seconds

    def _least_seconds_of_the_rest(self) -> float:
        """Of undecided vertices, where memory exceeds the budget most: the fractional knapsack that frees enough."""
        stage = int(self._memory.argmax())
        missing = int(self._memory[stage]) - self._budget
        if missing <= 0:
            return 0.0
        if stage not in self._cheapest_first:
            freed = self._lives.freed_bytes[:, stage]
            useful = np.flatnonzero(freed)
            by_price = np.argsort(self._lives.seconds[useful] / freed[useful], kind="stable")
            self._cheapest_first[stage] = useful[by_price].astype(np.int32)
        order = self._cheapest_first[stage]
        order = order[self._undecided[order]]
        freed = np.cumsum(self._lives.freed_bytes[order, stage])
        enough = int(np.searchsorted(freed, missing))
        if enough == len(order):
            return math.inf
        seconds = self._lives.seconds[order]
        before = int(freed[enough - 1]) if enough else 0
        part = (missing - before) / (int(freed[enough]) - before)
        return float(seconds[:enough].sum() + part * seconds[enough])

    def _offer(self) -> None:
        segments = self._reading.segment_of_ops(self._incumbent.problem.graph, np.flatnonzero(self._kept).tolist())
        self._incumbent.offer(self._again.schedule(segments), "feng_huang, branch and bound")
