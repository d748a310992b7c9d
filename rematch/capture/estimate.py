"""Profiles of calls without running them: results as traced, costs by the roofline of a device that is not here.

`with estimating("h100") as profiler: profiler.profile(call).cost.seconds`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph as FxGraph, Node
from torch.utils import _pytree as pytree

from rematch.capture.aten import aten
from rematch.capture.cost import Call, Placeholder, Profile, results_of
from rematch.capture.devices import Device, find_device
from rematch.capture.roofline import estimate, mapped

# What attention falls apart into on the CPU where a GPU has one kernel for it.
_UNFUSED_ATTENTION = (aten._safe_softmax.default,)


class Estimator:
    """Estimates each distinct call once, and notes where a kernel of this machine stands for one of the device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: dict[str, Profile] = {}
        self._notes: dict[str, None] = {}

    def profile(self, call: Call) -> Profile:
        if call.key not in self._known:
            node = node_of(call)
            self._known[call.key] = Profile(estimate(node, self.device), results_of(node.meta["val"], call.tensors))
            self._note(node)
        return self._known[call.key]

    def _note(self, node: Node) -> None:
        stands_for = mapped(node, self.device)
        if stands_for is not None:
            self._notes[stands_for] = None
        if node.target in _UNFUSED_ATTENTION and self.device.name != "cpu":
            self._notes[
                f"attention was captured as separate operators, as this machine runs it; on {self.device.name} "
                "one fused kernel may take its place, with less memory and time than planned"
            ] = None

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"costs are estimated for {self.device.name}, not measured", *self._notes)


@contextmanager
def estimating(device: str) -> Iterator[Estimator]:
    """A profiler by estimate; `DeviceError` for a device that the table does not have."""
    yield Estimator(find_device(device))


def node_of(call: Call) -> Node:
    """The call as a node of a graph of its own, with the fake values that the estimates read."""
    graph = FxGraph()
    inputs = []
    for index, tensor in enumerate(call.tensors):
        node = graph.placeholder(f"input_{index}")
        node.meta["val"] = tensor
        inputs.append(node)
    leaves = [inputs[leaf.index] if isinstance(leaf, Placeholder) else leaf for leaf in call.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, call.structure)
    made = graph.create_node("call_function", call.target, tuple(args), kwargs, name="call")
    made.meta["val"] = _returned(call)
    return made


def _returned(call: Call) -> Any:
    mode = next((getattr(tensor, "fake_mode", None) for tensor in call.tensors), None)
    if mode is None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode()
    with mode, torch.no_grad():
        # `transpose_` and its like would change the layout of the caller's own tensors.
        args, kwargs = call.arguments([tensor.detach() for tensor in call.tensors])
        return call.target(*args, **kwargs)
