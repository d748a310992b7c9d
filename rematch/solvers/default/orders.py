"""Other orders of first computations: orders that hold less memory, and a bound that holds for every order.

`any_order_bound(Problem(graph, budget_bytes), Deadline(10)).bound` is in percent of the time without recomputation.

*Orders.* What must come before what is a partial order: makers before readers, operators in their turns, readers of
what is mutated on their side of the mutation, all that is held before the loss. `lighter_order` moves operators within
it: one that leaves more in memory than it frees runs right before its first reader, one that frees more runs as soon as
it can.

*Bound.* The epoch relaxation (`epochs`) says which operators first run in which epoch by their place in the default
order. For moments tau_1 < ... < tau_K that the partial order puts in this sequence, some of that is true in every
order: what is before tau_k has run when tau_k first does, and what is behind it has not. So keep[k,v] is there for
values made before or by tau_k, again[e,w] for operators before or equal to tau_e, and (inputs) for readers behind tau_e
that are before or equal to tau_(e+1), or behind tau_K. Operators of which the partial order says neither cost nothing
and are not asked for anything, which only lowers the bound. The proof is the one for the default order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.graph.model import Bools, Floats, Ints, Longs
from rematch.solvers.base import Deadline, Problem
from rematch.solvers.common.highs import ABSENT, LinearModel, Minimum, minimise

_MOMENTS = 4  # at most, of the bound for every order


@dataclass(frozen=True, eq=False)
class PartialOrder:
    """Which operators must have run before which can run for the first time, whatever the order."""

    graph: Graph
    before: list[list[int]]
    behind: list[list[int]]

    @staticmethod
    def of(graph: Graph) -> PartialOrder:
        a = graph.arrays
        edges = {(int(maker), reader) for reader in range(len(graph.ops)) for maker in a.producer[a.inputs_of(reader)]}
        in_turn = a.order[a.turn[a.order] >= 0].tolist()
        edges |= set(pairwise(in_turn))
        once = a.order[a.once[a.order]].tolist()
        for op in range(len(graph.ops)):
            if a.once_from[op] > 0 and not a.once[op]:
                edges.add((once[a.once_from[op] - 1], op))
            if a.once_until[op] < len(once) and not a.once[op]:
                edges.add((op, once[a.once_until[op]]))
        edges |= {(int(maker), a.loss) for maker in a.producer[a.held]}
        before: list[list[int]] = [[] for _ in graph.ops]
        behind: list[list[int]] = [[] for _ in graph.ops]
        for first, second in sorted(edges):
            before[second].append(first)
            behind[first].append(second)
        return PartialOrder(graph, before, behind)

    def all_before(self, op: int) -> Bools:
        """Operators that must run before `op`, not itself."""
        return _reached(self.before, op)

    def all_behind(self, op: int) -> Bools:
        return _reached(self.behind, op)


def _reached(neighbours: Sequence[Sequence[int]], start: int) -> Bools:
    reached = np.zeros(len(neighbours), dtype=np.bool_)
    waiting = list(neighbours[start])
    while waiting:
        op = waiting.pop()
        if not reached[op]:
            reached[op] = True
            waiting += neighbours[op]
    return reached


def lighter_order(graph: Graph) -> tuple[int, ...] | None:
    """An order of first computations that holds less memory than the default one; None if none is found."""
    if graph.recompute_after_loss:
        return None
    partial = PartialOrder.of(graph)
    late = _late(partial)
    order = _early(partial, late)
    schedule = Schedule.from_ops(graph, order)
    if tuple(order) == graph.order or not simulate(graph, schedule).valid:
        return None
    return tuple(order)


def _late(partial: PartialOrder) -> list[int]:
    """The default order with what leaves more in memory than it frees moved to right before its first successor."""
    graph, a = partial.graph, partial.graph.arrays
    last_reader = _last_readers(graph)
    place = a.position.astype(np.float64).tolist()  # smaller is earlier; moved operators get places in between
    step = 1.0 / (len(graph.ops) + 1)
    for op in a.order[::-1].tolist():
        made = int(a.size[a.outputs_of(op)].sum())
        freed = sum(int(a.size[value]) for value in a.inputs_of(op) if last_reader[value] == op)
        if made > freed and partial.behind[op]:
            place[op] = max(place[op], min(place[successor] for successor in partial.behind[op]) - step)
    return _sorted(partial, place)


def _early(partial: PartialOrder, order: Sequence[int]) -> list[int]:
    """An order with what frees more memory than it leaves moved to right behind its last predecessor."""
    graph, a = partial.graph, partial.graph.arrays
    position = {op: index for index, op in enumerate(order)}
    place = [float(position[op]) for op in range(len(graph.ops))]
    users = [a.users_of(value).tolist() for value in range(len(graph.values))]
    for op in order:
        made = int(a.size[a.outputs_of(op)].sum())
        freed = 0
        for value in a.inputs_of(op).tolist():
            stays = a.target[value] or a.held[value]
            if not stays and all(place[user] <= place[op] for user in users[value]):
                freed += int(a.size[value])
        if freed > made and partial.before[op]:
            place[op] = min(place[op], max(place[earlier] for earlier in partial.before[op]) + 0.5)
    return _sorted(partial, place)


def _last_readers(graph: Graph) -> list[int]:
    """Per value the operator that reads it last in default order, -1 if it stays or is not read."""
    a = graph.arrays
    last = [-1] * len(graph.values)
    for value in range(len(graph.values)):
        users = a.users_of(value)
        if len(users) and not (a.target[value] or a.held[value]):
            last[value] = int(users[-1])
    return last


def _sorted(partial: PartialOrder, place: Sequence[float]) -> list[int]:
    """Operators by place as far as the partial order allows."""
    position = partial.graph.arrays.position
    missing = [len(earlier) for earlier in partial.before]
    ready = [(place[op], int(position[op]), op) for op, count in enumerate(missing) if count == 0]
    heapify(ready)
    order: list[int] = []
    while ready:
        op = heappop(ready)[2]
        order.append(op)
        for successor in partial.behind[op]:
            missing[successor] -= 1
            if missing[successor] == 0:
                heappush(ready, (place[successor], int(position[successor]), successor))
    return order


def any_order_bound(problem: Problem, deadline: Deadline) -> Minimum | None:
    """The linear relaxation for every order of first computations, in percent; None without a moment to look at."""
    partial = PartialOrder.of(problem.graph)
    moments = _chain_of_moments(problem, partial)
    if not moments:
        return None
    return minimise(AnyOrderModel(partial, problem.budget_bytes, moments).program, deadline=deadline, relaxed=True)


def _chain_of_moments(problem: Problem, partial: PartialOrder) -> list[int]:
    """Operators that run one after the other in every order, at high places of the memory without recomputation."""
    graph = problem.graph
    schedule = baseline(graph)
    memory = simulate(graph, schedule).timeline_bytes[schedule.steps >= 0]
    over = np.flatnonzero(memory > problem.budget_bytes)
    reach = len(over) // (2 * _MOMENTS)
    chosen: list[int] = []
    comparable = np.ones(len(graph.ops), dtype=np.bool_)
    places: list[int] = []
    by_height = over[np.argsort(-memory[over], kind="stable")].tolist()
    loss_first = [] if graph.loss is None else [int(graph.arrays.position[graph.loss])]
    for place in [*loss_first, *by_height]:
        op = graph.order[place]
        if len(chosen) == _MOMENTS:
            break
        if comparable[op] and op not in chosen and all(abs(place - other) > reach for other in places):
            chosen.append(op)
            places.append(place)
            comparable &= partial.all_before(op) | partial.all_behind(op)
    return sorted(chosen, key=graph.arrays.position.__getitem__)


class AnyOrderModel:
    """The program of the bound; `moments` are operators, each before the next in every order."""

    def __init__(self, partial: PartialOrder, budget_bytes: int, moments: Sequence[int]) -> None:
        graph, a = partial.graph, partial.graph.arrays
        self._graph, self._moments = graph, list(moments)
        self._free_bytes = max(budget_bytes - a.resident_bytes, 1)
        self._weight: Floats = a.size / self._free_bytes
        count = len(moments)
        self.early = np.full(len(graph.ops), count, dtype=np.int32)  # the first moment by which it has surely run
        self.late = np.full(len(graph.ops), -1, dtype=np.int32)  # the last moment behind which it surely first runs
        for number in range(count - 1, -1, -1):
            self.early[partial.all_before(moments[number])] = number
            self.early[moments[number]] = number
        for number in range(count):
            self.late[partial.all_behind(moments[number])] = number
        self.made_by = np.where(a.producer >= 0, self.early[a.producer], count + 1)
        self.program = LinearModel()
        self._add_columns()
        for epoch in range(count):
            self._enforce_memory(epoch)
            self._carry_over(epoch)
            self._require_inputs(epoch)

    def _add_columns(self) -> None:
        graph, a = self._graph, self._graph.arrays
        cost = a.seconds / (graph.baseline_seconds or 1.0) * 100.0
        self.keep = np.full((len(self._moments), len(graph.values)), ABSENT, dtype=np.int32)
        self.again = np.full((len(self._moments), len(graph.ops)), ABSENT, dtype=np.int32)
        for epoch, moment in enumerate(self._moments):
            values = np.flatnonzero(self.made_by <= epoch)
            surely = np.zeros(len(graph.values), dtype=np.bool_)
            surely[a.inputs_of(moment)] = surely[a.outputs_of(moment)] = True
            if a.loss >= 0 and self.early[a.loss] <= epoch:
                surely |= a.held
            self.keep[epoch, values] = self.program.columns(np.zeros(len(values)), lower=surely[values])
            ops = np.flatnonzero((self.early <= epoch) & self._may_run_again(epoch))
            self.again[epoch, ops] = self.program.columns(cost[ops])

    def _may_run_again(self, epoch: int) -> Bools:
        """Per operator, whether the rules of the graph let it run again behind a moment and up to the next."""
        a = self._graph.arrays
        once = a.order[a.once[a.order]]
        closed = np.zeros(len(once) + 1, dtype=np.bool_)  # per once count: it is larger when the epoch begins
        closed[:-1] = self.early[once] <= epoch
        allowed = ~a.once & ~closed[a.once_until]
        if a.recompute_after_loss and epoch + 1 < len(self._moments):
            allowed &= self._moments[epoch + 1] != a.loss and self.late[a.loss] <= epoch
        return np.asarray(allowed)

    def _enforce_memory(self, epoch: int) -> None:
        values = np.flatnonzero(self.keep[epoch] != ABSENT)
        room = 1.0 - self._graph.arrays.workspace[self._moments[epoch]] / self._free_bytes
        self.program.rows(self.keep[epoch, values][None, :], self._weight[values], upper=room)

    def _carry_over(self, epoch: int) -> None:
        if epoch + 1 == len(self._moments):
            return
        values = np.flatnonzero(self.keep[epoch] != ABSENT)
        makers = self._graph.arrays.producer[values]
        columns = np.stack((self.keep[epoch, values], self.again[epoch, makers], self.keep[epoch + 1, values]), axis=1)
        self.program.rows(columns, [1.0, 1.0, -1.0], lower=0.0)

    def _require_inputs(self, epoch: int) -> None:
        a = self._graph.arrays
        reader = np.repeat(np.arange(len(self._graph.ops), dtype=np.int32), np.diff(a.inputs_ptr))
        here = (self.late == epoch) & (self.early == epoch + 1)
        wanted = np.zeros(len(self._graph.values), dtype=np.bool_)
        wanted[a.inputs[here[reader]]] = True
        if a.loss >= 0 and here[a.loss]:
            wanted |= a.held
        if epoch + 1 == len(self._moments):
            wanted |= a.target | a.held
        values = np.flatnonzero(wanted & (self.keep[epoch] != ABSENT))
        self.program.rows(self._there(epoch, values), 1.0, lower=1.0)
        repeated = self.again[epoch, reader] != ABSENT
        columns = np.column_stack((self._there(epoch, a.inputs[repeated]), self.again[epoch, reader[repeated]]))
        self.program.rows(columns, [1.0, 1.0, -1.0], lower=0.0)

    def _there(self, epoch: int, values: Ints | Longs) -> Ints:
        """Columns that say that a value is kept at the moment, or made again behind it."""
        makers = self._graph.arrays.producer[values]
        return np.stack((self.keep[epoch, values], self.again[epoch, makers]), axis=1)
