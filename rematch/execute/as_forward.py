"""A callable that other libraries take for the `forward` it replaces.

`class Runner(AsForward)`, whose `plain` is the forward that it replaces
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn


class AsForward:
    """In the place of a module's `forward`: with its signature, to be bound, wrapped and unwrapped like it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner = module.__dict__.get("forward")  # set by another library on this very module

    @property
    def plain(self) -> Callable[..., Any]:
        """The module's own forward."""
        if self.inner is not None:
            inner: Callable[..., Any] = self.inner
            return inner
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plain)

    @property
    def __func__(self) -> Unbound:
        """As bound methods have it: libraries that wrap a module's forward bind it to the module again."""
        return Unbound(self)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What another library had put in the place of forward, for libraries that take their wrapping off again."""
        if self.inner is None:
            raise AttributeError("forward was not wrapped before rematch")
        return self.plain


class Unbound:
    """The same as a function whose first argument is the module."""

    def __init__(self, runner: AsForward) -> None:
        self.runner = runner

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.runner(*args, **kwargs)
