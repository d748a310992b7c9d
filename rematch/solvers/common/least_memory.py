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

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rematch.graph import Graph
from rematch.graph.model import Bools, Longs
from rematch.solvers.base import Deadline
from rematch.solvers.common.precedence import Precedence


def most_needed_bytes(precedence: Precedence, deadline: Deadline, enough_bytes: int | None = None) -> int:
    """The most that any first computation needs, of those that are looked at until `deadline`.

    Those that surely need most come first. The search ends early once more than `enough_bytes` are known to be needed.
    """
    surely = precedence.surely_bytes
    most = int(surely.max(initial=0))
    for position in np.argsort(-surely, kind="stable").tolist():
        if deadline.expired or (enough_bytes is not None and most > enough_bytes):
            break
        most = max(most, needed_bytes(precedence, position))
    return most


def needed_bytes(precedence: Precedence, position: int) -> int:
    """The least that can be alive while the operator at `position` first runs."""
    p, a = precedence, precedence.graph.arrays
    made = (p.made_at >= 0) & (p.made_at <= position)
    price = np.where(_surely_alive(p, position), 0, a.size)
    flow = _minimum_cut(
        p, made, p.wanted(position, len(p.graph.ops)), price, np.where(a.last_stage <= position, _no_limit(p), 0)
    )
    return int(p.surely_bytes[position]) + (0 if flow is None else int(flow.optimal_flow()))


def essential_values(
    precedence: Precedence, made: Bools, wanted: Bools, alive: Bools, price: Longs, again_price: Longs, may_run: Bools
) -> tuple[Bools, Bools]:
    """Those of the `alive` values from which all `wanted` ones can be made, at the least total price.

    `price` is that of keeping each value, `again_price` that of running each operator again, which only those that
    `may_run` do. `made` are the values that have been computed so far. Of several such sets it is the one that leaves
    least to recompute. Returns which values are kept, and which operators run again.
    """
    p, a = precedence, precedence.graph.arrays
    no_limit = _no_limit(p)
    flow = _minimum_cut(p, made, wanted, np.where(alive, price, no_limit), np.where(may_run, again_price, no_limit))
    if flow is None:
        return alive, np.zeros(len(p.graph.ops), dtype=np.bool_)
    needed = np.zeros(len(made) + len(p.graph.ops) + 2, dtype=np.bool_)
    needed[flow.get_source_side_min_cut()] = True
    essential = np.zeros(len(made), dtype=np.bool_)
    essential[made] = needed[np.flatnonzero(made)] & ~needed[len(made) + a.producer[made]]
    return essential & alive, needed[len(made) : len(made) + len(p.graph.ops)]


def _minimum_cut(precedence: Precedence, made: Bools, wanted: Bools, price: Longs, again_price: Longs) -> Any:
    """The solved network, or None; it costs to keep a value and to run an operator again."""
    from ortools.graph.python.max_flow import SimpleMaxFlow

    p, a = precedence, precedence.graph.arrays
    values, ops = len(p.graph.values), len(p.graph.ops)
    source, sink, first_op = values + ops, values + ops + 1, values
    done = np.zeros(ops, dtype=np.bool_)
    done[a.producer[made]] = True
    again = done[p.reader] & made[p.read]
    wanted = wanted & made
    paid = np.flatnonzero(done & (again_price > 0))
    no_limit = _no_limit(p)
    arcs: list[tuple[Longs, Longs, Longs]] = [
        _arcs(np.full(wanted.sum(), source), np.flatnonzero(wanted), no_limit),
        _arcs(first_op + p.reader[again], p.read[again], no_limit),
        _arcs(np.flatnonzero(made), first_op + a.producer[made], price[made]),
        _arcs(first_op + paid, np.full(len(paid), sink), again_price[paid]),
    ]
    starts, ends, capacities = (np.concatenate(parts) for parts in zip(*arcs, strict=True))
    flow = SimpleMaxFlow()
    flow.add_arcs_with_capacity(starts.astype(np.int32), ends.astype(np.int32), capacities)
    return flow if flow.solve(source, sink) == flow.OPTIMAL else None


def _no_limit(precedence: Precedence) -> int:
    return int(precedence.graph.arrays.size.sum()) + 1


def finally_needed_bytes(graph: Graph) -> int:
    """What is alive at some last computation of an operator that makes targets or held values, in any order.

    After the last run of such an operator its targets stay to the end. So each of these runs finds the targets of those
    before it alive, beside what it touches itself. The order of last runs that needs least is the one by what an
    operator touches beyond its own targets, largest first, as an exchange of two neighbours shows.
    """
    a = graph.arrays
    lasting = (a.target | a.held) & (a.producer >= 0)
    runs = []
    for op in np.unique(a.producer[lasting]).tolist():
        touched = np.unique(np.concatenate((a.inputs_of(op), a.outputs_of(op))))
        touched = touched[a.producer[touched] >= 0]
        left = lasting[touched] & (a.producer[touched] == op)
        beyond = int(a.size[touched[~lasting[touched]]].sum() + a.workspace[op])
        runs.append((beyond, int(a.size[touched[left]].sum())))
    most = there = 0
    for beyond, left_bytes in sorted(runs, reverse=True):
        there += left_bytes
        most = max(most, there + beyond)
    return int(a.resident_bytes) + most


def _surely_alive(precedence: Precedence, position: int) -> Bools:
    """Per value that is no resident, whether it is alive while the operator at `position` first runs."""
    p, a = precedence, precedence.graph.arrays
    alive = np.zeros(len(p.graph.values), dtype=np.bool_)
    alive[p.touched(a.order[position])] = True
    if a.loss >= 0 and position >= a.position[a.loss]:
        alive |= a.held
    return np.asarray(alive & (p.made_at >= 0))


def _arcs(starts: ArrayLike, ends: ArrayLike, capacities: ArrayLike) -> tuple[Longs, Longs, Longs]:
    from_node = np.asarray(starts, dtype=np.int64)
    limits = np.broadcast_to(np.asarray(capacities, dtype=np.int64), from_node.shape)
    return from_node, np.asarray(ends, dtype=np.int64), limits
