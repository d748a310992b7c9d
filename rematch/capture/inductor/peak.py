"""How much memory a forward and a backward graph take when inductor runs them, whoever made the partition.

`predicted_peaks(forward, backward, returned=1, resident_bytes=0).peak_bytes(loss_bytes=0)`

Buffers are those of `find_buffers`, each alive from the node that makes it to the last one that reads it. Inductor may
order kernels in another way and writes into memory that is no longer read, so the real peak is often a little lower.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from rematch.capture.inductor.buffers import Buffers, find_buffers, tensor_bytes
from rematch.capture.joint.traced import is_tangent, storage_key


@dataclass(frozen=True)
class StepPeaks:
    """The most memory in each part of a step; `at_loss_bytes` without what the loss itself takes."""

    forward_bytes: int
    at_loss_bytes: int
    backward_bytes: int

    def peak_bytes(self, loss_bytes: int) -> int:
        """The peak of the step, if the loss takes so much beside the tangents."""
        return max(self.forward_bytes, self.at_loss_bytes + loss_bytes, self.backward_bytes)


def predicted_peaks(
    forward: GraphModule,
    backward: GraphModule,
    *,
    returned: int,
    resident_bytes: int,
    dropped: Collection[int] = (),
) -> StepPeaks:
    """The peaks of a step. `returned` of forward's results go to the user, the others are saved for backward.

    Results at the places `dropped` are let go of before backward; `resident_bytes` are there all the time.
    """
    inputs = {_storage(node) for node in forward.graph.nodes if node.op == "placeholder"}
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    forward_peak, leaving = _walk(forward, alive={}, kept=inputs)
    held = {_storage(node): size for node, size in _sizes(_without(results[:returned], dropped))}
    alive = {_storage(node): size for node, size in _sizes(results) if _storage(node) not in inputs}
    tangents = [node for node in backward.graph.find_nodes(op="placeholder") if is_tangent(node)]
    at_loss = leaving + sum(tensor_bytes(node) for node in tangents)
    alive.update({_storage(node): tensor_bytes(node) for node in tangents})
    backward_peak, _ = _walk(backward, alive=alive, kept=inputs | set(held))
    return StepPeaks(resident_bytes + forward_peak, resident_bytes + at_loss, resident_bytes + backward_peak)


def _without(nodes: Sequence[object], places: Collection[int]) -> list[object]:
    return [node for place, node in enumerate(nodes) if place not in places]


def _sizes(nodes: tuple[object, ...] | list[object]) -> list[tuple[Node, int]]:
    return [(node, tensor_bytes(node)) for node in nodes if isinstance(node, Node)]


def _storage(node: Node) -> object:
    """What two nodes share if one shows the memory of the other."""
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, torch.Tensor) else node


def _walk(module: GraphModule, alive: dict[object, int], kept: set[object]) -> tuple[int, int]:
    """The most bytes at once beyond what is `kept` all the time, and those that are left at the end.

    `alive` are there at the start and can be freed.
    """
    outputs = module.graph.output_node().args[0]
    assert isinstance(outputs, (tuple, list))
    found = find_buffers(module, forward_outputs=0)
    order = list(found.buffers)
    final = {_storage(leaf) for leaf in found.leaves_of(node for node in outputs if isinstance(node, Node))}
    last: dict[object, int] = {}
    reads = [found.leaves_of(node.all_input_nodes) for node in order]
    for place, leaves in enumerate(reads):
        last.update({_storage(leaf): place for leaf in leaves})
    never_read = [storage for storage in alive if storage not in last and storage not in kept and storage not in final]
    for storage in never_read:
        alive.pop(storage)
    peak = now = sum(alive.values())
    for place, node in enumerate(order):
        for made in _made(found, node):
            if _storage(made) not in alive and _storage(made) not in kept:
                alive[_storage(made)] = tensor_bytes(made)
                now += tensor_bytes(made)
        peak = max(peak, now)
        for storage in {_storage(read) for read in (*reads[place], *_made(found, node))} - kept - final:
            if last.get(storage, place) <= place:
                now -= alive.pop(storage, 0)
    return peak, now


def _made(found: Buffers, node: Node) -> list[Node]:
    entries = [user for user in node.users if user.target is operator.getitem]
    return entries or [node]
