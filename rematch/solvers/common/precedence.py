"""Who reads what and until when: what every program over the stages of a schedule is built from.

`Precedence.of(graph).useful_until[value]`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rematch.graph import Graph
from rematch.graph.model import Bools, Ints, Longs, row_sums


@dataclass(frozen=True, eq=False)
class Precedence:
    """Who reads what and until when, for one graph, whatever the budget."""

    graph: Graph
    reader: Ints  # per read: the operator
    read: Ints  # per read: the value; held values count as read by the loss
    made_at: Ints  # per value: position of its producer, -1 for residents
    wanted_until: Ints  # per value: last position whose first computation reads it; op_count for targets and held
    useful_until: Ints  # per value: last stage in which anything, recomputations included, may have use for it

    @staticmethod
    def of(graph: Graph) -> Precedence:
        a = graph.arrays
        held = np.flatnonzero(a.held).astype(np.int32)
        reader = np.concatenate(
            (
                np.repeat(np.arange(len(graph.ops), dtype=np.int32), np.diff(a.inputs_ptr)),
                np.full(len(held), a.loss, np.int32),
            )
        )
        read = np.concatenate((a.inputs, held))
        wanted = np.full(len(graph.values), -1, dtype=np.int32)
        np.maximum.at(wanted, read, a.position[reader])
        wanted[a.target | a.held] = len(graph.ops)
        made_at = np.where(a.producer >= 0, a.position[a.producer], -1).astype(np.int32)
        return Precedence(graph, reader, read, made_at, wanted, _useful_until(graph, wanted))

    @cached_property
    def useful_op_until(self) -> Ints:
        """Per operator: the last stage in which computing it again may be of use and is allowed.

        It may come before the first stage in which it is allowed, and then there is none.
        """
        a = self.graph.arrays
        until = np.full(len(self.graph.ops), -1, dtype=np.int32)
        made = np.flatnonzero(a.producer >= 0)
        np.maximum.at(until, a.producer[made], self.useful_until[made])
        return np.minimum(until, a.last_stage)

    @cached_property
    def surely_bytes(self) -> Longs:
        """Per position: what is alive in its first computation whatever is recomputed when.

        That is what the operator touches, and from the loss on also all that is held.
        """
        a = self.graph.arrays
        held = np.where(a.held & (self.made_at >= 0), a.size, 0)
        touched = row_sums(held[a.inputs], a.inputs_ptr) + row_sums(held[a.outputs], a.outputs_ptr)
        after_loss = (a.loss >= 0) & (a.position >= a.position[a.loss])
        return np.asarray((self.graph.op_bytes + np.where(after_loss, held.sum() - touched, 0))[a.order])

    def wanted(self, after: int, through: int) -> Bools:
        """Values made by position `after` that first computations at `after` + 1 ... `through`, or the end, read."""
        at = self.graph.arrays.position[self.reader]
        wanted = np.zeros(len(self.graph.values), dtype=np.bool_)
        wanted[self.read[(at > after) & (at <= through)]] = True
        if through >= len(self.graph.ops):
            wanted |= self.wanted_until >= through
        return wanted & (self.made_at >= 0) & (self.made_at <= after)

    def touched(self, op: int) -> Ints:
        """Values that `op` reads or makes."""
        a = self.graph.arrays
        made = a.outputs_of(op)
        return np.unique(np.concatenate((a.inputs_of(op), made)))


def _useful_until(graph: Graph, wanted: Ints) -> Ints:
    """From the last operator back: a value is of use until its last reader, or a recomputation of a reader, is."""
    a = graph.arrays
    useful = wanted.tolist()
    first_stage, last_stage = a.first_stage.tolist(), a.last_stage.tolist()
    for position in range(len(graph.ops) - 1, -1, -1):
        op = int(a.order[position])
        made = a.outputs_of(op).tolist()
        again_until = min(last_stage[op], max((useful[value] for value in made), default=-1))
        until = again_until if again_until >= first_stage[op] else position
        for value in a.inputs_of(op).tolist():
            useful[value] = max(useful[value], until)
    return np.array(useful, dtype=np.int32)
