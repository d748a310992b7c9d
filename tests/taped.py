"""Modules whose forward runs under a tape, for tests of the tape without a planner.

`taped(module, drop_all(observe(copy.deepcopy(module), (batch,), {})))`
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rematch.execute.tape import Budget, Observation, Parting, TapePlan, drop, drop_all, observe, run

Policy = Callable[[Observation], TapePlan]


def plan_for(module: nn.Module, *args: Any, policy: Policy = drop_all, **kwargs: Any) -> TapePlan:
    """A plan from one forward of a copy; the random state is put back."""
    with torch.random.fork_rng():
        return policy(observe(copy.deepcopy(module), args, kwargs))


def taped(
    module: nn.Module,
    plan: TapePlan | None,
    *,
    budget: Budget | None = None,
    parted: Callable[[Parting], None] | None = None,
) -> nn.Module:
    """The same module, with `forward` under a tape."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(plain, args, kwargs, plan=plan, budget=budget, parted=parted)

    module.forward = forward
    return module


def taped_copy(module: nn.Module, *args: Any, policy: Policy = drop_all, **kwargs: Any) -> nn.Module:
    """A copy of the module under a tape that must not leave the plan."""
    return taped(copy.deepcopy(module), plan_for(module, *args, policy=policy, **kwargs), parted=_must_not_part)


def _must_not_part(parting: Parting) -> None:
    raise AssertionError(f"forward left the plan at call {parting.position}: {parting.calls[parting.position :][:3]}")


def drop_some(seed: int) -> Policy:
    """Drop about half of what can be dropped, and note no more than that takes."""

    def policy(observation: Observation) -> TapePlan:
        chosen = random.Random(seed)
        plan = drop(observation, frozenset(key for key in observation.droppable if chosen.random() < 0.5))
        needed = {call for call, _ in plan.dropped}
        unneeded = frozenset(call for call in plan.noted - needed if chosen.random() < 0.5)
        return TapePlan(plan.calls, plan.noted - unneeded, plan.dropped)

    return policy


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
