"""Samples of `make bench-fuzz`, which mutates graph and plan files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz import Fuzzer


def test_mutated_files_are_read_or_refused_in_words(tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path, seed=1)
    found = [fuzzer.try_one(number)[0] for number in range(600)]
    assert [text for text in found if not text.isidentifier()] == []
    assert {"read", "FormatError", "GraphError", "ScheduleError"} <= set(found)


def test_mutated_plans_are_refused_or_train_the_module_as_plain_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path / "costs"))
    fuzzer = Fuzzer(tmp_path, seed=1, applied=True)
    found = [fuzzer.try_one(number)[0] for number in range(40)]
    assert [text for text in found if not text.isidentifier()] == []
    assert {"read", "FormatError"} <= set(found)
