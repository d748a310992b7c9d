"""Compiled code is kept where it can be written, even if that is neither the package nor the user's cache."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numba
import pytest

from rematch import compilation


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Only `tmp_path` and what is inside can be written."""
    for name in ("NUMBA_CACHE_DIR", "REMATCH_CACHE"):
        monkeypatch.setenv(name, "")  # remembered, so that what the test sets does not stay
        monkeypatch.delenv(name)
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real = os.access
    inside = str(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).startswith(inside) and real(path, mode))
    return tmp_path


def test_nothing_is_changed_where_numba_can_help_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    compilation.choose_cache_folder()
    assert "NUMBA_CACHE_DIR" not in os.environ


def test_a_private_folder_among_temporary_files_is_the_last_resort(nowhere: Path) -> None:
    compilation.choose_cache_folder()
    chosen = Path(os.environ["NUMBA_CACHE_DIR"])
    assert chosen.parent == nowhere
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700


def test_a_folder_that_others_can_write_is_not_trusted(nowhere: Path) -> None:
    planted = nowhere / f"rematch-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    compilation.choose_cache_folder()
    assert Path(os.environ["NUMBA_CACHE_DIR"]) != planted


def test_the_folder_of_rematch_comes_first(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMATCH_CACHE", str(nowhere / "cache"))
    compilation.choose_cache_folder()
    assert os.environ["NUMBA_CACHE_DIR"] == str(nowhere / "cache" / "compiled")


def test_code_compiles_into_the_chosen_folder(tmp_path: Path) -> None:
    """A function whose file cannot be written beside is cached where the variable says."""
    code = """
import os, sys, tempfile
from rematch import compilation
compilation._is_writable = lambda folder: False
tempfile.tempdir = sys.argv[1]
import rematch.graph
assert os.environ["NUMBA_CACHE_DIR"].startswith(sys.argv[1])
from rematch.graph.kernels import sort_first
import numpy
numbers = numpy.array([3, 1, 2], dtype=numpy.int32)
sort_first(numbers, 3)
assert numbers.tolist() == [1, 2, 3]
"""
    environment = {key: entry for key, entry in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "REMATCH_CACHE")}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    assert list(tmp_path.rglob("*.nbi"))
