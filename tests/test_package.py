"""The built wheel holds everything that a user needs, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_wheel_solves_from_an_empty_folder(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", source], check=True)
    subprocess.run([*build, tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("rematch-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"rematch"}
    assert (installed / "rematch" / "py.typed").exists()
    assert list(installed.glob("rematch-*.dist-info/licenses/LICENSE"))
    for args in (
        ["generate", "chain", "layers=4", "-o", "g.json"],
        ["solve", "g.json", "--budget", "90%", "--solver", "greedy"],
    ):
        run = subprocess.run(
            [sys.executable, "-m", "rematch", *args],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
    assert list(installed.rglob("*.nbi")), "the code that ran was not the wheel's"
