"""`rematch solve`, `rematch check` and `rematch solvers`: schedules for graph files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rematch.cli.console import app, exit_with, say
from rematch.cli.inputs import GraphFile, Plain, Plugin, complete_solver, load_graph, make_solver, run_plugin
from rematch.errors import ScheduleError, SolverError

if TYPE_CHECKING:
    from rematch.graph import Graph, Simulation
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


@app.command()
def solve(
    graph: GraphFile,
    budget: Annotated[str, typer.Option(help='Memory limit: "80%" of the peak, "512MiB", "8GB" or bytes.')],
    solver: Annotated[
        str,
        typer.Option(
            help="A name from `rematch solvers`.", show_default="auto, the best one", autocompletion=complete_solver
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
    from rematch.planning.plan import Figures, Plan
    from rematch.report.text import describe_failure
    from rematch.solvers import DEFAULT_SOLVER

    require_time(time_limit)
    if output is not None:
        require_writable(output)
    run_plugin(plugin)
    chosen = make_solver(solver or DEFAULT_SOLVER, option or [])
    loaded = load_graph(graph, plain)
    problem, solution = _searched(loaded, budget, chosen, time_limit)
    figures = Figures.of(problem, solution)
    plan = None if solution.schedule is None else Plan.from_solution(problem, solution)
    if plan is not None and output is not None:
        plan.save(output)
    if json_output:
        say(json.dumps(figures_data(figures), indent=2))
    if plan is None:
        exit_with(1, describe_failure(figures, loaded.name, time_limit))
    if not json_output:
        say(str(plan))


@app.command()
def check(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan from `rematch solve -o`.")],
    graph: GraphFile,
    plain: Plain = False,
) -> None:
    """Check that PLAN belongs to GRAPH, is valid, and keeps its budget."""
    from rematch.planning.plan import Moved, Plan
    from rematch.units import extra_pct, format_bytes, format_extra

    known = Plan.load(plan)
    loaded = load_graph(graph, plain)
    seen = checked(known, plan, loaded, graph)
    extra = format_extra(extra_pct(seen.seconds, loaded.baseline_seconds))
    moved = Moved.by(loaded, known.schedule, seen)
    say(
        f"{plan} holds for {graph}: peak {format_bytes(seen.peak_bytes)} within a budget of "
        f"{format_bytes(known.figures.budget_bytes)}, {extra} time{f', {moved}' if moved else ''}"
    )


@app.command()
def solvers(plugin: Plugin = None) -> None:
    """List the solvers, with the paper each implements and the graphs it accepts."""
    from rematch.solvers import DEFAULT_SOLVER, solver_class, solver_names

    run_plugin(plugin)
    for name in solver_names():
        known = solver_class(name)
        say(f"{name}{'  (the default)' if name == DEFAULT_SOLVER else ''}")
        say(f"    paper    {known.paper or 'rematch itself'}")
        say(f"    accepts  {known.requires or 'any graph'}")
        if options := _option_defaults(known):
            say(f"    options  {options}")


def require_time(time_limit: float) -> None:
    """Refuse a time limit that is none."""
    if not 0 < time_limit < float("inf"):
        raise SolverError(f"--time-limit {time_limit:g} is not possible; give a number of seconds above 0, such as 60")


def plan_of_graph(graph: Graph, budget: str, solver: Solver, time_limit: float) -> Plan:
    """The plan for a graph; without one, the process exits with status 1."""
    from rematch.planning.plan import Figures, Plan
    from rematch.report.text import describe_failure

    problem, solution = _searched(graph, budget, solver, time_limit)
    if solution.schedule is None:
        exit_with(1, describe_failure(Figures.of(problem, solution), graph.name, time_limit))
    return Plan.from_solution(problem, solution)


def _searched(graph: Graph, budget: str, solver: Solver, time_limit: float) -> tuple[Problem, Solution]:
    from rematch.graph import baseline, simulate
    from rematch.planning.budget import parse_budget, require_possible
    from rematch.solvers import Problem

    budget_bytes = parse_budget(budget, simulate(graph, baseline(graph)).peak_bytes)
    require_possible(graph, budget_bytes)
    problem = Problem(graph, budget_bytes)
    return problem, _solve(problem, solver, time_limit)


def _solve(problem: Problem, solver: Solver, time_limit: float) -> Solution:
    from rematch.report.progress import progress_reporter
    from rematch.solvers import solve

    with progress_reporter(problem.graph.baseline_seconds) as on_progress:
        try:
            return solve(problem, solver, time_limit=time_limit, on_progress=on_progress)
        except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())
            raise SolverError(
                f"solver {solver.name!r} failed ({type(error).__name__}: {said}); check its options"
            ) from error


def checked(plan: Plan, plan_path: Path, graph: Graph, graph_path: Path) -> Simulation:
    try:
        return plan.check(graph)
    except ScheduleError as error:
        hint = "; a plan made with --plain needs --plain here" if plan.graph_fingerprint != graph.fingerprint else ""
        raise ScheduleError(f"{plan_path} does not hold for {graph_path}: {error}{hint}") from error


def _option_defaults(solver: type[Solver]) -> str:
    from dataclasses import fields, is_dataclass

    return ", ".join(f"{field.name}={field.default}" for field in fields(solver)) if is_dataclass(solver) else ""


def figures_data(figures: Figures) -> dict[str, Any]:
    """What `--json` prints of the figures of a plan."""
    from rematch.records import to_json

    return {key: to_json(getattr(figures, key)) for key in _JSON_KEYS}
