"""Contents of storages, and the notes from which they are computed again.

A `Content` is what a storage holds between two writes. Its `Note` is the call that wrote it; the call's arguments are
`Ref`s to other contents. What autograd saved of a content and what backward brought back hang on one `Saved`, which
lives as long as autograd holds a `Handle` of it. Nothing here refers to autograd's graph, so that a graph dropped
without a backward takes everything with it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from rematch.execute.tape.draws import Draw
from rematch.execute.tape.operators import Operator
from rematch.execute.transfers import HostCopy

# Size, stride, offset, dtype, and whether it shows its memory conjugated or negated.
Layout = tuple[Any, Any, Any, torch.dtype, bool, bool]

storage_address = torch._C._storage_address  # type: ignore[attr-defined]
_OWN_COPY = -1  # in place of a version: nobody else can change it


class Content:
    """What a storage holds between two writes; see the module."""

    __slots__ = (
        "__weakref__",
        "address",
        "constant",
        "copy",
        "dropped",
        "dropped_later",
        "held",
        "held_version",
        "index",
        "moved",
        "note",
        "position",
        "saved",
        "value",
        "version",
    )

    def __init__(self, note: Note | None, index: int, version: int, dropped: bool) -> None:
        self.note = note  # None: somebody wrote it whom we did not note
        self.index = index  # among what its call returns
        self.position = -1  # of its call in the plan, where that is not noted
        self.version = version  # of the storage, by autograd's counter
        self.dropped = dropped
        self.dropped_later = False  # it is there until the plan lets go of it in backward
        self.moved = False  # it goes to host memory when autograd saves it
        self.copy: HostCopy | None = None  # once it has gone there
        self.constant = False  # fresh zeros and the like, which code that no dispatcher sees may have changed
        self.address = 0
        self.held: torch.Tensor | None = None  # shows the storage, and keeps it
        self.held_version = 0
        self.value: torch.Tensor | None = None  # computed again, and held because the plan says so
        self.saved: weakref.ref[Saved] | None = None

    def hold(self, tensor: torch.Tensor, version: int, address: int) -> None:
        """Keep the content by keeping its storage; `tensor` must share autograd's version counter and no graph."""
        self.held = tensor
        self.held_version = version
        self.address = address

    def hold_copy(self, tensor: torch.Tensor) -> None:
        """Keep the content in memory of our own."""
        self.held = copy_with_storage(tensor)
        self.held_version = _OWN_COPY

    @property
    def key(self) -> tuple[int, int]:
        """Its name in the plan."""
        return self.position if self.note is None else self.note.position, self.index

    def let_go(self) -> None:
        """Hold the content no more, if it can be computed again or fetched."""
        if self.copy is not None:
            self.copy.let_go()
        elif self.note is None:
            return
        self.value = self.held = None
        saved = None if self.saved is None else self.saved()
        if saved is not None:
            saved.value = None

    def fetch(self) -> None:
        """Begin to bring the content back from host memory, if it is there and not here."""
        if self.copy is not None and self.value is None and self.held is None:
            self.copy.fetch()

    @property
    def owns_memory(self) -> bool:
        """Whether it is held in memory of our own."""
        return self.held is not None and self.held_version == _OWN_COPY

    def available(self) -> torch.Tensor | None:
        """A tensor that shows the content, if it is there; raises if it was there and somebody changed it."""
        if self.value is None and self.copy is not None:
            self.value = self.copy.tensor()
        if self.value is not None:
            return self.value
        if self.saved is not None:
            saved = self.saved()
            if saved is not None and saved.value is not None and saved.value._version == saved.value_version:
                return saved.value
        held = self.held
        if held is not None and self.held_version != _OWN_COPY:
            if held._version != self.held_version:
                raise modified_in_place(held.type(), held.shape, held._version, self.held_version)
            if storage_address(held) != self.address or not _has_memory(held):
                raise RuntimeError(
                    "a tensor needed to recompute activations was given other memory between forward and backward: "
                    f"[{held.type()} {list(held.shape)}]. Keep parameters where they are until backward has run, or "
                    "apply rematch inside the unit that shards them"
                )
        return held


class Ref:
    """An argument of a noted call: how it shows a content."""

    __slots__ = ("content", "layout", "requires_grad")

    def __init__(self, content: Content, layout: Layout | None, requires_grad: bool) -> None:
        self.content = content
        self.layout = layout  # None: exactly what the content holds
        self.requires_grad = requires_grad  # some kernels ask

    def shown(self, base: torch.Tensor) -> torch.Tensor:
        """The argument, once `base` shows the content."""
        layout = self.layout
        if layout is None:
            if base.requires_grad == self.requires_grad:
                return base
            layout = layout_of(base)
        made = show(base, layout)
        return made.requires_grad_() if self.requires_grad else made


class Note:
    """A call that can run again."""

    __slots__ = (
        "__weakref__",
        "args",
        "cost",
        "draw",
        "forgotten",
        "kwargs",
        "memory",
        "operator",
        "outputs",
        "position",
        "target",
    )

    def __init__(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> None:
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.position = position
        self.draw: Draw | None = None
        self.target: Ref | None = None  # the argument that the call writes over
        self.memory: tuple[int, torch.device] | None = None  # to allocate, if what it writes over does not matter
        self.outputs: list[tuple[int, weakref.ref[Content]]] = []
        self.cost = 0.0
        self.forgotten = False

    def forget(self) -> None:
        """Let go of all that running the call again would need."""
        self.args, self.kwargs, self.draw, self.target = (), {}, None, None
        self.forgotten = True

    def reads(self) -> list[Content]:
        """The contents that its arguments show, except what it writes over."""
        found = []
        for argument in (*self.args, *self.kwargs.values()):
            if type(argument) is Ref:
                if argument is not self.target:
                    found.append(argument.content)
            elif type(argument) is list:
                found += [entry.content for entry in argument if type(entry) is Ref]
        return found


class Saved:
    """What autograd saved of one content; `value` shows it while it is there."""

    __slots__ = ("__weakref__", "content", "last_use", "size_bytes", "value", "value_version", "version", "witness")

    def __init__(self, content: Content, witness: torch.Tensor, version: int) -> None:
        self.content = content
        self.witness = witness  # without memory; shares autograd's version counter
        self.version = version
        self.value: torch.Tensor | None = None
        self.value_version = 0
        self.size_bytes = 0
        self.last_use = 0

    def put(self, value: torch.Tensor) -> None:
        """Hold the content until autograd lets go of its last handle."""
        self.value = value
        self.value_version = value._version


class Handle:
    """What autograd holds instead of a tensor whose content is dropped, or may be."""

    __slots__ = ("backward", "layout", "saved")

    def __init__(self, saved: Saved, layout: Layout, backward: Any) -> None:
        self.saved = saved
        self.layout = layout
        self.backward = backward  # the `Backward` that brings the content back


def layout_of(tensor: torch.Tensor) -> Layout:
    """How the tensor shows its storage."""
    return (
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def show(base: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor with this layout on the storage of `base`."""
    size, stride, offset, dtype, conjugated, negated = layout
    if not (conjugated or negated or base.dtype != dtype or base.is_conj() or base.is_neg()):
        return base.as_strided(size, stride, offset)
    made = torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)
    made = torch._conj(made) if conjugated else made
    return torch._neg_view(made) if negated else made


def copy_with_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of all the memory that the tensor is part of."""
    with torch._C._DisableTorchDispatch():
        layout = layout_of(tensor)
        copy = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage().clone())
        return show(copy, layout)


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def let_go_of_memory(alias: torch.Tensor) -> None:
    """Leave of `alias` only its version counter, which tells of writes to the storage it was an alias of."""
    key = alias.dtype, alias.device
    empty = _EMPTY.get(key)
    if empty is None:
        with torch._C._DisableTorchDispatch():
            empty = _EMPTY[key] = torch.empty(0, dtype=alias.dtype, device=alias.device)
    alias.data = empty


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def modified_in_place(kind: str, shape: Any, version: int, expected: int) -> RuntimeError:
    """Eager's own error; autograd does not raise it itself where saved-tensor hooks are set."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}] is at version {version}; expected version {expected} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
