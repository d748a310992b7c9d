"""How much must be alive at a first computation, whatever is recomputed: a minimum cut for each position.

`most_needed_bytes(Precedence.of(graph), Deadline(5))` is a budget below which no schedule in default order exists.

While the operator at position q first runs, its inputs and outputs are alive, and from the loss on what is held. The
rest of what is alive must be enough to derive all that is read later: each such value is alive now, or its producer
runs again later, and then the same is true of the producer's inputs. Nothing is said about when, so time and memory of
recomputations are free. The fewest bytes that are enough are a minimum cut, in a network with a node for each value
(it is needed) and each operator (it runs again):

    source -> value             no limit         for what first computations after q read, and targets
    operator -> its inputs      no limit         what runs again needs its inputs
    value -> its producer       bytes(value)     needed, and not made again: alive at q; free for what is alive anyway
    operator -> sink            no limit         for operators that may not run again after q
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rematch.graph.model import Bools, Longs
from rematch.solvers.base import Deadline
from rematch.solvers.common.precedence import Precedence


def most_needed_bytes(precedence: Precedence, deadline: Deadline, enough_bytes: int | None = None) -> int:
    """The most that any first computation needs, of those that are looked at until `deadline`.

    Those that surely need most come first. The search ends early once more than `enough_bytes` are known to be needed.
    """
    graph = precedence.graph
    surely = np.array([_surely_bytes(precedence, position) for position in range(len(graph.ops))], dtype=np.int64)
    most = int(surely.max(initial=0))
    for position in np.argsort(-surely, kind="stable").tolist():
        if deadline.expired or (enough_bytes is not None and most > enough_bytes):
            break
        most = max(most, needed_bytes(precedence, position))
    return most


def needed_bytes(precedence: Precedence, position: int) -> int:
    """The least that can be alive while the operator at `position` first runs."""
    from ortools.graph.python.max_flow import SimpleMaxFlow

    p, a = precedence, precedence.graph.arrays
    values, ops = len(p.graph.values), len(p.graph.ops)
    source, sink, first_op = values + ops, values + ops + 1, values
    made = (p.made_at >= 0) & (p.made_at <= position)
    done = a.position <= position
    no_limit = int(a.size.sum()) + 1
    wanted = p.wanted(position, ops)
    again = done[p.reader] & made[p.read]
    fixed = done & (a.last_stage <= position)
    alive = _surely_alive(p, position)
    arcs: list[tuple[Longs, Longs, Longs]] = [
        _arcs(np.full(wanted.sum(), source), np.flatnonzero(wanted), no_limit),
        _arcs(first_op + p.reader[again], p.read[again], no_limit),
        _arcs(np.flatnonzero(made), first_op + a.producer[made], np.where(alive, 0, a.size)[made]),
        _arcs(first_op + np.flatnonzero(fixed), np.full(fixed.sum(), sink), no_limit),
    ]
    starts, ends, capacities = (np.concatenate(parts) for parts in zip(*arcs, strict=True))
    flow = SimpleMaxFlow()
    flow.add_arcs_with_capacity(starts.astype(np.int32), ends.astype(np.int32), capacities)
    if flow.solve(source, sink) != flow.OPTIMAL:
        return _surely_bytes(p, position)
    return _surely_bytes(p, position) + int(flow.optimal_flow())


def _surely_alive(precedence: Precedence, position: int) -> Bools:
    """Per value that is no resident, whether it is alive while the operator at `position` first runs."""
    p, a = precedence, precedence.graph.arrays
    alive = np.zeros(len(p.graph.values), dtype=np.bool_)
    alive[p.touched(a.order[position])] = True
    if a.loss >= 0 and position >= a.position[a.loss]:
        alive |= a.held
    return np.asarray(alive & (p.made_at >= 0))


def _surely_bytes(precedence: Precedence, position: int) -> int:
    a = precedence.graph.arrays
    alive: Longs = a.size[_surely_alive(precedence, position)]
    return int(a.resident_bytes + a.workspace[a.order[position]] + alive.sum())


def _arcs(starts: ArrayLike, ends: ArrayLike, capacities: ArrayLike) -> tuple[Longs, Longs, Longs]:
    from_node = np.asarray(starts, dtype=np.int64)
    limits = np.broadcast_to(np.asarray(capacities, dtype=np.int64), from_node.shape)
    return from_node, np.asarray(ends, dtype=np.int64), limits
