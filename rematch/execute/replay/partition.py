"""A schedule as two graph modules: forward up to the loss, backward after it.

`forward, backward = partition(capture, schedule)`, with the `host` memory that a schedule moves values to

The modules hold the traced calls in the order of the schedule, repeated ones as often as it runs them. Frees need no
nodes: whoever runs the modules drops each result after its last use, which is never later than the schedule says.
What backward reads of forward's results becomes additional outputs there and placeholders here.

A value that moves has three more calls: where its copy out begins, where the schedule frees it, and where its copy in
begins. Whoever reads it first after that waits for the copy. Backward is given the copy in host memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph as FxGraph, GraphModule, Node

from rematch.capture.aten import (
    PASS_THROUGH,
    RESHAPES,
    InPlaceOnCopy,
    aten,
    in_place_on_copy,
    is_random,
    without_running_statistics,
)
from rematch.capture.joint.assemble import Kernel
from rematch.capture.joint.carriers import carriers
from rematch.capture.joint.read import Capture
from rematch.capture.joint.traced import is_tangent
from rematch.errors import ScheduleError
from rematch.execute.random import note_state, replay
from rematch.execute.replay.moves import arrived, fetch, host_of, key_of, let_go, send
from rematch.execute.replay.source import leave
from rematch.execute.transfers import HostMemory
from rematch.graph import Compute, Fetch, Free, Offload, Phase, Schedule


def partition(capture: Capture, schedule: Schedule, host: HostMemory | None = None) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward module; backward is empty for an inference graph."""
    return _Partition(capture, schedule, host).modules()


class _Region:
    """One of the two graphs while it is being written."""

    def __init__(self) -> None:
        self.graph = FxGraph()
        self.made: dict[Node, Node] = {}  # traced node -> its latest node here


class _Partition:
    def __init__(self, capture: Capture, schedule: Schedule, host: HostMemory | None) -> None:
        self.capture = capture
        self.schedule = schedule
        self.ops = schedule.ops.tolist()
        self.forward = _Region()
        self.backward = _Region()
        self.region = self.forward
        self.saved: dict[Node, Node] = {}  # forward's node -> backward's placeholder
        self.states: dict[int, Node] = {}  # operator that notes a state -> its node in forward or backward
        self.shown_by = self._views_of_each_kernel()
        self.runs = dict.fromkeys(self.ops, 0)
        for op in self.ops:
            self.runs[op] += 1
        self.host_key = 0 if host is None else key_of(host)
        self.carriers = carriers(capture) if schedule.moves else {}
        self.leaving: dict[int, Node] = {}  # values whose copy out has begun in this region, and what stands for it
        self.hosted: dict[int, Node] = {}  # value -> its copy in host memory
        self.arriving: dict[Node, tuple[int, Node]] = {}  # traced node -> the value it carries, which was fetched

    def modules(self) -> tuple[GraphModule, GraphModule]:
        traced = self.capture.joint.graph
        placeholders = [node for node in traced.nodes if node.op == "placeholder"]
        tangents = [node for node in placeholders if is_tangent(node)]
        for node in placeholders:
            if node not in tangents:
                self._placeholder(self.forward, node)
        outputs = tuple(next(node for node in traced.nodes if node.op == "output").args[0])
        forward_outputs = outputs[: self.capture.forward_outputs]
        self.gradients = outputs[self.capture.forward_outputs :]
        returned: list[Any] = []
        done: set[int] = set()
        for step in self.schedule:
            if not isinstance(step, Compute):
                self._move(step)
            elif self.capture.graph.ops[step.op].phase is Phase.LOSS:
                returned = [self._look_up(node) for node in forward_outputs]
                self._end_copies()
                self.region = self.backward
                for node in tangents:
                    self._placeholder(self.backward, node)
            else:
                self._emit(step.op, again=step.op in done)
                done.add(step.op)
        if not tangents:
            returned = [self._look_up(node) for node in forward_outputs]
            self._end_copies()
            self.region = self.backward
        left = {place for places in self.capture.leaves.values() for place in places}
        gradients = [
            None if place in left else self._look_up(gradient) for place, gradient in enumerate(self.gradients)
        ]
        self._end_copies()
        self.forward.graph.output((*returned, *self.saved))
        self.backward.graph.output(tuple(gradients))
        self._placeholders_first(tangents)
        return self._module(self.forward), self._module(self.backward)

    def _module(self, region: _Region) -> GraphModule:
        attributes = {
            str(node.target): getattr(self.capture.joint, str(node.target))
            for node in region.graph.nodes
            if node.op == "get_attr"
        }
        return GraphModule(attributes, region.graph)

    def _placeholder(self, region: _Region, node: Node) -> None:
        made = region.graph.placeholder(node.name)
        made.meta = dict(node.meta)
        region.made[node] = made

    def _placeholders_first(self, tangents: list[Node]) -> None:
        """The autograd node hands over what was saved, then the tangents."""
        body = next(node for node in self.backward.graph.nodes if node.op != "placeholder")
        for placeholder in (*self.saved.values(), *(self.backward.made[node] for node in tangents)):
            body.prepend(placeholder)

    def _views_of_each_kernel(self) -> dict[Node, list[Node]]:
        """For each traced kernel, the views, tuple entries and detached tensors that show its results."""
        sources: dict[Node, set[Node]] = {}
        shown: dict[Node, list[Node]] = {}
        for node in self.capture.joint.graph.nodes:
            if node in self.capture.views:
                found: set[Node] = set()
                for arg in node.all_input_nodes:
                    found |= sources[arg] if arg in self.capture.views else {arg}
                sources[node] = found
                for kernel in found:
                    shown.setdefault(kernel, []).append(node)
        return shown

    def _emit(self, op: int, again: bool) -> None:
        kernels = self.capture.kernels[op]
        if op in self.capture.leaves:
            left = [self._look_up(self.gradients[place]) for place in self.capture.leaves[op]]
            self.region.graph.call_function(leave, (left,))
        if not kernels:
            return  # of a random state, too: written down where the random operator first runs, if that runs again
        state = self._random_state(op, again)
        for kernel in kernels:
            target, args, kwargs = self._call(kernel, again)
            if again and is_random(kernel.node):
                assert state is not None
                again_args: Any = (state, *self._device(kernel), target, *args)
                made = self.region.graph.call_function(replay, again_args, kwargs)
            else:
                made = self.region.graph.call_function(target, args, kwargs)
            self._adopt(kernel.node, made)

    # Values that move

    def _move(self, step: Free | Offload | Fetch) -> None:
        match step:
            case Offload(value):
                self._begin_copy_out(value)
            case Fetch(value):
                self._forget(value)
                device = str(self.carriers[value][0].meta["val"].device)
                begun: Any = (self.host_key, device, self._here(self.hosted[value]))
                arriving = self.region.graph.call_function(fetch, begun)
                self.arriving.update(dict.fromkeys(self.carriers[value], (value, arriving)))
            case Free(value) if value in self.hosted:
                self._forget(value)
                if value in self.leaving:
                    self.region.graph.call_function(let_go, (self.leaving.pop(value),))

    def _begin_copy_out(self, value: int) -> None:
        carrier = self.carriers[value][0]
        leaving = self.region.graph.call_function(send, (self.host_key, self._look_up(carrier)))
        host = self.region.graph.call_function(host_of, (leaving,))
        mode = _fake_mode_of(self.capture)
        like = carrier.meta["val"]
        with mode:
            host.meta["val"] = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
        self.leaving[value], self.hosted[value] = leaving, host

    def _end_copies(self) -> None:
        """The region ends, and only tensors go from forward to backward."""
        for carrier in list(self.arriving):
            if carrier in self.arriving:
                self._wait_for(carrier)
        for leaving in self.leaving.values():
            self.region.graph.call_function(let_go, (leaving,))
        self.leaving.clear()

    def _forget(self, value: int) -> None:
        """Whatever shows the value shows memory that it no longer has."""
        for carrier in self.carriers[value]:
            self.arriving.pop(carrier, None)
            kernel: Any = carrier.args[0] if carrier.target is operator.getitem else carrier
            for node in (carrier, *self.shown_by.get(kernel, ())):
                if self.capture.storage[node] == (value,):
                    self.forward.made.pop(node, None)
                    self.backward.made.pop(node, None)

    def _wait_for(self, carrier: Node) -> Node:
        """The value that a traced node carries, from where its copy in has ended."""
        value, arriving = self.arriving[carrier]
        made = self.region.graph.call_function(arrived, (arriving,))
        made.meta = dict(carrier.meta)
        for other in self.carriers[value]:
            del self.arriving[other]
            self.region.made[other] = made
        return made

    def _random_state(self, op: int, again: bool) -> Node | None:
        noted = self.capture.random_state_of.get(op)
        if noted is None or self.runs[op] == 1:
            return None
        if not again:
            kernel = next(kernel for kernel in self.capture.kernels[op] if is_random(kernel.node))
            made = self.region.graph.call_function(note_state, self._device(kernel))
            size = self.capture.graph.values[self.capture.graph.ops[noted].outputs[0]].size_bytes
            made.meta["val"] = _fake_mode_of(self.capture).from_tensor(torch.empty(size, dtype=torch.uint8))
            self.states[noted] = made
            return made
        return self._here(self.states[noted])

    def _device(self, kernel: Kernel) -> tuple[str, int | None]:
        value = kernel.node.meta["val"]
        tensor = value[0] if isinstance(value, (tuple, list)) else value
        return tensor.device.type, tensor.device.index

    def _call(self, kernel: Kernel, again: bool) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        node = kernel.node
        args = node.args
        if again and (harmless := without_running_statistics(node.target, args)) is not None:
            args = harmless
        target = aten.reshape.default if node in self.capture.reshaped else kernel.target
        if isinstance(target, InPlaceOnCopy):
            args = (target.twin, target.stride, *args)
            target = in_place_on_copy
        return target, *torch.fx.map_arg((args, dict(node.kwargs)), self._look_up)  # type: ignore[return-value]

    def _adopt(self, node: Node, made: Node) -> None:
        """`made` is the latest run of `node`: whatever showed an earlier run is out of date."""
        for shown in self.shown_by.get(node, ()):
            self.forward.made.pop(shown, None)
            self.backward.made.pop(shown, None)
        self.forward.made.pop(node, None)
        self.arriving = {carrier: found for carrier, found in self.arriving.items() if not _is_of(carrier, node)}
        made.meta = {**node.meta, **made.meta}
        self.region.made[node] = made
        if isinstance(node.meta.get("val"), (tuple, list)):
            self._take_apart(node, made)

    def _take_apart(self, node: Node, made: Node) -> None:
        """Bind the entries of a tuple at once, so that it does not keep alive those that are freed."""
        for user in node.users:
            if user.target is operator.getitem:
                entry = self.region.graph.call_function(operator.getitem, (made, user.args[1]))
                entry.meta = dict(user.meta)
                self.region.made[user] = entry

    def _look_up(self, node: Any) -> Any:
        """The node that stands here for a traced one, fetched from forward or shown anew where needed."""
        if not isinstance(node, Node):
            return node
        if node in self.region.made:
            return self.region.made[node]
        if node in self.arriving:
            return self._wait_for(node)
        if node in self.forward.made:
            return self._here(self.forward.made[node])
        if node.op == "get_attr":
            made = self.region.graph.get_attr(str(node.target))
            made.meta = dict(node.meta)
            self.region.made[node] = made
            return made
        if node in self.capture.views:
            return self._show(node)
        raise ScheduleError(f"the schedule reads {node.name!r} where it has not been computed")

    def _here(self, made: Node) -> Node:
        """A node of forward, saved for backward if we are there."""
        if self.region is self.forward or made.graph is self.backward.graph:
            return made
        if made not in self.saved:
            placeholder = self.backward.graph.placeholder(f"saved_{made.name}")
            placeholder.meta = dict(made.meta)
            self.saved[made] = placeholder
        return self.saved[made]

    def _show(self, node: Node) -> Node:
        if node.target in PASS_THROUGH:
            made: Node = self._look_up(node.args[0])
            self.region.made[node] = made
            return made
        if node.target is operator.getitem:
            self._show(node.args[0])  # type: ignore[arg-type]
            return self.region.made[node]
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), self._look_up)
        target: Any = aten.reshape.default if node.target in RESHAPES else node.target
        made = self.region.graph.call_function(target, args, kwargs)
        made.meta = dict(node.meta)
        self.region.made[node] = made
        if isinstance(node.meta.get("val"), (tuple, list)):
            self._take_apart(node, made)
        return made


def _is_of(carrier: Node, kernel: Node) -> bool:
    """Whether a node is a kernel or an entry of what it returns."""
    return carrier is kernel or (carrier.target is operator.getitem and carrier.args[0] is kernel)


def _fake_mode_of(capture: Capture) -> Any:
    placeholders = (node for node in capture.joint.graph.nodes if node.op == "placeholder")
    return next(n.meta["val"].fake_mode for n in placeholders if isinstance(n.meta.get("val"), torch.Tensor))
