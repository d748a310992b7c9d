"""A module that is another one with its own `forward`: same class, same parameters, same keys.

`twin = twin_of(module); twin.forward = Runner(twin, planner)`
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from rematch.execute.runner import Runner

M = TypeVar("M", bound=nn.Module)


def twin_of(module: M) -> M:
    """A module of the same class that shares parameters, buffers, submodules and hooks with `module`."""
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    runner = module.__dict__.get("forward")
    if isinstance(runner, Runner):  # a module of ours, planned anew
        twin.__dict__.pop("forward")
        if runner.inner is not None:
            twin.__dict__["forward"] = runner.inner
    return twin


def runner_of(module: nn.Module) -> Runner | None:
    """The runner of a module that `remat` or `apply` made; None for any other."""
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, Runner) else None
