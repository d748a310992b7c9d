"""What an operator costs on a device that need not be here: arithmetic or memory traffic, whichever takes longer.

`estimate(node, find_device("h100")).seconds`

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures", 2009.
A node is a call in an ATen graph traced with fake tensors. Its arithmetic is counted from shapes (torch's registry of
formulas where it has one, ours for the rest), its traffic from the distinct storages it reads and writes: a view costs
nothing and an expanded tensor counts once. `traits` has what shapes do not tell: how far kernels fall short of a
device's best, and how often they go over their arguments.

Workspace is estimated where a kernel is known to need a copy of a tensor. What else cuDNN takes depends on the
algorithm it picks, and counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rematch.capture.cost import Cost
from rematch.capture.devices import Device
from rematch.capture.traits import (
    ARITHMETIC_SHARE,
    BANDWIDTH_SHARE,
    CONVOLUTION_BACKWARD_SHARE,
    DEPTHWISE_SHARE,
    DROPOUT_SHARE,
    FULL_NORM_CHANNELS,
    GROUPED_SHARE,
    HALF_FULL_CHANNELS,
    KERNELS_PER_STEP,
    MISALIGNED_SHARE,
    TRANSPOSING_SHARE,
    WIDENING_SHARE,
    Family,
    Traits,
    traits_of,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class _NamedCall:
    """A node as its operator sees it: fake tensors in place of the nodes that make them."""

    operator: Any  # without its overload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    parameters: tuple[str, ...]  # names of the arguments, as far as the operator declares them
    changes_arguments: bool

    @classmethod
    def of(cls, node: torch.fx.Node) -> _NamedCall:
        schema = getattr(node.target, "_schema", None)
        return cls(
            operator=getattr(node.target, "overloadpacket", node.target),
            args=map_arg(node.args, _fake_value),
            kwargs=map_arg(node.kwargs, _fake_value),
            result=_fake_value(node),
            parameters=tuple(argument.name for argument in schema.arguments) if schema else (),
            changes_arguments=schema is not None and schema.is_mutable,
        )

    @cached_property
    def name(self) -> str:
        """`native_layer_norm`; operators that are not ATen's keep their namespace."""
        return str(self.operator).removeprefix("aten.")

    @cached_property
    def traits(self) -> Traits:
        return traits_of(self.name)

    @cached_property
    def named(self) -> dict[str, Any]:
        """Arguments by name; by number where the operator declares none."""
        names = self.parameters or tuple(map(str, range(len(self.args))))
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @cached_property
    def inputs(self) -> list[torch.Tensor]:
        return _tensors(self.named)

    @cached_property
    def outputs(self) -> list[torch.Tensor]:
        return _tensors(self.result)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic: that of the first tensor that does not hold integers."""
        types = [tensor.dtype for tensor in (*self.inputs, *self.outputs)]
        return next((dtype for dtype in types if dtype.is_floating_point or dtype.is_complex), torch.float32)

    @cached_property
    def is_free(self) -> bool:
        """A view, a question about shapes, or memory not yet written: nothing runs on the device."""
        if self.changes_arguments:
            return False
        read = {_storage_key(tensor) for tensor in self.inputs}
        return self.traits.times_written == 0 or all(_storage_key(tensor) in read for tensor in self.outputs)

    @property
    def is_backward(self) -> bool:
        return self.name.endswith("_backward")


def estimate(node: torch.fx.Node, device: Device) -> Cost:
    """Time, workspace and arithmetic of one call on `device`."""
    call = _NamedCall.of(node)
    if call.is_free:
        return Cost(seconds=0.0, workspace_bytes=0, flops=0.0)
    count = _flops(call)
    arithmetic_seconds = count / _flops_per_second(call, device)
    traffic_seconds = _moved_bytes(call) / _bytes_per_second(call, device)
    seconds = max(arithmetic_seconds, traffic_seconds) + _kernels_in_a_row(call) * device.launch_seconds
    if not device.is_cuda:
        return Cost(seconds, workspace_bytes=0, flops=count)
    relayout_seconds = _relayout_bytes(call) / device.copy_bytes_per_second
    return Cost(seconds + relayout_seconds, _cuda_workspace_bytes(call), count)


def flops(node: torch.fx.Node) -> float:
    """Additions and multiplications of the call, on any device."""
    call = _NamedCall.of(node)
    return 0.0 if call.is_free else _flops(call)


def moved_bytes(node: torch.fx.Node) -> int:
    """What the call reads from and writes to memory, on any device."""
    call = _NamedCall.of(node)
    return 0 if call.is_free else _moved_bytes(call)


def mapped(node: torch.fx.Node, device: Device) -> str | None:
    """`aten.mkldnn_rnn_layer as aten._cudnn_rnn` where a kernel of the CPU stands for one of `device`, else None."""
    call = _NamedCall.of(node)
    own = _cuda_counterpart(call) if device.is_cuda else None
    return f"{call.operator} as aten.{own}" if own else None


def _cuda_counterpart(call: _NamedCall) -> str | None:
    if call.name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        # On CUDA, flash attention takes 16-bit types without a mask; the memory-efficient kernel takes the rest.
        kind = "flash" if call.dtype.itemsize == 2 and call.named.get("attn_mask") is None else "efficient"
        return f"_scaled_dot_product_{kind}_attention" + ("_backward" if call.is_backward else "")
    return {
        "mkldnn_rnn_layer": "_cudnn_rnn",
        "mkldnn_rnn_layer_backward": "_cudnn_rnn_backward",
        "mkldnn_convolution": "cudnn_convolution",
        "mkldnn_linear": "addmm",
    }.get(call.name)


def _flops_per_second(call: _NamedCall, device: Device) -> float:
    """What this kernel reaches of the device's rate."""
    family = call.traits.family
    if family in (Family.MATMUL, Family.CONVOLUTION, Family.ATTENTION, Family.RECURRENT):
        rate = device.matrix_flops_per_second(call.dtype, tf32=_tf32_allowed(family)) * ARITHMETIC_SHARE[family]
        return _slowed_on_cuda(rate, call, device) if device.is_cuda else rate
    return device.vector_flops_per_second(call.dtype) * ARITHMETIC_SHARE[family]


def _slowed_on_cuda(rate: float, call: _NamedCall, device: Device) -> float:
    """The rate that is left by what keeps CUDA kernels off the matrix units, or slows them there."""
    if call.traits.family is Family.CONVOLUTION:
        return _convolution_rate(rate, call, device) * (CONVOLUTION_BACKWARD_SHARE if call.is_backward else 1.0)
    if call.named.get("dropout_p"):
        return rate * DROPOUT_SHARE
    return rate * MISALIGNED_SHARE if _on_matrix_units(call) and _has_misaligned_rows(call) else rate


def _convolution_rate(rate: float, call: _NamedCall, device: Device) -> float:
    """Few channels leave much of a matrix unit empty, and small groups all of it."""
    if call.named.get("groups", 1) > 1:
        share = DEPTHWISE_SHARE if _is_depthwise(call) else GROUPED_SHARE
        return min(rate, share * device.vector_flops_per_second(call.dtype))
    channels = int(max(8, min(call.named["weight"].shape[:2])))  # fewer are filled up to 8
    return rate * channels / (channels + HALF_FULL_CHANNELS)


def _is_depthwise(call: _NamedCall) -> bool:
    return bool(call.named.get("groups", 1) > 1 and call.named["weight"].shape[1] == 1)


def _on_matrix_units(call: _NamedCall) -> bool:
    if _is_depthwise(call):
        return False
    return call.dtype.itemsize <= 2 or (call.dtype is torch.float32 and _tf32_allowed(call.traits.family))


def _has_misaligned_rows(call: _NamedCall) -> bool:
    matrices = [tensor for tensor in (*call.inputs, *call.outputs) if tensor.dim() >= 2]
    return call.traits.family is Family.MATMUL and any(
        stride * tensor.element_size() % 16 for tensor in matrices for stride in tensor.stride()[-2:] if stride > 1
    )


def _bytes_per_second(call: _NamedCall, device: Device) -> float:
    """What this kernel reaches of the device's bandwidth."""
    share = BANDWIDTH_SHARE[call.traits.family]
    if device.is_cuda and call.traits.family in (Family.VECTOR, Family.NORM):
        share *= WIDENING_SHARE if _widens(call) else TRANSPOSING_SHARE if _transposes(call) else 1.0
    if device.is_cuda and "batch_norm" in call.name:
        share = min(share, call.named["input"].shape[1] / FULL_NORM_CHANNELS)
    return device.copy_bytes_per_second * share


def _widens(call: _NamedCall) -> bool:
    narrowest = min((t.element_size() for t in call.inputs if t.dtype.is_floating_point), default=0)
    return 0 < narrowest < max((tensor.element_size() for tensor in call.outputs), default=0)


def _transposes(call: _NamedCall) -> bool:
    """Whether some input of the result's shape lies in memory in another order."""
    result = call.outputs[0]
    return any(_order(tensor) != _order(result) for tensor in call.inputs if tensor.shape == result.shape)


def _order(tensor: torch.Tensor) -> list[int]:
    """Its dimensions from the widest stride to the narrowest, without those that have but one stride."""
    wide = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1 and tensor.stride(dim)]
    return sorted(wide, key=tensor.stride().__getitem__, reverse=True)


def _tf32_allowed(family: Family) -> bool:
    """By torch's settings as they are now; they can be read and set without CUDA."""
    if family is Family.CONVOLUTION:
        setting: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    elif family is Family.RECURRENT:
        setting = torch.backends.cudnn.rnn
    else:
        setting = torch.backends.cuda.matmul
    return bool(setting.fp32_precision == "tf32")


def _kernels_in_a_row(call: _NamedCall) -> int:
    """Kernels that wait for each other inside one call: of a recurrence some a step, of an FFT one a dimension."""
    if call.traits.family is Family.RECURRENT:
        time_dim = 1 if call.named["batch_first"] else 0
        return int(KERNELS_PER_STEP * call.named["input"].shape[time_dim] * call.named["num_layers"])
    return len(call.named["dim"]) if call.traits.family is Family.FFT else 1


def _flops(call: _NamedCall) -> float:
    formula = _FORMULAS.get(call.name) or _FAMILY_FORMULAS.get(call.traits.family)
    if formula is not None:
        count = formula(call)
    elif call.operator in flop_registry:
        count = float(flop_registry[call.operator](*call.args, **call.kwargs, out_val=call.result))
    else:
        elements = max((tensor.numel() for tensor in (*call.inputs, *call.outputs)), default=0)
        return float(elements) * call.traits.flops_per_element
    return 4 * count if call.dtype.is_complex and call.traits.family is Family.MATMUL else count


def _convolution_backward_flops(call: _NamedCall) -> float:
    """The forward count for each gradient. torch's own formula forgets groups in the gradient of the weight."""
    grad_output, source, weight = call.args[:3]
    settings = [call.named[name] for name in ("stride", "padding", "dilation", "transposed")]
    forward = flop_registry[aten.convolution](source, weight, None, *settings, out_val=grad_output)
    return float(forward * sum(call.named["output_mask"][:2]))


def _attention_flops(call: _NamedCall) -> float:
    """Half when causal: kernels skip what the mask hides."""
    tensors = [call.named[name] for name in ("query", "key", "value")]
    if call.is_backward:
        count = flop_registry[aten._scaled_dot_product_flash_attention_backward](call.args[0], *tensors, out_val=None)
    else:
        count = flop_registry[aten._scaled_dot_product_flash_attention](*tensors, out_val=None)
    return float(count / 2 if call.named.get("is_causal") else count)


def _recurrent_flops(call: _NamedCall) -> float:
    """Each weight matrix multiplies each step of each sequence, and in the backward pass twice."""
    weights = [value for name, value in call.named.items() if name.rstrip("01234") == "weight"]
    matrix_elements = sum(weight.numel() for weight in _tensors(weights) if weight.dim() == 2)
    steps = math.prod(call.named["input"].shape[:2])
    return float(2 * steps * matrix_elements * (2 if call.is_backward else 1))


def _fft_flops(call: _NamedCall) -> float:
    """5 n log2 n for n complex points, half of it where one side is real."""
    real = [tensor for tensor in (*call.inputs, *call.outputs) if not tensor.dtype.is_complex]
    signal = real[0] if real else call.inputs[0]
    points = math.prod(signal.shape[dim] for dim in call.named["dim"])
    return float((2.5 if real else 5.0) * signal.numel() * math.log2(max(points, 2)))


def _flops_of_dense_weight(call: _NamedCall) -> float:
    """Each result sums over all of a weight but its first dimension."""
    return float(2 * call.outputs[0].numel() * math.prod(call.named["weight"].shape[1:]))


_FORMULAS: dict[str, Callable[[_NamedCall], float]] = {
    "convolution_backward": _convolution_backward_flops,
    "mkldnn_convolution": _flops_of_dense_weight,
    "mkldnn_linear": _flops_of_dense_weight,
}
_FAMILY_FORMULAS: dict[Family, Callable[[_NamedCall], float]] = {
    Family.ATTENTION: _attention_flops,
    Family.RECURRENT: _recurrent_flops,
    Family.FFT: _fft_flops,
}


def _moved_bytes(call: _NamedCall) -> int:
    written = sum(_covered_bytes(tensor) for tensor in call.outputs)
    moved = _read_bytes(call, written) + written * call.traits.times_written
    return moved * len(call.named["dim"]) if call.traits.family is Family.FFT else moved  # one dimension after another


def _read_bytes(call: _NamedCall, result_bytes: int) -> int:
    """Each byte of a storage once, whatever views of it are read, times how often the kernel goes over it."""
    unread: dict[int, int] = {}
    total = 0
    for name, value in call.named.items():
        for tensor in _tensors(value):
            key = _storage_key(tensor)
            fresh = min(_covered_bytes(tensor), unread.setdefault(key, tensor.untyped_storage().nbytes()))
            unread[key] -= fresh
            if name == call.traits.gathered:
                fresh = min(fresh, result_bytes)
            total += fresh * call.traits.times_read.get(name, 1)
    return total


def _covered_bytes(tensor: torch.Tensor) -> int:
    """Memory under a tensor: a dimension it was expanded along has stride 0 and adds nothing."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size if stride else min(size, 1) for size, stride in steps)


def _channels_last_bytes(call: _NamedCall) -> int:
    """Size of the channels-last copies that cuDNN makes of images for the matrix units, unless windows are points."""
    if call.traits.family is not Family.CONVOLUTION or not _on_matrix_units(call):
        return 0
    source, weight = call.args[1:3] if call.is_backward else call.args[:2]
    result = call.args[0] if call.is_backward else call.outputs[0]
    windows_are_points = math.prod(weight.shape[2:]) * math.prod(call.named["stride"]) == 1
    if windows_are_points or source.stride(1) == 1:
        return 0
    return _covered_bytes(source) + _covered_bytes(result)


def _relayout_bytes(call: _NamedCall) -> int:
    """Traffic of those copies, read and written; each gradient needs its own."""
    return _channels_last_bytes(call) * (4 if call.is_backward else 2)


def _cuda_workspace_bytes(call: _NamedCall) -> int:
    """Copies that CUDA's kernels are known to make."""
    if call.traits.family is Family.CONVOLUTION:
        return _channels_last_bytes(call)
    if call.traits.family is Family.ATTENTION:  # gradients of queries are summed in 32 bits
        return 4 * call.named["query"].numel() if call.is_backward else 0
    if call.name in ("_fft_c2r", "_softmax_backward_data", "embedding_dense_backward"):
        return _covered_bytes(call.inputs[0])
    return 0


def _fake_value(node: torch.fx.Node) -> Any:
    return node.meta.get("val")


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The distinct tensors in a nest of lists and dicts."""
    return list({id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}.values())


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
