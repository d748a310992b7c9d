"""What each traced node really returns: eager's strides, devices and sizes, by profiles of the kernels.

`propagate(traced, profile).value[node]`

Walks the nodes in order. A kernel gets the results that its profile has; a view is taken again of what it shows, and
becomes a copy where real strides do not allow it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from rematch.capture.aten import PASS_THROUGH, RESHAPES, InPlaceOnCopy, aten, fill_of_empty, in_rows_apart
from rematch.capture.cost import Call, Profile, Result
from rematch.capture.joint.traced import Traced, leaves_of, storage_key, tensors_of
from rematch.errors import CaptureError


@dataclass
class Propagated:
    """What each node really returns, and at what cost."""

    value: dict[Node, Any] = field(default_factory=dict)
    storage_bytes: dict[int, int] = field(default_factory=dict)  # by storage, where it is more than the tensors need
    profile: dict[Node, Profile] = field(default_factory=dict)  # of kernels
    call: dict[Node, Call] = field(default_factory=dict)
    reshaped: set[Node] = field(default_factory=set)
    wrong: dict[str, Profile] = field(default_factory=dict)  # calls whose results were traced wrongly


def propagate(traced: Traced, profile: Callable[[Call], Profile]) -> Propagated:
    found = Propagated()
    value = found.value
    fake_mode = _fake_mode(traced)
    for node in (*traced.placeholders, *traced.constants):
        value[node] = node.meta.get("val")
    unchanged = set(traced.placeholders) | set(traced.constants)
    for node in traced.calls:
        same_inputs = all(arg in unchanged for arg in node.all_input_nodes)
        if node.target in PASS_THROUGH:
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


def _fake_mode(traced: Traced) -> Any:
    for node in traced.placeholders:
        if isinstance(node.meta.get("val"), torch.Tensor):
            return node.meta["val"].fake_mode
    raise CaptureError("the module takes no tensors and has no parameters, so that there is nothing to plan")


def _shows_its_inputs(node: Node, value: dict[Node, Any]) -> bool:
    """Whether tracing says that everything the node returns is a view of its inputs."""
    shown = {storage_key(tensor) for arg in node.all_input_nodes for tensor in tensors_of(value[arg])}
    returned = tensors_of(node.meta["val"])
    return all(storage_key(tensor) in shown for tensor in returned)


def _is_view(target: Any) -> bool:
    return isinstance(target, OpOverload) and (target.is_view or target in RESHAPES)


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
    traced: Traced,
    found: Propagated,
    profile: Callable[[Call], Profile],
    fake_mode: Any,
    unchanged: set[Node] | None,
) -> None:
    """Give a kernel's node the results it really has; `unchanged` collects it if they are the traced ones."""
    value = found.value
    copies = node.target in RESHAPES
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
        for tensor, result in zip(leaves_of(value[node]), seen.results, strict=True):
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


def _as_traced(node: Node, seen: Profile) -> bool:
    """Whether the results are new tensors of the traced shapes and strides."""
    fresh = all(result is None or (result.alias is None and result.offset == 0) for result in seen.results)
    return fresh and _same_layout(node, seen) and _same_devices(node, seen)


def _same_devices(node: Node, seen: Profile) -> bool:
    """Fused attention on CUDA is traced as if it left the seed of its dropout there; it is on the CPU."""
    return all(
        result is None or str(leaf.device) == result.device
        for leaf, result in zip(leaves_of(node.meta["val"]), seen.results, strict=True)
    )


def _same_layout(node: Node, seen: Profile) -> bool:
    leaves = leaves_of(node.meta["val"])
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
