"""The command line: `rematch solve graph.json --budget 50%`.

Everything heavy is imported inside the commands, so that `rematch --help` answers at once. What a user can get wrong
becomes one line on standard error and exit status 2; a search without a schedule is exit status 1. Results are saved
before they are printed, so that nothing that happens to standard output loses them.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from rematch import __version__
from rematch.errors import FormatError, RematchError, ScheduleError, SolverError, unknown_name
from rematch.units import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rematch.graph import Graph, Schedule, Simulation
    from rematch.graph.formats import Loaded
    from rematch.planning.plan import Figures, Plan
    from rematch.solvers import Problem, Solution, Solver

# What `solve --json` prints, in this order; the names are those of `Figures`.
_JSON_KEYS = (
    "solver",
    "status",
    "budget_bytes",
    "peak_bytes",
    "baseline_peak_bytes",
    "seconds",
    "baseline_seconds",
    "overhead_pct",
    "lower_bound_pct",
    "gap_pct",
    "computes",
    "solve_seconds",
    "bound_scope",
    "infeasible_up_to_bytes",
    "feasible_from_bytes",
)


_LONGEST_LINE = 2000  # of an error, before it is cut


class _OutputError(Exception):
    """Standard output takes no more: a closed pipe, a full disk."""


class OneLineErrors(TyperGroup):
    """A command group whose errors, ours and those of usage, are one line on standard error and exit status 2."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except RematchError as error:
            _exit_with(2, str(error))
        except typer.TyperException as error:
            said = error.format_message().rstrip(".")
            if not said:  # `rematch` alone: the help is printed already
                sys.exit(0)
            _exit_with(2, f"{said}; see rematch --help")
        except _OutputError as error:
            _drop_output()
            if isinstance(error.__cause__, BrokenPipeError):  # the reader, such as `head`, has seen enough
                sys.exit(128 + signal.SIGPIPE)
            _exit_with(2, f"cannot write to standard output: {error}")
        sys.exit(code or 0)


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train inside a memory budget: solve for the recomputation schedule instead of guessing it.",
)

GraphFile = Annotated[Path, typer.Argument(metavar="GRAPH", help="A graph file; docs/formats.md describes both forms.")]
Plain = Annotated[
    bool, typer.Option("--plain", help="Ignore workspace, targets, held values and fixed memory, as the papers do.")
]
Plugin = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A Python file to run first; it registers your own solvers.")
]


def _complete_solver(incomplete: str) -> list[str]:
    from rematch.solvers import solver_names

    return [name for name in solver_names() if name.startswith(incomplete)]


def _complete_family(incomplete: str) -> list[str]:
    from rematch.graph.generators import FAMILIES

    return [name for name in FAMILIES if name.startswith(incomplete)]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rematch {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command. --version has already exited when this runs."""


@app.command()
def solve(
    graph: GraphFile,
    budget: Annotated[str, typer.Option(help='Memory limit: "80%" of the peak, "512MiB", "8GB" or bytes.')],
    solver: Annotated[
        str,
        typer.Option(
            help="A name from `rematch solvers`.", show_default="auto, the best one", autocompletion=_complete_solver
        ),
    ] = "",
    time_limit: Annotated[float, typer.Option(help="Search for at most this many seconds.")] = 60.0,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A solver option, such as seed=3. Repeatable.")
    ] = None,
    plain: Plain = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN", help="Save the plan here.")] = None,
    plugin: Plugin = None,
) -> None:
    """Find the fastest schedule of GRAPH within a memory budget, and a bound on how fast any can be.

    Ctrl-C or a SIGTERM ends the search with the best schedule so far.
    """
    from rematch.files import require_writable
    from rematch.graph import baseline, simulate
    from rematch.planning.budget import parse_budget, require_possible
    from rematch.planning.plan import Figures, Plan
    from rematch.report.text import describe_failure
    from rematch.solvers import DEFAULT_SOLVER, Problem

    if not 0 < time_limit < float("inf"):
        raise SolverError(f"--time-limit {time_limit:g} is not possible; give a number of seconds above 0, such as 60")
    if output is not None:
        require_writable(output)
    _run_plugin(plugin)
    chosen = _make_solver(solver or DEFAULT_SOLVER, option or [])
    loaded = _load_graph(graph, plain)
    budget_bytes = parse_budget(budget, simulate(loaded, baseline(loaded)).peak_bytes)
    require_possible(loaded, budget_bytes)
    problem = Problem(loaded, budget_bytes)
    solution = _solve(problem, chosen, time_limit)
    figures = Figures.of(problem, solution)
    plan = None if solution.schedule is None else Plan.from_solution(problem, solution)
    if plan is not None and output is not None:
        plan.save(output)
    if json_output:
        _say(_figures_json(figures))
    if plan is None:
        _exit_with(1, describe_failure(figures, loaded.name, time_limit))
    if not json_output:
        _say(str(plan))


@app.command()
def solvers(plugin: Plugin = None) -> None:
    """List the solvers, with the paper each implements and the graphs it accepts."""
    from rematch.solvers import DEFAULT_SOLVER, solver_class, solver_names

    _run_plugin(plugin)
    for name in solver_names():
        known = solver_class(name)
        _say(f"{name}{'  (the default)' if name == DEFAULT_SOLVER else ''}")
        _say(f"    paper    {known.paper or 'rematch itself'}")
        _say(f"    accepts  {known.requires or 'any graph'}")
        if options := _option_defaults(known):
            _say(f"    options  {options}")


@app.command()
def show(
    file: Annotated[
        Path, typer.Argument(metavar="GRAPH|PLAN", help="A graph file, or a plan from `rematch solve -o`.")
    ],
    graph: Annotated[Path | None, typer.Option(metavar="GRAPH", help="The plan's graph; drawing needs it.")] = None,
    dot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the graph in DOT, for Graphviz.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the schedule: .png, .svg or .pdf.")] = None,
    plain: Plain = False,
) -> None:
    """Describe a graph or a plan, and draw it."""
    from rematch.files import read_json, require_writable
    from rematch.graph.formats import graph_from_json
    from rematch.planning.plan import Plan, is_plan
    from rematch.report.figure import picture_format
    from rematch.report.text import describe_graph

    for picture in (dot, plot):
        if picture is not None:
            require_writable(picture)
    if plot is not None:
        picture_format(plot)
    data = read_json(file)
    if is_plan(data):
        plan = Plan.from_json(data, str(file))
        if dot is not None or plot is not None:
            drawn = _graph_of(plan, file, graph, plain)
            _draw(drawn, plan.schedule, plan.figures.budget_bytes, dot, plot)
        _say(str(plan))
    else:
        loaded = _noted(graph_from_json(data, str(file), plain=plain), file)
        _draw(loaded, None, None, dot, plot)
        _say(describe_graph(loaded))


@app.command()
def check(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan from `rematch solve -o`.")],
    graph: GraphFile,
    plain: Plain = False,
) -> None:
    """Check that PLAN belongs to GRAPH, is valid, and keeps its budget."""
    from rematch.planning.plan import Plan
    from rematch.units import extra_pct, format_bytes, format_extra

    known = Plan.load(plan)
    loaded = _load_graph(graph, plain)
    seen = _checked(known, plan, loaded, graph)
    extra = format_extra(extra_pct(seen.seconds, loaded.baseline_seconds))
    _say(
        f"{plan} holds for {graph}: peak {format_bytes(seen.peak_bytes)} within a budget of "
        f"{format_bytes(known.figures.budget_bytes)}, {extra} time"
    )


@app.command()
def generate(
    family: Annotated[
        str, typer.Argument(help="The kind of graph; leave it out to list all.", autocompletion=_complete_family)
    ] = "",
    parameters: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Its parameters, such as layers=24.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Save the graph here, as JSON.")
    ] = None,
) -> None:
    """Generate a graph: rematch generate gpt layers=24 -o gpt24.json"""
    from rematch.files import require_writable
    from rematch.graph.formats import save_graph
    from rematch.graph.generators import FAMILIES
    from rematch.report.text import describe_graph

    if not family:
        _say("\n\n".join(_describe_family(name, make) for name, make in FAMILIES.items()))
        return
    make = FAMILIES.get(family.replace("-", "_"))
    if make is None:
        raise RematchError(unknown_name("family", family, list(FAMILIES)))
    if output is not None:
        require_writable(output)
    made = make(**_parse_parameters(family, make, parameters or []))
    if output is not None:
        save_graph(made, output)
    _say(describe_graph(made))


@app.command()
def demo() -> None:
    """Train a small GPT in half its memory, side by side with plain training."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else PyTorch remarks that it cannot count older memory
    from rematch.demo import run_demo

    if not run_demo(_say):
        _exit_with(1, "the demo should have shown equal training within the budget; please report this")


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip the self-test, which takes up to a minute.")] = False,
) -> None:
    """Show versions, solvers and devices, and check that solving and training work here."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from rematch.doctor import run_doctor

    if not run_doctor(_say, self_test=not quick):
        _exit_with(1, "something does not work here; the lines marked FAILED say what")


def main() -> None:
    """The `rematch` script."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # they are None where they were closed
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without bars shows "?" instead
    signal.signal(signal.SIGTERM, _terminate)
    app(prog_name="rematch")


def _terminate(number: int, frame: Any) -> NoReturn:
    """Leave through `finally`, so that nothing half-written stays behind."""
    sys.exit(128 + number)


def _drop_output() -> None:
    """Forget what standard output has not taken, or Python would try again, and complain, as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    """Print lines in which file names and the like may not act on the terminal."""
    try:
        typer.echo("\n".join(printable(line) for line in text.split("\n")))
        sys.stdout.flush()
    except OSError as error:
        raise _OutputError((error.strerror or str(error)).lower()) from error


def _warn(text: str) -> None:
    with suppress(OSError):  # nobody reads standard error
        typer.echo(f"rematch: {text}", err=True)


def _exit_with(status: int, text: str) -> NoReturn:
    lines = [printable(line, _LONGEST_LINE) for line in text.split("\n")]
    _warn("\n".join(lines))
    sys.exit(status)


def _solve(problem: Problem, solver: Solver, time_limit: float) -> Solution:
    from rematch.report.progress import progress_reporter
    from rematch.solvers import solve

    stop_signals = (signal.SIGINT, signal.SIGTERM)
    with progress_reporter(problem.graph.baseline_seconds) as on_progress:
        try:
            return solve(problem, solver, time_limit=time_limit, on_progress=on_progress, stop_signals=stop_signals)
        except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())
            raise SolverError(
                f"solver {solver.name!r} failed ({type(error).__name__}: {said}); check its options"
            ) from error


def _load_graph(path: Path, plain: bool) -> Graph:
    from rematch.graph.formats import load_graph

    return _noted(load_graph(path, plain=plain), path)


def _noted(loaded: Loaded, path: Path) -> Graph:
    """The graph alone, once standard error has been told what was assumed on the way in."""
    for note in loaded.notes:
        _warn(printable(f"{path}: {note}"))
    return loaded.graph


def _run_plugin(path: Path | None) -> None:
    if path is None:
        return
    import importlib.util

    name = f"rematch_plugin_{path.stem}"  # a name of its own: a plug-in may be called numpy.py
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SolverError(f"plug-in {path} is not a Python file; its name should end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import would, so that dataclasses find their module
    try:
        spec.loader.exec_module(module)
    except RematchError:
        raise
    except Exception as error:
        raise SolverError(f"plug-in {path} cannot be loaded: {type(error).__name__}: {error}") from error


def _make_solver(name: str, pairs: list[str]) -> Solver:
    from typing import get_type_hints

    from rematch.solvers import make_solver, solver_class

    known = solver_class(name)
    return make_solver(name, **_parse_pairs(pairs, f"option of solver {name!r}", get_type_hints(known)))


def _parse_parameters(family: str, make: Callable[..., Graph], pairs: list[str]) -> dict[str, Any]:
    from typing import get_type_hints

    kinds = {name: kind for name, kind in get_type_hints(make).items() if name != "return"}
    return _parse_pairs(pairs, f"parameter of {family!r}", kinds)


def _parse_pairs(pairs: list[str], what: str, kinds: dict[str, Any]) -> dict[str, Any]:
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


def _option_defaults(solver: type[Solver]) -> str:
    from dataclasses import fields, is_dataclass

    return ", ".join(f"{field.name}={field.default}" for field in fields(solver)) if is_dataclass(solver) else ""


def _describe_family(name: str, make: Callable[..., Graph]) -> str:
    """The family's docstring, with the defaults of its parameters where it explains them."""
    import inspect

    text = inspect.getdoc(make) or ""
    for parameter in inspect.signature(make).parameters.values():
        text = text.replace(f"\n{parameter.name}: ", f"\n{parameter.name}={parameter.default}  ")
    return f"{name}\n" + "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def _graph_of(plan: Plan, plan_path: Path, graph_path: Path | None, plain: bool) -> Graph:
    if graph_path is None:
        raise FormatError(f"{plan_path} is a plan; to draw it, give its graph too: --graph FILE")
    graph = _load_graph(graph_path, plain)
    _checked(plan, plan_path, graph, graph_path)
    return graph


def _checked(plan: Plan, plan_path: Path, graph: Graph, graph_path: Path) -> Simulation:
    try:
        return plan.check(graph)
    except ScheduleError as error:
        hint = "; a plan made with --plain needs --plain here" if plan.graph_fingerprint != graph.fingerprint else ""
        raise ScheduleError(f"{plan_path} does not hold for {graph_path}: {error}{hint}") from error


def _draw(
    graph: Graph, schedule: Schedule | None, budget_bytes: int | None, dot: Path | None, plot: Path | None
) -> None:
    if dot is not None:
        from rematch.files import write_text
        from rematch.graph.dot import to_dot

        write_text(dot, to_dot(graph, schedule))
    if plot is not None:
        from rematch.report.plot import plot_schedule

        plot_schedule(graph, schedule, plot, budget_bytes=budget_bytes)


def _figures_json(figures: Figures) -> str:
    import json

    from rematch.records import to_json

    return json.dumps({key: to_json(getattr(figures, key)) for key in _JSON_KEYS}, indent=2)
