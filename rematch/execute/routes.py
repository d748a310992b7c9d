"""Which calls of a module are alike, and how each kind of them runs.

`routes: dict[Kind, Route]`
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rematch.capture.recorded_graph import StepGraph
from rematch.capture.structures import tensors_in
from rematch.execute.loss_meter import LossMeter
from rematch.execute.tape import Blocks, TapePlan
from rematch.planning.plan import Plan
from rematch.planning.settings import REPLAY


class Kind(NamedTuple):
    """What tells calls apart that may need plans of their own."""

    arguments: tuple[Any, ...]
    structure: Hashable
    training: bool
    gradients: int  # how many are there already
    autocast: tuple[bool, ...]


@dataclass
class Route:
    """How calls of one kind run."""

    plan: Plan | None  # None where the path could not be foreseen
    step: StepGraph | None = None
    tape: TapePlan | None = None  # for the tape engine
    allocated_bytes: int = 0  # before its steps, and no part of them, as the tape's plan counts
    blocks: Blocks | None = None  # that run as captured under it
    watched: bool = False  # its first backward has been
    meter: LossMeter | None = None  # of the user's loss, until it is measured
    paths: int = 1  # that were planned for this kind of call
    retraces: int = 0  # of the replay engine, because a guard failed
    stale: bool = False  # plan again at the next call,
    disproved: bool = False  # and not by the cache, whose plan this was,
    name: str | None = None  # under this name
    plain: bool = False  # nothing that forward returns needs gradients

    @property
    def replays(self) -> bool:
        return self.plan is not None and self.plan.engine == REPLAY

    @property
    def runs_plainly(self) -> bool:
        return self.plain or (self.plan is not None and self.tape is None and not self.replays)


_LEAVES = {torch.Tensor, nn.Parameter, type(None), bool, int, float, str}  # most of what calls are given


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool, gradients: int) -> Kind:
    """The kind of a call with these arguments. A tape follows any path, so this may be coarse."""
    leaves: Iterable[Any] = (*args, *kwargs.values())
    structure: Hashable = (len(args), *kwargs)
    if not _LEAVES.issuperset(map(type, leaves)):
        leaves, structure = pytree.tree_flatten((args, kwargs))
    autocast = tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    return Kind(tuple(describe(leaf) for leaf in leaves), structure, training, gradients, autocast)


def describe(leaf: Any) -> Any:
    """What tells an argument from others that need another plan: of tensors the shape and type, else the value."""
    if isinstance(leaf, torch.Tensor):
        stride = leaf.stride() if leaf.layout is torch.strided else None
        return tuple(leaf.shape), stride, leaf.dtype, leaf.device, leaf.requires_grad
    inside = [describe(tensor) for tensor in tensors_in(leaf)]
    if inside:
        return type(leaf), *inside
    try:
        hash(leaf)
    except TypeError:
        return type(leaf)
    return leaf


class Gradients:
    """How many of a module's parameters have one.

    Walking through a module costs a call of a small one dearly, so its parameters are known until one is replaced.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._parameters: list[weakref.ref[nn.Parameter]] = []

    def count(self) -> int:
        counted = self._count_known()
        if counted is None:
            self._parameters = [weakref.ref(each) for each in self.module.parameters() if each.is_leaf]
            counted = self._count_known()
        return counted or 0

    def _count_known(self) -> int | None:
        """None if nothing is known, or no more."""
        count = 0
        for known in self._parameters:
            parameter = known()
            if parameter is None:
                return None
            if parameter.grad is not None:
                count += 1
        return count if self._parameters else None
