"""Which calls of a module are alike, and how each kind of them runs.

`routes: dict[Kind, Route]`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
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
    structure: pytree.TreeSpec
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
