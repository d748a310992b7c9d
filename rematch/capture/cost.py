"""What running one operator costs and what it returns, however that was found out.

`Call.of(node, values).key` names the operator with the shapes, strides, types and scalars it is given: calls with equal
keys cost the same and are looked at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from rematch.capture.aten import clones_storage


@dataclass(frozen=True)
class Cost:
    """Time, memory beyond inputs and outputs while it runs, and arithmetic (None where it is not known)."""

    seconds: float
    workspace_bytes: int
    flops: float | None


@dataclass(frozen=True)
class Result:
    """One tensor that a call returns. `alias` says whose storage it shares.

    That is `i` for the call's i-th distinct tensor argument, `~i` for its own earlier result i, None for none of them.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset: int
    storage_bytes: int
    device: str
    alias: int | None = None


@dataclass(frozen=True)
class Profile:
    """The cost of a call and what it returns, one entry for each result; None stands for an absent one."""

    cost: Cost
    results: tuple[Result | None, ...]


@dataclass(frozen=True)
class Placeholder:
    """Stands in a call's arguments for its distinct tensor number `index`."""

    index: int


@dataclass(frozen=True)
class Call:
    """An operator with its arguments, the tensors among them numbered by first appearance."""

    target: Any
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    tensors: tuple[torch.Tensor, ...]  # distinct, fake
    key: str

    @staticmethod
    def of(node: Node, value_of: Callable[[Node], Any], target: Any = None) -> Call:
        """The call that `node` makes when its arguments have these values, or `target` in place of its operator."""
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), value_of)
        return Call.made(node.target if target is None else target, args, kwargs)

    @staticmethod
    def made(target: Any, args: Any, kwargs: Any) -> Call:
        """The call of `target` with these arguments."""
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        numbers: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in numbers:
                    numbers[id(leaf)] = len(tensors)
                    tensors.append(leaf)
                leaves[position] = Placeholder(numbers[id(leaf)])
        described = ", ".join(describe(tensor) for tensor in tensors)
        if clones_storage(target):
            described += f", the first of {tensors[0].untyped_storage().nbytes()} bytes"
        given = ", ".join(_describe_leaf(leaf) for leaf in leaves)
        key = f"{target}({given} | {structure_text(structure)}) on {described}"
        return Call(target, tuple(leaves), structure, tuple(tensors), key)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with `tensors` in the places of the distinct ones."""
        leaves = [tensors[leaf.index] if isinstance(leaf, Placeholder) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    @property
    def class_key(self) -> str:
        """A short name for the key."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]


def describe(tensor: torch.Tensor) -> str:
    """`float32[2, 3](3, 1) cpu`"""
    dtype = str(tensor.dtype).removeprefix("torch.")
    lazily = " conjugated" * tensor.is_conj() + " negated" * tensor.is_neg()  # most kernels copy such a tensor first
    return f"{dtype}{list(tensor.shape)}{tuple(tensor.stride())} {tensor.device.type}{lazily}"


def _describe_leaf(leaf: Any) -> str:
    return f"#{leaf.index}" if isinstance(leaf, Placeholder) else repr(leaf)


def structure_text(structure: pytree.TreeSpec) -> str:
    """Brackets and stars: how many arguments there are and how they nest."""
    return "".join(str(structure).replace("TreeSpec", "").split())


def results_of(returned: Any, arguments: Sequence[torch.Tensor]) -> tuple[Result | None, ...]:
    """What `returned` is made of; storages are told apart by where they are."""
    owners: dict[int, int] = {}
    for index, tensor in enumerate(arguments):
        owners.setdefault(tensor.untyped_storage()._cdata, index)
    found: list[Result | None] = []
    for index, leaf in enumerate(returned if isinstance(returned, (tuple, list)) else (returned,)):
        if not isinstance(leaf, torch.Tensor):
            found.append(None)
            continue
        storage = leaf.untyped_storage()
        alias = owners.get(storage._cdata)
        owners.setdefault(storage._cdata, ~index)
        dtype = str(leaf.dtype).removeprefix("torch.")
        size = int(storage.nbytes())
        offset = int(leaf.storage_offset())
        found.append(Result(tuple(leaf.shape), leaf.stride(), dtype, offset, size, str(leaf.device), alias))
    return tuple(found)
