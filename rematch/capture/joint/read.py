"""From the joint forward and backward graph that AOTAutograd traces to our Graph, and the way back to its nodes.

`read_joint(joint, forward_outputs=1, inputs=inputs, profile=profile).graph`

Three passes: `propagate` gives each node the results its kernel really has, `assemble` makes operators of kernels and
values of storages, and this module adds what lies outside: the loss operator between forward and backward, which takes
the outputs and yields the tangents, and what is resident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rematch.capture.aten import forget_unread_statistics, write_without_copies
from rematch.capture.cost import Call, Profile
from rematch.capture.joint.assemble import Assembly, Kernel, OpDraft
from rematch.capture.joint.corrections import Corrections
from rematch.capture.joint.propagate import propagate
from rematch.capture.joint.traced import (
    Traced,
    device_bytes,
    is_tangent,
    leaves_of,
    module_path,
    storage_key,
    tensors_of,
)
from rematch.capture.joint.unused import drop_zero_tangents
from rematch.capture.memory import random_state_bytes
from rematch.errors import CaptureError
from rematch.graph import Graph, Op, Phase, Value
from rematch.graph.model import ALREADY_ALLOCATED, LOSS_VALUE

STRETCH_BYTES = 25 << 20  # of gradients that leave backward together: a bucket of DistributedDataParallel

# Before torch 2.12 the autograd engine holds the tangents until all of backward has run.
TANGENTS_CAN_BE_FREED = hasattr(torch.autograd.Function, "boxed_grads_call")


@dataclass(frozen=True)
class Input:
    """What a placeholder of the joint graph stands for; the role is "parameters", "buffers" or "inputs"."""

    name: str
    role: str
    is_leaf: bool = True  # of autograd, and no result of other operators, such as weights that a call is given


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory; without strides, in no way that can be asked for."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None


@dataclass(frozen=True)
class LossCost:
    """What the user's own loss takes outside the module, beyond the outputs it reads and the tangents it yields.

    `retained_bytes` stay while backward runs: the user holds the loss, and some losses keep a tensor for a number.
    """

    workspace_bytes: int
    retained_bytes: int
    seconds: float = 0.0
    unused: frozenset[int] = frozenset()  # outputs that it does not read, by their place among the module's
    tangents: tuple[Layout, ...] = ()  # of its differentiable inputs, in turn


@dataclass(frozen=True)
class Capture:
    """A graph and the traced nodes behind it."""

    graph: Graph
    joint: GraphModule
    kernels: tuple[tuple[Kernel, ...], ...]  # per operator of the graph; none for the loss and for random states
    random_state_of: dict[int, int]  # operator -> the operator that notes the generator's state for it
    storage: dict[Node, tuple[int | None, ...]]  # node -> the value behind each of its results
    views: frozenset[Node]  # nodes that cost nothing: they show a storage that another node made
    reshaped: frozenset[Node]  # traced views that real strides turn into copies
    forward_outputs: int  # the first of the joint graph's outputs; the rest are gradients
    dropped: frozenset[Node]  # tangents of outputs that the loss does not use
    differentiable_output_bytes: int
    leaves: dict[int, tuple[int, ...]]  # operator -> places, among the gradients, of those that leave backward there
    notes: tuple[str, ...] = ()


def read_joint(
    joint: GraphModule,
    *,
    forward_outputs: int,
    inputs: Sequence[Input],
    profile: Callable[[Call], Profile],
    corrections: Corrections,
    unused: frozenset[int] = frozenset(),
    taken: frozenset[str] = frozenset(),
    name: str = "",
) -> Capture:
    """The graph of a traced training step, or of inference if `joint` has no tangents.

    What lies outside of it, the cost of the loss and memory that is allocated already, is nothing until `with_outside`
    says otherwise. `unused` outputs get no gradient. Gradients leave backward in stretches, and those of `taken`
    parameters are gone then: added to what is there already, or used up by a hook. `TraceAgain` is raised if results
    have other strides than tracing believed: they decide which kernels eager runs next, so the graph must be traced
    with the right ones.
    """
    forget_unread_statistics(joint.graph)
    write_without_copies(joint.graph)
    traced = Traced(joint, forward_outputs, drop_zero_tangents(joint, unused))
    propagated = propagate(traced, profile)
    corrections.learn(propagated.wrong)
    assembly = Assembly(traced, propagated, profile)
    return _Finish(assembly, inputs, taken).capture(name)


class _Finish:
    """The graph: residents, operators in their order with the loss between, targets and what is held."""

    def __init__(self, assembly: Assembly, inputs: Sequence[Input], taken: frozenset[str]) -> None:
        self.assembly = assembly
        self.inputs = inputs
        self.taken = taken
        self.traced = assembly.traced
        self.backward_start = assembly.forward_drafts
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.kernels: list[tuple[Kernel, ...]] = []
        self.index: dict[int, int] = {}  # storage -> value
        self.random_state_of: dict[int, int] = {}
        self.leaves: dict[int, tuple[int, ...]] = {}
        self.given_away: set[int] = set()  # storages of gradients that are the parameters' own before backward ends
        self.roles = self._roles_of_what_leaves()

    def _roles_of_what_leaves(self) -> dict[int, str]:
        """By storage: what the module returns and the gradients."""
        outputs, count = self.traced.outputs, self.traced.forward_outputs
        leaving = {"gradients": outputs[count:], "outputs": outputs[:count]}
        return {
            key: role
            for role, nodes in leaving.items()
            for key in self.assembly.storages(node for node in nodes if isinstance(node, Node))
        }

    def capture(self, name: str) -> Capture:
        self._add_residents()
        tensors = self._tensor_of_each_storage()
        stretches = self._stretches()
        self.given_away = self._given_away(stretches)
        for number, draft in enumerate(self.assembly.drafts):
            if number == self.backward_start:
                self._add_loss()
            self._add_op(draft, number, tensors)
            if number in stretches:
                self._add_leave(stretches[number])
        if self.backward_start >= len(self.assembly.drafts):
            self._add_loss()
        outputs = self.traced.outputs
        forward = outputs[: self.traced.forward_outputs]
        has_loss = bool(self.traced.tangents)
        held = frozenset(self._values_of(forward))
        targets = frozenset(self._values_of(self._staying()))
        targets |= {self.ops[op].outputs[0] for op in self.leaves}
        stays = (LOSS_VALUE,) if TANGENTS_CAN_BE_FREED else (LOSS_VALUE, "tangents")
        targets |= {index for index, value in enumerate(self.values) if value.role in stays}
        graph = Graph(
            ops=tuple(self.ops),
            values=tuple(self.values),
            targets=(targets if has_loss else held) - self._residents(),
            held=(held if has_loss else frozenset()) - self._residents(),
            name=name,
        )
        return Capture(
            graph=graph,
            joint=self.traced.joint,
            kernels=tuple(self.kernels),
            random_state_of=self.random_state_of,
            storage=self._storage_of_each_node(),
            views=frozenset(n for n in self.traced.calls if n not in self._kernel_nodes()),
            reshaped=frozenset(self.assembly.found.reshaped),
            forward_outputs=self.traced.forward_outputs,
            dropped=self.traced.dropped,
            differentiable_output_bytes=self._tangent_bytes(),
            leaves=self.leaves,
        )

    def _kernel_nodes(self) -> set[Node]:
        return {kernel.node for kernels in self.kernels for kernel in kernels}

    def _residents(self) -> frozenset[int]:
        return frozenset(index for index, value in enumerate(self.values) if value.resident)

    def _add_residents(self) -> None:
        primals = [node for node in self.traced.placeholders if not is_tangent(node)]
        described = dict(zip(primals, self.inputs, strict=True))
        for node in (*primals, *self.traced.constants):
            for tensor in tensors_of(self.assembly.found.value[node]):
                key = storage_key(tensor)
                if key not in self.index:
                    info = described.get(node, Input(node.name, "constants"))
                    self._add_value(key, Value(info.name, device_bytes(tensor), resident=True, role=info.role))
        self.values.append(Value(ALREADY_ALLOCATED, 0, resident=True, role=ALREADY_ALLOCATED))

    def _add_value(self, key: int, value: Value) -> int:
        self.index[key] = len(self.values)
        self.values.append(value)
        return self.index[key]

    def _tensor_of_each_storage(self) -> dict[int, tuple[str, torch.Tensor]]:
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for draft in self.assembly.drafts:
            for kernel in draft.kernels:
                for position, tensor in enumerate(leaves_of(self.assembly.found.value[kernel.node])):
                    if isinstance(tensor, torch.Tensor):
                        name = kernel.node.name if position == 0 else f"{kernel.node.name}.{position}"
                        found.setdefault(storage_key(tensor), (name, tensor))
        return found

    def _add_op(self, draft: OpDraft, number: int, tensors: dict[int, tuple[str, torch.Tensor]]) -> None:
        inputs = [self._require(key, draft) for key in draft.inputs]
        node = draft.kernels[0].node
        phase = Phase.FORWARD if number < self.backward_start else Phase.BACKWARD
        path = module_path(node)
        if draft.random:
            inputs.append(self._add_random_state(node, phase, path))
        outputs = []
        for key in draft.outputs:
            label, tensor = tensors[key]
            size = self.assembly.bytes_of(key, tensor)
            outputs.append(self._add_value(key, Value(label, size, role=self.roles.get(key, ""))))
        if draft.random:
            self.random_state_of[len(self.ops)] = len(self.ops) - 1
        self.ops.append(
            Op(
                name="+".join(kernel.node.name for kernel in draft.kernels),
                seconds=draft.seconds,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                workspace_bytes=draft.workspace_bytes,
                phase=phase,
                once=draft.once or not self.given_away.isdisjoint(draft.outputs),
                random=draft.random or draft.updates,
                module_path=path,
                class_key=draft.class_key,
                flops=draft.flops,
            )
        )
        self.kernels.append(tuple(draft.kernels))

    def _require(self, key: int, draft: OpDraft) -> int:
        if key not in self.index:
            raise CaptureError(
                f"operator {draft.kernels[0].node.name} reads a tensor that no operator of the graph made"
            )
        return self.index[key]

    def _add_random_state(self, node: Node, phase: Phase, path: str) -> int:
        """The generator's state, noted before a random operator so that it can be run again."""
        device = next((t.device for t in tensors_of(self.assembly.found.value[node])), torch.device("cpu"))
        self.values.append(Value(f"{node.name}.state", random_state_bytes(device), role="random states"))
        self.ops.append(
            Op(f"{node.name}.state", 0.0, (), (len(self.values) - 1,), phase=phase, once=True, module_path=path)
        )
        self.kernels.append(())
        return len(self.values) - 1

    def _add_loss(self) -> None:
        tangents = self.traced.tangents
        if not tangents:
            return
        outputs = []
        for node in tangents:
            tensor = self.assembly.found.value[node]
            outputs.append(
                self._add_value(storage_key(tensor), Value(node.name, device_bytes(tensor), role="tangents"))
            )
            if not TANGENTS_CAN_BE_FREED and _is_for_base_of_view(node):
                # The output is a view, and the gradient that comes back for it is copied into the layout of its base.
                outputs.append(len(self.values))
                self.values.append(Value(f"{node.name}.copied", device_bytes(tensor), role="tangents"))
        outputs.append(len(self.values))
        self.values.append(Value(LOSS_VALUE, 0, role=LOSS_VALUE))
        held = self._values_of(self.traced.outputs[: self.traced.forward_outputs])
        self.ops.append(Op("loss", 0.0, tuple(held), tuple(outputs), phase=Phase.LOSS, once=True))
        self.kernels.append(())

    # Gradients on their way out

    def _gradients(self) -> dict[int, tuple[Node, Node, Input]]:
        """By place: each gradient, with the placeholder it belongs to and what that stands for."""
        primals = [node for node in self.traced.placeholders if not is_tangent(node)]
        gradients = self.traced.outputs[self.traced.forward_outputs :]
        found = enumerate(zip(gradients, primals, self.inputs, strict=False))
        return {place: entry for place, entry in found if isinstance(entry[0], Node)}

    def _stretches(self) -> dict[int, list[int]]:
        """By draft: the places of parameters' gradients that leave after it, all but those that leave at the end.

        A gradient may leave once it is final and its parameter is no longer read, for whoever gets it may change that.
        """
        last_use: dict[int, int] = {}
        for number, draft in enumerate(self.assembly.drafts[self.backward_start :], start=self.backward_start):
            last_use.update(dict.fromkeys((*draft.inputs, *draft.outputs), number))
        final: list[tuple[int, int, int]] = []  # when it can leave, its place and its size
        for place, (gradient, primal, info) in self._gradients().items():
            own, of_parameter = (self.assembly.storages([node]) for node in (gradient, primal))
            given_as = getattr(primal.meta.get("desc"), "idx", None)
            if given_as != place or not self.assembly.changed_buffers.isdisjoint(of_parameter):
                return {}
            if info.role == "parameters" and info.is_leaf and all(key in last_use for key in own):
                size = sum(device_bytes(t) for t in tensors_of(self.assembly.found.value[gradient]))
                final.append((max(last_use.get(key, 0) for key in (*own, *of_parameter)), place, size))
        found: dict[int, list[int]] = {}
        waiting, waiting_bytes = [], 0
        for (number, place, size), following in pairwise([*sorted(final), (len(self.assembly.drafts), -1, 0)]):
            waiting.append(place)
            waiting_bytes += size
            if waiting_bytes >= STRETCH_BYTES and following[0] > number and following[1] >= 0:
                found[number] = waiting
                waiting, waiting_bytes = [], 0
        return found

    def _given_away(self, stretches: Mapping[int, Sequence[int]]) -> set[int]:
        """Once a gradient has left nobody can free it, to make it again when backward ends: it is computed once."""
        gradients = self._gradients()
        left = [gradients[place] for places in stretches.values() for place in places]
        return set(self.assembly.storages(gradient for gradient, _, info in left if info.name not in self.taken))

    def _add_leave(self, places: list[int]) -> None:
        gradients = self._gradients()
        before = [self.ops[op].outputs[0] for op in list(self.leaves)[-1:]]
        left = self._values_of([gradients[place][0] for place in places])
        self.leaves[len(self.ops)] = tuple(places)
        name = f"leave_{len(self.leaves)}"
        self.values.append(Value(name, 0))
        inputs = (*dict.fromkeys(left), *before)
        self.ops.append(Op(name, 0.0, inputs, (len(self.values) - 1,), phase=Phase.BACKWARD, once=True))
        self.kernels.append(())

    def _staying(self) -> list[Node]:
        """The gradients that are there when backward has ended."""
        left = {place for places in self.leaves.values() for place in places}
        return [
            gradient
            for place, (gradient, _, info) in self._gradients().items()
            if place not in left or info.name not in self.taken
        ]

    def _tangent_bytes(self) -> int:
        return sum(device_bytes(self.assembly.found.value[node]) for node in self.traced.tangents)

    def _values_of(self, outputs: Sequence[Any]) -> list[int]:
        nodes = [output for output in outputs if isinstance(output, Node)]
        return [self.index[key] for key in self.assembly.storages(nodes)]

    def _storage_of_each_node(self) -> dict[Node, tuple[int | None, ...]]:
        return {
            node: tuple(
                self.index.get(self.assembly.storage(leaf)) if isinstance(leaf, torch.Tensor) else None
                for leaf in leaves_of(value)
            )
            for node, value in self.assembly.found.value.items()
        }


def _is_for_base_of_view(tangent: Node) -> bool:
    """Whether the output that the tangent belongs to is a view: then it is the tangent of what it is a view of."""
    return "IntermediateBase" in type(getattr(tangent.meta.get("desc"), "output", None)).__name__


def with_outside(capture: Capture, loss: LossCost, already_allocated_bytes: int) -> Capture:
    """The same capture with what lies outside the module: the cost of the loss, and memory in use before."""
    return replace(capture, graph=graph_with_outside(capture.graph, loss, already_allocated_bytes))


def graph_with_outside(graph: Graph, loss: LossCost, already_allocated_bytes: int) -> Graph:
    """The same graph with another cost of the loss, and other memory in use before."""
    ops = tuple(
        replace(op, seconds=loss.seconds, workspace_bytes=loss.workspace_bytes) if op.phase is Phase.LOSS else op
        for op in graph.ops
    )
    outside = {ALREADY_ALLOCATED: already_allocated_bytes, LOSS_VALUE: loss.retained_bytes}
    values = tuple(
        replace(value, size_bytes=outside[value.role]) if value.role in outside else value for value in graph.values
    )
    return replace(graph, ops=ops, values=values)
