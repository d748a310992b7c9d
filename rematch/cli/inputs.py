"""What commands read: graph files, solvers with their options, plug-ins, and KEY=VALUE."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rematch.cli.console import warn
from rematch.errors import RematchError, SolverError, unknown_name
from rematch.units import printable

if TYPE_CHECKING:
    from rematch.graph import Graph
    from rematch.graph.formats import Loaded
    from rematch.solvers import Solver

GraphFile = Annotated[Path, typer.Argument(metavar="GRAPH", help="A graph file; docs/formats.md describes both forms.")]
Plain = Annotated[
    bool, typer.Option("--plain", help="Ignore workspace, targets, held values and fixed memory, as the papers do.")
]
Plugin = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A Python file to run first; it registers your own solvers.")
]


def complete_solver(incomplete: str) -> list[str]:
    from rematch.solvers import solver_names

    return [name for name in solver_names() if name.startswith(incomplete)]


def load_graph(path: Path, plain: bool) -> Graph:
    from rematch.graph.formats import load_graph

    return noted(load_graph(path, plain=plain), path)


def noted(loaded: Loaded, path: Path) -> Graph:
    """The graph alone, once standard error has been told what was assumed on the way in."""
    for note in loaded.notes:
        warn(printable(f"{path}: {note}"))
    return loaded.graph


def run_plugin(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix != ".py":
        raise SolverError(f"plug-in {path} is not a Python file; its name should end in .py")
    import_file(path, f"rematch_plugin_{path.stem}", f"plug-in {path} cannot be loaded")


def import_file(path: Path, name: str, complaint: str) -> Any:
    """Run a Python file as a module of this name, which is not that of the file: that may be called numpy.py."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "there is a loader for every .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import would, so that dataclasses find their module
    try:
        spec.loader.exec_module(module)
    except RematchError:
        raise
    except Exception as error:
        raise SolverError(f"{complaint}: {type(error).__name__}: {error}") from error
    return module


def make_solver(name: str, pairs: list[str]) -> Solver:
    from rematch.solvers import make_solver

    return make_solver(name, **solver_options(name, pairs))


def solver_options(name: str, pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE as options of the solver of this name."""
    from dataclasses import fields, is_dataclass
    from typing import get_type_hints

    from rematch.solvers import solver_class

    known = solver_class(name)
    kinds = get_type_hints(known)
    names: list[str] = [field.name for field in fields(known)] if is_dataclass(known) else []
    return parse_pairs(pairs, f"option of solver {name!r}", {option: kinds[option] for option in names})


def parse_pairs(pairs: list[str], what: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """`["layers=3"]` as `{"layers": 3}`, each value of the kind that its name asks for."""
    import json

    from rematch.records import from_json

    parsed = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise RematchError(f"{what} {pair!r} is not of the form KEY=VALUE, such as {next(iter(kinds), 'seed')}=3")
        if name not in kinds:
            raise RematchError(unknown_name(what, name, list(kinds)))
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # no JSON, or a number of thousands of digits
            value = text
        parsed[name] = from_json(kinds[name], value, f"{what} {name!r}")
    return parsed
