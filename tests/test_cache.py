"""The cache: entries of all processes are kept, and whatever is wrong with it costs time alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rematch.cache import RecordFolder, RecordStore, cache_folder
from rematch.records import from_json


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


@pytest.mark.skipif(os.name != "posix", reason="needs the permissions of POSIX")
def test_folders_are_private_whatever_made_them_first(folder: Path) -> None:
    RecordFolder("plans", decode=lambda data: data).put("key", 3)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "plans")] == [0o700, 0o700]


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


# Records in files of their own


def records(most_bytes: int = 10_000) -> RecordFolder[Cost]:
    return RecordFolder("many", decode=lambda data: from_json(Cost, data), most_bytes=most_bytes)


def test_a_folder_keeps_records_by_any_key(folder: Path) -> None:
    for number, key in enumerate(("a", "../../b", "c" * 5000, "\ud800")):
        records().put(key, Cost(float(number)), label=f"number {number}")
        assert records().get(key) == Cost(float(number))
    assert {path.parent for path in folder.rglob("*.entry")} == {folder / "many"}
    assert (folder / "many").stat().st_mode & 0o077 == 0
    assert sorted(entry.label for entry in records().entries()) == [f"number {number}" for number in range(4)]
    records().delete("a")
    assert records().get("a") is None
    assert len(records().entries()) == 3


def test_what_nobody_used_for_longest_makes_room(folder: Path) -> None:
    large = Cost(1.0, tuple(range(400)))
    for number in range(4):
        records().put(str(number), large)
        for age, path in enumerate(sorted((folder / "many").iterdir(), key=lambda path: -path.stat().st_mtime)):
            os.utime(path, (1e9 - age, 1e9 - age))
    assert records().get("0") == large  # used now
    records().put("5", large)
    held = sum(path.stat().st_size for path in (folder / "many").iterdir())
    records(held).put("6", large)
    assert [records().get(str(number)) is not None for number in (0, 1, 5, 6)] == [True, False, True, True]
    records(100).put("7", large)
    assert records().get("7") is None, "too large for the whole folder"
    assert records().get("6") == large


def test_what_a_killed_process_left_goes_when_it_is_old(folder: Path) -> None:
    records().put("a", Cost(1.0))
    old, new, other = (folder / "many" / name for name in (".1.partial", ".2.partial", "notes.txt"))
    for path in (old, new, other):
        path.write_text("half a rec")
    os.utime(old, (1e9, 1e9))
    records().put("b", Cost(1.0))
    assert [path.exists() for path in (old, new, other)] == [False, True, True]


def test_a_file_of_another_user_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records().put("a", Cost(1.0))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert records().get("a") is None
    assert records().entries()
