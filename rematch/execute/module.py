"""A module that is another one with its own `forward`: same class, same parameters, same keys.

`twin = twin_of(module); twin.forward = Runner(twin, planner)`
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

from torch import nn

from rematch.execute.as_forward import Unbound
from rematch.execute.runner import Runner

M = TypeVar("M", bound=nn.Module)


def twin_of(module: M) -> M:
    """A module of the same class that shares parameters, buffers, submodules and hooks with `module`."""
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    strip(twin)
    return twin


def strip(module: nn.Module) -> None:
    """Give a module of ours, which is to be planned anew, the `forward` it had before."""
    runner = module.__dict__.get("forward")
    if isinstance(runner, Runner):
        module.__dict__.pop("forward")
        if runner.inner is not None:
            module.__dict__["forward"] = runner.inner


def runner_of(module: nn.Module) -> Runner | None:
    """The runner of a module that `remat` or `apply` made; None for any other.

    Other libraries may have wrapped `forward` since, as Accelerate does for mixed precision.
    """
    forward: Any = module.__dict__.get("forward")
    while forward is not None and not isinstance(forward, Runner):
        if isinstance(forward, types.MethodType):
            forward = forward.__func__
        elif isinstance(forward, Unbound):
            forward = forward.runner
        else:
            forward = getattr(forward, "__wrapped__", None)
    return forward
