"""The same computation at another batch size, or with another measure of cost.

`with_batch(graph, 64, captured=16)` has four times the activations and times; `between` needs two captures and no such
assumption; `with_flop_costs(graph)` counts floating-point operations in place of seconds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from rematch.errors import GraphError
from rematch.graph.model import Graph

_GROWING_RESIDENTS = frozenset({"inputs"})
_FIXED_ROLES = frozenset({"gradients", "random states"})


def with_batch(graph: Graph, batch: int, *, captured: int = 1) -> Graph:
    """The graph as it would be at `batch`, if it was captured at a batch of `captured`.

    Times, workspace, floating-point operations and values are in proportion to the batch. What is as large as the
    parameters is not: residents (but for those whose role is "inputs"), targets, which are their gradients, and values
    whose role says so. Kernels that are idle at small batches make the true times grow more slowly than that.
    """
    if batch < 1 or captured < 1:
        raise GraphError(f"a batch has at least one sample; {batch} was asked for of a graph captured at {captured}")

    def scaled(size_bytes: int) -> int:
        return -(-size_bytes * batch // captured)  # rounded up, exactly

    values = tuple(
        replace(value, size_bytes=scaled(value.size_bytes)) if grows else value
        for value, grows in zip(graph.values, _growing(graph), strict=True)
    )
    ratio = batch / captured
    ops = tuple(
        replace(
            op,
            seconds=op.seconds * ratio,
            workspace_bytes=scaled(op.workspace_bytes),
            flops=None if op.flops is None else op.flops * ratio,
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops, values=values)


def between(small: Graph, large: Graph, *, batches: tuple[int, int], batch: int) -> Graph:
    """The graph at `batch`, from two captured at other `batches`: sizes, times and workspace on a straight line.

    `GraphError` if the two are not the same operators.
    """
    if [op.name for op in small.ops] != [op.name for op in large.ops] or len(small.values) != len(large.values):
        raise GraphError(
            f"{small.name!r} runs other operators at a batch of {batches[1]} than at {batches[0]}, so nothing can be "
            "said of a third"
        )
    share = Fraction(batch - batches[0], batches[1] - batches[0])

    def bytes_at(first: int, second: int) -> int:
        return max(0, math.ceil(first + share * (second - first)))

    def number_at(first: float, second: float) -> float:
        return max(0.0, first + float(share) * (second - first))

    values = tuple(
        replace(a, size_bytes=bytes_at(a.size_bytes, b.size_bytes))
        for a, b in zip(small.values, large.values, strict=True)
    )
    ops = tuple(
        replace(
            a,
            seconds=number_at(a.seconds, b.seconds),
            workspace_bytes=bytes_at(a.workspace_bytes, b.workspace_bytes),
            flops=None if a.flops is None or b.flops is None else number_at(a.flops, b.flops),
        )
        for a, b in zip(small.ops, large.ops, strict=True)
    )
    return replace(small, ops=ops, values=values)


def _growing(graph: Graph) -> list[bool]:
    """Per value, whether it is in proportion to the batch."""
    return [
        value.role in _GROWING_RESIDENTS
        if value.resident
        else index not in graph.targets and value.role not in _FIXED_ROLES
        for index, value in enumerate(graph.values)
    ]


def with_flop_costs(graph: Graph) -> Graph:
    """The graph with floating-point operations as its costs (Jain et al., Checkmate, section 4.10).

    An operator that takes no time, as the loss of a module that was captured without one, takes none of these either.
    """
    if graph.link is not None:
        raise GraphError(f"graph {graph.name!r} has a link, whose speed is in seconds; its costs cannot be operations")
    for op in graph.ops:
        if op.flops is None and op.seconds > 0.0:
            raise GraphError(
                f"operator {op.name!r} of graph {graph.name!r} does not say how many floating-point operations it "
                "takes; use its seconds as costs"
            )
    return replace(graph, ops=tuple(replace(op, seconds=float(op.flops or 0.0)) for op in graph.ops))
