"""Files read with a clear word on what is wrong, and written whole or not at all.

`write_text(path, text)` leaves either the old file or the complete new one, whatever happens in between.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from rematch.errors import FormatError


def read_json(path: str | os.PathLike[str]) -> Any:
    """The contents of a JSON file, or `FormatError` with the place where it stops being JSON."""
    try:
        with collector_paused():
            return json.loads(_read_text(path), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise FormatError(f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise FormatError(f"{path} is not a file of ours: its JSON is nested too deeply to read") from error
    except ValueError as error:  # a constant refused below, or a number with more digits than Python reads
        raise FormatError(f"{path} is not JSON: {error}") from error


@contextmanager
def collector_paused() -> Iterator[None]:
    """A large file becomes millions of objects and no garbage; the collector would walk them over and over."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` as UTF-8: complete, or not at all and `FormatError`."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`: complete, or not at all and `FormatError`; into a device or a pipe, straight."""
    try:
        if _is_special(path):
            Path(path).write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data)  # a link keeps pointing to the file that is replaced
    except OSError as error:
        raise FormatError(f"cannot write {path}: {_reason(error)}") from error


def require_writable(path: str | os.PathLike[str]) -> None:
    """Find out before the work, not after it, that its result cannot be saved."""
    if os.path.isdir(path):
        raise FormatError(f"cannot write {path}: it is a folder; give the name of a file")
    target = Path(os.path.realpath(path))
    try:
        if not _is_special(path):
            _require_replaceable(target)
            tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise FormatError(f"cannot write {path}: in {target.parent}: {_reason(error)}; choose another place") from error


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a device, a pipe or a socket: a rename would put a plain file in its place."""
    found = Path(path)
    return found.exists() and not (found.is_file() or found.is_dir())


def _require_replaceable(target: Path) -> None:
    """Raise `OSError` for a name that is too long and for a file that is protected: renaming would not ask."""
    try:
        os.lstat(target)
    except FileNotFoundError:
        return
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _replace(target: Path, data: bytes) -> None:
    """Put a file with `data` in the place of `target`, with the permissions and the owner of the old one."""
    _require_replaceable(target)
    old = os.stat(target) if target.exists() else None
    partial = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        if not _write_unnamed(partial, data, old):
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            with open(os.open(partial, flags, _first_mode(old)), "wb") as file:
                _fill(file, data, old)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _write_unnamed(partial: Path, data: bytes, old: os.stat_result | None) -> bool:
    """Write a file that gets its name when it is complete, and so vanishes if the process is killed before.

    False where this is not possible: only Linux has such files, and not on every file system.
    """
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        descriptor = os.open(partial.parent, os.O_TMPFILE | os.O_WRONLY, _first_mode(old))
    except OSError:
        return False
    with open(descriptor, "wb") as file:
        _fill(file, data, old)
        try:  # `src_dir_fd` has no meaning here, but makes Python follow the link in /proc
            os.link(f"/proc/self/fd/{descriptor}", partial, src_dir_fd=descriptor, follow_symlinks=True)
        except OSError:
            return False
    return True


def _fill(file: IO[bytes], data: bytes, old: os.stat_result | None) -> None:
    """Write `data` through to the disk, once the file has the permissions of the `old` one."""
    if old is not None:
        _take_over_permissions(file.fileno(), old)
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _first_mode(old: os.stat_result | None) -> int:
    """Of a new file as the umask allows, of one that replaces another nobody else's until it has its permissions."""
    return 0o666 if old is None else 0o600


def _take_over_permissions(descriptor: int, old: os.stat_result) -> None:
    if hasattr(os, "fchown") and (os.geteuid(), os.getegid()) != (old.st_uid, old.st_gid):
        with suppress(OSError):  # only root may give files away
            os.fchown(descriptor, old.st_uid, old.st_gid)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FormatError(f"cannot read {path}: {_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"cannot read {path}: byte {error.start} is not UTF-8 text") from error


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
