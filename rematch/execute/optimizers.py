"""What optimizers keep on the device: forecast before the first step, and seen when it happens.

`forecast_state_bytes(optimizer, profile)`; `StepWatch(owns, changed)`
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from rematch.capture.cost import Call, Profile
from rematch.capture.memory import allocated_bytes
from rematch.capture.recorder import Recorded, Recorder
from rematch.capture.stand_ins import random_states_kept
from rematch.graph import Phase


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """What the optimizers keep on devices now, each storage once."""
    tensors = [leaf for optimizer in optimizers for leaf in pytree.tree_leaves(dict(optimizer.state))]
    storages = {
        tensor.untyped_storage()._cdata: allocated_bytes(tensor.untyped_storage().nbytes(), tensor.device)
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


def forecast_state_bytes(optimizer: Optimizer, profile: Callable[[Call], Profile]) -> int:
    """What the optimizer will keep: record the first `step()` of a copy of it on tensors without data."""
    if optimizer.state:
        return state_bytes([optimizer])
    recorder = Recorder(profile)
    recorder.phase = Phase.BACKWARD
    stand_in = copy.copy(optimizer)
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [
        {**group, "params": [_with_gradient(recorder, parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    with random_states_kept([]), recorder:
        stand_in.step()
    kept = {leaf.hold.storage for leaf in pytree.tree_leaves(dict(stand_in.state)) if isinstance(leaf, Recorded)}
    return sum(allocated_bytes(recorder.storages[s].size_bytes, recorder.storages[s].device) for s in kept)


def _with_gradient(recorder: Recorder, parameter: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(recorder.resident(parameter, "parameter", "parameters"), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        made.grad = recorder.resident(parameter, "parameter", "parameters")  # of the same shape, and counted elsewhere
    return made


class StepWatch:
    """Tells when an optimizer of some parameters holds more state than before, in any process-wide `step()`.

    Both arguments are methods of one object, which holds this and is not held by it.
    """

    def __init__(self, owns: Callable[[torch.Tensor], bool], changed: Callable[[int], None]) -> None:
        self._owns = weakref.WeakMethod(owns)
        self._changed = weakref.WeakMethod(changed)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._known_bytes = 0
        _WATCHES.add(self)
        _watch_steps()

    def stepped(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that has just made a step."""
        owns, changed = self._owns(), self._changed()
        if owns is None or changed is None or optimizer in self._optimizers:
            return
        if not any(owns(parameter) for group in optimizer.param_groups for parameter in group["params"][:1]):
            return
        self._optimizers.add(optimizer)
        held_bytes = state_bytes(self._optimizers)
        if held_bytes > self._known_bytes:
            self._known_bytes = held_bytes
            changed(held_bytes)


_WATCHES: weakref.WeakSet[StepWatch] = weakref.WeakSet()


@cache
def _watch_steps() -> None:
    """One hook for all, for good: torch goes over its hooks while they run, so none may be removed then."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for watch in list(_WATCHES):
        watch.stepped(optimizer)
