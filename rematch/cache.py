"""What rematch remembers between runs, in the cache folder of the user or in the one that REMATCH_CACHE names.

`store = RecordStore(Profile, "costs.json"); store.records["key"] = profile; store.save()`

A cache can only save time: a folder that cannot be read or written, a damaged file or an entry that does not fit cost
time, never correctness. Processes that save at once wait for each other, so that no entry is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

from rematch.errors import FormatError
from rematch.files import read_json, write_text
from rematch.records import from_json, to_json

T = TypeVar("T")


def cache_folder() -> Path:
    """Return the folder of the user's cache; the environment variable REMATCH_CACHE names another."""
    if os.environ.get("REMATCH_CACHE"):
        return Path(os.environ["REMATCH_CACHE"])
    from platformdirs import user_cache_path

    return user_cache_path("rematch")


class RecordStore(Generic[T]):
    """Records of one type by key, in one file of the cache; `is_usable` refuses entries that cannot be right."""

    def __init__(self, kind: type[T], name: str, is_usable: Callable[[T], bool] = lambda record: True) -> None:
        self.path = cache_folder() / name
        self._kind = kind
        self._is_usable = is_usable
        self._saved = self._load()
        self.records: dict[str, T] = dict(self._saved)

    def save(self) -> None:
        """Write what is new, together with what other processes have added meanwhile."""
        if self.records.keys() == self._saved.keys():
            return
        with suppress(OSError, FormatError):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(self.path.parent):
                self._saved = {**self._load(), **self.records}
                write_text(self.path, json.dumps({key: to_json(record) for key, record in self._saved.items()}))
        self.records = {**self._saved, **self.records}

    def _load(self) -> dict[str, T]:
        try:
            data = read_json(self.path)
        except FormatError:  # missing, unreadable or damaged
            return {}
        found = {}
        for key, entry in data.items() if isinstance(data, dict) else ():
            with suppress(FormatError):
                record = from_json(self._kind, entry, key)
                if self._is_usable(record):
                    found[key] = record
        return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from saving to `folder`. Where it cannot be locked, the last one to save wins."""
    try:
        import fcntl
    except ImportError:  # not POSIX
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which lets it go
