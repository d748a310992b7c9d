"""Regions under `torch.utils.checkpoint` inside a module: counted, and run as plain code if a plan takes their place.

`with checkpoint_regions(replace=True) as regions: module(batch)`

A region that is replaced runs as if its function were called directly: backward finds what it saved, and the plan
decides what of it is dropped. Code has usually bound `checkpoint` itself by the time we come, so what that function
calls is stood in for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint as of_torch


class Regions:
    """How many regions were entered, nested ones included."""

    def __init__(self, replace: bool) -> None:
        self.replace = replace
        self.entered = 0


class _Current(threading.local):
    regions: Regions | None = None


_CURRENT = _Current()
_LOCK = threading.Lock()
_watched = 0  # contexts at once, in all threads
_reentrant: Any = of_torch.CheckpointFunction
_without_reentrance: Callable[..., Any] = of_torch._checkpoint_without_reentrant_generator


@contextmanager
def checkpoint_regions(replace: bool) -> Iterator[Regions]:
    """Regions that this thread enters inside are counted, and run plainly if they are to be replaced."""
    before, regions = _CURRENT.regions, Regions(replace)
    _CURRENT.regions = regions
    _stand_in(1)
    try:
        yield regions
    finally:
        _stand_in(-1)
        _CURRENT.regions = before


def without_checkpoints(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with its regions run as plain code."""

    def plainly(*args: Any, **kwargs: Any) -> Any:
        with checkpoint_regions(replace=True):
            return forward(*args, **kwargs)

    return plainly


def _stand_in(more: int) -> None:
    """Stand in for torch's own functions while any thread watches."""
    global _watched
    with _LOCK:
        _watched += more
        of_torch.CheckpointFunction = _Reentrant if _watched else _reentrant  # type: ignore[assignment, misc]
        of_torch._checkpoint_without_reentrant_generator = _region if _watched else _without_reentrance


def _entered() -> bool:
    """Count a region; returns whether it is to run plainly."""
    regions = _CURRENT.regions
    if regions is None:
        return False
    regions.entered += 1
    return regions.replace


def _region(*args: Any, **kwargs: Any) -> Iterator[None]:
    """What surrounds the function of a region with use_reentrant=False."""
    return _nothing() if _entered() else _without_reentrance(*args, **kwargs)


def _nothing() -> Iterator[None]:
    yield


class _Reentrant:
    """In place of the autograd function of a region with use_reentrant=True."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_random_state: bool, *args: Any) -> Any:
        # A region without differentiable arguments gives its parameters no gradients, and torch warns of that.
        trains = any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args)
        if _entered() and trains:
            return function(*args)
        return _reentrant.apply(function, preserve_random_state, *args)
