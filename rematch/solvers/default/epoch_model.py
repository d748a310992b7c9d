"""The epoch relaxation as a mixed-integer program; `epochs` says what it means and proves that it is a relaxation.

`EpochModel(Precedence.of(graph), budget_bytes, Refinement(moments=(5, 9)))`

Words: *position* is a place in the default order; *stage q* is what runs after the first computation at position q-1
through that at position q; *moments* tau_1 < ... < tau_K are positions; *epoch k* is the stages after tau_k through
tau_(k+1), and epoch K ends the schedule. Epochs count from 0 in the code; the stages up to tau_1 are the *opening*.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rematch.graph.model import Bools, Floats, Ints
from rematch.solvers.common.highs import ABSENT, LinearModel
from rematch.solvers.common.precedence import Precedence


@dataclass(frozen=True)
class Refinement:
    """Where the relaxation looks closely: more of each makes it tighter and larger."""

    moments: tuple[int, ...]  # positions at which memory is enforced with its own variables
    stages: frozenset[int] = frozenset()  # positions at which memory is enforced by one row over the epoch's variables
    repeats: frozenset[tuple[int, int]] = frozenset()  # (operator, stage): memory enforced while it is computed again
    suffixes: bool = False  # relate recomputations of several epochs to each other


@dataclass(eq=False)
class EpochModel:
    """The program for one budget and one refinement. Costs are in percent of the graph's baseline seconds."""

    precedence: Precedence
    budget_bytes: int
    refinement: Refinement
    program: LinearModel = field(default_factory=LinearModel, init=False)
    keep: Ints = field(
        init=False
    )  # [moment, value] -> column, or ABSENT: the value is alive while the moment first runs
    again: Ints = field(init=False)  # [epoch, operator] -> column: computed in this epoch, and not for the first time
    twice: dict[tuple[int, int], int] = field(default_factory=dict, init=False)  # (epoch, operator) in its first epoch
    memory_rows: list[int] = field(default_factory=list, init=False)  # per moment, the row that enforces memory at it

    def __post_init__(self) -> None:
        graph = self.precedence.graph
        a = graph.arrays
        self.moments = np.array(self.refinement.moments, dtype=np.int32)
        self.ends = np.append(self.moments[1:], len(graph.ops)).astype(np.int32)
        self.free_bytes = max(self.budget_bytes - a.resident_bytes, 1)
        self.weight: Floats = a.size / self.free_bytes
        self.cost: Floats = a.seconds / (graph.baseline_seconds or 1.0) * 100.0
        self._add_columns()
        for epoch in range(len(self.moments)):
            self._enforce_memory_at_moment(epoch)
            self._carry_over(epoch)
            self._require_inputs(epoch)
        if self.refinement.suffixes:
            self._relate_epochs()
        for position in sorted(self.refinement.stages - set(self.refinement.moments)):
            self._enforce_memory_in_stage(position)
        self._enforce_memory_while_repeating()

    # Columns

    def _add_columns(self) -> None:
        p = self.precedence
        a = p.graph.arrays
        shape = (len(self.moments), len(p.graph.values))
        self.keep = np.full(shape, ABSENT, dtype=np.int32)
        self.again = np.full((len(self.moments), len(p.graph.ops)), ABSENT, dtype=np.int32)
        made = p.made_at >= 0
        for epoch, moment in enumerate(self.moments):
            running = p.touched(a.order[moment])
            surely = np.zeros(len(p.graph.values), dtype=np.bool_)
            surely[running] = True
            surely |= self._held_at(moment)
            possible = made & (p.made_at <= moment) & (surely | (p.useful_until > moment))
            values = np.flatnonzero(possible)
            fixed = surely[values] | (a.size[values] == 0)  # what weighs nothing may as well stay
            self.keep[epoch, values] = self.program.columns(np.zeros(len(values)), lower=fixed)
            ops = np.flatnonzero((a.position <= moment) & self._may_run_again(p.useful_op_until, epoch))
            self.again[epoch, ops] = self.program.columns(self.cost[ops])

    def _may_run_again(self, until: Ints, epoch: int) -> Bools:
        """Per operator, whether the epoch has a stage in which it may run again, and which is not beyond `until`."""
        first = np.maximum(self.precedence.graph.arrays.first_stage, self.begin_of(epoch))
        return np.asarray(first <= np.minimum(until, self.end_of(epoch)))

    def _held_at(self, position: int) -> Bools:
        a = self.precedence.graph.arrays
        return a.held & (a.loss >= 0 and position >= a.position[a.loss])

    # Rows

    def _enforce_memory_at_moment(self, epoch: int) -> None:
        values = np.flatnonzero(self.keep[epoch] != ABSENT)
        op = self.precedence.graph.arrays.order[self.moments[epoch]]
        room = 1.0 - self.precedence.graph.arrays.workspace[op] / self.free_bytes
        self.memory_rows.append(self.program.row_count)
        self.program.rows(self.keep[epoch, values][None, :], self.weight[values], upper=room)

    def _carry_over(self, epoch: int) -> None:
        """A value kept at the next moment was kept at this one or computed in between."""
        if epoch + 1 == len(self.moments):
            return
        p = self.precedence
        values = np.flatnonzero((self.keep[epoch + 1] != ABSENT) & (p.made_at <= self.moments[epoch]))
        columns = np.stack(
            (
                self.keep[epoch, values],
                self.again[epoch, p.graph.arrays.producer[values]],
                self.keep[epoch + 1, values],
            ),
            axis=1,
        )
        self.program.rows(columns, [1.0, 1.0, -1.0], lower=0.0)

    def _require_inputs(self, epoch: int) -> None:
        """What an epoch computes, for the first time or again, finds its inputs kept or computed in the epoch."""
        moment, end = int(self.moments[epoch]), int(self.ends[epoch])
        self._require(self.keep[epoch], self.again[epoch], self.precedence.wanted(moment, end))
        surely = np.flatnonzero(self._wanted_too_early(moment, end))
        self.program.rows(self.keep[epoch, surely][:, None], 1.0, lower=1.0)

    def _wanted_too_early(self, after: int, through: int) -> Bools:
        """Those of the wanted values of which a reader comes before their producer may run again."""
        p = self.precedence
        a = p.graph.arrays
        maker = a.producer[p.read]
        early = (a.position[p.reader] > after) & (a.position[p.reader] <= through)
        early &= (a.position[p.reader] < a.first_stage[maker]) & (p.made_at[p.read] <= after) & (maker >= 0)
        wanted = np.zeros(len(p.graph.values), dtype=np.bool_)
        wanted[p.read[early]] = True
        return wanted

    def _require(self, keep: Ints, again: Ints, wanted: Bools) -> None:
        p = self.precedence
        producer = p.graph.arrays.producer
        values = np.flatnonzero(wanted)
        self.program.rows(np.stack((keep[values], again[producer[values]]), axis=1), 1.0, lower=1.0)
        reads = (again[p.reader] != ABSENT) & ~wanted[p.read]
        reader, read = p.reader[reads], p.read[reads]
        columns = np.stack((keep[read], again[producer[read]], again[reader]), axis=1)
        self.program.rows(columns, [1.0, 1.0, -1.0], lower=0.0)

    def _relate_epochs(self) -> None:
        """For each moment, the same requirements as if all that comes after it were one epoch."""
        after = self.again[-1]  # operator -> column: computed again in an epoch or after it
        for epoch in range(len(self.moments) - 2, -1, -1):
            now = self.again[epoch]
            done = self.precedence.graph.arrays.position <= self.moments[epoch]
            both = np.flatnonzero(done & (now != ABSENT) & (after != ABSENT))
            column = np.where(done, np.where(now != ABSENT, now, after), ABSENT).astype(np.int32)
            column[both] = self.program.columns(np.zeros(len(both)), integer=False)
            self.program.rows(np.stack((now[both], after[both], column[both]), axis=1), [1.0, 1.0, -1.0], lower=0.0)
            after = column
            wanted = self.precedence.wanted(int(self.moments[epoch]), len(self.precedence.graph.ops))
            self._require(self.keep[epoch], column, wanted)

    def epoch_of(self, stage: int) -> int:
        """The epoch that a stage lies in; -1 for the opening."""
        return int(np.searchsorted(self.moments, stage, side="left")) - 1

    def begin_of(self, epoch: int) -> int:
        """The first stage of an epoch, or of the opening (-1)."""
        return int(self.moments[epoch]) + 1 if epoch >= 0 else 0

    def end_of(self, epoch: int) -> int:
        """The last stage of an epoch, or of the opening (-1)."""
        return int(self.ends[epoch]) if epoch >= 0 else int(self.moments[0])

    def _enforce_memory_in_stage(self, position: int) -> None:
        """Values needed after `position` are alive while it runs, unless their producer runs again in this epoch."""
        p = self.precedence
        a = p.graph.arrays
        epoch = self.epoch_of(position)
        end = self.end_of(epoch)
        op = a.order[position]
        running = np.zeros(len(p.graph.values), dtype=np.bool_)
        running[p.touched(op)] = True
        held = self._held_at(position)
        wanted = self.precedence.wanted(position, end) & ~running & ~held
        room = 1.0 - (a.workspace[op] / self.free_bytes + self.weight[running | held].sum() + self.weight[wanted].sum())
        kept = np.zeros(len(p.graph.values), dtype=np.bool_)
        if epoch + 1 < len(self.moments):
            kept = (
                (self.keep[epoch + 1] != ABSENT)
                & (p.made_at < position)
                & (p.wanted_until > end)
                & ~wanted
                & ~running
                & ~held
            )
        values = np.flatnonzero(wanted | kept)
        values = values[a.size[values] > 0]
        early = self._wanted_too_early(position, end)
        repeat = np.array(
            [ABSENT if early[value] else self._repeat_column(epoch, int(value)) for value in values], dtype=np.int32
        )
        stays = values[kept[values]]
        columns = np.concatenate((self.keep[epoch + 1, stays] if len(stays) else stays, repeat)).astype(np.int32)
        coefficients = np.concatenate((self.weight[stays], -self.weight[values]))
        self.program.rows(*_merged(columns, coefficients), upper=room)

    def _repeat_column(self, epoch: int, value: int) -> int:
        """The column that says that the producer of `value` runs, not for the first time, in the epoch."""
        p = self.precedence
        a = p.graph.arrays
        op = int(a.producer[value])
        if epoch >= 0 and a.position[op] <= self.moments[epoch]:
            return int(self.again[epoch, op])
        if not self._may_run_again(a.last_stage, epoch)[op]:
            return ABSENT
        if (epoch, op) not in self.twice:
            self.twice[epoch, op] = int(self.program.columns(self.cost[[op]])[0])
        return self.twice[epoch, op]

    def _enforce_memory_while_repeating(self) -> None:
        """While an operator is computed again, all that is kept across its epoch untouched is alive beside it."""
        a = self.precedence.graph.arrays
        across: dict[int, Ints] = {}
        for op, epoch in sorted({(op, self.epoch_of(stage)) for op, stage in self.refinement.repeats}):
            if epoch < 0 or self.again[epoch, op] == ABSENT:
                continue
            if epoch not in across:
                across[epoch] = self._kept_across(epoch)
            touched = self.precedence.touched(op)
            beside = np.setdiff1d(np.flatnonzero(across[epoch] != ABSENT), touched)
            needs = self.weight[touched].sum() + a.workspace[op] / self.free_bytes
            columns = np.append(across[epoch][beside], self.again[epoch, op])
            self.program.rows(columns[None, :], np.append(self.weight[beside], needs), upper=1.0)

    def _kept_across(self, epoch: int) -> Ints:
        """Per value a column, at least 1 if the value is kept at both ends of the epoch and not computed in it."""
        p = self.precedence
        a = p.graph.arrays
        last = epoch + 1 == len(self.moments)
        stays = (a.target | a.held) if last else self.keep[epoch + 1] != ABSENT
        values = np.flatnonzero((self.keep[epoch] != ABSENT) & stays & (a.size > 0))
        column = np.full(len(p.graph.values), ABSENT, dtype=np.int32)
        column[values] = self.program.columns(np.zeros(len(values)), integer=False)
        end = self.keep[epoch if last else epoch + 1, values]
        columns = np.stack((column[values], end, self.again[epoch, a.producer[values]]), axis=1)
        self.program.rows(columns, [1.0, -1.0, 1.0], lower=0.0)
        return column

    # From and to schedules

    def recomputations(self, point: Floats) -> Iterable[tuple[int, list[int]]]:
        """Per epoch, the operators that a point of the program computes again."""
        for epoch in range(len(self.moments)):
            ops = np.flatnonzero(self.again[epoch] != ABSENT)
            yield epoch, ops[point[self.again[epoch, ops]] > 0.5].tolist()


def _merged(columns: Ints, coefficients: Floats) -> tuple[Ints, Floats]:
    """One row with each column once."""
    present = columns != ABSENT
    unique, place = np.unique(columns[present], return_inverse=True)
    summed = np.bincount(place, weights=coefficients[present], minlength=len(unique)).astype(np.float64)
    return unique[None, :].astype(np.int32), summed
