"""What rematch remembers between runs, in the cache folder of the user or in the one that REMATCH_CACHE names.

`store = RecordStore(Profile, "costs.json"); store.records["key"] = profile; store.save()`
`folder = RecordFolder(Plan, "plans"); folder.put(key, plan); folder.get(key)`

A `RecordStore` keeps many small records in one file, a `RecordFolder` large ones in a file each. A cache can only save
time: a folder that cannot be read or written, a damaged file or an entry that does not fit cost time, never
correctness. Files are replaced whole, so a process that is killed leaves the old entry or the new one, and processes
that save at once wait for each other, so that no entry is lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rematch.errors import FormatError, RematchError
from rematch.files import collector_paused, read_json, write_bytes, write_text
from rematch.records import from_json, to_json

T = TypeVar("T")

_FORMAT = "rematch-cache"
_VERSION = 1
_ENTRY = re.compile(r"[0-9a-f]{64}\.entry")
_PARTIAL = re.compile(r"\..*\.partial")  # what a process left that was killed while it wrote
_PARTIAL_SECONDS = 3600.0  # after which nobody can still be writing it
_MOST_BYTES = 256 * 2**20


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
            _make_private(self.path.parent)
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


@dataclass(frozen=True)
class Entry:
    """A file of a `RecordFolder`. `label` says what is in it."""

    key: str
    path: Path
    size_bytes: int
    used_at: float  # seconds since 1970
    label: str


class RecordFolder(Generic[T]):
    """Records of one type, each in a file of its own; those that nobody used for longest make room for new ones.

    Keys are texts of any length. `encode` and `decode` turn records into what JSON can say and back; `decode` raises
    `FormatError` for data that is no record.
    """

    def __init__(
        self,
        name: str,
        *,
        encode: Callable[[T], Any] = to_json,
        decode: Callable[[Any], T],
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self.path = cache_folder() / name
        self._encode = encode
        self._decode = decode
        self._most_bytes = most_bytes

    def get(self, key: str) -> T | None:
        """The record of this key, if there is one that can be read. A damaged file is deleted."""
        path = self._path_of(key)
        try:
            header, body = _read_entry(path)
        except OSError:  # there is none, or it is not ours to read
            return None
        try:
            if header.get("key") != path.stem:
                raise FormatError("it has been renamed")
            with collector_paused():
                record = self._decode(json.loads(body))
        except (RematchError, ValueError, RecursionError):
            self.delete(key)
            return None
        with suppress(OSError):
            os.utime(path)  # used now: the oldest go first
        return record

    def put(self, key: str, record: T, label: str = "") -> None:
        """Keep the record, and drop the oldest ones if they are too many."""
        path = self._path_of(key)
        body = json.dumps(self._encode(record), separators=(",", ":"), allow_nan=False).encode()
        header = {"format": _FORMAT, "version": _VERSION, "key": path.stem, "label": label, "sha256": _digest(body)}
        data = json.dumps(header).encode() + b"\n" + body
        if len(data) > self._most_bytes:
            return
        with suppress(OSError, FormatError):
            _make_private(self.path)
            write_bytes(path, data)
            self._make_room()

    def delete(self, key: str) -> None:
        """Forget the record of this key, if there is one."""
        with suppress(OSError):
            self._path_of(key).unlink()

    def entries(self) -> list[Entry]:
        """What is there, last used first."""
        found = []
        for path in self._files(_ENTRY):
            with suppress(OSError):
                with open(path, "rb") as file:
                    header = _header(file.readline())
                seen = path.stat()
                found.append(Entry(path.stem, path, seen.st_size, seen.st_mtime, str((header or {}).get("label", ""))))
        return sorted(found, key=lambda entry: entry.used_at, reverse=True)

    def _path_of(self, key: str) -> Path:
        return self.path / f"{_digest(key.encode('utf-8', 'surrogatepass'))}.entry"

    def _files(self, names: re.Pattern[str]) -> list[Path]:
        with suppress(OSError):
            return [path for path in self.path.iterdir() if names.fullmatch(path.name)]
        return []

    def _make_room(self) -> None:
        with _locked(self.path):
            for path in self._files(_PARTIAL):
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > _PARTIAL_SECONDS:
                        path.unlink()
            files = []
            for path in self._files(_ENTRY):
                with suppress(OSError):  # another process deleted it
                    seen = path.stat()
                    files.append((seen.st_mtime, seen.st_size, path))
            total_bytes = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total_bytes <= self._most_bytes:
                    break
                with suppress(OSError):
                    path.unlink()
                total_bytes -= size


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_entry(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and body of an entry. Both are empty if they are damaged; `OSError` for a file of another user."""
    with open(path, "rb") as file:
        if hasattr(os, "geteuid") and os.fstat(file.fileno()).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        header, body = _header(file.readline()), file.read()
    if header is None or header.get("sha256") != _digest(body):
        return {}, b""
    return header, body


def _header(line: bytes) -> dict[str, Any] | None:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(header, dict) and header.get("format") == _FORMAT and header.get("version") == _VERSION
    return header if known else None


def _make_private(folder: Path) -> None:
    """Make the folder, which nobody else may look into. One that somebody made before keeps its permissions."""
    for made in (folder.parent, folder):  # what `parents` makes is open to all
        made.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)


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
