"""From the joint forward and backward graph that AOTAutograd traces to our Graph, and the way back to its nodes.

`read_joint(joint, forward_outputs=1, inputs=inputs, profile=profile).graph`

Three passes. *Propagate* walks the traced nodes and gives each the results its kernel really has, strides included; a
traced view that real strides do not allow becomes a copy. *Assemble* makes operators of kernels and values of storages:
views, tuples and detached tensors fold into the storage they show, and a pointwise kernel whose input nobody else reads
works in place, as part of the operator before it. *Finish* adds what lies outside the module: the loss operator between
forward and backward, which takes the outputs and yields the tangents, and what is resident.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from rematch.capture.aten import (
    InPlaceOnCopy,
    aten,
    fill_of_empty,
    forget_unread_statistics,
    in_place_twin,
    in_rows_apart,
    is_of_torch,
    is_random,
    may_repeat,
    updated_statistics,
)
from rematch.capture.corrections import Corrections
from rematch.capture.cost import Call, Profile, Result
from rematch.capture.memory import allocated_bytes
from rematch.capture.unused import drop_zero_tangents
from rematch.errors import CaptureError
from rematch.graph import Graph, Op, Phase, Value
from rematch.graph.model import ALREADY_ALLOCATED, LOSS_VALUE

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)
_PASS_THROUGH = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)


# Before torch 2.12 the autograd engine holds the tangents until all of backward has run.
TANGENTS_CAN_BE_FREED = hasattr(torch.autograd.Function, "boxed_grads_call")


@dataclass(frozen=True)
class Input:
    """What a placeholder of the joint graph stands for; the role is "parameters", "buffers" or "inputs"."""

    name: str
    role: str


@dataclass(frozen=True)
class Kernel:
    """One call of an operator: the traced node, and what to call for it where that differs."""

    node: Node
    target: Any


@dataclass(frozen=True)
class LossCost:
    """What the user's own loss takes outside the module, beyond the outputs it reads and the tangents it yields.

    `retained_bytes` stay while backward runs: the user holds the loss, and some losses keep a tensor for a number.
    """

    workspace_bytes: int
    retained_bytes: int
    seconds: float = 0.0
    unused: frozenset[int] = frozenset()  # outputs that it does not read, by their place among the module's


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
    accumulated: dict[int, tuple[str, Node]]  # operator -> the parameter whose gradient it adds up, and that gradient
    ordered: frozenset[int]  # operators whose first runs keep their order: random ones, those that change or read state
    differentiable_output_bytes: int
    notes: tuple[str, ...] = ()


def read_joint(
    joint: GraphModule,
    *,
    forward_outputs: int,
    inputs: Sequence[Input],
    profile: Callable[[Call], Profile],
    corrections: Corrections,
    accumulate: frozenset[str] = frozenset(),
    unused: frozenset[int] = frozenset(),
    name: str = "",
) -> Capture:
    """The graph of a traced training step, or of inference if `joint` has no tangents.

    What lies outside of it, the cost of the loss and memory that is allocated already, is nothing until `with_outside`
    says otherwise. Gradients of the parameters in `accumulate` are added to what is there as soon as they are computed,
    and freed. `unused` outputs get no gradient. `TraceAgain` is raised if results have other strides than tracing
    believed: they decide which kernels eager runs next, so the graph must be traced with the right ones.
    """
    forget_unread_statistics(joint.graph)
    traced = _Traced(joint, forward_outputs, drop_zero_tangents(joint, unused))
    propagated = _propagate(traced, profile)
    corrections.learn(propagated.wrong)
    return _Assembly(traced, propagated, profile, inputs).capture(accumulate, name)


class _Traced:
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

    def is_tangent(self, node: Node) -> bool:
        return node.op == "placeholder" and "tangents" in str(node.target)

    @property
    def tangents(self) -> list[Node]:
        return [node for node in self.placeholders if self.is_tangent(node) and node not in self.dropped]

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


@dataclass
class _Propagated:
    """What each node really returns, and at what cost."""

    value: dict[Node, Any] = field(default_factory=dict)
    storage_bytes: dict[int, int] = field(default_factory=dict)  # by storage, where it is more than the tensors need
    profile: dict[Node, Profile] = field(default_factory=dict)  # of kernels
    call: dict[Node, Call] = field(default_factory=dict)
    reshaped: set[Node] = field(default_factory=set)
    wrong: dict[str, Profile] = field(default_factory=dict)  # calls whose results were traced wrongly


def storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _propagate(traced: _Traced, profile: Callable[[Call], Profile]) -> _Propagated:
    found = _Propagated()
    value = found.value
    fake_mode = _fake_mode(traced)
    for node in (*traced.placeholders, *traced.constants):
        value[node] = node.meta.get("val")
    unchanged = set(traced.placeholders) | set(traced.constants)
    for node in traced.calls:
        same_inputs = all(arg in unchanged for arg in node.all_input_nodes)
        if node.target in _PASS_THROUGH:
            value[node] = value[node.args[0]]
            if same_inputs:
                unchanged.add(node)
        elif node.target is operator.getitem:
            source, index = node.args
            value[node] = value[source][index]
            if source in unchanged:
                unchanged.add(node)
        elif same_inputs and _shows_its_inputs(node, value):
            value[node] = node.meta["val"]
            unchanged.add(node)
        elif not same_inputs and (shown := _view_again(node, value, fake_mode)) is not None:
            value[node] = shown
        else:
            _run(node, traced, found, profile, fake_mode, unchanged if same_inputs else None)
    return found


def _fake_mode(traced: _Traced) -> Any:
    for node in traced.placeholders:
        if isinstance(node.meta.get("val"), torch.Tensor):
            return node.meta["val"].fake_mode
    raise CaptureError("the module takes no tensors and has no parameters, so that there is nothing to plan")


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = value if isinstance(value, (tuple, list)) else (value,)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _shows_its_inputs(node: Node, value: dict[Node, Any]) -> bool:
    """Whether tracing says that everything the node returns is a view of its inputs."""
    shown = {storage_key(tensor) for arg in node.all_input_nodes for tensor in _tensors(value[arg])}
    returned = _tensors(node.meta["val"])
    return all(storage_key(tensor) in shown for tensor in returned)


def _is_view(target: Any) -> bool:
    return isinstance(target, OpOverload) and (target.is_view or target in _RESHAPES)


def _view_again(node: Node, value: dict[Node, Any], fake_mode: Any) -> Any:
    """A traced view, taken of inputs that have other strides than traced; None where it has to copy or is no view."""
    if not _is_view(node.target):
        return None
    call = Call.of(node, value.__getitem__)
    args, kwargs = call.arguments(call.tensors)
    with fake_mode:
        try:
            return call.target(*args, **kwargs)
        except (RuntimeError, ValueError):
            return None


def _run(
    node: Node,
    traced: _Traced,
    found: _Propagated,
    profile: Callable[[Call], Profile],
    fake_mode: Any,
    unchanged: set[Node] | None,
) -> None:
    """Give a kernel's node the results it really has; `unchanged` collects it if they are the traced ones."""
    value = found.value
    copies = node.target in _RESHAPES
    first = value.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    apart = None if copies else in_rows_apart(node, first)
    target = aten._reshape_copy.default if copies else fill_of_empty(node) or apart or node.target
    if not isinstance(target, (OpOverload, InPlaceOnCopy)):
        raise CaptureError(
            f"operator {target} cannot be planned: it runs code of its own that is not traced; "
            "keep the part of the model that uses it outside, or wrap the modules around it one by one"
        )
    if copies:
        found.reshaped.add(node)
    call = Call.of(node, value.__getitem__, target)
    seen = profile(call)
    found.profile[node], found.call[node] = seen, call
    filled = fill_of_empty(node) is not None
    if unchanged is not None and not filled and _as_traced(node, seen):
        unchanged.add(node)
        value[node] = node.meta["val"]
        for tensor, result in zip(_leaves(value[node]), seen.results, strict=True):
            if result is not None:
                found.storage_bytes[storage_key(tensor)] = result.storage_bytes
        return
    if unchanged is not None and not copies and apart is None and not _same_layout(node, seen):
        found.wrong[Call.of(node, value.__getitem__).key] = seen
    returned: list[Any] = []
    for result in seen.results:
        returned.append(None if result is None else _tensor_for(result, call, returned, fake_mode))
        if result is not None and result.alias is None:
            found.storage_bytes[storage_key(returned[-1])] = result.storage_bytes
    value[node] = returned if isinstance(node.meta["val"], (tuple, list)) else returned[0]


def _leaves(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _as_traced(node: Node, seen: Profile) -> bool:
    """Whether the results are new tensors of the traced shapes and strides."""
    fresh = all(result is None or (result.alias is None and result.offset == 0) for result in seen.results)
    return fresh and _same_layout(node, seen) and _same_devices(node, seen)


def _same_devices(node: Node, seen: Profile) -> bool:
    """Fused attention on CUDA is traced as if it left the seed of its dropout there; it is on the CPU."""
    return all(
        result is None or str(leaf.device) == result.device
        for leaf, result in zip(_leaves(node.meta["val"]), seen.results, strict=True)
    )


def _same_layout(node: Node, seen: Profile) -> bool:
    leaves = _leaves(node.meta["val"])
    return len(leaves) == len(seen.results) and all(
        (not isinstance(leaf, torch.Tensor))
        if result is None
        else (isinstance(leaf, torch.Tensor) and tuple(leaf.shape) == result.shape and leaf.stride() == result.stride)
        for leaf, result in zip(leaves, seen.results, strict=True)
    )


def _tensor_for(result: Result, call: Call, earlier: list[Any], fake_mode: Any) -> torch.Tensor:
    dtype = getattr(torch, result.dtype)
    with fake_mode:
        if result.alias is None:
            extent = result.offset + 1 + sum((s - 1) * t for s, t in zip(result.shape, result.stride, strict=True))
            empty = torch.empty(max(0, extent), dtype=dtype, device=result.device)
        else:
            empty = call.tensors[result.alias] if result.alias >= 0 else earlier[~result.alias]
            if empty.dtype != dtype:
                empty = empty.view(dtype)
        return empty.as_strided(result.shape, result.stride, result.offset)


@dataclass
class _OpDraft:
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


class _Assembly:
    """Operators out of kernels, values out of storages."""

    def __init__(
        self, traced: _Traced, propagated: _Propagated, profile: Callable[[Call], Profile], inputs: Sequence[Input]
    ) -> None:
        self.traced = traced
        self.found = propagated
        self.profile = profile
        self.inputs = inputs
        self.merged: dict[int, int] = {}  # storage of an in-place result -> the storage it was written into
        self.readers: dict[int, set[Node]] = {}
        self.drafts: list[_OpDraft] = []
        self.maker: dict[int, int] = {}  # storage -> draft
        self.kept = self._kept_storages()
        self.changed_buffers = self._changed_buffers()

    def storage(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor)
        return self.merged.get(key, key)

    def storages(self, nodes: Iterable[Node]) -> list[int]:
        found = dict.fromkeys(self.storage(t) for node in nodes for t in _tensors(self.found.value[node]))
        return list(found)

    def _kept_storages(self) -> set[int]:
        """Storages that leave the module: outputs and gradients."""
        nodes = [output for output in self.traced.outputs if isinstance(output, Node)]
        return {storage_key(t) for node in nodes for t in _tensors(self.found.value[node])}

    def _changed_buffers(self) -> set[int]:
        changed = (buffer for node in self.traced.calls for buffer in updated_statistics(node))
        return {storage_key(t) for buffer in changed for t in _tensors(self.found.value[buffer])}

    def capture(self, accumulate: frozenset[str], name: str) -> Capture:
        kernels = [node for node in self.traced.calls if node in self.found.profile]
        for node in kernels:
            for storage in self.storages(node.all_input_nodes):
                self.readers.setdefault(storage, set()).add(node)
        for node in kernels:
            if not self._works_in_place(node):
                self._add_kernel(node)
        forward = sum(not self._is_backward(draft.kernels[0].node) for draft in self.drafts)
        return _Finish(self, forward, accumulate).capture(name)

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
            _OpDraft(
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
        return list(dict.fromkeys(self.storage(tensor) for tensor in _tensors(value)))

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
        whole = self.found.storage_bytes.get(storage_key(given), _storage_bytes(given))
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

    def storage_bytes(self, key: int, tensor: torch.Tensor) -> int:
        return allocated_bytes(self.found.storage_bytes.get(key, _storage_bytes(tensor)), tensor.device)


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


class _Finish:
    """The graph: residents, operators in their order with the loss between, targets and what is held."""

    def __init__(self, assembly: _Assembly, backward_start: int, accumulate: frozenset[str]) -> None:
        self.assembly = assembly
        self.traced = assembly.traced
        self.backward_start = backward_start
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.kernels: list[tuple[Kernel, ...]] = []
        self.index: dict[int, int] = {}  # storage -> value
        self.random_state_of: dict[int, int] = {}
        self.ordered: set[int] = set()
        self.accumulated: dict[int, tuple[str, Node]] = {}
        self.to_accumulate = self._gradients_to_accumulate(accumulate)
        self.roles = self._roles_of_what_leaves()

    def _gradients_to_accumulate(self, accumulate: frozenset[str]) -> dict[int, list[tuple[str, Node]]]:
        """By the storage of a gradient: the parameters it is for, and the node that shows it."""
        found: dict[int, list[tuple[str, Node]]] = {}
        gradients = self.traced.outputs[self.traced.forward_outputs :]
        for info, node in zip(self.assembly.inputs, gradients, strict=False):
            if info.role == "parameters" and info.name in accumulate and isinstance(node, Node):
                (key,) = self.assembly.storages([node])
                if key in self.assembly.maker:
                    found.setdefault(key, []).append((info.name, node))
        return found

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
        for number, draft in enumerate(self.assembly.drafts):
            if number == self.backward_start:
                self._add_loss()
            self._add_op(draft, number, tensors)
        if self.backward_start >= len(self.assembly.drafts):
            self._add_loss()
        outputs = self.traced.outputs
        forward = outputs[: self.traced.forward_outputs]
        has_loss = bool(self.traced.tangents)
        held = frozenset(self._values_of(forward))
        done = {node for _, node in self.accumulated.values()}
        targets = frozenset(self._values_of([g for g in outputs[self.traced.forward_outputs :] if g not in done]))
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
            accumulated=self.accumulated,
            ordered=frozenset(self.ordered),
            differentiable_output_bytes=self._tangent_bytes(),
        )

    def _kernel_nodes(self) -> set[Node]:
        return {kernel.node for kernels in self.kernels for kernel in kernels}

    def _residents(self) -> frozenset[int]:
        return frozenset(index for index, value in enumerate(self.values) if value.resident)

    def _add_residents(self) -> None:
        primals = [node for node in self.traced.placeholders if not self.traced.is_tangent(node)]
        described = dict(zip(primals, self.assembly.inputs, strict=True))
        for node in (*primals, *self.traced.constants):
            for tensor in _tensors(self.assembly.found.value[node]):
                key = storage_key(tensor)
                if key not in self.index:
                    info = described.get(node, Input(node.name, "constants"))
                    self._add_value(key, Value(info.name, _nbytes(tensor), resident=True, role=info.role))
        self.values.append(Value(ALREADY_ALLOCATED, 0, resident=True, role=ALREADY_ALLOCATED))

    def _add_value(self, key: int, value: Value) -> int:
        self.index[key] = len(self.values)
        self.values.append(value)
        return self.index[key]

    def _tensor_of_each_storage(self) -> dict[int, tuple[str, torch.Tensor]]:
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for draft in self.assembly.drafts:
            for kernel in draft.kernels:
                for position, tensor in enumerate(_leaves(self.assembly.found.value[kernel.node])):
                    if isinstance(tensor, torch.Tensor):
                        name = kernel.node.name if position == 0 else f"{kernel.node.name}.{position}"
                        found.setdefault(storage_key(tensor), (name, tensor))
        return found

    def _add_op(self, draft: _OpDraft, number: int, tensors: dict[int, tuple[str, torch.Tensor]]) -> None:
        inputs = [self._require(key, draft) for key in draft.inputs]
        node = draft.kernels[0].node
        phase = Phase.FORWARD if number < self.backward_start else Phase.BACKWARD
        path = module_path(node)
        if draft.random:
            inputs.append(self._add_random_state(node, phase, path))
        outputs = []
        for key in draft.outputs:
            label, tensor = tensors[key]
            size = self.assembly.storage_bytes(key, tensor)
            outputs.append(self._add_value(key, Value(label, size, role=self.roles.get(key, ""))))
        if draft.random or draft.updates or draft.once:
            self.ordered.add(len(self.ops))
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
                once=draft.once,
                module_path=path,
                class_key=draft.class_key,
                flops=draft.flops,
            )
        )
        self.kernels.append(tuple(draft.kernels))
        for key in draft.outputs:
            for parameter, gradient in self.to_accumulate.get(key, ()):
                self._add_accumulation(parameter, gradient, key)

    def _add_accumulation(self, parameter: str, gradient: Node, key: int) -> None:
        shown = self.assembly.found.value[gradient]
        cost = self.assembly.profile(Call.made(aten.add_.Tensor, (shown, shown), {})).cost
        self.accumulated[len(self.ops)] = (parameter, gradient)
        self.ops.append(
            Op(
                f"accumulate {parameter}",
                cost.seconds,
                (self.index[key],),
                (),
                phase=Phase.BACKWARD,
                once=True,
                module_path=parameter.rpartition(".")[0],
            )
        )
        self.kernels.append(())

    def _require(self, key: int, draft: _OpDraft) -> int:
        if key not in self.index:
            raise CaptureError(
                f"operator {draft.kernels[0].node.name} reads a tensor that no operator of the graph made"
            )
        return self.index[key]

    def _add_random_state(self, node: Node, phase: Phase, path: str) -> int:
        """The generator's state, noted before a random operator so that it can be run again."""
        device = next((t.device for t in _tensors(self.assembly.found.value[node])), torch.device("cpu"))
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
            outputs.append(self._add_value(storage_key(tensor), Value(node.name, _nbytes(tensor), role="tangents")))
            if not TANGENTS_CAN_BE_FREED and _is_for_base_of_view(node):
                # The output is a view, and the gradient that comes back for it is copied into the layout of its base.
                outputs.append(len(self.values))
                self.values.append(Value(f"{node.name}.copied", _nbytes(tensor), role="tangents"))
        outputs.append(len(self.values))
        self.values.append(Value(LOSS_VALUE, 0, role=LOSS_VALUE))
        held = self._values_of(self.traced.outputs[: self.traced.forward_outputs])
        self.ops.append(Op("loss", 0.0, tuple(held), tuple(outputs), phase=Phase.LOSS, once=True))
        self.kernels.append(())

    def _tangent_bytes(self) -> int:
        return sum(_nbytes(self.assembly.found.value[node]) for node in self.traced.tangents)

    def _values_of(self, outputs: Sequence[Any]) -> list[int]:
        nodes = [output for output in outputs if isinstance(output, Node)]
        return [self.index[key] for key in self.assembly.storages(nodes)]

    def _storage_of_each_node(self) -> dict[Node, tuple[int | None, ...]]:
        return {
            node: tuple(
                self.index.get(self.assembly.storage(leaf)) if isinstance(leaf, torch.Tensor) else None
                for leaf in _leaves(value)
            )
            for node, value in self.assembly.found.value.items()
        }


def _is_for_base_of_view(tangent: Node) -> bool:
    """Whether the output that the tangent belongs to is a view: then it is the tangent of what it is a view of."""
    return "IntermediateBase" in type(getattr(tangent.meta.get("desc"), "output", None)).__name__


def _storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _nbytes(tensor: torch.Tensor) -> int:
    """What the tensor's storage takes on its device."""
    return allocated_bytes(_storage_bytes(tensor), tensor.device)


def device_of(joint: GraphModule) -> torch.device:
    """Where the graph runs: the device of its inputs, CUDA if any of them is there."""
    values = [node.meta.get("val") for node in joint.graph.nodes if node.op == "placeholder"]
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type == "cuda"), devices[0])


def random_state_bytes(device: torch.device) -> int:
    """Size of a generator's state: a Mersenne Twister on the CPU, a seed and an offset on CUDA."""
    return 16 if device.type == "cuda" else int(torch.get_rng_state().numel())


def module_path(node: Node) -> str:
    """`h.0.attn` for a node traced inside that submodule; forward and backward alike."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return clean_path(list(stack.values())[-1][0]) if stack else ""


def clean_path(source: str) -> str:
    """`L['self']._modules['h']._modules['0'].attn` as `h.0.attn`"""
    import re

    parts = re.findall(r"\['([^']*)'\]|\.(\w+)|\[(\d+)\]", source)
    names = [next(filter(None, part), "") for part in parts]
    return ".".join(name for name in names if name and name != "_modules").removeprefix("self").removeprefix(".")


def with_outside(capture: Capture, loss: LossCost, already_allocated_bytes: int) -> Capture:
    """The same capture with what lies outside the module: the cost of the loss, and memory in use before."""
    graph = capture.graph
    ops = tuple(
        replace(op, seconds=loss.seconds, workspace_bytes=loss.workspace_bytes) if op.phase is Phase.LOSS else op
        for op in graph.ops
    )
    outside = {ALREADY_ALLOCATED: already_allocated_bytes, LOSS_VALUE: loss.retained_bytes}
    values = tuple(
        replace(value, size_bytes=outside[value.role]) if value.role in outside else value for value in graph.values
    )
    return replace(capture, graph=replace(graph, ops=ops, values=values))
