"""Checkmate's program (9), and its unpartitioned form, for graphs as we have them; `checkmate` solves it.

`CheckmateModel(graph, budget_bytes).program` has, for stages t = 0, 1, ..., operators k and values v, the columns

    R[t,k]        k is computed in stage t
    S[t,v]        v is in memory when stage t begins
    FREE[t,v,k]   v is freed in stage t right after k, which reads it
    U[t,k]        memory while k runs in stage t, workspace left out

and the paper's rows: (1b) inputs are there or computed in the stage, (1c) what is kept was there or computed in the
stage before, (2)-(3) the memory recurrence, (7) when a value may be freed, (8) stage t is the one in which the operator
at position t runs first. Stages run operators in default order, each at most once.

What our graphs have beyond the paper's, and what becomes of it:

- Several outputs: S and FREE speak of values, R of operators. FREE[t,k,k], which the paper leaves out (4.8), stays for
  operators with several outputs: one may be computed again for the sake of another.
- Workspace is part of the limit of U[t,k], while k runs.
- Targets: one more stage after the last first computation, and at its end they must be there. Held values count as read
  by the loss and have S = 1 from then on; one that is computed again after the loss is there twice while it is, so the
  recurrence takes the old copy off afterwards.
- An operator marked once, and one that reads what is to be mutated, has no R after its last stage.
- Columns that no use can follow are left out (constraints implied by optimality, as in 4.8).

(7) comes in two forms. `split`, the default, says FREE + x <= 1 for each hazard x by itself, and that no more of a
value can be freed than is there (theorem 4.1), so that FREE may be continuous. It also limits memory at the end of a
stage, where it is known without FREE and U: the operator at position t runs last in stage t, beside what it reads and
makes and what S[t+1] keeps. Both lift the linear relaxation. The paper's own form (7b-c) adds the hazards up.

These limits at the end of stages are nearly all that matters. On ResNet50 two or three stages of 353 need the
recurrence (2)-(3) for the relaxation to satisfy it everywhere, and without the other ones it takes 7 s instead of more
than 250. So `accounted` may name the stages that have FREE and U at all, and `unaccounted` says which ones a point
still breaks.

The unpartitioned form (1d-e) has n stages in which any operator may run. Each operator that nobody reads must run in
one of them; operators marked once run exactly once and in default order among their kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from rematch.errors import ScheduleError
from rematch.graph import Graph, Schedule
from rematch.graph.matrices import stage_of_each_compute
from rematch.graph.model import Bools, Floats, Ints, Longs
from rematch.solvers.common.highs import ABSENT, LinearModel
from rematch.solvers.common.precedence import Precedence

MOST_OPERATORS = 1500  # columns and rows grow with the square: a million and three for a thousand operators


@dataclass(frozen=True, eq=False)
class Frees:
    """Where in a stage a value may be freed: entry e is after operator `after[e]`, unless a later user of it runs."""

    after: Ints
    value: Ints
    entry: Ints  # per pair of an entry and an operator that reads its value later in the stage: the entry
    later: Ints  # and the operator

    @staticmethod
    def of(precedence: Precedence, *, dead_outputs: bool) -> Frees:
        a = precedence.graph.arrays
        reader, read = np.unique(np.stack((precedence.reader, precedence.read)), axis=1)  # the loss may also read held
        read_at_all = np.zeros(len(a.size), dtype=np.bool_)
        read_at_all[read] = True
        output_count = np.diff(a.outputs_ptr)[a.producer]
        own = (a.producer >= 0) & ((output_count > 1) | (dead_outputs & ~read_at_all))
        own_value = np.flatnonzero(own).astype(np.int32)
        after = np.concatenate((reader, a.producer[own_value]))
        value = np.concatenate((read, own_value))
        heavy = a.size[value] > 0
        after, value = after[heavy], value[heavy]
        by_value: dict[int, list[int]] = {}
        for user, used in zip(reader.tolist(), read.tolist(), strict=True):
            by_value.setdefault(used, []).append(user)
        pairs = [
            (entry, user)
            for entry, (op, freed) in enumerate(zip(after.tolist(), value.tolist(), strict=True))
            for user in by_value.get(freed, ())
            if a.position[user] > a.position[op]
        ]
        entry, later = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
        return Frees(after, value, entry, later)


@dataclass(eq=False)
class CheckmateModel:
    """The program for one budget. Costs are in percent of the graph's baseline seconds: 100 is no recomputation."""

    graph: Graph
    budget_bytes: int
    partitioned: bool = True
    split: bool = True
    accounted: frozenset[int] | None = None  # stages with the memory recurrence, None for all
    program: LinearModel = field(default_factory=LinearModel, init=False)
    R: Ints = field(init=False)  # [stage, operator] -> column, or ABSENT
    S: Ints = field(init=False)  # [stage, value] -> column, or ABSENT
    M: Ints = field(init=False)  # [stage, value] -> column: v comes from elsewhere when the stage begins; ABSENT here

    def __post_init__(self) -> None:
        a = self.graph.arrays
        self.precedence = Precedence.of(self.graph)
        self.frees = Frees.of(self.precedence, dead_outputs=not self.partitioned)
        self.free_bytes = max(self.budget_bytes - a.resident_bytes, 1)  # the unit of memory in the program
        self.room = self._room_of(self.budget_bytes)
        self._limited: list[tuple[int, float]] = []  # rows that limit memory, and what they leave out of it
        self.weight: Floats = a.size / self.free_bytes
        self._made_weight: Floats = np.zeros(len(self.graph.ops))
        np.add.at(self._made_weight, a.producer[a.outputs], self.weight[a.outputs])
        self._add_columns()
        self._require_inputs()
        self._carry_over()
        for stage in range(self.stage_count):
            if self.accounted is None or stage in self.accounted:
                self._account_for_memory(stage)
            if self.partitioned and self.split and stage < len(self.graph.ops):
                self._limit_first_computation(stage)
        if not self.partitioned:
            self._compute_everything()
            self._keep_windows()
            self._keep_turns()
            self._hold_after_the_loss()

    @cached_property
    def stage_count(self) -> int:
        """One for each operator, and one for targets that are made again after the last first computation."""
        return len(self.graph.ops) + bool((self.graph.arrays.target & (self.graph.arrays.producer >= 0)).any())

    # Columns

    def _add_columns(self) -> None:
        a = self.graph.arrays
        cost = a.seconds / (self.graph.baseline_seconds or 1.0) * 100.0
        self.R = np.full((self.stage_count, len(self.graph.ops)), ABSENT, dtype=np.int32)
        self.S = np.full((self.stage_count, len(self.graph.values)), ABSENT, dtype=np.int32)
        self.M = np.full(self.S.shape, ABSENT, dtype=np.int32)
        self._surely_kept = np.zeros(self.S.shape, dtype=np.bool_)
        for stage in range(self.stage_count):
            ops = np.flatnonzero(self._may_run(stage))
            self.R[stage, ops] = self.program.columns(cost[ops], lower=self._must_run(stage)[ops])
            values = np.flatnonzero(self._may_be_kept(stage))
            surely = (a.held & self._after_loss(stage)) | (self.partitioned & (a.size == 0))
            self._surely_kept[stage] = surely
            self.S[stage, values] = self.program.columns(np.zeros(len(values)), lower=surely[values])

    def _may_run(self, stage: int) -> Bools:
        position, first_stage = self.graph.arrays.position, self.graph.arrays.first_stage
        if not self.partitioned:
            return np.ones(len(position), dtype=np.bool_)
        again = (first_stage <= stage) & (stage <= self.precedence.useful_op_until)
        return np.asarray(again | (position == stage))

    def _must_run(self, stage: int) -> Bools:
        return np.asarray(self.partitioned & (self.graph.arrays.position == stage))

    def _may_be_kept(self, stage: int) -> Bools:
        p = self.precedence
        if not self.partitioned:
            return np.asarray((p.made_at >= 0) & (stage > 0))
        return np.asarray((p.made_at >= 0) & (p.made_at < stage) & (stage <= p.useful_until))

    def _after_loss(self, stage: int) -> bool:
        a = self.graph.arrays
        return bool(self.partitioned and a.loss >= 0 and stage > a.position[a.loss])

    # Rows

    def _require_inputs(self) -> None:
        """(1b): what a stage computes finds its inputs in memory when the stage begins, or computed in it."""
        p = self.precedence
        maker = self.graph.arrays.producer[p.read]
        for stage in range(self.stage_count):
            reads = (self.R[stage, p.reader] != ABSENT) & (maker >= 0)
            columns = (self.R[stage, maker], self.S[stage, p.read], self.M[stage, p.read], self.R[stage, p.reader])
            self.program.rows(np.stack(columns, axis=1)[reads], [1.0, 1.0, 1.0, -1.0], lower=0.0)

    def _carry_over(self) -> None:
        """(1c): what is kept for the next stage was in memory or computed in this one; and so at the end."""
        a = self.graph.arrays
        made = np.flatnonzero(a.producer >= 0)
        for stage in range(1, self.stage_count):
            values = made[self.S[stage, made] != ABSENT]
            self._require_kept(stage - 1, values, self.S[stage, values])
        wanted = made[(a.target | a.held)[made]]
        if self.stage_count:
            self._require_kept(self.stage_count - 1, wanted, None)

    def _require_kept(self, stage: int, values: Ints | Longs, kept: Ints | None) -> None:
        there = [self.S[stage, values], self.R[stage, self.graph.arrays.producer[values]], self.M[stage, values]]
        if kept is None:
            self.program.rows(np.stack(there, axis=1), 1.0, lower=1.0)
        else:
            self.program.rows(np.stack([*there, kept], axis=1), [1.0, 1.0, 1.0, -1.0], lower=0.0)

    def _limit_first_computation(self, stage: int) -> None:
        """Memory while the last operator of the stage runs: what it touches, and what the next stage finds."""
        a = self.graph.arrays
        op = int(a.order[stage])
        touched = self.precedence.touched(op)
        kept = self._kept_next(stage).copy()
        kept[touched] = ABSENT
        values = np.flatnonzero(kept != ABSENT)
        room = self.room - self.weight[touched].sum() - a.workspace[op] / self.free_bytes
        self._limited.append((self.program.row_count, self.room - room))
        self.program.rows(kept[values][None, :], self.weight[values], upper=room)

    def _account_for_memory(self, stage: int) -> None:
        """(2)-(3): memory while each operator of the stage runs, from what is in memory when the stage begins."""
        a = self.graph.arrays
        ops = a.order[self.R[stage, a.order] != ABSENT]
        if not len(ops):
            return
        free = self._free_columns(stage, int(ops[-1]))
        used = self.program.columns(np.zeros(len(ops)), upper=np.inf, integer=False)
        made_bytes = self._made_weight[ops]
        kept, brought = np.flatnonzero(self.S[stage] != ABSENT), np.flatnonzero(self.M[stage] != ABSENT)
        first = np.concatenate(([used[0], self.R[stage, ops[0]]], self.S[stage, kept], self.M[stage, brought]))
        weights = np.concatenate(([1.0, -made_bytes[0]], -self.weight[kept], -self.weight[brought]))
        self.program.rows(first[None, :].astype(np.int32), weights, lower=0.0, upper=0.0)
        columns, coefficients = self._freed_after(stage, ops[:-1], free)
        recurrence = np.stack((used[1:], used[:-1], self.R[stage, ops[1:]]), axis=1)
        factors = np.stack((np.ones(len(ops) - 1), -np.ones(len(ops) - 1), -made_bytes[1:]), axis=1)
        self.program.rows(
            np.concatenate((recurrence, columns), axis=1),
            np.concatenate((factors, coefficients), axis=1),
            lower=0.0,
            upper=0.0,
        )
        limit = np.stack((used, self.R[stage, ops]), axis=1)
        workspace = a.workspace[ops] / self.free_bytes
        self._limited += [(self.program.row_count + row, 0.0) for row in range(len(ops))]
        self.program.rows(limit, np.stack((np.ones(len(ops)), workspace), axis=1), upper=self.room)

    def _freed_after(self, stage: int, ops: Ints, free: Ints) -> tuple[Ints, Floats]:
        """Per operator, what leaves memory when it ends: columns and their weights, padded with ABSENT."""
        listed: dict[int, dict[int, float]] = {int(op): {} for op in ops}
        for entry in np.flatnonzero(free != ABSENT).tolist():
            listed[int(self.frees.after[entry])][int(free[entry])] = self.weight[self.frees.value[entry]]
        for value, column in self._replaced(stage):
            leaving = listed.get(int(self.graph.arrays.producer[value]), {})
            leaving[column] = leaving.get(column, 0.0) + self.weight[value]  # held siblings share a column
        width = max((len(entries) for entries in listed.values()), default=0)
        columns = np.full((len(ops), width), ABSENT, dtype=np.int32)
        weights = np.zeros((len(ops), width))
        for row, op in enumerate(ops.tolist()):
            for slot, (column, weight) in enumerate(listed[op].items()):
                columns[row, slot], weights[row, slot] = column, weight
        return columns, weights

    def _replaced(self, stage: int) -> list[tuple[int, int]]:
        """Held values of which a stage may have two copies, and the column that says so: the old one goes at once."""
        a = self.graph.arrays
        held = np.flatnonzero(a.held & (a.producer >= 0) & (a.size > 0))
        if self.partitioned:
            again = [(int(v), int(self.R[stage, a.producer[v]])) for v in held if self._after_loss(stage)]
            return [(value, column) for value, column in again if column != ABSENT]
        copies = self.program.columns(np.zeros(len(held)), integer=False)
        if len(held):
            self.program.rows(np.stack((copies, self.R[stage, a.producer[held]]), axis=1), [1.0, -1.0], upper=0.0)
            lost = np.broadcast_to(self.R[:stage, a.loss], (len(held), stage))
            columns = np.concatenate((copies[:, None], lost), axis=1)
            self.program.rows(columns, [1.0] + [-1.0] * stage, upper=0.0)
        return list(zip(held.tolist(), copies.tolist(), strict=True))

    def _free_columns(self, stage: int, last_op: int) -> Ints:
        """Per entry of `frees` a column, or ABSENT where nothing can be freed in this stage or nothing follows."""
        frees = self.frees
        kept_next = self._kept_next(stage)
        surely_next = self._surely_kept[stage + 1] if stage + 1 < self.stage_count else self._wanted_at_the_end()
        surely_run = self._must_run(stage)
        possible = (self.R[stage, frees.after] != ABSENT) & (frees.after != last_op) & ~surely_next[frees.value]
        possible[frees.entry[surely_run[frees.later]]] = False
        pair = possible[frees.entry] & (self.R[stage, frees.later] != ABSENT)
        column = np.full(len(frees.after), ABSENT, dtype=np.int32)
        column[possible] = self.program.columns(np.zeros(int(possible.sum())), integer=not self.split)
        hazards = (self.R[stage, frees.after], kept_next[frees.value])
        if self.split:
            self._split_hazards(stage, column, possible, pair, hazards)
        else:
            self._summed_hazards(stage, column, possible, pair, hazards)
        return column

    def _kept_next(self, stage: int) -> Ints:
        """Per value, the column that says that the next stage finds it in memory."""
        return self.S[stage + 1] if stage + 1 < self.stage_count else np.full(self.S.shape[1], ABSENT, dtype=np.int32)

    def _wanted_at_the_end(self) -> Bools:
        return self.graph.arrays.target | self.graph.arrays.held

    def _split_hazards(
        self, stage: int, column: Ints, possible: Bools, pair: Bools, hazards: tuple[Ints, Ints]
    ) -> None:
        """A free needs its operator to run, no keeping and no later user; no more is freed than is there."""
        frees, (runs, kept) = self.frees, hazards
        self.program.rows(np.stack((column, runs), axis=1)[possible], [1.0, -1.0], upper=0.0)
        stays = possible & (kept != ABSENT)
        self.program.rows(np.stack((column, kept), axis=1)[stays], 1.0, upper=1.0)
        entry, later = frees.entry[pair], frees.later[pair]
        self.program.rows(np.stack((column[entry], self.R[stage, later]), axis=1), 1.0, upper=1.0)
        by_value: dict[int, list[int]] = {}
        for index in np.flatnonzero(possible).tolist():
            by_value.setdefault(int(frees.value[index]), []).append(int(column[index]))
        width = max(map(len, by_value.values()), default=0)
        rows = np.full((len(by_value), width + 3), ABSENT, dtype=np.int32)
        for row, (value, freed) in enumerate(by_value.items()):
            rows[row, : len(freed)] = freed
            made = self.R[stage, self.graph.arrays.producer[value]]
            rows[row, width:] = self.S[stage, value], made, self.M[stage, value]
        self.program.rows(rows, [1.0] * width + [-1.0, -1.0, -1.0], upper=0.0)

    def _summed_hazards(
        self, stage: int, column: Ints, possible: Bools, pair: Bools, hazards: tuple[Ints, Ints]
    ) -> None:
        """(7b) 1 - FREE <= number of hazards, (7c) most possible hazards x (1 - FREE) >= number of hazards."""
        frees, (runs, kept) = self.frees, hazards
        later: dict[int, list[int]] = {}
        for index in np.flatnonzero(pair).tolist():
            later.setdefault(int(frees.entry[index]), []).append(int(self.R[stage, frees.later[index]]))
        entries = np.flatnonzero(possible)
        width = max(map(len, later.values()), default=0)
        rows = np.full((len(entries), width + 3), ABSENT, dtype=np.int32)
        for row, entry in enumerate(entries.tolist()):
            users = later.get(entry, [])
            rows[row, :3] = column[entry], runs[entry], kept[entry]
            rows[row, 3 : 3 + len(users)] = users
        most = 1.0 + (rows[:, 2:] != ABSENT).sum(axis=1)
        ones = np.ones((len(entries), width + 1))
        signs = np.concatenate((np.ones((len(entries), 1)), -np.ones((len(entries), 1)), ones), axis=1)
        self.program.rows(rows, signs, lower=0.0)
        signs[:, 0] = most
        self.program.rows(rows, signs, upper=most - 1.0)

    # The unpartitioned form

    def _compute_everything(self) -> None:
        """(1e): operators that nobody reads run in some stage, and with them all they need; once means exactly once."""
        a = self.graph.arrays
        read = np.zeros(len(self.graph.values), dtype=np.bool_)
        read[self.precedence.read] = True
        is_read = np.zeros(len(self.graph.ops), dtype=np.bool_)
        is_read[a.producer[read & (a.producer >= 0)]] = True
        for op in range(len(self.graph.ops)):
            if a.once[op] or not is_read[op]:
                upper = 1.0 if a.once[op] else np.inf
                self.program.rows(self.R[:, op][None, :], 1.0, lower=1.0, upper=upper)

    def _keep_windows(self) -> None:
        """Operators marked once keep their order; readers of what is mutated run in their window of the once count."""
        a = self.graph.arrays
        sequence = a.order[a.once[a.order]]
        for op in range(len(self.graph.ops)):
            for stage in range(self.stage_count):
                if a.once_from[op] > 0:
                    before = self.R[: stage + 1, sequence[a.once_from[op] - 1]]
                    self._order_rows(self.R[stage, op], before, sign=-1.0, upper=0.0)
                if a.once_until[op] < len(sequence) and not a.once[op]:
                    after = self.R[:stage, sequence[a.once_until[op]]]
                    self._order_rows(self.R[stage, op], after, sign=1.0, upper=1.0)

    def _keep_turns(self) -> None:
        """First runs that keep the default order do so; nothing runs twice up to the loss where that is not allowed."""
        a = self.graph.arrays
        sequence = a.order[a.turn[a.order] >= 0]
        for earlier, op in pairwise(sequence.tolist()):
            for stage in range(self.stage_count):
                self._order_rows(self.R[stage, op], self.R[: stage + 1, earlier], sign=-1.0, upper=0.0)
        if not self.graph.recompute_after_loss:
            return
        for op in np.flatnonzero(~a.once).tolist():
            for stage in range(1, self.stage_count):
                runs, lost = self.R[: stage + 1, op], self.R[:stage, a.loss]
                row = np.concatenate((runs, lost))[None, :]
                self.program.rows(row, [1.0] * len(runs) + [-float(stage)] * len(lost), upper=1.0)

    def _order_rows(self, column: int, others: Ints, *, sign: float, upper: float) -> None:
        """column + sign x (sum of others) <= upper"""
        row = np.append(others, column).astype(np.int32)
        self.program.rows(row[None, :], [sign] * len(others) + [1.0], upper=upper)

    def _hold_after_the_loss(self) -> None:
        a = self.graph.arrays
        for value in np.flatnonzero(a.held & (a.producer >= 0)).tolist():
            for stage in range(1, self.stage_count):
                row = np.append(self.R[:stage, a.loss], self.S[stage, value]).astype(np.int32)
                self.program.rows(row[None, :], [1.0] * stage + [-1.0], upper=0.0)

    # From and to schedules

    def schedule(self, point: Floats) -> Schedule:
        """Algorithm 1: the stages one after the other, every value freed as early as its uses allow."""
        order = self.graph.arrays.order
        columns = self.R[:, order]
        runs = (columns != ABSENT) & (point[columns] > 0.5)
        return Schedule.from_ops(self.graph, order[np.nonzero(runs)[1]])

    def kept(self, point: Floats) -> Floats:
        """S, for n + 1 stages, with 0 where there is no column."""
        shares = np.zeros((len(self.graph.ops) + 1, len(self.graph.values)))
        shares[: self.stage_count] = _at(point, self.S)
        return shares

    def limits(self, budget_bytes: int) -> tuple[Ints, Floats]:
        """The rows that limit memory, and their upper ends for another budget."""
        rows, left_out = zip(*self._limited, strict=True) if self._limited else ((), ())
        return np.array(rows, dtype=np.int32), self._room_of(budget_bytes) - np.array(left_out)

    def _room_of(self, budget_bytes: int) -> float:
        return (budget_bytes - self.graph.arrays.resident_bytes) / self.free_bytes

    def unaccounted(self, point: Floats, budget_bytes: int, tolerance: float = 1e-6) -> frozenset[int]:
        """Stages without the memory recurrence of which a point for a budget shows that they need it.

        The recurrence can be satisfied iff it is when every value is freed as early and as far as (7) allows.
        """
        known = self.accounted if self.accounted is not None else range(self.stage_count)
        stages = sorted(set(range(self.stage_count)).difference(known))
        most = self._room_of(budget_bytes) + tolerance
        return frozenset(stage for stage in stages if self._largest_use(point, stage) > most)

    def _largest_use(self, point: Floats, stage: int) -> float:
        a, frees = self.graph.arrays, self.frees
        runs, there = _at(point, self.R[stage]), _at(point, self.S[stage])
        kept = _at(point, self._kept_next(stage)) if stage + 1 < self.stage_count else self._wanted_at_the_end()
        most = np.minimum(runs[frees.after], 1.0 - kept[frees.value])
        np.minimum.at(most, frees.entry, 1.0 - runs[frees.later])
        used = largest = float(self.weight @ there)
        left = there + np.where(a.producer >= 0, runs[a.producer], 0.0)
        freeing: dict[int, list[int]] = {}
        for entry in np.flatnonzero(most > 0.0).tolist():
            freeing.setdefault(int(frees.after[entry]), []).append(entry)
        for op in a.order[runs[a.order] > 0.0].tolist():
            used += self._made_weight[op] * runs[op]
            largest = max(largest, used + a.workspace[op] / self.free_bytes * runs[op])
            for entry in freeing.get(op, ()):
                value = int(frees.value[entry])
                freed = min(most[entry], left[value])
                left[value] -= freed
                used -= self.weight[value] * freed
        return largest

    def start(self, schedule: Schedule) -> dict[int, float] | None:
        """R and S of `schedule` by column, None if it cannot be cut into the program's stages.

        Within a stage operators are put in default order, each once, which may take more memory.
        """
        stages = self._stages(schedule)
        if stages is None:
            return None
        possible = stages < self.stage_count  # what comes later is computed in vain, as there are no targets
        ran = np.zeros(self.R.shape, dtype=np.bool_)
        ran[stages[possible], schedule.ops[possible]] = True
        ran &= self.R != ABSENT  # what is left out is computed in vain
        kept = self._kept(ran) | self._surely_kept
        present = (self.R != ABSENT, self.S != ABSENT)
        columns = np.concatenate((self.R[present[0]], self.S[present[1]]))
        settings = np.concatenate((ran[present[0]], kept[present[1]])).astype(np.float64)
        return dict(zip(columns.tolist(), settings.tolist(), strict=True))

    def _stages(self, schedule: Schedule) -> Longs | None:
        """The stage of each computation; without partition, a stage ends where the default order is left."""
        if not self.partitioned:
            backwards = np.diff(self.graph.arrays.position[schedule.ops], prepend=-1) <= 0
            return np.cumsum(backwards, dtype=np.int64) if backwards.sum() < self.stage_count else None
        try:
            return stage_of_each_compute(self.graph, schedule)
        except ScheduleError:
            return None

    def _kept(self, ran: Bools) -> Bools:
        """What must be in memory when each stage begins, if `ran` says what the stages compute."""
        a = self.graph.arrays
        kept = np.zeros(self.S.shape, dtype=np.bool_)
        needed = (a.target | a.held) & (a.producer >= 0)
        loss_stage = int(np.argmax(ran[:, a.loss])) if a.loss >= 0 else self.stage_count
        for stage in range(self.stage_count - 1, -1, -1):
            for op in a.order[ran[stage, a.order]][::-1].tolist():
                made = a.outputs_of(op)
                needed[made] = a.held[made] & (stage > loss_stage)
                needed[a.inputs_of(op)] = True
                if op == a.loss:
                    needed |= a.held & (a.producer >= 0)
            kept[stage] = needed
        return kept


def _at(point: Floats, columns: Ints) -> Floats:
    """The point's entries at `columns`, 0 where there is none."""
    return np.where(columns == ABSENT, 0.0, point[columns])
