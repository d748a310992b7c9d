"""Whether a traced graph is what eager runs: the trace of the replay engine against the recording.

`differences(joint, recording)` is None, or says what is different

Both are compared as kernels in a canonical form: in-place operators by their functional names, views and detached
tensors left out; operator, shapes, strides, dtypes and scalars. The recording also holds the user's loss and what
autograd does with finished gradients, so it may have kernels in backward that the trace has not, and no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from rematch.capture.aten import PASS_THROUGH, RESHAPES, is_uninitialised
from rematch.capture.recording import RecordedCall, Recording, TensorRef

Kernel = tuple[str, tuple[Any, ...]]


def differences(joint: GraphModule, recording: Recording) -> str | None:
    """What the trace has that eager has not, or the other way round, in words."""
    of_trace = Counter(_canonical_node(node) for node in joint.graph.nodes if _is_kernel(node.target))
    of_eager = Counter(_canonical_call(call) for call in recording.calls if call.makes or call.writes)
    forward = Counter(
        _canonical_call(call)
        for call in recording.calls[: recording.forward_until]
        if (call.makes or call.writes) and not is_uninitialised(call.target)
    )
    extra = of_trace - of_eager
    missing = forward - of_trace
    if extra:
        return f"the trace has {_named(extra)}, which eager does not run"
    if missing:
        return f"eager runs {_named(missing)}, which the trace has not"
    return None


def _named(kernels: Counter[Kernel]) -> str:
    (name, arguments), count = next(iter(kernels.items()))
    shapes = [argument[0] for argument in arguments if isinstance(argument, tuple)]
    return f"{count} x {name} of {shapes}" + (f" and {len(kernels) - 1} more" if len(kernels) > 1 else "")


def _is_kernel(target: Any) -> bool:
    if not isinstance(target, OpOverload) or target in PASS_THROUGH or is_uninitialised(target):
        return False
    return not (target.is_view or target in RESHAPES)


def _canonical_node(node: Node) -> Kernel:
    return _canonical(node.target, _values(node.args), _values(node.kwargs.values()))


def _values(arguments: Iterable[Any]) -> list[Any]:
    return [
        torch.fx.map_arg(argument, lambda arg: arg.meta.get("val"))  # type: ignore[misc]
        for argument in arguments
    ]


def _canonical_call(call: RecordedCall) -> Kernel:
    return _canonical(call.target, call.args, call.kwargs.values())


def _canonical(target: Any, args: Iterable[Any], kwargs: Iterable[Any]) -> Kernel:
    packet = getattr(target, "overloadpacket", None)
    name = (packet.__name__ if packet is not None else str(target)).rstrip("_")
    described: list[Any] = []
    for argument in (*args, *kwargs):
        for leaf in argument if isinstance(argument, (list, tuple)) else (argument,):
            tensor = leaf.tensor if isinstance(leaf, TensorRef) else leaf
            if isinstance(tensor, torch.Tensor):
                described.append((tuple(tensor.shape), tensor.stride(), tensor.dtype))
            elif isinstance(tensor, (bool, int, float)):
                described.append(float(tensor))
    return name, tuple(described)
