"""`rematch cache`: what is remembered between runs, and how to forget it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rematch.cli.console import app, say


@dataclass(frozen=True)
class _File:
    """A file of the cache."""

    kind: str  # "plan", "costs" or "links"
    label: str
    size_bytes: int
    used_at: float  # seconds since 1970
    path: Path


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete everything that is listed.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """List the plans and the measured costs and link speeds that rematch keeps between runs.

    They are in your cache folder, or in the one that the environment variable REMATCH_CACHE names.
    """
    from rematch.cache import cache_folder

    files = [*_plans(), *_costs()]
    if clear:
        for file in files:
            with suppress(OSError):  # another process deleted it
                file.path.unlink()
    if json_output:
        rows = [{**vars(file), "path": str(file.path)} for file in files]
        say(json.dumps({"folder": str(cache_folder()), "cleared": clear, "files": rows}, indent=2))
    else:
        say(_table(cache_folder(), files, clear))


def _table(folder: Path, files: list[_File], cleared: bool) -> str:
    from rematch.units import format_bytes

    total = format_bytes(sum(file.size_bytes for file in files))
    heading = f"{folder}: {len(files)} files, {total}{', deleted' if cleared else ''}"
    rows = [
        f"  {file.kind:<5}  {format_bytes(file.size_bytes):>9}  {_age(time.time() - file.used_at):>12}  {file.label}"
        for file in files
    ]
    return "\n".join([heading, *rows])


def _age(seconds: float) -> str:
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"


def _plans() -> list[_File]:
    from rematch.cache import RecordFolder

    folder: RecordFolder[Any] = RecordFolder("plans", decode=lambda data: data)
    return [_File("plan", entry.label, entry.size_bytes, entry.used_at, entry.path) for entry in folder.entries()]


def _costs() -> list[_File]:
    from rematch.cache import cache_folder

    found = []
    for path in sorted((*cache_folder().glob("costs-*.json"), *cache_folder().glob("links.json"))):
        with suppress(OSError):
            seen = path.stat()
            kind, _, label = path.stem.partition("-")
            found.append(_File(kind, label or "speeds to host memory", seen.st_size, seen.st_mtime, path))
    return found
