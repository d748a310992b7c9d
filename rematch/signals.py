"""Signals that end a search and not the process.

`with signals_end(deadline.stop): search()`

Ctrl-C and SIGTERM end a search with the best it has. A handler of the user's own runs as well, as soon as the signal
comes; one that would only end the process, as Python's own do, does not run the first time. What is ignored stays
ignored, and in threads other than the main one, which cannot listen, nothing changes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, FrameType | None], Any]
H = TypeVar("H", bound=Handler)

_ENDING: set[Any] = {signal.SIG_DFL, signal.default_int_handler}


def ends_process(handler: H) -> H:
    """Decorator: a handler that does no more than end the process, so that a search may be ended in its place."""
    _ENDING.add(handler)
    return handler


@contextmanager
def signals_end(stop: Callable[[], None], signals: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Have the first of `signals` call `stop`; from then on, all of them do again what they did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # `None` is a handler that was not set from Python, so Python could not set it again.
    before = {number: signal.getsignal(number) for number in signals}
    before = {number: known for number, known in before.items() if known not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is listen:  # nobody has set another meanwhile
                signal.signal(number, handler)

    def listen(number: int, frame: FrameType | None) -> None:
        stop()
        restore()
        handler = before[signal.Signals(number)]
        if callable(handler) and handler not in _ENDING:
            handler(number, frame)

    for number in before:
        signal.signal(number, listen)
    try:
        yield
    finally:
        restore()
