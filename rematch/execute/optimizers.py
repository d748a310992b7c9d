"""What optimizers keep on the device: forecast before the first step, and seen when it happens.

`forecast_state_bytes(optimizer, profile)`; `StepWatch(owns, changed)`
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter, defaultdict
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
    """What the optimizer will keep: record the first `step()` of a copy of it on tensors without data.

    PyTorch's own optimizers treat each parameter by itself, so that one parameter of each kind tells for all like it.
    """
    if optimizer.state:
        return state_bytes([optimizer])
    recorder = Recorder(profile)
    recorder.phase = Phase.BACKWARD
    stand_in = copy.copy(optimizer)
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = []
    separable = type(optimizer) in _SEPARABLE
    alike: Counter[torch.Tensor] = Counter()  # by parameter that takes part: for how many it stands
    for group in optimizer.param_groups:
        made: dict[Any, nn.Parameter] = {}
        for parameter in group["params"]:
            kind = _kind(parameter) if separable else id(parameter)
            if kind not in made:
                made[kind] = _with_gradient(recorder, parameter)
            alike[made[kind]] += 1
        stand_in.param_groups.append({**group, "params": list(made.values())})
    with random_states_kept([]), recorder:
        stand_in.step()
    kept: Counter[int] = Counter()  # by storage
    for parameter, state in stand_in.state.items():
        held = {leaf.hold.storage for leaf in pytree.tree_leaves(state) if isinstance(leaf, Recorded)}
        kept |= Counter(dict.fromkeys(held, alike[parameter]))
    storages = recorder.storages
    return sum(count * allocated_bytes(storages[s].size_bytes, storages[s].device) for s, count in kept.items())


_SEPARABLE = {
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, torch.optim.LBFGS)
}


def _kind(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Parameters of one kind have states of one size."""
    layout = tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device
    return type(parameter), *layout, parameter.requires_grad


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
