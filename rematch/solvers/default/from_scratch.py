"""A schedule that keeps nothing of forward: after the loss, what is read is made anew from the inputs each time.

`from_scratch(graph)`

On a chain no schedule holds less memory, and on training steps with skips few do. It takes milliseconds to write down
and runs each operator of forward about as often as there are operators in backward, so `pruned` for a budget, or
the start of a search for small ones, is what it is good for.
"""

from __future__ import annotations

import numpy as np

from rematch.graph import Graph, Schedule
from rematch.solvers.common.pruning import in_turn
from rematch.solvers.default.frugal import MOST_RUNS


def from_scratch(graph: Graph) -> Schedule | None:
    """First computations in default order; None without a loss, or where it would be too long."""
    a = graph.arrays
    if a.loss < 0:
        return None
    order, loss_position = a.order.tolist(), int(a.position[a.loss])
    made_from: dict[int, int] = {}  # operator of forward -> bits of the positions that it is made from, and its own
    sequence: list[int] = []
    for position, op in enumerate(order):
        bits = 0
        for value in graph.ops[op].inputs:
            bits |= made_from.get(int(a.producer[value]), 0)
        if position < loss_position:
            made_from[op] = bits | 1 << position
        elif position > loss_position:
            if len(sequence) + bits.bit_count() > MOST_RUNS * len(order):
                return None
            sequence += [order[at] for at in _positions(bits)]
        sequence.append(op)
    return Schedule.from_ops(graph, in_turn(graph, np.array(sequence, dtype=np.int32)))


def _positions(bits: int) -> list[int]:
    digits = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(digits, bitorder="little")).tolist()
