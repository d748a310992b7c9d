"""What ATen operators are to a scheduler: random, in need of state, able to work in place, or better not repeated.

`is_random(node)` for a node that calls `aten.bernoulli`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

aten = torch.ops.aten

RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)
PASS_THROUGH = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)  # below autograd, what they are given

# Batch norm kernels that update the running statistics they are given: where in their arguments these are, and whether
# it trains. The schemas do not say that they write, so tracing leaves them as they are.
BATCH_NORM_STATISTICS: dict[OpOverload, tuple[tuple[int, ...], int]] = {
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.cudnn_batch_norm.default: ((3, 4), 5),
    aten.miopen_batch_norm.default: ((3, 4), 5),
}
# Their backward kernels take the statistics too, and do not read them if the forward trained (None: it always did).
_BATCH_NORM_BACKWARD_STATISTICS: dict[OpOverload, tuple[tuple[int, ...], int | None]] = {
    aten.native_batch_norm_backward.default: ((3, 4), 7),
    aten.cudnn_batch_norm_backward.default: ((3, 4), None),
    aten.miopen_batch_norm_backward.default: ((3, 4), None),
}

# CUDA kernels that add with atomics, so that two runs may differ in the last bit.
_NONDETERMINISTIC_ON_CUDA = frozenset(
    [
        "_adaptive_avg_pool2d_backward",
        "_adaptive_avg_pool3d_backward",
        "_efficient_attention_backward",
        "_embedding_bag_backward",
        "_embedding_bag_dense_backward",
        "_flash_attention_backward",
        "_index_put_impl",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
        "_upsample_bicubic2d_aa_backward",
        "_upsample_bilinear2d_aa_backward",
        "adaptive_max_pool2d_backward",
        "adaptive_max_pool3d_backward",
        "avg_pool3d_backward",
        "bincount",
        "cumsum",
        "embedding_dense_backward",
        "fractional_max_pool2d_backward",
        "fractional_max_pool3d_backward",
        "grid_sampler_2d_backward",
        "grid_sampler_3d_backward",
        "histc",
        "index_add",
        "index_put",
        "index_reduce",
        "max_pool3d_with_indices_backward",
        "max_unpool2d",
        "max_unpool3d",
        "nll_loss2d_forward",
        "put",
        "reflection_pad1d_backward",
        "reflection_pad2d_backward",
        "reflection_pad3d_backward",
        "replication_pad1d_backward",
        "replication_pad2d_backward",
        "replication_pad3d_backward",
        "scatter_add",
        "scatter_reduce",
        "upsample_bicubic2d_backward",
        "upsample_bilinear2d_backward",
        "upsample_linear1d_backward",
        "upsample_nearest1d_backward",
        "upsample_nearest2d_backward",
        "upsample_nearest3d_backward",
        "upsample_trilinear3d_backward",
    ]
)


# Kernels that read what their forward left in a buffer of its own format: made-up numbers there crash them. Others of
# this kind get a real buffer from `with_state_of_forward`.
_READS_OPAQUE_STATE = frozenset(["miopen_rnn_backward", "mps_lstm_backward"])


# What they return is what the program has not written yet. The first hold garbage until somebody writes all of it; the
# others are mostly made in order to be written to, perhaps by code that no dispatcher sees.
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_CONSTANT = {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"}
# In place, and whatever was there before does not matter.
_FILLING = {
    "bernoulli_",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
}
_FILLING |= {"uniform_", "zero_"}
# These change which storage a tensor has, or how large it is, rather than what is in it.
_REPLACES_STORAGE = {"set_", "resize_", "resize_as_", "_resize_output_", "swap_tensors"}
# Their dropout has a state of its own, which they change.
_KEEPS_STATE = {"_cudnn_rnn", "miopen_rnn", "_cudnn_init_dropout_state"}


def is_uninitialised(target: Any) -> bool:
    """Whether the operator only allocates memory."""
    return _name(target) in _UNINITIALISED


def is_constant(target: Any) -> bool:
    """Whether the operator allocates memory with the same number everywhere."""
    return _name(target) in _CONSTANT


def is_filling(target: Any) -> bool:
    """Whether the operator writes over all of what it is given, in place."""
    return _name(target) in _FILLING


def can_be_noted(target: Any) -> bool:
    """Whether we know what the operator does to memory: it computes results from arguments, and no more than that."""
    return is_of_torch(target) and _name(target) not in _UNINITIALISED | _REPLACES_STORAGE | _KEEPS_STATE


def _name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None else ""


def can_be_tried(target: Any) -> bool:
    """Whether the operator can be run on made-up tensors: it must not communicate or read state of its own format."""
    return is_of_torch(target) and target.overloadpacket.__name__ not in _READS_OPAQUE_STATE


def with_state_of_forward(target: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Real arguments for a backward kernel, its forward's own results among them where made-up ones would crash it."""
    if target is aten.mkldnn_rnn_layer_backward.default:
        reverse, mode, hidden, layers, biases, trains, both_ways, batch_sizes, batch_first = args[13:22]
        output, hy, cy, workspace = aten.mkldnn_rnn_layer.default(
            *args[:7], reverse, batch_sizes, mode, hidden, layers, biases, both_ways, batch_first, trains
        )
        return [*args[:7], output, hy, cy, *args[10:22], workspace]
    if target is aten._cudnn_rnn_backward.default:
        dropout, trains, state = args[15], args[16], args[19]
        if state is not None:
            state = aten._cudnn_init_dropout_state.default(dropout, trains, 0, dtype=state.dtype, device=state.device)
        output, _, _, reserve, _ = aten._cudnn_rnn.default(*args[:6], *args[10:19], state)
        return [*args[:6], output, *args[7:19], state, reserve, *args[21:]]
    return args


def is_random(node: Node) -> bool:
    """Whether the call of a traced node draws from a generator."""
    return draws(node.target, node.args, node.kwargs)


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call draws from a generator."""
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Fused attention carries the tag, and draws only if it drops out.
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0.0)
    return True


def is_of_torch(target: Any) -> bool:
    """Whether we know what the operator does: a custom one promises nothing but what its schema says.

    It may return a tensor that it keeps. And collectives must run as often everywhere.
    """
    return isinstance(target, OpOverload) and target.namespace in ("aten", "prims", "prim")


def may_repeat(target: Any, on_cuda: bool) -> bool:
    """Whether running the operator twice on the same inputs gives the same bits (random ones: with their state)."""
    if not is_of_torch(target):
        return False
    return not on_cuda or torch.are_deterministic_algorithms_enabled() or not adds_with_atomics(target)


def adds_with_atomics(target: OpOverload) -> bool:
    """Whether the operator or its in-place variant may differ in the last bit between two runs on CUDA."""
    return target.overloadpacket.__name__.rstrip("_") in _NONDETERMINISTIC_ON_CUDA


def without_running_statistics(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Arguments that make a training batch norm compute the same and update nothing; None for all other calls."""
    if target not in BATCH_NORM_STATISTICS:
        return None
    statistics, training = BATCH_NORM_STATISTICS[target]
    if not args[training] or all(args[index] is None for index in statistics):
        return None
    return tuple(None if index in statistics else arg for index, arg in enumerate(args))


def updated_statistics(node: Node) -> tuple[Node, ...]:
    """The running statistics that a call changes in place."""
    if without_running_statistics(node.target, node.args) is None:
        return ()
    statistics, _ = BATCH_NORM_STATISTICS[node.target]  # type: ignore[index]
    return tuple(arg for index in statistics if isinstance(arg := node.args[index], Node))


def forget_unread_statistics(graph: torch.fx.Graph) -> None:
    """Take the running statistics out of backward kernels that do not read them.

    They change during forward, so that whoever read them in backward would see other contents than were traced.
    """
    for node in graph.nodes:
        if node.target not in _BATCH_NORM_BACKWARD_STATISTICS:
            continue
        statistics, training = _BATCH_NORM_BACKWARD_STATISTICS[node.target]
        if training is None or node.args[training]:
            node.args = tuple(None if index in statistics else arg for index, arg in enumerate(node.args))


_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default)


def write_without_copies(graph: torch.fx.Graph) -> None:
    """Have what `x[i] = y` is traced to read `y`, and not a copy of it that lies in memory as `x[i]` does.

    Such a copy takes as much as all of `x`, and eager makes none.
    """
    for node in list(graph.nodes):
        if node.target is not aten.copy.default or not _alike(*(arg.meta["val"] for arg in node.args[:2])):
            continue
        for user in list(node.users):
            if user.target in _SCATTERS and user.args[0] is not node:
                user.replace_input_with(node, node.args[1])
        if not node.users:
            graph.erase_node(node)


def clones_storage(target: Any) -> bool:
    """Whether the kernel copies all of the memory that its first argument is part of, in order to change some of it."""
    return target in (*_SCATTERS, aten.as_strided_scatter.default, aten.copy.default)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


# Tracing turns `empty_like(x).bernoulli_(p)` into a call that returns its numbers in a new tensor, in another order if
# the old one was not contiguous. On memory that nobody has written to, these are the calls that were meant.
_FILLS: dict[Any, OpOverload] = {
    aten.bernoulli.p: aten.bernoulli_.float,
    aten.uniform.default: aten.uniform_.default,
    aten.normal_functional.default: aten.normal_.default,
    aten.exponential.default: aten.exponential_.default,
    aten.random.default: aten.random_.default,
    aten.random.to: aten.random_.to,
}


def fill_of_empty(node: Node) -> OpOverload | None:
    """The in-place operator behind a call that fills fresh memory with random numbers; None for other calls."""
    source = node.args[0] if node.args else None
    fresh = isinstance(source, Node) and is_uninitialised(source.target) and len(source.users) == 1
    return _FILLS.get(node.target) if fresh else None


@cache
def in_place_twin(target: Any) -> OpOverload | None:
    """The variant that overwrites its first argument with the same bits, for pointwise operators that have one."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or torch.Tag.pointwise not in target.tags:
        return None
    packet = getattr(aten, f"{target.overloadpacket.__name__}_", None)
    found = getattr(packet, target._overloadname, None) if packet is not None else None
    return found if isinstance(found, OpOverload) and _takes_the_same(target, found) else None


def _takes_the_same(one: OpOverload, other: OpOverload) -> bool:
    return [a.name for a in one._schema.arguments] == [a.name for a in other._schema.arguments]


IN_PLACE = "rematch_in_place"  # the mark of a node that eager runs in place


def in_place_on_copy(
    op: Callable[..., torch.Tensor], stride: Sequence[int], first: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`op` on a copy of `first` with other strides."""
    copy = torch.empty_strided(first.shape, stride, dtype=first.dtype, device=first.device)
    return op(copy.copy_(first), *args, **kwargs)


@dataclass(frozen=True)
class InPlaceOnCopy:
    """An in-place operator on a copy with these strides: what eager computes when it overwrites part of a tensor.

    Vectorized kernels round differently at the end of a row than in its middle. A result in rows that do not follow
    each other in memory must be computed in such rows again, although nothing else is left of the tensor around it.
    """

    twin: OpOverload
    stride: tuple[int, ...]

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return in_place_on_copy(self.twin._op, self.stride, first, *args, **kwargs)

    def __str__(self) -> str:
        return f"{self.twin} on a copy {self.stride}"


def in_rows_apart(node: Node, first: Any) -> InPlaceOnCopy | None:
    """How to run a node that eager runs in place on `first`, if `first` is part of a tensor; None for all others."""
    twin = in_place_twin(node.target)
    marked = node.meta.get("custom", {}).get(IN_PLACE, False)
    if twin is None or not marked or not isinstance(first, torch.Tensor):
        return None
    stride = _rows_apart(tuple(first.shape), first.stride())
    return None if stride is None else InPlaceOnCopy(twin, stride)


def _rows_apart(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides with gaps wherever `stride` has them, as small as can be; None if it has no gaps or overlaps itself."""
    dims = sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: stride[dim])
    found = [1] * len(shape)
    dense_before = dense_now = spanned = 1
    gaps = False
    for dim in dims:
        if stride[dim] < spanned:
            return None
        spanned += (shape[dim] - 1) * stride[dim]
        gap = stride[dim] != dense_before
        gaps |= gap
        found[dim] = dense_now + gap
        dense_before, dense_now = stride[dim] * shape[dim], found[dim] * shape[dim]
    return tuple(found) if gaps else None
