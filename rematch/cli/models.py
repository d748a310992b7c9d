"""`rematch plan`, `rematch memory` and `rematch pareto`: plans for a model that a function makes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rematch.cli.console import app, say
from rematch.cli.inputs import complete_solver, import_file, load_graph, make_solver, solver_options
from rematch.errors import CaptureError, RematchError, unknown_name

if TYPE_CHECKING:
    from rematch.foresight.answer import Answer

_FORM = "write it as package.module:function or file.py:function"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A function, as package.module:function or file.py:function. It returns the module and a sample, and "
        "perhaps the loss.",
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


class _Made(NamedTuple):
    """What the user's function returned."""

    model: Any
    sample: Any
    loss: Any = None


@app.command()
def plan(
    model: ModelName,
    budget: Annotated[str, typer.Option(help='Memory limit: "80%" of the peak, "8GiB", bytes, or "auto".')],
    device: DeviceName = None,
    engine: Annotated[str, typer.Option(help="Who runs the plan: auto, tape, replay or compiled.")] = "auto",
    solver: SolverName = "",
    time_limit: Annotated[float, typer.Option(help="Search for at most this many seconds.")] = 60.0,
    option: Option = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Plan anew, whatever earlier runs found.")] = False,
    json_output: Json = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN", help="Save the plan here.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="HTML", help="Write a page about the plan here.")] = None,
) -> None:
    """Plan the training of MODEL within a memory budget: rematch plan train.py:make_model --budget 8GiB"""
    from rematch.files import require_writable
    from rematch.solvers import DEFAULT_SOLVER

    for file in (output, report):
        if file is not None:
            require_writable(file)
    options = solver_options(solver or DEFAULT_SOLVER, option or [])
    made = _make(model)
    with _errors_of(model):
        from rematch.api import plan as plan_model

        found = plan_model(
            made.model,
            made.sample,
            loss=made.loss,
            budget=budget,
            device=device,
            engine=engine,
            solver=solver or DEFAULT_SOLVER,
            time_limit=time_limit,
            cache=not no_cache,
            **options,
        )
    if output is not None:
        found.save(output)
    if report is not None:
        found.report(report)
    say(json.dumps(_plan_data(found), indent=2) if json_output else str(found))


def _plan_data(found: Any) -> dict[str, Any]:
    from rematch.cli.solve import figures_data

    return {**figures_data(found.figures), "engine": found.engine, "notes": list(found.notes)}


@app.command()
def memory(model: ModelName, device: DeviceName = None, json_output: Json = False, plot: Picture = None) -> None:
    """Show the peak of plain training of MODEL, and what it is made of, without running it."""
    _require_picture(plot)
    made = _make(model)
    with _errors_of(model):
        from rematch.foresight.memory import memory as ask

        answer = ask(made.model, made.sample, loss=made.loss, device=device)
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
    json_output: Json = False,
    plot: Picture = None,
) -> None:
    """Show the extra time that smaller and smaller budgets take, with a bound for each."""
    from rematch.solvers import DEFAULT_SOLVER

    _require_picture(plot)
    chosen = make_solver(solver or DEFAULT_SOLVER, option or [])
    if ":" in what and not Path(what).exists():
        made = _make(what)
        with _errors_of(what):
            from rematch.foresight.tradeoff import pareto as ask

            answer = ask(
                made.model,
                made.sample,
                loss=made.loss,
                budgets=budgets,
                device=device,
                solver=chosen,
                time_limit=time_limit,
            )
    else:
        if device is not None:
            raise RematchError("--device is for models; the costs of a graph file are those that it has")
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


def _make(name: str) -> _Made:
    """Call the function of this name and take apart what it returns."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else PyTorch remarks that it cannot count older memory
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function:
        raise RematchError(f"{name!r} names no function; {_FORM}")
    module = _imported(where)
    make = getattr(module, function, None)
    if not callable(make):
        public = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise RematchError(unknown_name(f"function of {where}", function, public))
    with _errors_of(name):
        returned = make()
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        said = f"{len(returned)} things" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise CaptureError(f"{name} returned {said}; it should return (module, sample) or (module, sample, loss)")
    return _Made(*returned)


def _imported(where: str) -> Any:
    from importlib import import_module

    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise RematchError(f"there is no file {where}; {_FORM}")
        sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script, so that it finds its neighbours
        return import_file(path, f"rematch_model_{path.stem}", f"{where} cannot be loaded")
    sys.path.insert(0, os.getcwd())
    with _errors_of(where):
        return import_module(where)


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Errors of the user's own code are one line that says whose they are."""
    try:
        yield
    except RematchError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise CaptureError(f"{name} failed: {type(error).__name__}: {said}") from error
