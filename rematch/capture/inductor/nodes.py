"""What a node of inductor's joint graph becomes: a view, part of a fused kernel, or a kernel of its own.

`kind_of(node) is Kind.KERNEL` for a node that calls `aten.mm`
"""

from __future__ import annotations

import operator
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from rematch.capture.aten import PASS_THROUGH, RESHAPES, draws, may_repeat


class Kind(Enum):
    """What inductor makes of a node."""

    INPUT = "input"  # a placeholder, or an attribute of the module
    SYMBOL = "symbol"  # a size or another number, computed on the host
    VIEW = "view"  # shows memory that another node made
    FUSED = "fused"  # computed inside the kernels of those who read it, unless it must be in memory
    REDUCTION = "reduction"  # fused too, and always in memory
    KERNEL = "kernel"  # matrix products, convolutions, attention, and whatever is not known to fuse


_REDUCTIONS = frozenset(
    [
        "all",
        "amax",
        "amin",
        "aminmax",
        "any",
        "argmax",
        "argmin",
        "linalg_vector_norm",
        "logsumexp",
        "mean",
        "norm",
        "prepare_softmax_online",
        "prod",
        "std",
        "std_mean",
        "sum",
        "var",
        "var_mean",
        "xor_sum",
    ]
)
# Lowered to a loop over the result, though they do not carry torch's tag for pointwise operators.
_FUSED = frozenset(
    [
        "_adaptive_avg_pool2d",
        "_low_memory_max_pool_offsets_to_indices",
        "_low_memory_max_pool_with_offsets",
        "_to_copy",
        "_unsafe_index",
        "_unsafe_masked_index",
        "arange",
        "avg_pool2d",
        "broadcast_in_dim",
        "cat",
        "clone",
        "constant_pad_nd",
        "convert_element_type",
        "copy",
        "embedding",
        "empty",
        "empty_like",
        "empty_strided",
        "eye",
        "fill",
        "flip",
        "full",
        "full_like",
        "gather",
        "index",
        "index_select",
        "inductor_lookup_seed",
        "inductor_randint",
        "inductor_random",
        "iota",
        "lift_fresh_copy",
        "masked_fill",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "one_hot",
        "ones",
        "ones_like",
        "repeat",
        "roll",
        "scalar_tensor",
        "select_scatter",
        "slice_scatter",
        "tril",
        "triu",
        "upsample_nearest2d",
        "zeros",
        "zeros_like",
    ]
)


# Kernels that compute what they scatter, and where to, on the fly, into memory that they take over.
_SCATTERING = frozenset(
    [
        "_unsafe_index_put",
        "embedding_dense_backward",
        "index_add",
        "index_put",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    ]
)


def reads_memory(node: Node) -> bool:
    """Whether the node is a kernel whose arguments must be in memory."""
    if kind_of(node) is not Kind.KERNEL or node.target is operator.getitem or is_mutation(node):
        return False
    packet = getattr(node.target, "overloadpacket", None)
    return packet is None or packet.__name__ not in _SCATTERING


def kind_of(node: Node) -> Kind:
    """Say what inductor makes of `node`."""
    if node.op in ("placeholder", "get_attr"):
        return Kind.INPUT
    if node.target is operator.getitem:
        source = kind_of(node.args[0])  # type: ignore[arg-type]
        return Kind.VIEW if source in (Kind.VIEW, Kind.INPUT) else source
    if not isinstance(node.target, OpOverload):
        return Kind.KERNEL if _has_tensors(node) or node.op != "call_function" else Kind.SYMBOL
    if not _has_tensors(node):
        return Kind.SYMBOL if not node.target._schema.is_mutable and node.meta.get("val") is not None else Kind.KERNEL
    return _kind_of_operator(node.target)


@cache
def _kind_of_operator(target: OpOverload) -> Kind:
    schema = target._schema
    if schema.is_mutable:
        return Kind.KERNEL
    if target in RESHAPES or target in PASS_THROUGH or any(result.alias_info is not None for result in schema.returns):
        return Kind.VIEW
    name = target.overloadpacket.__name__
    if target.namespace not in ("aten", "prims"):
        return Kind.KERNEL
    if name in _REDUCTIONS or str(target) in _REDUCING_OVERLOADS:
        return Kind.REDUCTION
    if name in _FUSED or torch.Tag.pointwise in target.tags:
        return Kind.FUSED
    return Kind.KERNEL


# `max` and `min` of two tensors are pointwise.
_REDUCING_OVERLOADS = frozenset(
    ["aten.max.default", "aten.max.dim", "aten.min.default", "aten.min.dim", "prims.sum.default", "prims.var.default"]
)


def _has_tensors(node: Node) -> bool:
    value = node.meta.get("val")
    leaves = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def is_random_numbers(node: Node) -> bool:
    """Whether the node computes random numbers from a seed, which costs more than the memory it writes."""
    return node.target is torch.ops.prims.inductor_random.default


def is_concatenation(node: Node) -> bool:
    """Whether the node lays its inputs side by side: each writes its own part, so the whole is in memory."""
    return node.target is torch.ops.aten.cat.default


def is_mutation(node: Node) -> bool:
    """Whether the node writes into one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def runs_once(node: Node, on_cuda: bool) -> bool:
    """Whether the node must not run again.

    It draws from a generator, changes an argument, communicates, adds with atomics, or is no operator of PyTorch's.
    """
    if node.op != "call_function" or node.target is operator.getitem or kind_of(node) is Kind.SYMBOL:
        return False
    if is_mutation(node) or draws(node.target, node.args, node.kwargs):
        return True
    return not may_repeat(node.target, on_cuda)


def constant_of(node: Node) -> tuple[Any] | None:
    """The number or None that an entry of a tuple is, in a tuple of its own; None for entries that are tensors."""
    if node.target is not operator.getitem:
        return None
    value = node.meta.get("val")
    return (value,) if value is None or isinstance(value, (bool, int, float)) else None


def is_seed_input(node: Node) -> bool:
    """Whether an input is the seed or the offset of a generator, which AOTAutograd passes if it is told to."""
    return "seed" in str(node.target) or "offset" in str(node.target)
