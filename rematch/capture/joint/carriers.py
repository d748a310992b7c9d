"""Which traced nodes carry each value: the tensors that an engine copies to host memory, and puts in place again.

`carriers(capture)[value]`
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from rematch.capture.joint.read import Capture
from rematch.capture.joint.traced import device_of
from rematch.graph import Phase


def carriers(capture: Capture) -> dict[int, tuple[Node, ...]]:
    """Per value that an operator makes: the nodes that hold it once the operator has run, all with one layout.

    That is the last of its kernels that writes the value, or the entries of a tuple that this kernel returns.
    """
    found: dict[int, tuple[Node, ...]] = {}
    for kernels in capture.kernels:
        for kernel in kernels:
            node = kernel.node
            whole = isinstance(node.meta.get("val"), torch.Tensor)
            made: dict[int, tuple[Node, ...]] = {}
            for carrier in (node,) if whole else [user for user in node.users if user.target is operator.getitem]:
                value = capture.storage[carrier][0]
                if value is not None:
                    made[value] = (*made.get(value, ()), carrier)
            found.update(made)
    return found


def movable_values(capture: Capture) -> frozenset[int]:
    """Values that can leave the device and come back: made in forward, by one layout, and of no use to others."""
    graph, device = capture.graph, device_of(capture.joint)
    others = graph.targets | graph.held
    found = set()
    for value, nodes in carriers(capture).items():
        maker = graph.ops[graph.arrays.producer[value]] if graph.arrays.producer[value] >= 0 else None
        tensors = [node.meta["val"] for node in nodes]
        if (
            maker is not None
            and maker.phase is Phase.FORWARD
            and value not in others
            and all(tensor.device == device and tensor.layout is torch.strided for tensor in tensors)
            and len({(tensor.stride(), tensor.storage_offset(), tensor.shape, tensor.dtype) for tensor in tensors}) == 1
        ):
            found.add(value)
    return frozenset(found)
