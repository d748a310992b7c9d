"""The joint graph that AOTAutograd traced, read once, and what its nodes tell.

`Traced(joint, forward_outputs=1, dropped=frozenset()).tangents`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rematch.capture.aten import is_random, updated_statistics
from rematch.capture.memory import allocated_bytes


def is_tangent(node: Node) -> bool:
    """Whether a node of the joint graph is the gradient that comes in for an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


class Traced:
    """The joint graph, read once."""

    def __init__(self, joint: GraphModule, forward_outputs: int, dropped: frozenset[Node]) -> None:
        self.joint = joint
        self.dropped = dropped
        self.forward_outputs = forward_outputs
        nodes = list(joint.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.calls = [node for node in nodes if node.op == "call_function"]
        self.constants = [node for node in nodes if node.op == "get_attr"]
        self.outputs = tuple(next(node for node in nodes if node.op == "output").args[0])
        self.position = {node: index for index, node in enumerate(nodes)}
        self.backward_from = self._start_of_backward()

    @property
    def tangents(self) -> list[Node]:
        return [node for node in self.placeholders if is_tangent(node) and node not in self.dropped]

    def _start_of_backward(self) -> int:
        """Tracing runs forward first. It ends with the last call an output, a random number or a statistic needs."""
        last = 0
        needs_tangent: set[Node] = set(self.tangents)
        for node in self.calls:
            if any(arg in needs_tangent for arg in node.all_input_nodes):
                needs_tangent.add(node)
            elif is_random(node) or updated_statistics(node):
                last = max(last, self.position[node])
        for output in self.outputs[: self.forward_outputs]:
            if isinstance(output, Node):
                last = max(last, self.position[output])
        return last + 1


def tensors_of(value: Any) -> list[torch.Tensor]:
    leaves = value if isinstance(value, (tuple, list)) else (value,)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def leaves_of(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def device_bytes(tensor: torch.Tensor) -> int:
    """What the tensor's storage takes on its device."""
    return allocated_bytes(storage_bytes(tensor), tensor.device)


def device_of(joint: GraphModule) -> torch.device:
    """Where the graph runs: the device of its inputs, CUDA if any of them is there."""
    values = [node.meta.get("val") for node in joint.graph.nodes if node.op == "placeholder"]
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type == "cuda"), devices[0])


def module_path(node: Node) -> str:
    """`h.0.attn` for a node traced inside that submodule; forward and backward alike."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return clean_path(list(stack.values())[-1][0]) if stack else ""


def clean_path(source: str) -> str:
    """`L['self']._modules['h']._modules['0'].attn` as `h.0.attn`"""
    parts = re.findall(r"\['([^']*)'\]|\.(\w+)|\[(\d+)\]", source)
    names = [next(filter(None, part), "") for part in parts]
    return ".".join(name for name in names if name and name != "_modules").removeprefix("self").removeprefix(".")
