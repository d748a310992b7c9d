"""A head and its cross entropy over slices of the tokens, so that the logits are never there as a whole.

`forward = with_chunked_loss(model.forward, head_of(model), chunks=8)`

While forward runs, the head returns `Logits`: what they would be computed from. Casts, and views and slices of all but
the last dimension, go to the head's input instead. A cross entropy of them runs slice by slice: a product, a cast and a
loss for each, which the planner sees as operators of their own and recomputes as it likes. Whoever asks for anything
else gets the logits as a tensor, computed then.

A product of fewer rows may round otherwise, so the loss and the gradients are as close to eager's as two orders of a
sum are, and no longer equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rematch.errors import CaptureError

_IGNORED = -100  # what cross_entropy leaves out unless it is told


def head_of(module: nn.Module) -> nn.Linear:
    """The linear layer that makes logits: what a transformers model says it is, else the widest one."""
    named = getattr(module, "get_output_embeddings", None)
    head = named() if callable(named) else None
    if head is None:
        layers = [layer for layer in module.modules() if type(layer) is nn.Linear]
        head = max(layers, key=lambda layer: layer.out_features, default=None)
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        raise CaptureError(
            f"{type(module).__name__} has no plain linear layer that could feed a cross entropy, so chunk_loss= has "
            "nothing to cut. Leave it out"
        )
    return head


def with_chunked_loss(forward: Callable[..., Any], head: nn.Linear, chunks: int) -> Callable[..., Any]:
    """`forward` with the head's logits made when they are needed, and their cross entropy in so many slices."""

    def deferred(hidden: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return F.linear(hidden, head.weight, head.bias)
        return Logits(hidden, head, chunks)

    def run(*args: Any, **kwargs: Any) -> Any:
        head.__dict__["forward"] = deferred
        try:
            return forward(*args, **kwargs)
        finally:
            head.__dict__.pop("forward", None)

    return run


class Logits:
    """Stands for the tensor `head(hidden)`, and becomes it as soon as a cross entropy is not all that is asked."""

    def __init__(self, hidden: Tensor, head: nn.Linear, chunks: int, dtype: torch.dtype | None = None) -> None:
        self._hidden = hidden
        self._head = head
        self._chunks = chunks
        self._dtype = dtype  # that they are cast to
        self._value: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._head.out_features))

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def ndim(self) -> int:
        return self._hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> Logits:
        return self._of(self._hidden, torch.float32)

    def contiguous(self) -> Logits:
        return self

    def view(self, *shape: Any) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
        if len(sizes) < 2 or sizes[-1] not in (self._head.out_features, -1) or not _same_rows(sizes[:-1], self.shape):
            return self.tensor().view(*shape)
        return self._of(self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]), self._dtype)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if end_dim % self.ndim == self.ndim - 1:
            return self.tensor().flatten(start_dim, end_dim)
        return self._of(self._hidden.flatten(start_dim, end_dim), self._dtype)

    def __getitem__(self, index: Any) -> Any:
        places = index if isinstance(index, tuple) else (index,)
        whole = slice(None)
        cut = [place for place in places if place is not Ellipsis]
        keeps_rows = all(isinstance(place, slice) for place in cut)
        last = Ellipsis in places or len(cut) == self.ndim
        if keeps_rows and (not last or (cut and cut[-1] == whole and len(cut) > 1)):
            return self._of(self._hidden[index], self._dtype)
        return self.tensor()[index]

    def _of(self, hidden: Tensor, dtype: torch.dtype | None) -> Logits:
        return Logits(hidden, self._head, self._chunks, dtype)

    def tensor(self) -> Tensor:
        """The logits themselves."""
        if self._value is None:
            self._value = self._rows(self._hidden)
        return self._value

    def _rows(self, hidden: Tensor) -> Tensor:
        made = F.linear(hidden, self._head.weight, self._head.bias)
        return made if self._dtype is None else made.to(self._dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and isinstance(args[0] if args else kwargs.get("input"), cls):
            return _cross_entropy(*args, **kwargs)
        made = torch.utils._pytree.tree_map_only(cls, cls.tensor, (args, kwargs))
        return func(*made[0], **made[1])

    def __repr__(self) -> str:
        return f"Logits(shape={tuple(self.shape)}, computed when they are read)"


def _cross_entropy(
    input: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = _IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits with a row for each target, slice by slice."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    if not plain or input.ndim != 2 or target.ndim != 1:
        return F.cross_entropy(
            input.tensor(), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    hidden, rows = input._hidden, math.ceil(len(target) / input._chunks)
    total = torch.zeros((), dtype=torch.float32, device=target.device)
    for part, wanted in zip(hidden.split(max(1, rows)), target.split(max(1, rows)), strict=True):
        total = total + F.cross_entropy(
            input._rows(part), wanted, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
        )
    counted = total if reduction == "sum" else total / (target != ignore_index).sum()
    return counted if input._dtype is not None else counted.to(hidden.dtype)


def _same_rows(leading: Any, shape: torch.Size) -> bool:
    """Whether the leading sizes can be those of the same rows."""
    rows = math.prod(shape[:-1])
    known = math.prod(size for size in leading if size != -1)
    return rows == known if -1 not in leading else bool(known) and rows % known == 0
