"""The epoch relaxation with a link: a linear program below every schedule that keeps, recomputes and moves values.

`JointModel(Precedence.of(graph), budget_bytes, moments=(5, 9))`

In the frame of `rematch.solvers.default.epochs`, whose words and columns `keep[k,v]` and `again[e,w]` are used here.
Epoch e lasts from the end of the first computation of tau_e to that of tau_(e+1), the opening (-1) from the start, the
last epoch until all has ended. In addition:

    stall[e]   time of epoch e in which no first computation and no `again` runs
    in[e,v]    share of v that is copied in during epoch e                       (v made by tau_e)
    out[k,v]   share of v that was copied out when the computation of tau_k begins   (v made by tau_k)
    lasts[e] = seconds of first computations in e + sum of seconds(w) again[e,w] + stall[e]
    until[e] = the same, but with the first computation of tau_e and without that of tau_(e+1)

    minimise   sum of lasts[e]
    (memory)   as before, with keep[k,v] the share of v on the device
    (carry)    keep[e+1,v] <= keep[e,v] + again[e,producer(v)] + in[e,v]
    (inputs)   1, or again[e,w], <= keep[e,v] + again[e,producer(v)] + in[e,v]
    (there)    in[e,v] <= out[e,v],   out[e,v] <= out[e+1,v]
    (present)  out[e+1,v] - out[e,v] <= keep[e,v] + again[e,producer(v)]
    (in)       sum of bytes(v) in[e,v] <= speed in x lasts[e]
    (out)      sum of bytes(v) (out[e+1,v] - out[e,v]) <= speed out x until[e]
    (host)     sum of bytes(v) out[K,v] <= host bytes

*It is a relaxation.* Take a valid schedule whose first computations follow the order, and read the columns off it. The
device holds all of a value's memory from the fetch on, so counting the share that has arrived, keep[k,v], only takes
from (memory). Let in[e,v] be the share of v that arrives in e if v was not complete at tau_e and is not computed in e,
and 0 otherwise: then (carry) and (inputs) hold, because an operator begins only when its inputs are complete. For v
with in[e,v] > 0 the copy out had ended when tau_e began: v was on its way in, or not on the device, and not computed
since, and values are freed between computations. That is (there). A copy out reads the device, where v was complete at
tau_e or was computed in e: (present). A link moves at most its speed times the time: (in) and (out). Host memory is
never given back: (host). What runs in an epoch beside first computations and one run for each `again` is part of its
stall.

Two kinds of rows look inside an epoch. What first computations up to position q of epoch e read arrives before q
begins: the part of (in) for those values, with the time up to q in place of lasts[e]. What is first made at position q
of an epoch or later leaves after that: the part of (out) for those values, with the time from q on. *Suffixes* relate
epochs as in `epochs`: all that follows a moment is one epoch too, with later_in[e,v] <= out[e,v] and at most the sum of
in[e,v] over what follows.

With one moment the columns may be asked to be whole: count a value on its way in as kept, for it has all its memory,
and one on its way out as not copied out, for it is on the device. Then `in` counts values whose whole copy runs in the
epoch, and `out` those whose copy has ended. With more moments a copy may run in two epochs.

The bound is valid for schedules whose first computations follow the default order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rematch.graph.model import Bools, Floats, Ints
from rematch.solvers.common.highs import ABSENT, LinearModel
from rematch.solvers.common.precedence import Precedence

_WINDOWS = 40  # inside epochs, for each direction; all epochs share them
_LEAST_WINDOWS = 6  # of each epoch


class JointModel:
    """The program for one budget and some moments. Costs are in percent of the graph's baseline seconds."""

    def __init__(self, precedence: Precedence, budget_bytes: int, moments: Sequence[int]) -> None:
        graph = precedence.graph
        a = graph.arrays
        assert graph.link is not None, "only a link moves values"
        self.precedence = precedence
        self.moments = np.array(moments, dtype=np.int32)
        self.ends = np.append(self.moments[1:], len(graph.ops)).astype(np.int32)
        self.free_bytes = max(budget_bytes - a.resident_bytes, 1)
        self.program = LinearModel()
        self.memory_rows: list[int] = []  # per moment
        self._cost: Floats = a.seconds / (graph.baseline_seconds or 1.0) * 100.0
        to_percent = 100.0 / (graph.baseline_seconds or 1.0)
        self._out_cost: Floats = a.size / graph.link.out_bytes_per_second * to_percent  # to move all of each value
        self._in_cost: Floats = a.size / graph.link.in_bytes_per_second * to_percent
        self._passed: Floats = np.concatenate(
            ([0.0], np.cumsum(self._cost[a.order]))
        )  # first computations, by position
        self._add_columns()
        for epoch in range(len(self.moments)):
            self._enforce_memory(epoch)
            self._carry_over(epoch)
            self._require_inputs(epoch)
            self._limit_in(epoch)
        for epoch in range(-1, len(self.moments) - 1):
            self._limit_out(epoch)
        self._limit_host()
        self._relate_epochs()

    # Columns

    def _add_columns(self) -> None:
        p, a = self.precedence, self.precedence.graph.arrays
        count, values = len(self.moments), len(p.graph.values)
        self.keep, self.bring, self.gone = (np.full((count, values), ABSENT, dtype=np.int32) for _ in range(3))
        self.again = np.full((count, len(p.graph.ops)), ABSENT, dtype=np.int32)
        self.stall = self.program.columns(np.ones(count + 1), upper=np.inf, integer=False)  # the opening's first
        loss_at = a.position[a.loss] if a.loss >= 0 else -1
        for epoch, moment in enumerate(self.moments.tolist()):
            surely = np.zeros(values, dtype=np.bool_)
            surely[p.touched(a.order[moment])] = True
            surely |= a.held & (a.loss >= 0 and moment >= loss_at)
            possible = (p.made_at >= 0) & (p.made_at <= moment) & (surely | (p.useful_until > moment))
            kept = np.flatnonzero(possible)
            fixed = surely[kept] | (a.size[kept] == 0)  # what weighs nothing may as well stay
            self.keep[epoch, kept] = self.program.columns(np.zeros(len(kept)), lower=fixed)
            ops = np.flatnonzero((a.position <= moment) & self._may_run_again(epoch))
            self.again[epoch, ops] = self.program.columns(self._cost[ops])
            moved = kept[(a.size[kept] > 0) & a.movable[kept] & (p.useful_until[kept] > moment)]
            self.gone[epoch, moved] = self.program.columns(np.zeros(len(moved)))
            if not p.graph.recompute_after_loss or self.ends[epoch] > loss_at:
                self.bring[epoch, moved] = self.program.columns(np.zeros(len(moved)))

    def _may_run_again(self, epoch: int) -> Bools:
        first = np.maximum(self.precedence.graph.arrays.first_stage, self.moments[epoch] + 1)
        return np.asarray(first <= np.minimum(self.precedence.useful_op_until, self.ends[epoch]))

    # Rows

    def _enforce_memory(self, epoch: int) -> None:
        a = self.precedence.graph.arrays
        values = np.flatnonzero(self.keep[epoch] != ABSENT)
        room = 1.0 - a.workspace[a.order[self.moments[epoch]]] / self.free_bytes
        self.memory_rows.append(self.program.row_count)
        self.program.rows(self.keep[epoch, values][None, :], a.size[values] / self.free_bytes, upper=room)

    def _carry_over(self, epoch: int) -> None:
        if epoch + 1 == len(self.moments):
            return
        p = self.precedence
        values = np.flatnonzero((self.keep[epoch + 1] != ABSENT) & (p.made_at <= self.moments[epoch]))
        again = self.again[epoch, p.graph.arrays.producer[values]]
        columns = (self.keep[epoch, values], again, self.bring[epoch, values], self.keep[epoch + 1, values])
        self.program.rows(np.stack(columns, axis=1), [1.0, 1.0, 1.0, -1.0], lower=0.0)
        leaving = np.flatnonzero((self.gone[epoch + 1] != ABSENT) & (p.made_at <= self.moments[epoch]))
        again = self.again[epoch, p.graph.arrays.producer[leaving]]
        before, after = self.gone[epoch, leaving], self.gone[epoch + 1, leaving]
        self.program.rows(np.stack((after, before), axis=1), [1.0, -1.0], lower=0.0)
        columns = (self.keep[epoch, leaving], again, before, after)
        self.program.rows(np.stack(columns, axis=1), [1.0, 1.0, 1.0, -1.0], lower=0.0)

    def _require_inputs(self, epoch: int) -> None:
        moment, end = int(self.moments[epoch]), int(self.ends[epoch])
        self._require(self.keep[epoch], self.again[epoch], self.bring[epoch], self.precedence.wanted(moment, end))
        brought = np.flatnonzero(self.bring[epoch] != ABSENT)
        columns = np.stack((self.gone[epoch, brought], self.bring[epoch, brought]), axis=1)
        self.program.rows(columns, [1.0, -1.0], lower=0.0)

    def _require(self, keep: Ints, again: Ints, bring: Ints, wanted: Bools) -> None:
        p = self.precedence
        producer = p.graph.arrays.producer
        values = np.flatnonzero(wanted)
        self.program.rows(np.stack((keep[values], again[producer[values]], bring[values]), axis=1), 1.0, lower=1.0)
        reads = (again[p.reader] != ABSENT) & ~wanted[p.read]
        reader, read = p.reader[reads], p.read[reads]
        columns = np.stack((keep[read], again[producer[read]], bring[read], again[reader]), axis=1)
        self.program.rows(columns, [1.0, 1.0, 1.0, -1.0], lower=0.0)

    def _limit_in(self, epoch: int) -> None:
        """The link brings no more than there is time for: in the epoch, and before what reads it."""
        brought = np.flatnonzero(self.bring[epoch] != ABSENT)
        first, end = int(self.moments[epoch]) + 1, int(self.ends[epoch])
        self._limit(self.bring[epoch, brought], self._in_cost[brought], epoch, self._seconds(epoch))
        read_at = self._first_read(first, end)[brought]
        for position in self._windows(first, end):
            early = brought[read_at <= position]
            if len(early):
                passed = float(self._passed[position] - self._passed[first])
                self._limit(self.bring[epoch, early], self._in_cost[early], epoch, passed)

    def _first_read(self, first: int, end: int) -> Ints:
        """Per value, the first position from `first` to `end` that reads it when first run; beyond `end` if none."""
        p = self.precedence
        at = p.graph.arrays.position[p.reader]
        read_at = np.full(len(p.graph.values), end + 1, dtype=np.int32)
        inside = (at >= first) & (at <= end)
        np.minimum.at(read_at, p.read[inside], at[inside])
        return read_at

    def _limit_out(self, epoch: int) -> None:
        """The link takes no more than there is time for: in the epoch, and after it is made."""
        p = self.precedence
        leaving = np.flatnonzero(self.gone[epoch + 1] != ABSENT)
        before = np.full(len(leaving), ABSENT) if epoch < 0 else self.gone[epoch, leaving]
        first, end = int(self.moments[epoch]) + 1 if epoch >= 0 else 0, int(self.moments[epoch + 1])
        columns = np.concatenate((self.gone[epoch + 1, leaving], before)).astype(np.int32)
        cost = np.concatenate((self._out_cost[leaving], -self._out_cost[leaving]))
        begun = float(self._passed[first - 1]) if epoch >= 0 else 0.0
        self._limit(columns, cost, epoch, float(self._passed[end]) - begun)
        for position in self._windows(first, end):
            late = leaving[p.made_at[leaving] >= position]
            if len(late):
                left = float(self._passed[end] - self._passed[position + 1])
                self._limit(self.gone[epoch + 1, late], self._out_cost[late], epoch, left)

    def _limit(self, columns: Ints, cost: Floats, epoch: int, seconds: float) -> None:
        """What moves takes no longer than so much of first computations, with all that an epoch adds to them."""
        ops = np.flatnonzero(self.again[epoch] != ABSENT) if epoch >= 0 else np.zeros(0, dtype=np.int64)
        again = self.again[epoch, ops] if epoch >= 0 else np.zeros(0, dtype=np.int32)
        every = np.concatenate((columns, again, self.stall[[epoch + 1]])).astype(np.int32)
        self.program.rows(every[None, :], np.concatenate((cost, -self._cost[ops], [-1.0])), upper=seconds)

    def _seconds(self, epoch: int) -> float:
        """Time of an epoch's first computations, in percent."""
        end = min(int(self.ends[epoch]), len(self._passed) - 2)
        return float(self._passed[end + 1] - self._passed[int(self.moments[epoch]) + 1])

    def _limit_host(self) -> None:
        graph = self.precedence.graph
        assert graph.link is not None, "only a link moves values"
        values = np.flatnonzero(self.gone[-1] != ABSENT)
        share = graph.arrays.size[values] / max(graph.link.host_bytes, 1)
        self.program.rows(self.gone[-1, values][None, :], share, upper=float(graph.link.host_bytes > 0))

    def _relate_epochs(self) -> None:
        """For each moment, the same requirements as if all that comes after it were one epoch."""
        count = len(self.precedence.graph.ops)
        position, made_at = self.precedence.graph.arrays.position, self.precedence.made_at
        again, bring = self.again[-1], self.bring[-1]
        for epoch in range(len(self.moments) - 2, -1, -1):
            again = self._joined(self.again[epoch], again, position <= self.moments[epoch])
            bring = self._joined(self.bring[epoch], bring, (made_at >= 0) & (made_at <= self.moments[epoch]))
            there = np.flatnonzero((bring != ABSENT) & (self.gone[epoch] != ABSENT))
            bring = np.where(self.gone[epoch] != ABSENT, bring, ABSENT).astype(np.int32)
            self.program.rows(np.stack((self.gone[epoch, there], bring[there]), axis=1), [1.0, -1.0], lower=0.0)
            self._require(self.keep[epoch], again, bring, self.precedence.wanted(int(self.moments[epoch]), count))

    def _joined(self, now: Ints, after: Ints, done: Bools) -> Ints:
        """Columns that say that something happens now or after, at most the sum of the two."""
        both = np.flatnonzero(done & ((now != ABSENT) | (after != ABSENT)))
        column = np.full(len(now), ABSENT, dtype=np.int32)
        column[both] = self.program.columns(np.zeros(len(both)), integer=False)
        self.program.rows(np.stack((now[both], after[both], column[both]), axis=1), [1.0, 1.0, -1.0], lower=0.0)
        return column

    def _windows(self, first: int, end: int) -> list[int]:
        """Positions spread over `first` + 1 ... `end` - 1."""
        count = max(_LEAST_WINDOWS, _WINDOWS // len(self.moments))
        return sorted({int(at) for at in np.linspace(first, end, count + 2)[1:-1]} - {first, end})
