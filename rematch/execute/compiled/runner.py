"""The `forward` of a module that trains inside a budget through torch.compile.

`module.forward = CompiledRunner(module, settings)`

Dynamo traces the module's own forward, and every graph it finds goes to the backend. Each shape is compiled and planned
by itself. Everything that must survive copying and pickling is data; what was compiled is compiled again when needed.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

from rematch.errors import CaptureError
from rematch.execute.compiled.backend import CompiledBackend, Planned
from rematch.planning.plan import Plan
from rematch.planning.settings import Settings


class CompiledRunner:
    """Callable like the `forward` it replaces; see the module."""

    def __init__(self, module: nn.Module, settings: Settings, required: Plan | None = None) -> None:
        self.module = module
        self.settings = settings
        self.required = required
        self.inner = module.__dict__.get("forward")  # set by another library on this very module
        self._reset()

    def _reset(self) -> None:
        self._backend = CompiledBackend(self.settings, required=self.required)
        self._compiled: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_backend", "_compiled")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plain)

    @property
    def plain(self) -> Callable[..., Any]:
        """The module's own forward."""
        if self.inner is not None:
            inner: Callable[..., Any] = self.inner
            return inner
        return types.MethodType(type(self.module).forward, self.module)

    @property
    def plans(self) -> list[Plan]:
        """One for each training graph that was compiled so far."""
        return self._backend.plans

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(_entry(self.plain), backend=self._backend, dynamic=False)
        return self._compiled(*args, **kwargs)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace, plan and compile for these arguments without running anything on them.

        Where forward breaks into several graphs, this compiles the first one; the others follow in the first call.
        """
        self._backend.dry = True
        try:
            with torch.enable_grad():
                self(*args, **kwargs)
        except Planned:
            return
        finally:
            self._backend.dry = False
        raise CaptureError(
            f"{type(self.module).__name__} was not compiled: its forward has no tensor operation to plan, "
            "or torch.compile is disabled (TORCHDYNAMO_DISABLE, torch._dynamo.config.disable)"
        )


def _entry(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function with code of its own, so that no other module shares its cache or its limit of shapes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(co_name="forward"), globals(), "forward", None, call.__closure__)
