"""What a fused operator reads for nothing when it runs again in backward.

`FreeReads(found).of(node)`, a set of buffers and inputs

Inductor fuses kernels that read the same memory. A forward operator that runs again for a matrix product of backward is
computed inside a kernel of backward that reads the same buffer anyway, such as the gradient of a layer norm, if that
kernel need not wait for the product. Then only writing the result takes time.
"""

from __future__ import annotations

from torch.fx import Node

from rematch.capture.inductor.buffers import Buffers
from rematch.capture.inductor.nodes import Kind


class FreeReads:
    """See the module."""

    def __init__(self, found: Buffers) -> None:
        self._found = found
        self._place = {node: place for place, node in enumerate(found.joint.graph.nodes)}
        self._after = self._reached()
        self._fused: dict[Node, list[Node]] = {}  # leaf -> fused kernels of backward that read it
        self._products: dict[Node, list[Node]] = {}  # leaf -> other kernels of backward that read it
        for node in found.buffers:
            if node in found.needs_tangent:
                readers = self._products if found.kinds[node] is Kind.KERNEL else self._fused
                for leaf in found.leaves_of(node.all_input_nodes):
                    readers.setdefault(leaf, []).append(node)

    def _reached(self) -> dict[Node, int]:
        """For each node those that depend on it, as bits."""
        after: dict[Node, int] = {}
        for node in reversed(self._found.joint.graph.nodes):
            bits = 0
            for user in node.users:
                bits |= after[user] | 1 << self._place[user]
            after[node] = bits
        return after

    def of(self, node: Node) -> set[Node]:
        """The leaves of a forward node that a kernel of backward reads when the node could run again."""
        waiting_for = 0
        for result in (node, *node.users):
            for product in self._products.get(result, ()):
                waiting_for |= self._after[product]
        leaves = self._found.leaves_of(node.all_input_nodes)
        return {leaf for leaf in leaves if self._read_before(leaf, waiting_for)}

    def _read_before(self, leaf: Node, waiting_for: int) -> bool:
        return any(not waiting_for >> self._place[kernel] & 1 for kernel in self._fused.get(leaf, ()))
