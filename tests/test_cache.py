"""The cache: entries of all processes are kept, and whatever is wrong with it costs time alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rematch.cache import RecordStore, cache_folder


@dataclass(frozen=True)
class Cost:
    seconds: float
    sizes: tuple[int, ...] = (1,)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_saved_is_there_next_time() -> None:
    store = RecordStore(Cost, "costs.json")
    store.records["a"] = Cost(1.0)
    store.save()
    assert RecordStore(Cost, "costs.json").records == {"a": Cost(1.0)}


def test_an_empty_variable_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMATCH_CACHE", "")
    assert cache_folder().is_absolute()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 3}', '{"a": {"seconds": "x"}}', '{"a": {"seconds": 1, "sizes": []}}']
)
def test_damaged_files_and_entries_are_ignored(text: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "costs.json").write_text(text)
    store = RecordStore(Cost, "costs.json", is_usable=lambda cost: bool(cost.sizes))
    assert store.records == {}
    store.records["b"] = Cost(2.0)
    store.save()
    assert json.loads((folder / "costs.json").read_text()) == {"b": {"seconds": 2.0, "sizes": [1]}}


def test_one_bad_entry_does_not_spoil_the_others(folder: Path) -> None:
    folder.mkdir()
    (folder / "costs.json").write_text('{"a": {"seconds": 1.0}, "b": null}')
    assert RecordStore(Cost, "costs.json").records == {"a": Cost(1.0)}


def test_a_folder_that_cannot_be_used_costs_time_alone(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    store = RecordStore(Cost, "costs.json")
    store.records["a"] = Cost(1.0)
    store.save()
    assert store.records == {"a": Cost(1.0)}


def test_no_entry_is_lost_when_processes_save_at_once(tmp_path: Path) -> None:
    code = """
import sys
from rematch.cache import RecordStore
for number in range(8):
    store = RecordStore(float, "costs.json")
    store.records[f"{sys.argv[1]} {number}"] = 1.0
    store.save()
"""
    running = [subprocess.Popen([sys.executable, "-c", code, str(process)]) for process in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert len(RecordStore(float, "costs.json").records) == 32
