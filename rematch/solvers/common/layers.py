"""Which forward operator each backward operator belongs to: a graph says what is read, not what is differentiated.

`backward_of(graph)[op]` is the forward operator that `op` differentiates, or helps to; -1 for all but backward ones.

The backward of an operator reads what its formula needs: inputs, outputs or weights of that operator. So the forward
operator that reads or makes the most of what a backward operator reads is the best guess, one of the module that the
backward operator comes from before all others. Gradients flow from the end of the forward pass to its beginning, so no
guess is later than the one before it in default order. What reads no trace of the forward pass (sums of gradients,
changes of layout) belongs where its gradients come from.

Guesses are late rather than early: of operators that touch as much of what is read, the latest that is still possible
is taken. That cannot push later guesses off the truth, as an early one would.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

import numpy as np

from rematch.graph import Graph, Phase
from rematch.graph.model import Ints

_NEAREST = 8  # operators asked for each value read: a mask or a step that all layers read would make this quadratic


def backward_of(graph: Graph) -> Ints:
    """Per operator the forward operator it differentiates; along the default order these run back through forward."""
    touching, latest = _forward_pass(graph)
    found = np.full(len(graph.ops), -1, dtype=np.int32)
    for index in graph.order:
        op = graph.ops[index]
        if op.phase is Phase.BACKWARD and latest >= 0:
            counts = Counter(at for value in set(op.inputs) for at in _nearest(touching[value], latest))
            of_module = [at for at in counts if graph.ops[graph.order[at]].module_path == op.module_path]
            latest = max(of_module or counts, key=lambda at: (counts[at], at), default=latest)
            found[index] = graph.order[latest]
    return found


def _forward_pass(graph: Graph) -> tuple[list[list[int]], int]:
    """Positions in default order: per value of the forward operators that touch it, ascending, and of the last one."""
    touching: list[list[int]] = [[] for _ in graph.values]
    last = -1
    for at, index in enumerate(graph.order):
        op = graph.ops[index]
        if op.phase is Phase.FORWARD:
            for value in {*op.inputs, *op.outputs}:
                touching[value].append(at)
            last = at
    return touching, last


def _nearest(positions: list[int], latest: int) -> list[int]:
    end = bisect_right(positions, latest)
    return positions[max(0, end - _NEAREST) : end]
