"""`import rematch` and `rematch --help` load nothing heavy; every public name is found all the same."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rematch

HEAVY = {"numba", "llvmlite", "highspy", "matplotlib", "torch", "scipy", "networkx", "ortools"}


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running `code`."""
    report = "import sys, json; print('\\n' + json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}


def test_importing_rematch_loads_not_even_numpy() -> None:
    assert not modules_after("import rematch") & (HEAVY | {"numpy", "typer", "rich"})


def test_help_loads_nothing_heavy() -> None:
    code = "from rematch.cli import app\ntry: app(['solve', '--help'])\nexcept SystemExit: pass"
    assert not modules_after(code) & (HEAVY | {"numpy"})


@pytest.mark.parametrize("room", ["rematch.graph", "rematch.solvers", "rematch.planning.plan", "rematch.report.text"])
def test_rooms_load_no_solver_library(room: str) -> None:
    assert not modules_after(f"import {room}") & HEAVY


@pytest.mark.parametrize(
    ("room", "may_import"),
    [
        ("graph", {"graph", "errors", "files", "units"}),
        ("solvers", {"solvers", "graph", "errors", "units"}),
    ],
)
def test_layers_point_one_way(room: str, may_import: set[str]) -> None:
    for path in sorted((Path(rematch.__file__).parent / room).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        ours = {module.split(".")[1] for module in modules if module.startswith("rematch.")}
        assert ours <= may_import, path


def test_every_public_name_is_found() -> None:
    for name in rematch._HOME:
        assert getattr(rematch, name).__name__ == name or name == "OnProgress"
        assert name in dir(rematch)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(rematch.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == rematch._HOME


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="rematerialise"):
        _ = rematch.rematerialise
