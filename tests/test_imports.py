"""What each part of rematch may import, what loading it costs, and the public names."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

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


# What each package or module may import from rematch; the longest name that fits a module is its rule. Imports inside
# functions and for type checkers count too, except that a Plan may load the report that prints it.
BASE = {"errors", "units"}
MAY_IMPORT = {
    "rematch": {"rematch", "api", "errors", "foresight", "graph", "planning.plan", "solvers"},
    "errors": set(),
    "units": set(),
    "signals": set(),
    "compilation": set(),
    "cache": {"errors", "files", "records"},
    "files": {"errors"},
    "records": {"errors"},
    "graph": {*BASE, "compilation", "files", "graph", "records"},
    "solvers": {*BASE, "graph", "signals", "solvers"},
    "capture": {*BASE, "cache", "capture", "graph"},
    "execute": {*BASE, "capture", "execute", "graph"},
    "execute.compiled": {*BASE, "rematch", "cache", "capture", "execute", "graph", "planning", "records"},
    "execute.ranks": {*BASE, "execute", "planning.plan"},
    "execute.runner": {*BASE, "capture", "execute", "graph", "planning", "report.progress", "solvers.base"},
    "execute.earlier_plans": {*BASE, "capture", "execute", "graph", "planning", "solvers.base"},
    "execute.refusals": {*BASE, "capture", "planning.settings"},
    "execute.choice": {"capture", "execute", "graph", "planning.settings"},
    "execute.routes": {"capture", "execute", "planning"},
    "execute.tape.stored": {*BASE, "execute", "records"},
    "planning": {*BASE, "capture", "files", "graph", "planning", "records", "report.progress", "signals", "solvers"},
    "planning.plan_cache": {*BASE, "cache", "capture", "graph", "planning", "records", "solvers.base"},
    "planning.fingerprint": {"rematch", "capture"},
    "planning.budget": {*BASE, "graph"},
    "planning.plan": {*BASE, "files", "graph", "records", "solvers.base", "report.page", "report.plot", "report.text"},
    "report": {*BASE, "files", "graph", "planning.plan", "report", "solvers"},
    "report.page": {*BASE, "rematch", "files", "graph", "planning.plan", "report", "solvers.base"},
    "report.figure": {*BASE, "files"},
    "report.progress": {*BASE, "solvers.base"},
    "api": {*BASE, "capture", "execute", "graph", "planning", "solvers"},
    "integrations": {*BASE, "api", "execute.module", "integrations"},
    "foresight": {*BASE, "api", "capture", "foresight", "graph", "planning", "records", "report", "solvers"},
    "trial": {"api", "capture"},
    "demo": {*BASE, "api", "trial"},
    "doctor": {*BASE, "rematch", "api", "cache", "graph", "solvers", "trial"},
    "warmup": {"graph", "solvers"},
    "cli": {
        *BASE,
        "rematch",
        "cache",
        "cli",
        "demo",
        "doctor",
        "files",
        "graph",
        "planning",
        "records",
        "report",
        "signals",
        "solvers",
    },
    "cli.link": {*BASE, "capture.link", "cli", "files", "graph", "planning.budget", "report.text"},
    "cli.models": {
        *BASE,
        "api",
        "capture.devices",
        "cli",
        "files",
        "foresight",
        "planning",
        "report.figure",
        "solvers",
    },
    "cli.report": {*BASE, "cli", "files", "foresight", "graph", "planning", "solvers"},
    "__main__": {"cli"},
}
# Inside solvers: the contract knows no method, what methods share knows no method but the default ones, and a method
# knows the default ones and what they share. Exceptions name who uses what.
CONTRACT = {"base", "registry", "incumbent"}
SHARED = {*CONTRACT, "common", "default", "exhaustive", "minimum", "noremat"}
SOLVERS_MAY_IMPORT = {
    "__init__": CONTRACT,
    "base": {"registry"},
    "registry": set(),
    "incumbent": {"base"},
    "common": {*CONTRACT, "common", "checkpoints"},
    "default": {*SHARED, "transfers"},  # which `auto` asks where a graph has a link
    "max_batch": {*CONTRACT, "minimum"},
    "poet": {*SHARED, "checkmate", "transfers"},
    "rotor": {*SHARED, "rotor", "checkpoints"},
    "feng_huang": {*SHARED, "feng_huang", "checkpoints"},
    "hiremate": {*SHARED, "hiremate", "checkpoints"},
}


def test_every_module_imports_only_what_its_layer_may() -> None:
    for module, path in rematch_modules().items():
        allowed = MAY_IMPORT[longest_prefix(module, MAY_IMPORT)]
        for imported in imported_modules(path):
            assert any(is_inside(imported, layer) for layer in allowed), f"{module} imports {imported}"


def test_every_solver_imports_only_the_contract_and_what_is_shared() -> None:
    for module, path in rematch_modules().items():
        if is_inside(module, "solvers"):
            room = [*module.split("."), "__init__"][1]
            allowed = SOLVERS_MAY_IMPORT.get(room, {*SHARED, room})
            for imported in imported_modules(path):
                if is_inside(imported, "solvers"):
                    assert imported.split(".")[1] in allowed, f"{module} imports {imported}"


def test_modules_can_be_loaded_in_some_order() -> None:
    """No cycle among imports that happen when a module is loaded."""
    modules = rematch_modules()
    loads = {
        module: {found for found in imported_modules(path, when_loaded=True) if found in modules and found != module}
        for module, path in modules.items()
    }
    TopologicalSorter(loads).prepare()  # raises CycleError, which names the cycle


def rematch_modules() -> dict[str, Path]:
    """Every module of rematch, named without the leading `rematch.`, with its file."""
    root = Path(rematch.__file__).parent
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "rematch"] = path
    return modules


def imported_modules(path: Path, *, when_loaded: bool = False) -> Iterator[str]:
    """What a file imports from rematch, without the leading `rematch.`; `when_loaded`: only at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if when_loaded else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "rematch":
            yield from ("rematch" if alias.name.startswith("__") else alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rematch."):
            yield (node.module or "").removeprefix("rematch.")
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("rematch") for alias in node.names), f"{path}: use from ... import"


def is_inside(module: str, layer: str) -> bool:
    return module == layer or module.startswith(f"{layer}.")


def longest_prefix(module: str, rules: Iterable[str]) -> str:
    fitting = [rule for rule in rules if is_inside(module, rule)]
    assert fitting, f"no rule says what {module} may import"
    return max(fitting, key=len)


PUBLIC = {
    "BudgetError",
    "BudgetInfeasible",
    "CaptureError",
    "Plan",
    "RematchError",
    "ScheduleError",
    "apply",
    "graph",
    "max_batch",
    "memory",
    "min_budget",
    "pareto",
    "plan",
    "plans_of",
    "remat",
    "solvers",
    "trace",
}


def test_the_public_names_are_found() -> None:
    for name in PUBLIC:
        assert getattr(rematch, name).__name__.removeprefix("rematch.") == name
    hidden = {"TYPE_CHECKING", "Any", "annotations", "import_module"}
    loaded = {name for name in vars(rematch) if isinstance(getattr(rematch, name), ModuleType)}
    assert {name for name in dir(rematch) if not name.startswith("_")} - hidden - loaded == PUBLIC - loaded


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(rematch.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == rematch._LAZY


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="rematerialise"):
        _ = rematch.rematerialise
