"""The best schedule that uses only recomputations which given schedules have, by integer programming.

`best_of_union(problem, [sequence, other], deadline=Deadline(10.0))`

Methods that choose recomputations in groups, such as HiRemate's options of a piece, leave memory unused and repeat more
than a budget asks for. Here the groups of one or several of their schedules are taken apart again. Checkmate's program
(Jain et al., MLSys 2020) with R[t, i] = 0 wherever no given schedule computes operator i again before first computation
t is small: it has a column for each run that some schedule has, and, for each value, one for each time between two runs
that make or read it, in which it stays in memory or not.

    x[r]            run r takes place; first computations do
    g[v, j]         value v stays in memory between its events j and j + 1

    x[r] <= g[v, j - 1]                 event j is a read of v by run r
    g[v, j] <= g[v, j - 1] (+ x[r])     (event j is a making of v by run r)
    sum of the sizes in memory <= budget during each run

With x whole, the least g that satisfy the rows are whole too, so that only x has to be.

Schedules of groups recompute at the beginning of a group what is needed in the middle of it. Operators named as
`anywhere` may also run right before any first computation that wants them. That is a much larger program, whose
relaxation is still solved quickly. Its reduced costs say by how much a schedule with a certain run must exceed the
relaxation; runs are admitted to the integer program by them, the most promising first, then more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from rematch.graph import Graph
from rematch.graph.model import Bools, Floats, Ints
from rematch.solvers.base import Deadline, Problem
from rematch.solvers.common.highs import LinearModel, minimise

_MOST_TERMS = 500_000  # of memory rows, all together: seconds to write down
_RELAXED_TERMS = (150_000, 450_000)  # of programs whose relaxation chooses runs: the larger, the more it chooses
_LEAST_GAIN = 1e-3  # points of extra time
_ADMITTED = (0.05, 0.5, math.inf)  # points of reduced cost, one program after the other
_SHARE_OF_EACH = 0.6  # of the time that is left, for each of these programs

Stages = list[set[int]]  # what is computed again before each first computation


def best_of_union(
    problem: Problem,
    sequences: Sequence[Ints],
    *,
    deadline: Deadline,
    known: Ints | None = None,
    anywhere: Collection[int] = (),
) -> Iterator[Ints]:
    """Faster and faster runs within the budget, the last of them the fastest found.

    Each run is one that a sequence has, or of an operator that may run `anywhere`, right before a first computation
    that wants it. First computations are in default order in every sequence, in `known`, which keeps the budget, and in
    what is returned. Nothing is if nothing faster than `known` is found.
    """
    graph = problem.graph
    own: Stages = [set() for _ in range(len(graph.ops) + 1)] if known is None else stages_of(graph, known)
    stages = _joined([own, *(stages_of(graph, sequence) for sequence in sequences)])
    for program in _promising(problem, stages, anywhere, deadline) if anywhere else (stages,):
        admitted = _joined([own, program])
        runs = _runs_in_turn(graph, admitted)
        if _most_terms(graph, runs) > _MOST_TERMS or deadline.expired:
            return
        start = None if known is None else _taken(graph, admitted, own)
        seconds = deadline.remaining * (_SHARE_OF_EACH if anywhere else 1.0)
        found = RunModel(graph, runs, problem.budget_bytes).best(deadline.within(seconds), start)
        if found is not None:
            known, own = found, stages_of(graph, found)
            yield found


def _joined(parts: Sequence[Stages]) -> Stages:
    return [set[int]().union(*at_one_stage) for at_one_stage in zip(*parts, strict=True)]


def _runs_in_turn(graph: Graph, stages: Stages) -> list[int]:
    """Before each first computation, in default order, what is computed again there."""
    place = graph.arrays.position.tolist()
    runs: list[int] = []
    for stage, op in enumerate(graph.order):
        runs += [*sorted(stages[stage], key=place.__getitem__), op]
    return runs


def _taken(graph: Graph, stages: Stages, own: Stages) -> list[bool]:
    """For each of the runs in turn, whether it is a first computation or among a schedule's `own`."""
    place = graph.arrays.position.tolist()
    taken: list[bool] = []
    for stage in range(len(graph.order)):
        taken += [*(op in own[stage] for op in sorted(stages[stage], key=place.__getitem__)), True]
    return taken


# --- other times ------------------------------------------------------------------------------------------------------


def _at_other_times(graph: Graph, stages: Stages, anywhere: Collection[int], most_terms: int) -> Stages:
    """What may run anywhere also at other stages: where the first computation reads what it makes, or something else
    that is computed again there does, and so on as many steps back as the program may be large."""
    again = set(anywhere)
    wider = stages
    while True:
        wanted = [_makers_wanted(graph, again, stage, found) for stage, found in enumerate(wider[: len(graph.order)])]
        if not any(wanted):
            return wider
        candidate = [found | more for found, more in zip(wider, [*wanted, set[int]()], strict=True)]
        if _most_terms(graph, _runs_in_turn(graph, candidate)) > most_terms:
            return wider
        wider = candidate


def _makers_wanted(graph: Graph, again: set[int], stage: int, found: set[int]) -> set[int]:
    """What makes an input of a stage's runs and may be computed again there, but is not."""
    a = graph.arrays
    makers = {int(a.producer[value]) for op in (graph.order[stage], *found) for value in graph.ops[op].inputs}
    return {op for op in makers & again if op not in found and a.first_stage[op] <= stage <= a.last_stage[op]}


def _promising(problem: Problem, stages: Stages, anywhere: Collection[int], deadline: Deadline) -> Iterator[Stages]:
    """Runs by their reduced cost in a relaxation, more and more of them, and then in a larger one."""
    known: Stages | None = None
    for most_terms in _RELAXED_TERMS:
        wider = _at_other_times(problem.graph, stages, anywhere, most_terms)
        if wider != known and not deadline.expired:
            yield from _admitted(problem, wider, deadline)
        known = wider


def _admitted(problem: Problem, stages: Stages, deadline: Deadline) -> Iterator[Stages]:
    """Of the runs at these stages those with little reduced cost, then more; none without an answer in time."""
    graph = problem.graph
    runs = _runs_in_turn(graph, stages)
    if _most_terms(graph, runs) > _MOST_TERMS:
        return
    costs = RunModel(graph, runs, problem.budget_bytes).reduced_costs(deadline)
    if costs is None:
        return
    is_first = _first_runs(runs)
    stage_of = np.cumsum(np.concatenate(([0], is_first[:-1])))
    before = -1
    for points in _ADMITTED:
        admitted = costs <= points
        if admitted.sum() > before:
            before = int(admitted.sum())
            found: Stages = [set() for _ in stages]
            for at in np.flatnonzero(admitted & ~is_first):
                found[stage_of[at]].add(runs[at])
            yield found


def _most_terms(graph: Graph, runs: Sequence[int]) -> int:
    """Terms that the memory rows may have, all together: for each value, the runs from its first event to its last."""
    first, last = dict[int, int](), dict[int, int]()
    for at, op in enumerate(runs):
        for value in (*graph.ops[op].inputs, *graph.ops[op].outputs):
            first.setdefault(value, at)
            last[value] = at
    return sum(last[value] - first[value] + 1 for value in last if graph.arrays.producer[value] >= 0)


def stages_of(graph: Graph, sequence: Ints) -> Stages:
    """What a sequence computes again before each first computation; after the last there is nothing left to do."""
    again: Stages = [set() for _ in range(len(graph.ops) + 1)]
    stage, seen = 0, set[int]()
    for op in sequence.tolist():
        if op in seen:
            again[stage].add(op)
        else:
            seen.add(op)
            stage += 1
    return again


class RunModel:
    """The program for one sequence of possible runs; costs are in percent of the time without recomputation."""

    def __init__(self, graph: Graph, runs: list[int], budget_bytes: int) -> None:
        self._graph, self._runs = graph, runs
        self._percent = 100.0 / (graph.baseline_seconds or 1.0)
        self._program = LinearModel()
        self._memory: list[dict[int, int]] = [{} for _ in self._runs]
        self._is_first = _first_runs(self._runs)
        seconds = graph.arrays.seconds[runs] * self._percent
        self._x = self._program.columns(np.where(self._is_first, 0.0, seconds), self._is_first.astype(float)).tolist()
        for value, events in enumerate(self._events()):
            self._follow(value, events)
        self._limit_memory(budget_bytes - graph.resident_bytes)

    def best(self, deadline: Deadline, start: Sequence[bool] | None = None) -> Ints | None:
        """The fastest runs found, if they take less time than those of `start`, which keep the budget."""
        chosen = None if start is None else dict(zip(self._x, map(float, start), strict=True))
        repeats = self._graph.arrays.seconds[self._runs] * self._percent * ~self._is_first
        cutoff = math.inf if start is None else float(repeats[np.array(start)].sum()) - _LEAST_GAIN
        found = minimise(self._program, deadline=deadline, cutoff=cutoff, absolute_gap=_LEAST_GAIN, start=chosen)
        if found.point is None or found.objective > cutoff:
            return None
        taken: Ints = np.array(self._runs, dtype=np.int32)[found.point[self._x] > 0.5]
        return taken

    def reduced_costs(self, deadline: Deadline) -> Floats | None:
        """Per run, by how many points schedules that take it exceed the relaxation; at most 0 for runs that it takes.

        None if no schedule keeps the budget, or no time is left.
        """
        found = minimise(self._program, deadline=deadline, relaxed=True)
        return None if found.reduced_costs is None else found.reduced_costs[self._x]

    def _events(self) -> list[list[tuple[int, bool]]]:
        """Per value, the runs that read or make it, in turn, and whether they make it; the loss reads what is held."""
        graph = self._graph
        events: list[list[tuple[int, bool]]] = [[] for _ in graph.values]
        for at, op in enumerate(self._runs):
            read = {*graph.ops[op].inputs, *(graph.held if op == graph.loss else ())}
            for value in read:
                events[value].append((at, False))
            for value in graph.ops[op].outputs:
                events[value].append((at, True))
        return events

    def _follow(self, value: int, events: Sequence[tuple[int, bool]]) -> None:
        """Columns for the times between events of a value, and rows that tie them together."""
        graph, size = self._graph, self._graph.values[value].size_bytes
        if graph.arrays.producer[value] < 0:
            return
        loss_at = next((at for at, op in enumerate(self._runs) if op == graph.loss), len(self._runs))
        before: int | None = None
        for number, (at, makes) in enumerate(events):
            ends = events[number + 1][0] if number + 1 < len(events) else len(self._runs)
            is_last = number + 1 == len(events)
            stays = (is_last and value in graph.targets) or (value in graph.held and at >= loss_at)
            if before is not None:
                self._count(at, before, size)
            if makes:
                self._count(at, self._x[at], size)
            elif before is not None:
                self._rows([self._x[at], before], [1.0, -1.0])
            if is_last and not stays:
                return
            after = int(self._program.columns(np.zeros(1), float(stays), integer=False)[0])
            sources = [column for column in (before, self._x[at] if makes else None) if column is not None]
            self._rows([after, *sources], [1.0, *([-1.0] * len(sources))])
            for inside in range(at + 1, ends):
                self._count(inside, after, size)
            before = after

    def _count(self, at: int, column: int, size_bytes: int) -> None:
        if size_bytes:
            self._memory[at][column] = self._memory[at].get(column, 0) + size_bytes

    def _limit_memory(self, free_bytes: int) -> None:
        """During each run: what is in memory, what it makes, and its workspace. A row that cannot bind is left out."""
        for at, op in enumerate(self._runs):
            self._count(at, self._x[at], self._graph.ops[op].workspace_bytes)
            terms = self._memory[at]
            if sum(terms.values()) > free_bytes:
                scale = 1.0 / max(1, free_bytes)
                self._rows(list(terms), [size * scale for size in terms.values()], free_bytes * scale)

    def _rows(self, columns: list[int], coefficients: list[float], upper: float = 0.0) -> None:
        self._program.rows(np.array([columns], dtype=np.int32), np.array([coefficients]), upper=upper)


def _first_runs(runs: Sequence[int]) -> Bools:
    """Per run, whether its operator has not run before."""
    is_first = np.zeros(len(runs), dtype=np.bool_)
    is_first[np.unique(np.array(runs), return_index=True)[1]] = True
    return is_first
