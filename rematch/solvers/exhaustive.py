"""Ground truth for tiny graphs: the fastest schedule over all orders, with any number of recomputations.

`solve(Problem(graph, budget_bytes), "exhaustive")` is optimal or proves that there is no schedule.

Dijkstra's algorithm over states (operators run so far, values alive), both as bit sets; how many of the operators
marked once have run follows from the first. An edge runs one operator. Running it for the first time costs nothing,
running it again costs its seconds, so the length of a path is the time beyond the one computation of everything that no
schedule avoids. The search stays small, and exact, through two observations:

- Freeing costs nothing and can wait. Of two states with the same operators run, the one in which more is alive is at
  least as good: what it has in excess can be freed when the memory is needed. So values are freed only right before an
  operator that would not fit, only in sets of which no smaller one suffices, and a state is dropped if an earlier
  (hence no slower) one with the same operators run has all its values alive.
- An output of the operator about to run is better freed before, as it is made anew; only a held value after the loss
  cannot be, and counts twice.

This is the judge of the other solvers in the tests, so it is kept obvious and does not use the compiled simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from rematch.errors import ScheduleError, SolverError
from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.solvers.base import BoundScope, Deadline, OnProgress, Problem, Solution, Solver, Status
from rematch.solvers.common.order import Order

MOST_OPERATORS = 14  # states grow exponentially with their number

_SCOPES = {"any": BoundScope.ANY_ORDER, "default": BoundScope.DEFAULT_ORDER}


@dataclass(frozen=True)
class Exhaustive(Solver):
    """`order="default"` lets first computations follow the default order only; recomputations are free in both."""

    order: Order = "any"

    name = "exhaustive"
    paper = ""
    requires = f"a graph of at most {MOST_OPERATORS} operators"

    def __post_init__(self) -> None:
        if self.order not in _SCOPES:
            raise SolverError(f"solver 'exhaustive' has no order {self.order!r}; it has: {', '.join(_SCOPES)}")

    def applicable(self, problem: Problem) -> bool:
        return len(problem.graph.ops) <= MOST_OPERATORS

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        scope = _SCOPES[self.order]
        try:
            sequence = _Search(problem.graph, problem.budget_bytes, self.order).fastest(deadline)
        except TimeoutError:
            return Solution(None, Status.NOT_FOUND, self.name, bound_scope=scope)
        if sequence is None:
            return Solution(
                None, Status.INFEASIBLE, self.name, bound_scope=scope, infeasible_up_to_bytes=problem.budget_bytes
            )
        schedule = Schedule.from_ops(problem.graph, sequence)
        seconds = simulate(problem.graph, schedule).checked().seconds
        return Solution(schedule, Status.OPTIMAL, self.name, lower_bound_seconds=seconds, bound_scope=scope)


def min_budget(graph: Graph, order: Order = "any") -> int:
    """The smallest budget for which there is a schedule, exactly."""
    if len(graph.ops) > MOST_OPERATORS:
        raise SolverError(f"min_budget takes at most {MOST_OPERATORS} operators; {graph.name!r} has {len(graph.ops)}")
    return simulate(graph, leanest_schedule(graph, order, Deadline())[1]).peak_bytes


def leanest_schedule(graph: Graph, order: Order, deadline: Deadline) -> tuple[int, Schedule]:
    """The largest budget proved infeasible by `deadline`, and the schedule with the smallest peak found by then."""
    infeasible = graph.largest_op_bytes - 1
    schedule = baseline(graph)
    feasible = simulate(graph, schedule).checked().peak_bytes
    while feasible - infeasible > 1:
        budget = (infeasible + feasible) // 2
        try:
            sequence = _Search(graph, budget, order, timed=False).fastest(deadline)
        except TimeoutError:
            break
        if sequence is None:
            infeasible = budget
            continue
        schedule = Schedule.from_ops(graph, sequence)
        feasible = simulate(graph, schedule).checked().peak_bytes
        if feasible > budget:  # never, but if it happened the loop would not end
            raise ScheduleError(f"the search took a schedule with a peak of {feasible} bytes to fit into {budget}")
    return infeasible, schedule


class _Search:
    """The problem as bit sets: bit v of a set of values is value v, bit i of a set of operators is operator i."""

    def __init__(self, graph: Graph, budget_bytes: int, order: Order, timed: bool = True) -> None:
        self.graph = graph
        self.order = order
        self.room = budget_bytes - graph.resident_bytes
        resident = {v for v, value in enumerate(graph.values) if value.resident}
        self.inputs = [_bits(set(op.inputs) - resident) for op in graph.ops]
        self.outputs = [_bits(op.outputs) for op in graph.ops]
        self.held = _bits(graph.held - resident)
        self.wanted = self.held | _bits(graph.targets - resident)
        self.once = _bits(i for i in range(len(graph.ops)) if graph.arrays.once[i])
        keeping = [i for i in graph.order if order == "default" or graph.arrays.turn[i] >= 0]
        self.first_before = {op: _bits(keeping[:rank]) for rank, op in enumerate(keeping)}
        self.needed_to_repeat = _bits([graph.arrays.loss]) if graph.recompute_after_loss else 0
        self.all_run = (1 << len(graph.ops)) - 1
        self.seconds = [op.seconds if timed else 0.0 for op in graph.ops]

    def fastest(self, deadline: Deadline) -> list[int] | None:
        """The operators of a fastest schedule in the order they run, None if there is no schedule."""
        settled: dict[int, list[int]] = {}  # operators run -> sets of values alive
        pushed = 0
        queue: list[tuple[float, int, int, int, int, _Path]] = [(0.0, len(self.graph.ops), 0, 0, 0, None)]
        while queue:
            if deadline.expired:
                raise TimeoutError
            extra, _, _, run, alive, path = heappop(queue)
            if run == self.all_run and not self.wanted & ~alive:
                return _unrolled(path)
            better = settled.setdefault(run, [])
            if any(not alive & ~other for other in better):
                continue
            better.append(alive)
            for op in self._runnable(run, alive):
                again = bool(run >> op & 1)
                run_after = run | 1 << op
                missing = (self.all_run ^ run_after).bit_count()  # equally fast: first the one that is nearly done
                for alive_after in self._alive_after(op, run, alive):
                    pushed += 1
                    cost = extra + (self.seconds[op] if again else 0.0)
                    heappush(queue, (cost, missing, pushed, run_after, alive_after, (path, op)))
        return None

    def _runnable(self, run: int, alive: int) -> Iterator[int]:
        """Operators that may run now, were there memory enough."""
        arrays = self.graph.arrays
        once_count = (run & self.once).bit_count()
        for op in range(len(self.graph.ops)):
            again = run >> op & 1
            in_turn = not (self.needed_to_repeat if again else self.first_before.get(op, 0)) & ~run
            in_window = arrays.once_from[op] <= once_count <= arrays.once_until[op]
            needed = self.inputs[op] | (self.held if op == arrays.loss else 0)
            if in_turn and in_window and not needed & ~alive:
                yield op

    def _alive_after(self, op: int, run: int, alive: int) -> Iterator[int]:
        """The largest sets of values that can be alive after `op`, for each way to make room for it."""
        loss = self.graph.arrays.loss
        holding = loss >= 0 and (op == loss or bool(run >> loss & 1))
        staying = alive & (self.inputs[op] | (self.held if holding else 0))
        room = self.room - self._bytes(staying) - self._bytes(self.outputs[op]) - self.graph.ops[op].workspace_bytes
        if room < 0:
            return
        others = [(self.graph.values[v].size_bytes, v) for v in _members(alive & ~staying & ~self.outputs[op])]
        for kept in _largest_fitting(sorted(others, reverse=True), room):
            yield staying | self.outputs[op] | kept

    def _bytes(self, values: int) -> int:
        return sum(self.graph.values[v].size_bytes for v in _members(values))


def _largest_fitting(values: list[tuple[int, int]], room: int, smallest_left_out: int | None = None) -> Iterator[int]:
    """Sets of `values`, (bytes, number) from large to small, that fit into `room` and leave no space for one more."""
    if sum(size for size, _ in values) <= room:
        room -= sum(size for size, _ in values)
        if smallest_left_out is None or smallest_left_out > room:
            yield _bits(v for _, v in values)
        return
    (size, value), rest = values[0], values[1:]
    if size <= room:
        for kept in _largest_fitting(rest, room - size, smallest_left_out):
            yield kept | 1 << value
    yield from _largest_fitting(rest, room, size)


_Path = tuple[Any, int] | None  # the path before, and the operator run last


def _unrolled(path: _Path) -> list[int]:
    ops = []
    while path is not None:
        path, op = path
        ops.append(op)
    return ops[::-1]


def _bits(members: Iterable[int]) -> int:
    return sum(1 << member for member in set(members))


def _members(bits: int) -> Iterator[int]:
    while bits:
        yield bits.bit_length() - 1
        bits ^= 1 << bits.bit_length() - 1
