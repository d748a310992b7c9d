"""Sequences of operators made to keep a graph's rules, and made shorter where memory allows it.

`pruned(graph, in_turn(graph, sequence), limit_bytes)`

Algorithms on the shape of a graph (Kumar et al., NeurIPS 2019) know neither operators that may run only once nor a
budget. Both are dealt with afterwards, on the plain sequence of operators that they yield; which values are freed when
follows from it, as `Schedule.from_ops` has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rematch.graph import Graph, Schedule
from rematch.graph.model import Ints
from rematch.solvers.incumbent import Incumbent

if TYPE_CHECKING:
    from rematch.solvers.common.pruning_kernels import Costs, Rules

_PASSES = 4  # over all runs; on training graphs few go after the second pass

_Arrays = TypeVar("_Arrays", "Rules", "Costs")


def in_turn(graph: Graph, sequence: Ints) -> Ints:
    """The sequence as far as the rules of `graph` let it run, valid if each operator ran after those it reads.

    An operator that may not run again, because it is marked once, reads what has been changed since or comes before the
    loss where the graph recomputes only after it, is left out: its values stay in memory from when it ran. Operators
    whose first runs keep the default order take their turns; what has not run when its last chance comes, or when one
    of these needs it, runs then.
    """
    from rematch.solvers.common import pruning_kernels

    ordered: Ints = pruning_kernels.in_turn(sequence, _fields_of(graph, pruning_kernels.Rules))
    return ordered


def in_default_order(graph: Graph, sequence: Ints) -> Ints:
    """The sequence with first computations in default order: what is skipped runs before what comes after it.

    Where that was computed later than now, it is computed then once more; `pruned` drops what is of no use.
    """
    position = graph.arrays.position
    first = 0  # the position of the next first computation
    ordered: list[int] = []
    for op in sequence.tolist():
        if position[op] >= first:
            ordered += graph.order[first : position[op] + 1]
            first = int(position[op]) + 1
        elif not graph.ops[op].once:
            ordered.append(op)
    return np.array([*ordered, *graph.order[first:]], dtype=np.int32)


def pruned(graph: Graph, sequence: Ints, limit_bytes: int, *, keep_first: bool = False) -> Ints:
    """A valid sequence without the recomputations that the limit does not ask for.

    A recomputation goes if its values can stay in memory from the run before without a peak above `limit_bytes`, or
    above the peak that `sequence` has already; with it goes what was recomputed for it alone. So the result is never
    slower than the sequence, and of a larger peak only within the limit. With `keep_first` the first run of each
    operator stays, and with it their order, even where nothing reads it before the next; without, the first runs of
    those that keep the default order do.
    """
    from rematch.solvers.common import pruning_kernels

    costs = _fields_of(graph, pruning_kernels.Costs)
    shorter: Ints = pruning_kernels.pruned(sequence, limit_bytes, keep_first, _PASSES, costs)
    return shorter


def as_late_as_possible(graph: Graph, sequence: Ints) -> Ints:
    """The sequence, valid, with each recomputation right before the first computation that it is needed for.

    What is recomputed for something that is recomputed itself moves with it. What nothing reads any more is left out,
    and so is what may not run that late: its values stay from before.
    """
    runs = sequence.tolist()
    is_first = np.zeros(len(runs), dtype=np.bool_)
    is_first[np.unique(sequence, return_index=True)[1]] = True
    needed_at: dict[int, int] = {}  # of each value: the first computation, by index in `runs`, that asks for it next
    moved_to: dict[int, int] = {}
    for at in range(len(runs) - 1, -1, -1):
        op = graph.ops[runs[at]]
        asked = [needed_at.pop(value) for value in op.outputs if value in needed_at]
        if is_first[at] or asked:
            moved_to[at] = at if is_first[at] else min(asked)
            for value in op.inputs:
                needed_at[value] = min(moved_to[at], needed_at.get(value, moved_to[at]))
    moved = sorted(moved_to, key=lambda at: (moved_to[at], at))
    return in_turn(graph, np.array([runs[at] for at in moved], dtype=np.int32))


def _fields_of(graph: Graph, kind: type[_Arrays]) -> _Arrays:
    """The arrays of a graph that a named tuple for compiled code has fields for."""
    return kind(*(getattr(graph.arrays, field) for field in kind._fields))


def offer_in_default_order(incumbent: Incumbent, sequence: Ints, by: str) -> bool:
    """Offer a sequence with first computations in default order, without what the budget has room to keep instead."""
    graph, budget_bytes = incumbent.problem.graph, incumbent.problem.budget_bytes
    ordered = in_turn(graph, in_default_order(graph, sequence))
    return incumbent.offer(Schedule.from_ops(graph, pruned(graph, ordered, budget_bytes, keep_first=True)), by)


def offer_pruned(incumbent: Incumbent, sequence: Ints, by: str) -> bool:
    """Offer a sequence as it is and with first computations in default order, each without what there is room to keep.

    Neither is always the faster one: in default order something may run early and again later.
    """
    graph, budget_bytes = incumbent.problem.graph, incumbent.problem.budget_bytes
    ordered = in_turn(graph, sequence)
    as_given = incumbent.offer(Schedule.from_ops(graph, pruned(graph, ordered, budget_bytes)), by)
    return offer_in_default_order(incumbent, sequence, by) or as_given
