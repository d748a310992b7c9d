"""TWRemat: recursion on the balanced separators of a tree decomposition.

`Recursion.of(graph).sequence(1)` are the operators that TWRemat(1) runs, one after the other.

R. Kumar, M. Purohit, Z. Svitkina, E. Vee, J. Wang, "Efficient Rematerialization for Deep Networks" (NeurIPS 2019),
algorithm 1 and section 4.3. To compute the operators S of a part V' of the graph, take the bag X* that separates it
best; for each v in X*, in default order, compute what v reads in each part beyond X*, by recursion, then v itself,
which stays in memory; at last compute what S has in each part. TWRemat(k) stops where fewer than k bags are left and
computes what is needed there once, in default order; so k = 1 recurses to the end and k = n runs everything once.

Theorem 5: TWRemat(1) takes O((M_in + width M_max) log n) memory. That holds for graphs in which every operator may run
any number of times. What runs once stays in memory, beyond any such bound.

Where the paper is silent or does not fit our graphs:
- Only operators on which S depends are computed; the paper computes all of X*.
- S is not one final operator but all that make targets or that nobody reads.
- The loss runs once, so it is the first separator; what it reads, held values and what must run before it come first,
  and everything after it finds its result in memory. For other operators that run once, and windows of mutations, see
  `pruning.in_turn`.
- Parts that are computed one after the other come in Sethi and Ullman's order: first the one that needs most while it
  runs beyond what it leaves behind.
- A call depends on the part and on S alone, and few sets S occur for a part. Each is planned once, for all k together,
  with the number of runs it leads to, so that no sequence is written that there is no time for.
- Time counts as half of the balance (see `separators`), beside the paper's balance of bags: both are tried.
- The paper leaves pruning open. Every sequence is pruned to the budget, and the fastest result over all k wins: small k
  leave more recomputations to choose from, and are often best in the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from rematch.errors import SolverError
from rematch.graph import Graph, Op, Schedule, Value, baseline, simulate
from rematch.graph.model import Ints, Longs
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.common.pruning import in_turn, pruned
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.treewidth.elimination import MOST_WORK, Heuristic, decompose
from rematch.solvers.treewidth.separators import Separation, separate
from rematch.solvers.treewidth.tree_decomposition import TreeDecomposition, operator_neighbours

_RUNS_PER_SECOND = 150_000  # of operators that are written, simulated and pruned, which cannot be interrupted
_WORK_PER_SECOND = 10_000_000  # for decomposing: done in half of the time that is left
_WORTH_TRYING = 1.03  # a k whose sequence is less than so much longer than the last one tried is passed over


@dataclass(frozen=True)
class TWRemat(Solver):
    """The fastest of TWRemat(k) over all k, pruned to the budget.

    k: only this one, as in the paper; None tries all
    pruned: whether recomputations go that the budget has room to do without; False leaves the recursion's own sequence
    """

    heuristic: Heuristic = "min-fill"
    k: int | None = None
    pruned: bool = True

    name = "twremat"
    paper = "Kumar et al., Efficient Rematerialization for Deep Networks, NeurIPS 2019 (algorithm 1, TWRemat)"

    def prepare(self) -> None:
        tiny = Graph((Op("make", 0.0, (), (0,)), Op("use", 0.0, (0,), ())), (Value("made", 1),))
        pruned(tiny, Recursion.of(tiny).sequence(1), 0)

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        incumbent = Incumbent(problem, deadline, on_progress)
        incumbent.offer(baseline(problem.graph), self.name)
        if not incumbent.over:
            self._search(incumbent)
        return incumbent.solution(self.name)

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            raise SolverError(f"solver 'twremat' needs a k of at least 1; got {self.k}")

    def _search(self, incumbent: Incumbent) -> None:
        graph, deadline = incumbent.problem.graph, incumbent.deadline
        work = int(min(MOST_WORK, _WORK_PER_SECOND * deadline.remaining))
        try:
            decomposition = decompose(operator_neighbours(graph), self.heuristic, work)
            bags = f"{len(decomposition.bags)} bags, width {decomposition.width}"
            incumbent.tell(self.name, f"{self.heuristic} tree decomposition: {bags}")
            for by_time in (False, True) if self.pruned else (False,):
                recursion = Recursion.of(graph, decomposition, by_time=by_time, deadline=deadline)
                for stop_below in self._stops(incumbent.problem, recursion, deadline):
                    if incumbent.over or not _has_time(recursion, stop_below, deadline):
                        break
                    self._offer(incumbent, recursion, stop_below)
        except OutOfTime:
            incumbent.tell(self.name, "out of time while planning the recursion")

    def _stops(self, problem: Problem, recursion: Recursion, deadline: Deadline) -> list[int]:
        """The values of k to try, in turn."""
        return [self.k] if self.k is not None else _fastest_feasible_first(problem, recursion, deadline)

    def _offer(self, incumbent: Incumbent, recursion: Recursion, stop_below: int) -> None:
        graph = incumbent.problem.graph
        sequence = recursion.sequence(stop_below)
        if self.pruned:
            sequence = pruned(graph, sequence, incumbent.problem.budget_bytes)
        incumbent.offer(Schedule.from_ops(graph, sequence), f"{self.name}({stop_below})")


def _fastest_feasible_first(problem: Problem, recursion: Recursion, deadline: Deadline) -> list[int]:
    """Values of k: from the fastest within the budget to the slowest, then the faster ones.

    Peaks fall with k, but not always, and pruning lowers some; so the faster ones are worth a try if there is time.
    """

    def fits(stop_below: int) -> bool:
        if not _has_time(recursion, stop_below, deadline):
            return True  # not tried anyway
        schedule = Schedule.from_ops(problem.graph, recursion.sequence(stop_below))
        return simulate(problem.graph, schedule).peak_bytes <= problem.budget_bytes

    stops = list(_spread(recursion))
    first = bisect_left(stops, True, key=fits)
    return stops[first:] + stops[:first]


def _has_time(recursion: Recursion, stop_below: int, deadline: Deadline) -> bool:
    """Whether a sequence of this length can be dealt with before the deadline."""
    return recursion.length(stop_below) <= _RUNS_PER_SECOND * deadline.remaining


def _spread(recursion: Recursion) -> Iterator[int]:
    """Values of k from the shortest sequence to the longest, without those that make little difference."""
    tried = 0.0
    for stop_below, runs in zip(recursion.stops[::-1], recursion.runs[::-1].tolist(), strict=True):
        if runs >= _WORTH_TRYING * tried or stop_below == 1:
            tried = runs
            yield stop_below


@dataclass(frozen=True)
class Point:
    """What TWRemat(k) costs, with k = `stop_below`."""

    stop_below: int
    seconds: float
    peak_bytes: int


def trade_off(graph: Graph, recursion: Recursion | None = None) -> list[Point]:
    """Figure 4: time and peak of TWRemat(k), unpruned, for every k at which it changes, from 1 up."""
    recursion = recursion or Recursion.of(graph)
    points = []
    for stop_below in recursion.stops:
        seen = simulate(graph, Schedule.from_ops(graph, recursion.sequence(stop_below))).checked()
        points.append(Point(stop_below, seen.seconds, seen.peak_bytes))
    return points


class OutOfTime(Exception):
    """The deadline expired before the recursion was planned."""


@dataclass(frozen=True, eq=False)
class _Call:
    """Algorithm 1 for one part of the graph and one set of operators to compute there."""

    bags: int
    in_one_pass: tuple[int, ...]  # all that is needed, in default order
    steps: tuple[_Call | int, ...]  # what to call and which operators to run, if the recursion goes on
    runs: Longs  # per k, of operators
    excess_bytes: int  # what the largest of these operators needs beyond what the call leaves behind


class Recursion:
    """Algorithm 1 on one graph, planned for every k.

    `stops` are the values of k at which the sequence may change, in ascending order, and `runs` are the lengths of the
    sequences that they give. What a step of the paper would run against the rules of the graph is mended afterwards,
    which changes the length a little.
    """

    def __init__(self, graph: Graph, separation: Separation, deadline: Deadline | None = None) -> None:
        self._graph, self._deadline = graph, deadline
        self._position = graph.arrays.position.tolist()
        self._reads = _operators_read(graph)
        self._op_bytes: list[int] = graph.op_bytes.tolist()
        self._made_bytes = [sum(graph.values[value].size_bytes for value in op.outputs) for op in graph.ops]
        self.stops = sorted({1} | {bags + 1 for bags in _bag_counts(separation)})
        self._stops = np.array(self.stops)
        self._calls: dict[tuple[int, frozenset[int]], _Call] = {}
        self._root = self._call(separation, frozenset(_operators_wanted(graph, self._reads)))

    @staticmethod
    def of(
        graph: Graph,
        decomposition: TreeDecomposition | None = None,
        *,
        by_time: bool = False,
        deadline: Deadline | None = None,
    ) -> Recursion:
        """On balanced separators of `decomposition`, by default one by min-fill, after the loss as the first one.

        `OutOfTime` if the deadline expires before all is planned.
        """
        weights = graph.arrays.seconds.tolist() if by_time else ()
        first = () if graph.loss is None else (graph.loss,)

        def check() -> None:
            if deadline is not None and deadline.expired:
                raise OutOfTime

        tree = decomposition or decompose(operator_neighbours(graph))
        return Recursion(graph, separate(tree, first, weights, check), deadline)

    @property
    def runs(self) -> Longs:
        return self._root.runs

    def length(self, stop_below: int) -> int:
        """Runs of TWRemat(k) with k = `stop_below`."""
        return int(self.runs[self._at(stop_below)])

    def _at(self, stop_below: int) -> int:
        return int(np.searchsorted(self._stops, stop_below, side="right")) - 1

    def sequence(self, stop_below: int) -> Ints:
        """The operators of TWRemat(k) with k = `stop_below`, as they may run."""
        at = self._at(stop_below)
        sequence = np.empty(int(self.runs[at]), dtype=np.int32)
        self._write(self._root, at, sequence, 0, {})
        return in_turn(self._graph, sequence)

    def _write(self, call: _Call, at: int, sequence: Ints, start: int, written: dict[int, int]) -> None:
        """Write a call's runs from `start` on, copied from where the same call was `written` before."""
        runs = int(call.runs[at])
        before = written.setdefault(id(call), start)
        if before != start:
            sequence[start : start + runs] = sequence[before : before + runs]
            return
        for step in call.in_one_pass if call.bags < self.stops[at] else call.steps:
            if isinstance(step, _Call):
                self._write(step, at, sequence, start, written)
                start += int(step.runs[at])
            else:
                sequence[start] = step
                start += 1

    def _call(self, part: Separation, wanted: frozenset[int]) -> _Call:
        key = id(part), wanted
        if key not in self._calls:
            if self._deadline is not None and self._deadline.expired:
                raise OutOfTime
            needed = tuple(sorted(self._needed(part, wanted), key=self._position.__getitem__))
            steps: list[_Call | int] = []
            for op in needed:
                if op in part.separator:
                    steps += [*self._calls_for(part, self._reads[op]), op]
            steps += self._calls_for(part, wanted)
            recursing = sum((step.runs if isinstance(step, _Call) else 1 for step in steps), np.zeros_like(self._stops))
            runs = np.where(self._stops > part.bags, len(needed), recursing)
            self._calls[key] = _Call(part.bags, needed, tuple(steps), runs, self._excess_bytes(needed, wanted))
        return self._calls[key]

    def _excess_bytes(self, needed: Collection[int], wanted: Collection[int]) -> int:
        largest_bytes = max((self._op_bytes[op] for op in needed), default=0)
        return largest_bytes - sum(self._made_bytes[op] for op in wanted)

    def _calls_for(self, part: Separation, wanted: Collection[int]) -> list[_Call]:
        """The calls that compute those of `wanted` that are in the part but not in its separator."""
        by_piece: dict[int, list[int]] = {}
        for op in sorted(wanted, key=self._position.__getitem__):
            piece = part.piece_of.get(op)
            if piece is not None:
                by_piece.setdefault(piece, []).append(op)
        calls = [self._call(part.parts[piece], frozenset(members)) for piece, members in by_piece.items()]
        return sorted(calls, key=lambda call: call.excess_bytes, reverse=True)

    def _needed(self, part: Separation, wanted: frozenset[int]) -> set[int]:
        """What must be computed in the part for `wanted`, all outside of it being in memory."""
        needed, found = set(wanted), list(wanted)
        for op in found:
            fresh = (self._reads[op] & part.vertices) - needed
            needed |= fresh
            found += fresh
        return needed


def _bag_counts(part: Separation) -> set[int]:
    return {part.bags}.union(*map(_bag_counts, part.parts))


def _operators_read(graph: Graph) -> list[frozenset[int]]:
    """Per operator, those that must have run before it; the loss also waits for held values, and for its turn."""
    a = graph.arrays
    bounds = zip(a.inputs_ptr[:-1].tolist(), a.inputs_ptr[1:].tolist(), strict=True)
    makers = a.producer[a.inputs].tolist()
    reads = [frozenset(makers[start:end]) for start, end in bounds]
    if a.loss >= 0:
        in_turn_before = np.flatnonzero((a.turn >= 0) & (a.position < a.position[a.loss]))
        reads[a.loss] |= frozenset(a.producer[a.held].tolist()) | frozenset(in_turn_before.tolist())
    return reads


def _operators_wanted(graph: Graph, reads: list[frozenset[int]]) -> set[int]:
    """Those that nothing comes after, and those that make targets: all else runs on the way to them."""
    wanted = set(range(len(graph.ops))).difference(*reads)
    return wanted | set(graph.arrays.producer[graph.arrays.target].tolist())
