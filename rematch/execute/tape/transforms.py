"""`torch.func` inside a forward that runs under a tape.

`with transforms_allowed(): forward()`

`torch.func.grad` and its like refuse to run where saved-tensor hooks are set. They ask a context manager of autograd to
forbid such hooks, and that finds ours. While a forward runs, ours takes its place: it lifts the tape's hooks for as
long as the transform runs, so that what is saved inside is kept, and leaves the hooks of others to raise as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph

from rematch.execute.tape.tape import unpack

_AUTOGRAD: Any = torch._C._autograd
_forbid_hooks = graph.disable_saved_tensors_hooks
_lock = threading.Lock()
_running = 0


@contextmanager
def transforms_allowed() -> Iterator[None]:
    """Function transforms run inside, although a tape has its hooks set."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(more: int) -> None:
    global _running
    with _lock:
        _running += more
        graph.disable_saved_tensors_hooks = _without_tapes if _running else _forbid_hooks


@contextmanager
def _without_tapes(error_message: str) -> Iterator[None]:
    lifted = []
    while (hooks := _AUTOGRAD._top_saved_tensors_default_hooks(True)) is not None and hooks[1] is unpack:
        lifted.append(hooks)
        _AUTOGRAD._pop_saved_tensors_default_hooks()
    try:
        with _forbid_hooks(error_message):
            yield
    finally:
        for pack, _ in reversed(lifted):
            _AUTOGRAD._push_saved_tensors_default_hooks(pack, unpack)
