"""`rematch plan`, `rematch memory` and `rematch pareto`: plans for a model that a function makes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rematch.cli.console import app, say
from rematch.cli.inputs import (
    Plugin,
    complete_solver,
    import_file,
    load_graph,
    make_solver,
    run_plugin,
    solver_options,
)
from rematch.cli.solve import figures_data, require_time
from rematch.errors import CaptureError, RematchError, unknown_name

if TYPE_CHECKING:
    from rematch.foresight.answer import Answer
    from rematch.planning.plan import Plan

_FORM = "write it as package.module:function or file.py:function"
_KEEP = "A pattern of submodules or operators that are never recomputed. Repeatable."
_RECOMPUTE = "A pattern of submodules or operators that are always recomputed. Repeatable."
_CHECKPOINTS = "What becomes of regions under torch.utils.checkpoint in the model: respect or replace."
_MOST_FILES = 50  # that completion reads


def complete_model(incomplete: str) -> list[str]:
    """`file.py:function` for the functions of the files that begin so; nothing is run."""
    return [name for path in _python_files(incomplete) for name in _functions(path) if name.startswith(incomplete)]


def _python_files(incomplete: str) -> list[Path]:
    start = incomplete.partition(":")[0]
    folder = Path(start) if start.endswith("/") else Path(start).parent
    with suppress(OSError):
        return sorted(path for path in folder.glob("*.py") if str(path).startswith(start))[:_MOST_FILES]
    return []


def _functions(path: Path) -> list[str]:
    import ast

    with suppress(OSError, ValueError, SyntaxError, RecursionError):
        body = ast.parse(path.read_bytes()).body
        return [f"{path}:{node.name}" for node in body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    return []


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A function, as package.module:function or file.py:function. It returns the module and a sample, and "
        "perhaps the loss.",
        autocompletion=complete_model,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Picture = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: .png, .svg or .pdf.")]
Option = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A solver option, such as seed=3. Repeatable.")
]


def _complete_device(incomplete: str) -> list[str]:
    from rematch.capture.devices import known_devices

    return [name for name in known_devices() if name.startswith(incomplete)]


DeviceName = Annotated[
    str | None,
    typer.Option(help="A device that is not here, such as h200; costs are estimated.", autocompletion=_complete_device),
]
SolverName = Annotated[
    str,
    typer.Option(
        help="A name from `rematch solvers`.", show_default="auto, the best one", autocompletion=complete_solver
    ),
]


def _complete_engine(incomplete: str) -> list[str]:
    from rematch.planning.settings import ENGINES

    return [name for name in ENGINES if name.startswith(incomplete)]


EngineName = Annotated[
    str, typer.Option(help="Who runs the plan: auto, tape, replay or compiled.", autocompletion=_complete_engine)
]
ChunkLoss = Annotated[
    int, typer.Option(min=1, help="Run the head and its cross entropy in so many slices of the tokens.")
]
Offload = Annotated[str | None, typer.Option(help="How much host memory values may move to, such as 32GiB.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Plan anew, whatever earlier runs found.")]


class Made(NamedTuple):
    """What the user's function returned."""

    model: Any
    sample: Any
    loss: Any = None


@app.command()
def plan(
    model: ModelName,
    budget: Annotated[str, typer.Option(help='Memory limit: "80%" of the peak, "8GiB", bytes, or "auto".')],
    device: DeviceName = None,
    engine: EngineName = "auto",
    solver: SolverName = "",
    time_limit: Annotated[float, typer.Option(help="Search for at most this many seconds.")] = 60.0,
    option: Option = None,
    keep: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help=_KEEP)] = None,
    recompute: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help=_RECOMPUTE)] = None,
    checkpoints: Annotated[str | None, typer.Option(help=_CHECKPOINTS)] = None,
    chunk_loss: ChunkLoss = 1,
    offload: Offload = None,
    no_cache: NoCache = False,
    json_output: Json = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN", help="Save the plan here.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="HTML", help="Write a page about the plan here.")] = None,
    plugin: Plugin = None,
) -> None:
    """Plan the training of MODEL within a memory budget: rematch plan train.py:make_model --budget 8GiB"""
    from rematch.files import require_writable

    for file in (output, report):
        if file is not None:
            require_writable(file)
    require_time(time_limit)
    run_plugin(plugin)
    pins: dict[str, Any] = {"keep": keep or (), "recompute": recompute or ()}
    chosen: dict[str, Any] = {"checkpoints": checkpoints, "chunk_loss": chunk_loss, "cache": not no_cache, **pins}
    chosen["offload"] = offload or False
    found = plan_of_model(model, budget, device, engine, solver, time_limit, option, **chosen)
    if output is not None:
        found.save(output)
    if report is not None:
        found.report(report)
    say(json.dumps(_plan_data(found), indent=2) if json_output else str(found))


def plan_of_model(
    name: str,
    budget: str,
    device: str | None,
    engine: str,
    solver: str,
    time_limit: float,
    option: list[str] | None,
    **chosen: Any,
) -> Plan:
    """The plan for the model that the function of this name makes; `chosen` is what `rematch.plan` takes besides."""
    from rematch.solvers import DEFAULT_SOLVER

    options = solver_options(solver or DEFAULT_SOLVER, option or [])
    made = make_model(name)
    with errors_of(name):
        from rematch.api import plan

        return plan(
            made.model,
            made.sample,
            loss=made.loss,
            budget=budget,
            device=device,
            engine=engine,
            solver=solver or DEFAULT_SOLVER,
            time_limit=time_limit,
            **chosen,
            **options,
        )


def _plan_data(found: Any) -> dict[str, Any]:
    return {**figures_data(found.figures), "engine": found.engine, "notes": list(found.notes)}


@app.command()
def memory(
    model: ModelName,
    device: DeviceName = None,
    chunk_loss: ChunkLoss = 1,
    json_output: Json = False,
    plot: Picture = None,
) -> None:
    """Show the peak of plain training of MODEL, and what it is made of, without running it."""
    _require_picture(plot)
    made = make_model(model)
    with errors_of(model):
        from rematch.foresight.memory import memory as ask

        answer = ask(made.model, made.sample, loss=made.loss, device=device, chunk_loss=chunk_loss)
    _answer(answer, json_output, plot)


@app.command()
def pareto(
    what: Annotated[
        str, typer.Argument(metavar="GRAPH|MODEL", help="A graph file, or a function as `rematch plan` takes it.")
    ],
    budgets: Annotated[int, typer.Option(help="How many budgets to try.", min=2)] = 8,
    device: DeviceName = None,
    solver: SolverName = "",
    time_limit: Annotated[float, typer.Option(help="Search for at most this many seconds, for each budget.")] = 10.0,
    option: Option = None,
    chunk_loss: ChunkLoss = 1,
    offload: Offload = None,
    json_output: Json = False,
    plot: Picture = None,
    plugin: Plugin = None,
) -> None:
    """Show the extra time that smaller and smaller budgets take, with a bound for each."""
    from rematch.solvers import DEFAULT_SOLVER

    _require_picture(plot)
    require_time(time_limit)
    run_plugin(plugin)
    chosen = make_solver(solver or DEFAULT_SOLVER, option or [])
    if is_model(what):
        made = make_model(what)
        with errors_of(what):
            from rematch.foresight.tradeoff import pareto as ask

            how: dict[str, Any] = {"budgets": budgets, "device": device, "solver": chosen, "time_limit": time_limit}
            how |= {"chunk_loss": chunk_loss, "offload": offload or False}
            answer = ask(made.model, made.sample, loss=made.loss, **how)
    else:
        given = {"--device": device is not None, "--chunk-loss": chunk_loss != 1, "--offload": offload is not None}
        if option_given := next((name for name, is_given in given.items() if is_given), None):
            raise RematchError(f"{option_given} is for models; a graph file has its operators and their costs")
        graph = load_graph(Path(what), plain=False)
        from rematch.foresight.tradeoff import pareto_of

        answer = pareto_of(graph, budgets, solver=chosen, time_limit=time_limit)
    _answer(answer, json_output, plot)


def _require_picture(path: Path | None) -> None:
    from rematch.files import require_writable
    from rematch.report.figure import picture_format

    if path is not None:
        picture_format(path)
        require_writable(path)


def _answer(answer: Answer, json_output: bool, plot: Path | None) -> None:
    if plot is not None:
        answer.plot(plot)
    say(json.dumps(answer.to_data(), indent=2) if json_output else str(answer))


def is_model(text: str) -> bool:
    """Whether this names a function that makes a model, and not a file."""
    return ":" in text and not Path(text).exists()


def make_model(name: str) -> Made:
    """Call the function of this name and take apart what it returns."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else PyTorch remarks that it cannot count older memory
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        hint = "; for graph files there is `rematch solve`" if name.endswith(".json") else ""
        raise RematchError(f"{name!r} names no function; {_FORM}{hint}")
    module = _imported(where)
    make = getattr(module, function, None)
    if not callable(make):
        public = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise RematchError(unknown_name(f"function of {where}", function, public))
    with errors_of(name):
        returned = make()
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        said = f"{len(returned)} things" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise CaptureError(f"{name} returned {said}; it should return (module, sample) or (module, sample, loss)")
    return Made(*returned)


def _imported(where: str) -> Any:
    from importlib import import_module

    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise RematchError(f"there is no file {where}; {_FORM}")
        sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script, so that it finds its neighbours
        return import_file(path, f"rematch_model_{path.stem}", f"{where} cannot be loaded")
    sys.path.insert(0, os.getcwd())
    with errors_of(where):
        return import_module(where)


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Errors of the user's own code are one line that says whose they are."""
    try:
        yield
    except RematchError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise CaptureError(f"{name} failed: {type(error).__name__}: {said}") from error
