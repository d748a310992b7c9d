"""Random operators, run again with the random numbers of their first run.

`state = note_state("cpu", None)` before the first run; `replay(state, "cpu", None, op, *args)` for each later one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _generator(kind: str, index: int | None) -> torch.Generator:
    if kind == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    return torch.default_generator


def note_state(kind: str, index: int | None) -> torch.Tensor:
    """The state of the device's generator now."""
    return _generator(kind, index).get_state()


def replay(state: torch.Tensor, kind: str, index: int | None, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `op` returned when the generator was in `state`; the generator is left as it is now."""
    generator = _generator(kind, index)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(now)
