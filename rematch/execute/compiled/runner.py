"""The `forward` of a module that trains inside a budget through torch.compile.

`module.forward = CompiledRunner(module, planner)`

Dynamo traces the module's own forward, and every graph it finds goes to the backend. Each shape is compiled and planned
by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

from rematch.errors import CaptureError
from rematch.execute.compiled.backend import CompiledBackend, Planned
from rematch.execute.own_code import own_code
from rematch.execute.runner import Loss, Runner
from rematch.planning.planner import Planner


class CompiledRunner(Runner):
    """Callable like the `forward` it replaces; see the module."""

    def __init__(self, module: nn.Module, planner: Planner, loss: Loss | None = None) -> None:
        if loss is not None:
            raise CaptureError(
                'engine="compiled" takes no loss=: the first steps measure what your loss takes, and correct the plan. '
                "Leave it out"
            )
        super().__init__(module, planner)

    def _reset(self) -> None:
        super()._reset()
        self._backend: CompiledBackend | None = None
        self._compiled: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("_backend", "_compiled")}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside another torch.compile, which takes this module as part of itself
            return super().__call__(*args, **kwargs)
        if self._compiled is None:
            self._backend = CompiledBackend(self.planner)
            self._backend.state_bytes = self._kept_bytes()
            self._compiled = torch.compile(own_code(self.plain), backend=self._backend, dynamic=False)
        return self._compiled(*args, **kwargs)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # type: ignore[override]
        """Trace, plan and compile for these arguments without running anything on them.

        Where forward breaks into several graphs, this compiles the first one; the others follow in the first call.
        """
        self._backend = CompiledBackend(self.planner)
        self._backend.state_bytes = self._kept_bytes()
        self._compiled = torch.compile(own_code(self.plain), backend=self._backend, dynamic=False)
        self._backend.dry = True
        try:
            with torch.enable_grad():
                self._compiled(*args, **kwargs)
        except Planned:
            return
        finally:
            self._backend.dry = False
        raise CaptureError(
            f"{type(self.module).__name__} was not compiled: its forward has no tensor operation to plan, "
            "torch.compile leaves all of it to eager mode (as it does with nn.LSTM, nn.GRU and nn.RNN: leave out "
            "engine= for these), or it is disabled (TORCHDYNAMO_DISABLE, torch._dynamo.config.disable)"
        )

    def _kept_bytes(self) -> int:
        """The state of an optimizer that was announced, and gradients that others are to be added to."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        gradients = sum(parameter.nbytes for parameter in parameters) if self.planner.settings.accumulate else 0
        return self.state_bytes + gradients
