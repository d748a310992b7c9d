"""Files read with a clear word on what is wrong, and written whole or not at all.

`write_text(path, text)` leaves either the old file or the complete new one, whatever happens in between.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, NoReturn

from rematch.errors import FormatError


def read_json(path: str | os.PathLike[str]) -> Any:
    """The contents of a JSON file, or `FormatError` with the place where it stops being JSON."""
    try:
        return json.loads(_read_text(path), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise FormatError(f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise FormatError(f"{path} is not a file of ours: its JSON is nested too deeply to read") from error
    except ValueError as error:  # a constant refused below, or a number with more digits than Python reads
        raise FormatError(f"{path} is not JSON: {error}") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` as UTF-8: complete, or not at all and `FormatError`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`: complete, or not at all and `FormatError`."""
    target = Path(os.path.realpath(path))  # a link keeps pointing to the file that is replaced
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise FormatError(f"cannot write {path}: {_reason(error)}") from error


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
