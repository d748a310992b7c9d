"""What is built for a registry holds everything that a user needs, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**inherited, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution of the last commit, and the wheel that is built from it."""
    pytest.importorskip("build", reason="needs build: pip install '.[release]'")
    folder = tmp_path_factory.mktemp("built")
    run("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", "source", cwd=folder)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, "source", cwd=folder)
    return folder


@pytest.mark.slow
def test_a_registry_would_take_it(built: Path) -> None:
    pytest.importorskip("twine", reason="needs twine: pip install '.[release]'")
    run(sys.executable, "-m", "twine", "check", "--strict", *built.glob("rematch-*"), cwd=built)


@pytest.mark.slow
def test_the_source_can_be_tested_and_the_wheel_holds_the_package_alone(built: Path) -> None:
    (source,) = built.glob("rematch-*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kept = {"LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "mkdocs.yml", "docs/formats.md", "examples"}
    assert kept | {"tests/test_package.py", "tests/conftest.py", "benchmarks/fuzz.py"} <= names
    (wheel,) = built.glob("rematch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in held} == {"rematch"}
    assert "rematch/py.typed" in held
    assert [name for name in held if name.endswith("licenses/LICENSE")]


@pytest.mark.slow
def test_a_wheel_solves_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("rematch-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    run(binaries / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (packages,) = (tmp_path / "env").rglob("site-packages")
    # The libraries that rematch needs are those of the tests; rematch itself is not found there, as it is in place.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    where = run(binaries / "python", "-c", "import rematch; print(rematch.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    listed = run(binaries / "python", "-c", "import torch; print(torch.compiler.list_backends())", cwd=tmp_path)
    assert "'rematch'" in listed  # for torch.compile(backend="rematch"), without an import of rematch
    run(binaries / "rematch", "generate", "chain", "layers=4", "-o", "g.json", cwd=tmp_path)
    run(binaries / "rematch", "solve", "g.json", "--budget", "90%", "-o", "p.json", cwd=tmp_path)
    assert "holds for g.json" in run(binaries / "rematch", "check", "p.json", "g.json", cwd=tmp_path)
    assert list(packages.glob("rematch/**/*.nbi")), "compiled code is not kept beside the sources"
