"""What it costs the host that a dispatch mode sees every operator.

`dispatch_seconds()`
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class _Empty(TorchDispatchMode):
    """Sees every operator and does nothing about it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@cache
def dispatch_seconds(calls: int = 200) -> float:
    """What a dispatch mode costs this host for each operator."""
    with _disable_current_modes(), torch.no_grad():
        one = torch.ones(1)

        def seconds() -> float:
            started = time.perf_counter()
            for _ in range(calls):
                one.neg()
            return (time.perf_counter() - started) / calls

        plain = min(seconds() for _ in range(3))
        with _Empty():
            return max(0.0, min(seconds() for _ in range(3)) - plain)
