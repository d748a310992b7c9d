"""Which nodes of inductor's joint graph are in memory, and what each of the others is computed from.

`found = find_buffers(joint, forward_outputs=1); node in found.buffers`

Inductor computes a pointwise node inside the kernels of those who read it. A node is a *buffer*, in memory for a while,
if a kernel makes it or reads it, if it is a result of the graph, a reduction, a concatenation or the mask of a dropout.
So is a node that several others read if it is smaller than what it is computed from (the sum of a residual connection),
or if it is computed from so much that inductor would not compute it twice. All other nodes are *inlined*: their leaves
are the buffers and inputs that they are computed from.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rematch.capture.inductor.nodes import (
    Kind,
    constant_of,
    is_concatenation,
    is_mutation,
    is_random_numbers,
    kind_of,
    reads_memory,
    runs_once,
)
from rematch.capture.joint.traced import is_tangent
from rematch.capture.memory import allocated_bytes
from rematch.errors import CaptureError

_SMALLER = 0.75  # of what it is computed from: a node that several read is then worth its memory
_MOST_READS = 8  # inductor's own limits: of inputs to an inlined node,
_MOST_SHARED_READS = 4  # and to one that several nodes read


@dataclass
class Buffers:
    """What `find_buffers` found; see the module."""

    joint: GraphModule
    kinds: dict[Node, Kind]
    outputs: tuple[Any, ...]  # of forward, then the gradients
    forward_outputs: int
    needs_tangent: set[Node]
    forward: set[Node]  # nodes that forward must compute
    mutated: set[Node]  # inputs that forward changes
    buffers: dict[Node, None] = field(default_factory=dict)  # in the graph's order; tuples by the node that makes them
    leaves: dict[Node, frozenset[Node]] = field(default_factory=dict)  # what an inlined node is computed from
    random_numbers: dict[Node, int] = field(default_factory=dict)  # that computing an inlined node draws

    def leaves_of(self, nodes: Iterable[Node]) -> frozenset[Node]:
        """The inputs and buffers that somebody reads who has `nodes` as arguments."""
        found: set[Node] = set()
        for node in nodes:
            if self.kinds[node] is Kind.SYMBOL or constant_of(node) is not None:
                continue
            found |= self.leaves.get(node, frozenset((node,)))
        return frozenset(found)

    def drawn_by(self, nodes: Iterable[Node]) -> int:
        """How many random numbers somebody draws who inlines `nodes`."""
        return sum(self.random_numbers.get(node, 0) for node in nodes)


def find_buffers(joint: GraphModule, *, forward_outputs: int) -> Buffers:
    """Read a joint graph after inductor's passes; `CaptureError` says why one cannot be planned."""
    nodes = list(joint.graph.nodes)
    outputs = tuple(joint.graph.output_node().args[0])  # type: ignore[arg-type]
    calls = [node for node in nodes if node.op != "output"]
    for node in calls:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(f"{node.name} is a sparse tensor, whose size is known only while the graph runs")
    needs_tangent = _needing_tangents(calls)
    found = Buffers(
        joint=joint,
        kinds={node: kind_of(node) for node in calls},
        outputs=outputs,
        forward_outputs=forward_outputs,
        needs_tangent=needs_tangent,
        forward=_needed_in_forward(calls, outputs[:forward_outputs], needs_tangent),
        mutated={node.args[0] for node in calls if is_mutation(node) and node.args and isinstance(node.args[0], Node)},
    )
    in_memory = _read_or_returned(found, calls)
    for node in calls:
        _place(found, node, in_memory)
    return found


def _needing_tangents(calls: list[Node]) -> set[Node]:
    found: set[Node] = set()
    for node in calls:
        backward_only = is_mutation(node) and "backward" in str(node.meta.get("partitioner_tag", ""))
        if is_tangent(node) or backward_only or any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _needed_in_forward(calls: list[Node], outputs: tuple[Any, ...], needs_tangent: set[Node]) -> set[Node]:
    """What forward's results, its changes of inputs and its random numbers are computed from."""
    found = {output for output in outputs if isinstance(output, Node)}
    if found & needs_tangent:
        raise CaptureError("a result of forward depends on gradients")
    for node in reversed(calls):
        needed = runs_once(node, on_cuda=False) or any(user in found for user in node.users)
        if needed and node not in needs_tangent:
            found.add(node)
    return found


def _read_or_returned(found: Buffers, calls: list[Node]) -> set[Node]:
    """Nodes that must be in memory because a kernel or whoever runs the graph reads them, perhaps through views."""
    reached = [output for output in found.outputs if isinstance(output, Node)]
    for node in calls:
        if reads_memory(node):
            reached += node.all_input_nodes
    return {_base(found, node) for node in reached}


def _base(found: Buffers, node: Node) -> Node:
    """What a view shows."""
    while found.kinds[node] is Kind.VIEW and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _place(found: Buffers, node: Node, in_memory: set[Node]) -> None:
    """Decide whether the node is a buffer, and if not, what it is computed from."""
    kind = found.kinds[node]
    if kind in (Kind.INPUT, Kind.SYMBOL):
        return
    if node.target is operator.getitem and kind is not Kind.VIEW:
        return  # part of what its source makes
    arguments = node.all_input_nodes
    if kind in (Kind.KERNEL, Kind.REDUCTION) or (kind is Kind.FUSED and _is_buffer(found, node, in_memory)):
        found.buffers[node] = None
        return
    found.leaves[node] = found.leaves_of(arguments)
    own = hinted(node.meta["val"].numel()) if is_random_numbers(node) else 0
    found.random_numbers[node] = own + found.drawn_by(arguments)


def _is_buffer(found: Buffers, node: Node, in_memory: set[Node]) -> bool:
    value = node.meta.get("val")
    if node in in_memory or is_concatenation(node) or not isinstance(value, torch.Tensor):
        return True
    if value.dtype is torch.bool and found.drawn_by(node.all_input_nodes):
        return True
    leaves = found.leaves_of(node.all_input_nodes)
    computed = sum(tensor_bytes(leaf) for leaf in leaves if found.kinds[leaf] is not Kind.INPUT or is_tangent(leaf))
    if len(node.users) > 1 and 0 < tensor_bytes(node) <= _SMALLER * computed:
        return True
    in_forward = node in found.forward
    readers = sum((user in found.forward) is in_forward for user in node.users)  # backward's own are not forward's
    return len(leaves) > (_MOST_SHARED_READS if readers > 1 else _MOST_READS)


def tensor_bytes(node: Node) -> int:
    """What the tensor of a node takes in memory; 0 for anything else."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return allocated_bytes(hinted(value.numel()) * value.element_size(), value.device)


def hinted(size: Any) -> int:
    """A size as a number: of a symbol, what it was when the graph was traced."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise CaptureError(f"a tensor has the size {size}, which is known only while the graph runs")
    return int(hint)
