"""The forward pass of a graph: its operators, and whether it is a chain.

`forward_ops(graph)` are the operators of the forward pass in default order.
"""

from __future__ import annotations

import numpy as np

from rematch.graph import Graph, Phase
from rematch.graph.model import Ints


def forward_ops(graph: Graph) -> Ints:
    """Operators of the forward pass in default order."""
    return np.array([op for op in graph.order if graph.ops[op].phase is Phase.FORWARD], dtype=np.int32)


def is_linear(graph: Graph) -> bool:
    """Whether every forward operator reads only residents and what the forward operator before it makes."""
    producer = graph.arrays.producer
    ops = forward_ops(graph).tolist()
    before = dict(zip(ops[1:], ops, strict=False))
    return all(producer[value] in (-1, before.get(op)) for op in ops for value in graph.ops[op].inputs)
