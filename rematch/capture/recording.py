"""A training step as eager runs it, written down: operators in order, and how long each storage is held and by whom.

`record(module, (batch,), {}, loss=loss, profile=profile).calls`

Times are positions: an event at time t happens after call t - 1 and before call t. A storage is *held* while Python or
the autograd engine has a tensor that shows it, and *saved* while the graph that autograd keeps for backward does. In
plain training it lives as long as either; a tape that drops what is saved lets it live only while it is held.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rematch.capture.cost import Profile
from rematch.graph import Phase


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor of the recording: which contents of which storage it shows. In-place writes make new versions."""

    storage: int
    version: int
    tensor: torch.Tensor = field(compare=False)  # fake: shape, strides, offset and dtype


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One operator that eager dispatches. Views are calls too, and make no storage."""

    target: Any
    args: tuple[Any, ...]  # with a TensorRef for each tensor
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef | None, ...]  # flat
    makes: tuple[int, ...]  # storages that are new
    writes: tuple[int, ...]  # storages that are changed in place
    phase: Phase
    module_path: str
    grad_enabled: bool
    profile: Profile | None  # None for views, and for what cannot be measured
    class_key: str = ""  # equal for calls that cost the same

    @property
    def inputs(self) -> list[TensorRef]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, TensorRef)]

    @property
    def reads(self) -> tuple[int, ...]:
        """Storages that it is given."""
        return tuple(dict.fromkeys(ref.storage for ref in self.inputs))


@dataclass(frozen=True, slots=True)
class Holding:
    """A time in which Python or the engine has a tensor that shows the storage."""

    since: int
    until: int
    after_unpacking: bool  # it ends after backward has asked for what the next call reads


@dataclass(slots=True)
class RecordedStorage:
    """A piece of memory. `role` is empty for what the step itself allocates."""

    size_bytes: int
    device: torch.device
    name: str = ""
    role: str = ""
    held: list[Holding] = field(default_factory=list)
    saved: list[SavedTensor] = field(default_factory=list)

    @property
    def resident(self) -> bool:
        return bool(self.role)


@dataclass(slots=True)
class SavedTensor:
    """A tensor that autograd saved for backward, from `at` until `released`.

    It asks for it when it is `unpacked`: at a time, and as the how-manieth access of all.
    """

    ref: TensorRef
    at: int
    phase: Phase
    unpacked: list[tuple[int, int]] = field(default_factory=list)
    released: int | None = None


@dataclass(frozen=True)
class Recording:
    """See the module. `loss_at` is the time at which backward starts."""

    calls: tuple[RecordedCall, ...]
    storages: tuple[RecordedStorage, ...]
    forward_until: int  # the module's own calls are those before; the loss's follow
    loss_at: int
    outputs: tuple[int, ...]  # storages of what forward returned
    roots: tuple[int, ...]  # storages of what backward starts from
    gradients: dict[str, int]  # by parameter: the storage that `.grad` has at the end
    reads: int  # how many values Python read
    readings: tuple[str, ...] | None  # those of forward; None if some were no single numbers, or no operator read them
    has_loss: bool  # whether the user's own loss is part of it
    unseen_bytes: int = 0  # at most, of what torch allocates where no dispatcher sees it
    asks_for_compiler: bool = False  # whether forward asks if torch.compile traces it
    checkpoints: int = 0  # regions under torch.utils.checkpoint that forward entered
    notes: tuple[str, ...] = ()
