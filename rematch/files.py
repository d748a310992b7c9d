"""Files read with a clear word on what is wrong, and written whole or not at all.

`write_text(path, text)` leaves either the old file or the complete new one, whatever happens in between.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

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
    write_bytes(path, text.encode("utf-8"))


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
    if Path(path).is_dir():
        raise FormatError(f"cannot write {path}: it is a folder; give the name of a file")
    if _is_special(path):
        return
    folder = Path(os.path.realpath(path)).parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise FormatError(f"cannot write {path}: in {folder}: {_reason(error)}; choose another place") from error


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a device, a pipe or a socket: a rename would put a plain file in its place."""
    found = Path(path)
    return found.exists() and not (found.is_file() or found.is_dir())


def _replace(target: Path, data: bytes) -> None:
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


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
