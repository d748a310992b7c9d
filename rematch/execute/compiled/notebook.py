"""What was decided for a graph, on disk, so that another process need not solve or measure again.

`Notebook("key").note(Note(...))` and, in another process, `Notebook("key").read(correction_bytes=0)`

Inductor keeps compiled graphs on disk and does not ask for a partition again; the plan behind it is here. A file that
is missing or damaged costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from rematch.cache import cache_folder
from rematch.capture.cost import describe
from rematch.errors import FormatError
from rematch.files import read_json, write_text
from rematch.planning.plan import Plan
from rematch.records import from_json, to_json


@dataclass(frozen=True)
class Note:
    """A decision: the plan, whether torch's own partition runs, and the figures that measuring is judged by."""

    plan: Plan
    by_torch: bool
    predicted_bytes: int
    asked_bytes: int


@dataclass(frozen=True)
class _Settled:
    correction_bytes: int


def graph_key(module: GraphModule, example_inputs: Sequence[Any], identity: object) -> str:
    """A name for a graph that Dynamo traced, compiled under these circumstances."""
    inputs = [describe(given) if isinstance(given, torch.Tensor) else repr(given) for given in example_inputs]
    text = "\n".join([module.code, *inputs, repr(identity), torch.__version__])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Notebook:
    """The notes of one graph, one for each correction that it was compiled with."""

    def __init__(self, key: str) -> None:
        self._folder = cache_folder() / "compiled"
        self._key = key

    @property
    def correction_bytes(self) -> int | None:
        """The correction that measuring has settled on, if it has."""
        found = self._read(self._path("settled"), _Settled)
        return None if found is None else found.correction_bytes

    def settle(self, correction_bytes: int) -> None:
        self._write(self._path("settled"), _Settled(correction_bytes))

    def read(self, correction_bytes: int) -> Note | None:
        found: Note | None = self._read(self._path(str(correction_bytes)), Note)
        return found

    def note(self, correction_bytes: int, note: Note) -> None:
        self._write(self._path(str(correction_bytes)), note)

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._key}-{name}.json"

    def _read(self, path: Path, kind: type[Any]) -> Any:
        try:
            return from_json(kind, read_json(path), str(path))
        except FormatError:
            return None

    def _write(self, path: Path, record: object) -> None:
        with suppress(OSError, FormatError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_text(path, json.dumps(to_json(record)))
