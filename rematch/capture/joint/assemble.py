"""Operators out of kernels, values out of storages.

`Assembly(traced, propagated, profile).drafts`

Views, tuples and detached tensors fold into the storage they show, and a pointwise kernel whose input nobody else reads
works in place, as part of the operator before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from rematch.capture.aten import (
    fill_of_empty,
    in_place_twin,
    is_of_torch,
    is_random,
    may_repeat,
    updated_statistics,
)
from rematch.capture.cost import Call, Profile
from rematch.capture.joint.propagate import Propagated
from rematch.capture.joint.traced import Traced, storage_bytes, storage_key, tensors_of
from rematch.capture.memory import allocated_bytes
from rematch.errors import CaptureError


@dataclass(frozen=True)
class Kernel:
    """One call of an operator: the traced node, and what to call for it where that differs."""

    node: Node
    target: Any


@dataclass
class OpDraft:
    """An operator while it is being put together; values are storages by key."""

    kernels: list[Kernel]
    inputs: list[int]
    outputs: list[int]
    seconds: float
    workspace_bytes: int
    flops: float | None
    class_key: str
    random: bool
    once: bool
    updates: bool


class Assembly:
    """Operators out of kernels, values out of storages."""

    def __init__(self, traced: Traced, propagated: Propagated, profile: Callable[[Call], Profile]) -> None:
        self.traced = traced
        self.found = propagated
        self.profile = profile
        self.merged: dict[int, int] = {}  # storage of an in-place result -> the storage it was written into
        self.readers: dict[int, set[Node]] = {}
        self.drafts: list[OpDraft] = []
        self.maker: dict[int, int] = {}  # storage -> draft
        self.kept = self._kept_storages()
        self.changed_buffers = self._changed_buffers()
        self._assemble()

    def storage(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor)
        return self.merged.get(key, key)

    def storages(self, nodes: Iterable[Node]) -> list[int]:
        found = dict.fromkeys(self.storage(t) for node in nodes for t in tensors_of(self.found.value[node]))
        return list(found)

    def _kept_storages(self) -> set[int]:
        """Storages that leave the module: outputs and gradients."""
        nodes = [output for output in self.traced.outputs if isinstance(output, Node)]
        return {storage_key(t) for node in nodes for t in tensors_of(self.found.value[node])}

    def _changed_buffers(self) -> set[int]:
        """Storages of inputs that forward changes: what reads one of them must not read it again in backward."""
        changed = [buffer for node in self.traced.calls for buffer in updated_statistics(node)]
        described = {node.meta.get("desc"): node for node in self.traced.placeholders}
        for output in self.traced.joint.graph.output_node().meta.get("desc", ()):
            mutated = described.get(getattr(output, "mutated_input", None))
            changed += [mutated] if mutated is not None else []
        return {storage_key(t) for buffer in changed for t in tensors_of(self.found.value[buffer])}

    def _assemble(self) -> None:
        kernels = [node for node in self.traced.calls if node in self.found.profile]
        for node in kernels:
            for storage in self.storages(node.all_input_nodes):
                self.readers.setdefault(storage, set()).add(node)
        for node in kernels:
            if not self._works_in_place(node):
                self._add_kernel(node)

    @property
    def forward_drafts(self) -> int:
        """How many of the drafts run before the loss."""
        return sum(not self._is_backward(draft.kernels[0].node) for draft in self.drafts)

    def _is_backward(self, node: Node) -> bool:
        return self.traced.position[node] >= self.traced.backward_from

    def _add_kernel(self, node: Node) -> None:
        seen, call = self.found.profile[node], self.found.call[node]
        inputs = self.storages(node.all_input_nodes)
        outputs = [key for key in self._storages_of(self.found.value[node]) if key not in inputs]
        if not outputs:
            if _writes(node):
                raise CaptureError(f"operator {node.target} changes a tensor in a way that tracing did not resolve")
            return  # real strides made a view of it
        updates = bool(updated_statistics(node))
        on_cuda = any(tensor.device.type == "cuda" for tensor in call.tensors)
        reads_changed = not updates and any(key in self.changed_buffers for key in inputs)
        for key in outputs:
            self.maker[key] = len(self.drafts)
        self.drafts.append(
            OpDraft(
                kernels=[Kernel(node, call.target)],
                inputs=inputs,
                outputs=outputs,
                seconds=seen.cost.seconds,
                workspace_bytes=seen.cost.workspace_bytes,
                flops=seen.cost.flops,
                class_key=call.class_key,
                random=is_random(node),
                once=reads_changed or not may_repeat(node.target, on_cuda),
                updates=updates,
            )
        )

    def _storages_of(self, value: Any) -> list[int]:
        return list(dict.fromkeys(self.storage(tensor) for tensor in tensors_of(value)))

    def _works_in_place(self, node: Node) -> bool:
        """Let `node` overwrite its first argument, if the operator just before made that and nobody else reads it."""
        filled = fill_of_empty(node)
        twin = filled or in_place_twin(node.target)
        first = node.args[0] if node.args else None
        if twin is None or not isinstance(first, Node) or not self.drafts:
            return False
        given, returned = self.found.value[first], self.found.value[node]
        if not isinstance(given, torch.Tensor) or not isinstance(returned, torch.Tensor):
            return False
        storage = self.storage(given)
        last = len(self.drafts) - 1
        if self.maker.get(storage) != last or self._is_backward(node) != self._is_backward(
            self.drafts[last].kernels[0].node
        ):
            return False
        others = self.storages(arg for arg in node.all_input_nodes if arg is not first)
        alone = filled is not None or (self.readers.get(storage, set()) == {node} and storage not in self.kept)
        alone = alone and storage not in others and is_of_torch(self.drafts[last].kernels[0].node.target)
        twice = sum(arg is first for arg in node.args) > 1
        same = given.dtype == returned.dtype and given.shape == returned.shape and given.stride() == returned.stride()
        whole = self.found.storage_bytes.get(storage_key(given), storage_bytes(given))
        if not alone or twice or not same or whole != given.numel() * given.element_size():
            return False
        draft = self.drafts[last]
        call = Call.of(node, self.found.value.__getitem__, twin)
        cost = self.profile(call).cost
        if filled is None:
            self.merged[storage_key(returned)] = storage
            self.readers[storage] = self.readers.pop(storage_key(returned), set())
        else:
            self.readers[storage].discard(node)
        if storage_key(returned) in self.kept:
            self.kept.add(storage)
        draft.kernels.append(Kernel(node, twin))
        draft.inputs.extend(key for key in others if key not in draft.inputs and key not in draft.outputs)
        draft.seconds += cost.seconds
        draft.workspace_bytes = max(draft.workspace_bytes, cost.workspace_bytes)
        draft.flops = None if draft.flops is None or cost.flops is None else draft.flops + cost.flops
        draft.class_key = f"{draft.class_key}+{call.class_key}"
        draft.random |= is_random(node)
        draft.once |= not self.changed_buffers.isdisjoint(others)
        return True

    def bytes_of(self, key: int, tensor: torch.Tensor) -> int:
        return allocated_bytes(self.found.storage_bytes.get(key, storage_bytes(tensor)), tensor.device)


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
