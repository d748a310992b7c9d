"""Functions that Dynamo must not look into, although it compiles something around them.

`keep_dynamo_out(function)`

A submodule under torch.compile runs operators eagerly where its graph breaks, and then calls a tape while Dynamo looks
at every Python frame. `torch._dynamo.disable` wraps a function for that, which costs each call as much as a small
operator does. Marking its code costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_FRAMES: Any = torch._C._dynamo.eval_frame
KEEPS_DYNAMO_OUT = hasattr(_FRAMES, "set_code_exec_strategy")

Function = TypeVar("Function", bound=Callable[..., Any])


def keep_dynamo_out(function: Function) -> Function:
    """Mark the function's code: Dynamo skips its frames, and those of what it calls."""
    if KEEPS_DYNAMO_OUT:
        skip = _FRAMES._FrameAction.SKIP
        _FRAMES.set_code_exec_strategy(function.__code__, _FRAMES._FrameExecStrategy(skip, skip))
    return function
