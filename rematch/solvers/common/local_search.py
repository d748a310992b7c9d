"""Local search over sets of recomputations by simulated annealing, with an incremental simulator in compiled code.

`search = LocalSearch(problem, seed=1); search.run(10_000); search.best`

First computations follow the default order and cut the schedule into stages, as in Jain et al., "Checkmate" (MLSys
2020): stage t ends with the first computation of order[t]. A state is a set of pairs (stage, operator): the operator is
computed again in that stage, operators of a stage run in default order, and a value is freed after its last use before
it is computed again. So every state is a valid schedule, and only its memory can be wrong. The search minimises

    seconds of recomputation + weight x sum over stages of (peak of the stage - budget, where positive)

by the rule of Kirkpatrick, Gelatt and Vecchi, "Optimization by Simulated Annealing" (Science 1983). The weight rises
while states are over the budget and falls while they are within it, so that the search walks along the border; it
doubles until the first state within the budget. The temperature falls in cycles that grow longer. Every other cycle
begins from the best state so far, the rest from no recomputation at all: from the best alone some searches never left
its neighbourhood. A move evicts a value that is idle in a stage over the budget (computes it again before its next use,
with those of its inputs that are gone), leaves a recomputation out together with what only it needed, does both, or
shifts a recomputation to another stage. `local_search_kernels` has the state, its exact update and the moves.

The result depends on the problem, the seed and the number of moves alone, not on the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rematch.graph import Graph, Schedule, simulate
from rematch.graph.matrices import stage_of_each_compute
from rematch.graph.model import Ints, compressed_rows
from rematch.solvers.base import Deadline, Problem
from rematch.solvers.common.pauses import PausedGraph

if TYPE_CHECKING:
    from rematch.solvers.common.local_search_kernels import Model, State

_CHUNK = 1000  # moves between two adjustments of temperature and weight
_COST_UNITS = 2**44  # the time of running everything once; costs are whole numbers, so that undoing a move is exact
_FIRST_CYCLE = 100_000  # moves, from hot to cold
_CYCLE_GROWTH = 1.5  # of the next one: a slower cooling may find what a faster one missed
_HOT, _WARM, _COLD = 1.0, 0.03, 0.003  # temperatures, in mean costs of an operator
_FIRST_WEIGHT = 8.0  # all the excess without recomputation weighs as much as running everything this often
_FEASIBLE_SHARE = (0.3, 0.5)  # of the moves of a chunk; outside, the weight changes
_WEIGHT_STEP = 1.05  # a chunk: the weight moves slowly, or it would swing from all to none feasible
_ROOM_PER_OP = 16  # recomputations, at first; more room is made for a schedule that needs it


class LocalSearch:
    """A search that can be stopped, looked at, given a better schedule, and continued.

    `search = LocalSearch(problem, seed=1); search.run(10_000); search.best`

    With more than one of `passes` through each stage it also finds schedules that recompute in another order, or the
    same operator several times, between two first computations; its moves are then slower.
    """

    def __init__(self, problem: Problem, *, seed: int = 0, start: Schedule | None = None, passes: int = 1) -> None:
        from rematch.solvers.common import local_search_kernels

        self._kernels = local_search_kernels
        self._pauses = PausedGraph.of(problem.graph, passes - 1) if passes > 1 else None
        self._problem = problem if self._pauses is None else Problem(self._pauses.paused, problem.budget_bytes)
        self._model = make_model(self._problem)
        self._state = make_state(self._model, seed, _ROOM_PER_OP * (len(self._problem.graph.ops) + 4))
        self.moves = 0
        self._cycles = 0  # completed
        self._cycle_length = _FIRST_CYCLE
        self._cycle_from = 0  # the move at which the present cycle began
        self._heat = _HOT
        has_outputs = np.diff(self._model.outputs_ptr) > 0
        movable = has_outputs & (self._model.last_stage >= self._model.first_stage)
        self._mean_cost = max(1.0, float(self._model.cost[movable].mean())) if movable.any() else 0.0
        self._best_cost = int(local_search_kernels.NO_BEST)
        self._best_rows: Ints = np.zeros((0, 2), dtype=np.int32)
        self._best: Schedule | None = None  # made when asked for
        self._best_seconds: float | None = None
        self._load(self._best_rows)
        self._weight = _FIRST_WEIGHT * _COST_UNITS / max(1, int(self._state.counters[local_search_kernels.EXCESS]))
        if start is not None:
            self.adopt(start)

    @property
    def best(self) -> Schedule | None:
        """The fastest schedule within the budget so far."""
        if self._best is None and self._best_cost < self._kernels.NO_BEST:
            found = schedule_of(self._problem.graph, self._best_rows)
            self._best = found if self._pauses is None else self._pauses.schedule(found)
        return self._best

    @property
    def best_seconds(self) -> float | None:
        if self._best_seconds is None and self.best is not None:
            graph = self._problem.graph if self._pauses is None else self._pauses.graph
            self._best_seconds = simulate(graph, self.best).checked().seconds
        return self._best_seconds

    @property
    def finished(self) -> bool:
        """Whether more moves cannot help: nothing is recomputed, or nothing can be."""
        return self._best_cost == 0 or self._mean_cost == 0

    def run(self, iterations: int, deadline: Deadline | None = None) -> bool:
        """Make that many moves, the same whether in one run or in many; fewer if `deadline` comes.

        Returns whether a better schedule was found.
        """
        before = self._best_cost
        while iterations > 0 and not self.finished and not (deadline is not None and deadline.expired):
            self._set_levels()
            moves = min(iterations, _CHUNK - self.moves % _CHUNK)
            self._kernels.anneal(self._model, self._state, moves)
            self.moves += moves
            iterations -= moves
            self._note_best()
            if self.moves % _CHUNK == 0:
                self._adjust_weight()
                if self.moves - self._cycle_from >= self._cycle_length:
                    self._next_cycle()
        return self._best_cost < before

    def adopt(self, schedule: Schedule) -> None:
        """Go on from `schedule`, whose first computations follow the default order; within the budget or not."""
        graph, given = self._problem.graph, schedule
        if self._pauses is not None:
            schedule = self._pauses.paused_schedule(given)
        seen = simulate(graph, schedule).checked()
        rows = recomputations_of(graph, schedule)
        cost = int(self._model.cost[graph.arrays.position[schedule.ops]].sum() - self._model.cost.sum())
        if seen.peak_bytes <= self._problem.budget_bytes and cost < self._best_cost:
            self._best_cost, self._best_rows, self._best, self._best_seconds = cost, rows, given, seen.seconds
            self._state.counters[self._kernels.BEST_COST] = cost
        self._load(rows)
        self._kernels.trim(self._model, self._state)
        self._note_best()
        self._begin_cycle(_WARM)

    def tidy(self) -> None:
        """Leave out of the best schedule what it does not need, and go on from there."""
        if self._best_cost < self._kernels.NO_BEST:
            self._load(self._best_rows)
            self._kernels.trim(self._model, self._state)
            self._note_best()

    def _load(self, rows: Ints) -> None:
        if 2 * len(rows) > len(self._state.pool):
            roomy = make_state(self._model, 0, 4 * len(rows))
            roomy.counters[self._kernels.BEST_COST] = self._best_cost
            self._state = roomy._replace(random=self._state.random)
        self._kernels.load(self._model, self._state, rows)
        self._note_best()

    def _note_best(self) -> None:
        counters = self._state.counters
        if counters[self._kernels.BEST_COST] < self._best_cost:
            self._best_cost = int(counters[self._kernels.BEST_COST])
            self._best_rows = self._state.best[: counters[self._kernels.BEST_COUNT]].copy()
            self._best = self._best_seconds = None

    def _set_levels(self) -> None:
        cooled = (self.moves - self.moves % _CHUNK - self._cycle_from) / self._cycle_length
        temperature = self._heat * (_COLD / self._heat) ** cooled
        self._state.levels[self._kernels.TEMPERATURE] = self._mean_cost * temperature
        self._state.levels[self._kernels.WEIGHT] = self._weight

    def _adjust_weight(self) -> None:
        counters = self._state.counters
        feasible_share = counters[self._kernels.FEASIBLE_MOVES] / _CHUNK
        counters[self._kernels.FEASIBLE_MOVES] = 0
        low, high = _FEASIBLE_SHARE
        if feasible_share < low:
            self._weight *= _WEIGHT_STEP if self._best_cost < self._kernels.NO_BEST else 2.0
        elif feasible_share > high:
            self._weight /= _WEIGHT_STEP

    def _next_cycle(self) -> None:
        self.tidy()
        self._cycles += 1
        if self._cycles % 2 == 1:
            self._load(np.zeros((0, 2), dtype=np.int32))
        self._cycle_length = int(self._cycle_length * _CYCLE_GROWTH) // _CHUNK * _CHUNK
        self._begin_cycle(_HOT)

    def _begin_cycle(self, heat: float) -> None:
        self._heat = heat
        self._cycle_from = self.moves - self.moves % _CHUNK


def recomputations_of(graph: Graph, schedule: Schedule) -> Ints:
    """The recomputations of a valid schedule as rows of (stage, position of the operator), each once."""
    stages = stage_of_each_compute(graph, schedule)
    positions = graph.arrays.position[schedule.ops]
    again = positions < stages
    return np.unique(np.column_stack((stages[again], positions[again])).astype(np.int32), axis=0)


def schedule_of(graph: Graph, rows: Ints) -> Schedule:
    """The schedule with the recomputations `rows` of (stage, position of the operator)."""
    first = np.arange(len(graph.ops), dtype=np.int32)
    stages = np.concatenate((rows[:, 0], first))
    positions = np.concatenate((rows[:, 1], first))
    return Schedule.from_ops(graph, graph.arrays.order[positions[np.lexsort((positions, stages))]])


def make_model(problem: Problem) -> Model:
    """The problem as the kernels see it: operators numbered by position, then one that reads what must last."""
    from rematch.solvers.common.local_search_kernels import Model

    graph = problem.graph
    a = graph.arrays
    count = len(graph.ops)
    inputs = [*_rows_by_position(a.inputs_ptr, a.inputs, a.order), np.flatnonzero(a.target | a.held).tolist()]
    outputs = [*_rows_by_position(a.outputs_ptr, a.outputs, a.order), []]
    users: list[list[int]] = [[] for _ in graph.values]
    for position, row in enumerate(inputs):
        for value in row:
            users[value].append(position)
    slot = np.zeros(len(graph.values), dtype=np.int32)
    for row in outputs:
        slot[row] = np.arange(len(row))
    inputs_ptr, inputs_flat = compressed_rows(inputs)
    outputs_ptr, outputs_flat = compressed_rows(outputs)
    users_ptr, users_flat = compressed_rows(users)
    share = a.seconds[a.order] / (graph.baseline_seconds or 1.0)
    loss_stage = a.position[a.loss] if a.loss >= 0 else count
    return Model(
        inputs_ptr=inputs_ptr,
        inputs=inputs_flat,
        outputs_ptr=outputs_ptr,
        outputs=outputs_flat,
        users_ptr=users_ptr,
        users=users_flat,
        producer=np.append(a.position, np.int32(-1))[a.producer],
        slot=slot,
        size=a.size.copy(),
        held_from=np.where(a.held, loss_stage, count).astype(np.int32),
        workspace=np.append(a.workspace[a.order], 0),
        cost=np.append(np.rint(share * _COST_UNITS), 0).astype(np.int64),
        first_stage=np.append(a.first_stage[a.order], count + 1).astype(np.int32),
        last_stage=np.append(a.last_stage[a.order], count).astype(np.int32),
        budget=np.array([problem.budget_bytes - a.resident_bytes], dtype=np.int64),
    )


def _rows_by_position(pointer: Ints, entries: Ints, order: Ints) -> list[list[int]]:
    return [entries[pointer[op] : pointer[op + 1]].tolist() for op in order]


def make_state(model: Model, seed: int, room: int) -> State:
    """The state without recomputation, with room for that many."""
    from rematch.solvers.common import local_search_kernels as k

    stages = len(model.workspace)
    nodes = np.full((stages + room, k.NODE_COLUMNS), -1, dtype=np.int32)
    nodes[:stages, k.STAGE] = nodes[:stages, k.OP] = np.arange(stages)
    until = np.full((stages + room, max(1, int(np.diff(model.outputs_ptr).max()))), -1, dtype=np.int32)
    change = np.zeros(stages + 1, dtype=np.int64)  # of what is alive when a stage begins, against the stage before
    for value in model.outputs:
        readers = model.users[model.users_ptr[value] : model.users_ptr[value + 1]]
        if len(readers):
            until[model.producer[value], model.slot[value]] = readers[-1]
            change[model.producer[value] + 1] += model.size[value]
            change[readers[-1] + 1] -= model.size[value]
    alive = np.cumsum(change)[:stages]
    counters = np.zeros(k.COUNTERS, dtype=np.int64)
    counters[k.BEST_COST] = k.NO_BEST
    counters[k.EXCESS] = np.maximum(alive - model.budget[0], 0).sum()
    counters[k.DIRTY] = stages
    state = k.State(
        nodes=nodes,
        until=until,
        pool=np.arange(stages, stages + room, dtype=np.int32),
        peak=alive,
        inside=np.zeros(stages, dtype=np.int64),
        dirty=np.arange(stages, dtype=np.int32),
        is_dirty=np.ones(stages, dtype=np.bool_),
        mark=np.zeros(len(model.size), dtype=np.int64),
        journal=np.zeros((k.JOURNAL_ROWS, 3), dtype=np.int32),
        stack=np.zeros(k.STACK_ROWS, dtype=np.int32),
        best=np.zeros((room, 2), dtype=np.int32),
        counters=counters,
        levels=np.ones(k.LEVELS),
        random=np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1),  # never 0: xorshift
    )
    k.load(model, state, np.zeros((0, 2), dtype=np.int32))  # which finds the peaks of all stages
    return state
