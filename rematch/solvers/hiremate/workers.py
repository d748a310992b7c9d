"""Processes to solve pieces in, when nobody gave an executor.

`with process_pool(2) as pool: pool.submit(solve, task)`

New processes are started afresh: a copy of this one would have the locks of libraries' threads and not the threads.
They do not run the user's script again, as Python has it, for what they call is in importable modules; so a script
needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes have been started; what waits in it is given up when the block ends."""
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        with _without_main():
            list(pool.map(int, range(workers)))  # each submission starts a process while the others are starting
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _without_main() -> Iterator[None]:
    """Processes that start meanwhile find no script to run."""
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if getattr(main, name, None) is not None}
    for name in hidden:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)
