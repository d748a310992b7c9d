"""Operators that run while forward does, but are not forward's.

`with not_forward(): ...` and no tape of this thread notes what runs inside
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    not_forward = False


thread = _Thread()


@contextmanager
def not_forward() -> Iterator[None]:
    """What runs inside recomputes, or belongs to somebody's hooks."""
    before = thread.not_forward
    thread.not_forward = True
    try:
        yield
    finally:
        thread.not_forward = before
