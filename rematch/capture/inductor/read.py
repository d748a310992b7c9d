"""From inductor's joint graph to our Graph, with the way back to its nodes.

`read_fused(joint, forward_outputs=1, static=frozenset(), profile=measurer.profile).graph`

An operator is a buffer of `find_buffers` and everything inlined into it. Matrix products, convolutions, attention and
whatever is not known to fuse cost what they cost in eager mode. All others cost memory traffic: the bytes that their
leaves and results have, at the rate that a large copy reaches. In backward, kernels between two products count as
fused: what one of them has read or written, the next ones read at no cost. A forward operator has the cost of running
again, where reads can be free (see `again`); what it costs more in forward is the loss operator's. Random numbers count
as traffic too: computing one takes about as long as moving 16 bytes.

Inductor runs convolutions in channels-last order where it expects a gain. They are measured so, and copies of weights
and inputs in that order are in memory from the beginning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from rematch.capture.cost import Call, Cost, Profile
from rematch.capture.inductor.again import FreeReads
from rematch.capture.inductor.buffers import Buffers, find_buffers, hinted, tensor_bytes
from rematch.capture.inductor.nodes import Kind, is_mutation, kind_of, runs_once
from rematch.capture.joint.read import TANGENTS_CAN_BE_FREED
from rematch.capture.joint.traced import device_of, is_tangent, module_path, storage_key
from rematch.capture.memory import allocated_bytes
from rematch.errors import CaptureError, RematchError
from rematch.graph import Graph, Op, Phase, Value
from rematch.graph.model import ALREADY_ALLOCATED, LOSS_VALUE

COPIES = "copies in channels-last order"  # name of the value that stands for them
_PROBE_BYTES = 2**26  # of the copy that is timed to know the rate
_BYTES_PER_RANDOM_NUMBER = 16
_LAUNCH_SECONDS = 1e-6


@dataclass(frozen=True)
class FusedCapture:
    """A graph of fused kernels and the traced nodes behind it."""

    graph: Graph
    found: Buffers
    made: tuple[tuple[Node, ...], ...]  # per operator, the node that makes its buffer and the entries of a tuple
    value_of: dict[Node, int]  # node of a buffer, or of an entry -> value
    tangent_bytes: int
    symbolic: bool  # some sizes are known as they were when the graph was traced, and may change
    first_run_seconds: float  # of forward's operators, beyond what they cost when they run again
    returns_loss: bool  # forward returns a number to differentiate, so nothing large is computed from its results
    notes: tuple[str, ...] = ()

    @property
    def joint(self) -> GraphModule:
        return self.found.joint


def read_fused(
    joint: GraphModule,
    *,
    forward_outputs: int,
    static: frozenset[int],
    profile: Callable[[Call], Profile],
    dropped: Collection[int] = (),
    name: str = "",
) -> FusedCapture:
    """The graph of a training step as inductor runs it; inputs numbered in `static` are parameters and buffers.

    Whoever gets forward's results holds them until backward has ended, but for those at the places `dropped`.
    """
    return _Reading(find_buffers(joint, forward_outputs=forward_outputs), static, profile, dropped).capture(name)


class _Reading:
    def __init__(
        self, found: Buffers, static: frozenset[int], profile: Callable[[Call], Profile], dropped: Collection[int]
    ) -> None:
        self.found = found
        self.static = static
        self.profile = profile
        self.dropped = dropped
        self.device = device_of(found.joint)
        self.position = {node: place for place, node in enumerate(found.buffers)}
        self.concrete = _Concrete()
        self.channels_last = GraphLowering.decide_layout_opt(found.joint, is_inference=False)
        self.free_reads = FreeReads(found)
        self.first_run_seconds = 0.0
        self.bytes_per_second = self._copy_rate()
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.made: list[tuple[Node, ...]] = []
        self.value_of: dict[Node, int] = {}
        self.fresh: set[Node] = set()  # what the running kernel of backward has read or written
        self.estimated: set[str] = set()  # operators that could not be measured

    def capture(self, name: str) -> FusedCapture:
        found = self.found
        self._add_residents()
        placeholders = [node for node in found.joint.graph.nodes if node.op == "placeholder"]
        tangents = [node for node in placeholders if is_tangent(node)]
        if not tangents:
            raise CaptureError("the graph has no gradients to start from")
        for node in found.buffers:
            if node in found.forward:
                self._add_op(node, Phase.FORWARD)
        returned = found.outputs[: found.forward_outputs]
        held = self._values_of(tuple(node for place, node in enumerate(returned) if place not in self.dropped))
        self._add_loss(tangents, self._values_of(returned))
        for node in self._backward_order():
            self._add_op(node, Phase.BACKWARD)
        targets = self._values_of(found.outputs[found.forward_outputs :])
        stays = (LOSS_VALUE,) if TANGENTS_CAN_BE_FREED else (LOSS_VALUE, "tangents")
        targets += [index for index, value in enumerate(self.values) if value.role in stays]
        for index in targets:
            if not self.values[index].role:
                self.values[index] = replace(self.values[index], role="gradients")
        residents = {index for index, value in enumerate(self.values) if value.resident}
        graph = Graph(
            ops=tuple(self.ops),
            values=tuple(self.values),
            targets=frozenset(targets) - residents,
            held=frozenset(held) - residents,
            name=name,
        )
        return FusedCapture(
            graph=graph,
            found=found,
            made=tuple(self.made),
            value_of=self.value_of,
            tangent_bytes=sum(tensor_bytes(node) for node in tangents),
            symbolic=any(_is_symbolic(node.meta["val"]) for node in self.value_of),
            first_run_seconds=self.first_run_seconds,
            returns_loss=any(_is_number(node.meta.get("val")) for node in tangents),
            notes=self._notes(),
        )

    def _backward_order(self) -> list[Node]:
        """Buffers of backward as traced, those that need no gradient just before the first one that reads them."""
        found = self.found
        order: dict[Node, None] = {}
        later = [node for node in found.buffers if node not in found.forward]
        for node in sorted(later, key=lambda node: node not in found.needs_tangent):
            waiting, wanted = [node], []
            while waiting:
                buffer = waiting.pop()
                wanted.append(buffer)
                sources = (self._maker(leaf) for leaf in found.leaves_of(buffer.all_input_nodes))
                waiting += [
                    made for made in sources if made in found.buffers and made not in found.forward | order.keys()
                ]
            order.update(dict.fromkeys(sorted(set(wanted), key=self.position.__getitem__)))
        return list(order)

    def _maker(self, leaf: Node) -> Node:
        """The node that makes a buffer, for an entry of a tuple the tuple's."""
        source = leaf.args[0] if leaf.target is operator.getitem else leaf
        return source if isinstance(source, Node) and source in self.found.buffers else leaf

    def _copy_rate(self) -> float:
        """Bytes per second that a large copy reads and writes."""
        with FakeTensorMode():
            probe = torch.empty(_PROBE_BYTES // 4, dtype=torch.float32, device=self.device)
        seconds = self.profile(Call.made(torch.ops.aten.clone.default, (probe,), {})).cost.seconds
        return 2 * _PROBE_BYTES / max(seconds, 1e-9)

    def _add_residents(self) -> None:
        storages: dict[int, int] = {}
        primals = 0
        for node in self.found.joint.graph.nodes:
            if node.op not in ("placeholder", "get_attr") or is_tangent(node):
                continue
            role = "parameters" if primals in self.static else "inputs"
            primals += node.op == "placeholder"
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            key = storage_key(value)
            if key not in storages:
                storages[key] = len(self.values)
                size = allocated_bytes(hinted(value.untyped_storage().nbytes()), value.device)
                self.values.append(
                    Value(node.name, size, resident=True, role=role if node.op == "placeholder" else "constants")
                )
            self.value_of[node] = storages[key]
        copied_bytes = sum(tensor_bytes(node) for node in self._reordered())
        if copied_bytes:
            self.values.append(Value(COPIES, copied_bytes, resident=True, role="constants"))
        self.values.append(Value(ALREADY_ALLOCATED, 0, resident=True, role=ALREADY_ALLOCATED))

    def _reordered(self) -> set[Node]:
        """Weights and inputs of convolutions that inductor copies into channels-last order."""
        if not self.channels_last:
            return set()
        convolutions = self.found.joint.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
        read = {argument for convolution in convolutions for argument in convolution.args[:2]}
        given = [node for node in read if isinstance(node, Node) and self.found.kinds[node] is Kind.INPUT]
        return {node for node in given if not _is_channels_last(node.meta["val"])}

    def _add_loss(self, tangents: list[Node], returned: list[int]) -> None:
        outputs = []
        for node in tangents:
            if isinstance(node.meta.get("val"), torch.Tensor):
                outputs.append(self._add_value(node, "tangents"))
        outputs.append(len(self.values))
        self.values.append(Value(LOSS_VALUE, 0, role=LOSS_VALUE))
        self.ops.append(Op("loss", 0.0, tuple(dict.fromkeys(returned)), tuple(outputs), phase=Phase.LOSS, once=True))
        self.made.append(())

    def _add_op(self, node: Node, phase: Phase) -> None:
        leaves = self._leaves(node)
        entries = tuple(user for user in node.users if user.target is operator.getitem)
        results = [made for made in entries or (node,) if isinstance(made.meta.get("val"), torch.Tensor)]
        once = runs_once(node, self.device.type == "cuda") or bool(self.found.mutated & leaves)
        if phase is Phase.BACKWARD and self.found.mutated & leaves:
            raise CaptureError(f"backward reads {next(iter(self.found.mutated & leaves))}, which forward changes")
        cost = self._cost(node, leaves, results, phase)
        inputs = dict.fromkeys(self.value_of[leaf] for leaf in leaves if leaf in self.value_of)
        role = "outputs" if phase is Phase.FORWARD and self._is_returned(results) else ""
        outputs = () if is_mutation(node) else tuple(self._add_value(result, role) for result in results)
        self.ops.append(
            Op(
                name=node.name,
                seconds=cost.seconds,
                inputs=tuple(sorted(inputs)),
                outputs=outputs,
                workspace_bytes=cost.workspace_bytes,
                phase=phase,
                once=once,
                module_path=module_path(node),
                class_key=self._class_key(node, cost),
                flops=cost.flops,
            )
        )
        self.made.append((node, *entries))

    def _leaves(self, node: Node) -> frozenset[Node]:
        leaves = self.found.leaves_of(node.all_input_nodes)
        missing = [leaf for leaf in leaves if leaf not in self.value_of and tensor_bytes(leaf)]
        if missing:
            raise CaptureError(f"{node.name} reads {missing[0].name}, which is computed after it")
        return leaves

    def _class_key(self, node: Node, cost: Cost) -> str:
        sizes = [tensor_bytes(leaf) for leaf in sorted(self.found.leaves_of(node.all_input_nodes), key=str)]
        return f"{node.target} {sorted(sizes)} {cost.seconds:.3g}"

    def _is_returned(self, results: list[Node]) -> bool:
        returned = set(self.found.outputs[: self.found.forward_outputs])
        return any(result in returned for result in results)

    def _add_value(self, node: Node, role: str = "") -> int:
        self.value_of[node] = len(self.values)
        self.values.append(Value(node.name, tensor_bytes(node), role=role))
        return self.value_of[node]

    def _values_of(self, outputs: tuple[Any, ...]) -> list[int]:
        leaves = self.found.leaves_of(output for output in outputs if isinstance(output, Node))
        return sorted({self.value_of[leaf] for leaf in leaves if leaf in self.value_of})

    # Costs

    def _cost(self, node: Node, leaves: frozenset[Node], results: list[Node], phase: Phase) -> Cost:
        if kind_of(node) is Kind.KERNEL and not is_mutation(node):
            self.fresh.clear()
            try:
                return self.profile(Call.of(node, self._as_run(node))).cost
            except RematchError:
                self.estimated.add(str(node.target))
        return self._traffic(node, leaves, results, phase)

    def _as_run(self, node: Node) -> Callable[[Node], Any]:
        """What the arguments of a kernel are like: those of convolutions may be reordered."""
        packet = getattr(node.target, "overloadpacket", None)
        if self.channels_last and packet in (torch.ops.aten.convolution, torch.ops.aten.convolution_backward):
            return self.concrete.channels_last
        return self.concrete.value

    def _traffic(self, node: Node, leaves: frozenset[Node], results: list[Node], phase: Phase) -> Cost:
        """The cost of a fused kernel; in forward, of running it again."""
        written = sum(tensor_bytes(result) for result in results)
        written += _BYTES_PER_RANDOM_NUMBER * self.found.drawn_by(node.all_input_nodes)
        if phase is Phase.BACKWARD:
            moved = written + self._read_bytes(node, leaves - self.fresh, results)
            self.fresh |= leaves | set(results)
        else:
            self.fresh.clear()
            moved = written + self._read_bytes(node, leaves - self.free_reads.of(node), results)
            first = written + self._read_bytes(node, leaves, results)
            self.first_run_seconds += (first - moved) / self.bytes_per_second
        return Cost(_LAUNCH_SECONDS + moved / self.bytes_per_second, 0, None)

    def _read_bytes(self, node: Node, leaves: frozenset[Node], results: list[Node]) -> int:
        """What a fused kernel reads of its leaves: of a lookup only what it needs."""
        elements = max((hinted(result.meta["val"].numel()) for result in results), default=0)
        whole = self.found.kinds[node] is not Kind.FUSED
        read = 0
        for leaf in leaves:
            value = leaf.meta.get("val")
            if isinstance(value, torch.Tensor):
                touched = tensor_bytes(leaf)
                read += touched if whole else min(touched, elements * value.element_size())
        return read

    def _notes(self) -> tuple[str, ...]:
        notes = [
            "costs: products, convolutions and attention as in eager mode; fused kernels by the memory they read and "
            f"write, at {self.bytes_per_second / 2**30:.0f} GiB/s"
        ]
        if self.estimated:
            notes.append(
                f"costs: by memory traffic too, for they cannot be measured: {', '.join(sorted(self.estimated))}"
            )
        if any("recompute" in node.meta for node in self.found.joint.graph.nodes):
            notes.append("torch.utils.checkpoint inside the model: rematch decides what is recomputed")
        return tuple(notes)


class _Concrete:
    """Values of nodes with numbers in the place of symbols."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()

    def value(self, node: Node) -> Any:
        return pytree.tree_map(self._leaf, node.meta.get("val"))

    def channels_last(self, node: Node) -> Any:
        """The same for a tensor that inductor has put into channels-last order."""
        value = self.value(node)
        if not isinstance(value, torch.Tensor) or value.dim() != 4:
            return value
        with self._mode:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device, memory_format=torch.channels_last)

    def _leaf(self, leaf: Any) -> Any:
        """All tensors are made anew: those of two modes cannot go into one operator."""
        if isinstance(leaf, torch.SymInt):
            return hinted(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape, stride = ([hinted(size) for size in sizes] for sizes in (leaf.shape, leaf.stride()))
        with self._mode:
            return torch.empty_strided(shape, stride, dtype=leaf.dtype, device=leaf.device)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hinted(value.numel()) == 1


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() != 4 or tensor.is_contiguous(memory_format=torch.channels_last)


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride()))
