"""`rematch report`: one HTML page about a plan, or about the plan for a graph or a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rematch.cli.console import app, say
from rematch.cli.inputs import Plain, Plugin, make_solver, noted, run_plugin
from rematch.cli.models import (
    ChunkLoss,
    DeviceName,
    EngineName,
    NoCache,
    Offload,
    Option,
    SolverName,
    complete_model,
    is_model,
    plan_of_model,
)
from rematch.cli.show import graph_of
from rematch.cli.solve import plan_of_graph, require_time
from rematch.errors import RematchError

if TYPE_CHECKING:
    from rematch.planning.plan import Figures, Plan

_CURVE_SECONDS = 10.0  # for each budget of the curve


def _complete_file_or_model(incomplete: str) -> list[str]:
    from glob import escape, glob

    return [*sorted(glob(f"{escape(incomplete)}*.json")), *complete_model(incomplete)]


@app.command()
def report(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|GRAPH|MODEL",
            help="A plan or a graph file, or a function as `rematch plan` takes it.",
            autocompletion=_complete_file_or_model,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="HTML", help="Write the page here.")] = Path(
        "plan.html"
    ),
    budget: Annotated[str | None, typer.Option(help="For a graph or a model: the memory limit, such as 8GiB.")] = None,
    trade_off: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Draw the extra time of this many budgets too; 10 seconds each at most.",
        ),
    ] = 0,
    graph: Annotated[
        Path | None,
        typer.Option(metavar="GRAPH", help="The plan's graph: the page then tells which modules hold the memory."),
    ] = None,
    device: DeviceName = None,
    engine: EngineName = "auto",
    solver: SolverName = "",
    time_limit: Annotated[float, typer.Option(help="Search for at most this many seconds, for each budget.")] = 60.0,
    option: Option = None,
    chunk_loss: ChunkLoss = 1,
    offload: Offload = None,
    no_cache: NoCache = False,
    plain: Plain = False,
    plugin: Plugin = None,
) -> None:
    """Write one HTML page that needs nothing else: rematch report train.py:make_model --budget 8GiB

    It shows the memory over time, the schedule, where the extra time goes, and the proof.
    """
    from rematch.files import read_json, require_writable
    from rematch.graph.formats import graph_from_json
    from rematch.planning.plan import Plan, is_plan
    from rematch.solvers import DEFAULT_SOLVER

    require_writable(output)
    require_time(time_limit)
    run_plugin(plugin)
    told = True
    if is_model(what):
        chosen_options = {"cache": not no_cache, "chunk_loss": chunk_loss, "offload": offload or False}
        known = plan_of_model(what, _required(budget), device, engine, solver, time_limit, option, **chosen_options)
    elif is_plan(data := read_json(what)):
        if budget is not None:
            raise RematchError(f"{what} is a plan, which has its budget; --budget is for graphs and models")
        known, told = Plan.from_json(data, what), graph is not None
        if graph is not None:
            known = known.with_graph(graph_of(known, Path(what), graph, plain))
    else:
        loaded = noted(graph_from_json(data, what, plain=plain), Path(what))
        chosen = make_solver(solver or DEFAULT_SOLVER, option or [])
        known = plan_of_graph(loaded, _required(budget), chosen, time_limit)
    known.report(output, trade_off=_points(known, trade_off, solver, option, time_limit))
    say(f"{output} shows {what}" + ("" if told else "; with --graph it would tell more"))


def _required(budget: str | None) -> str:
    if budget is None:
        raise RematchError("a graph or a model needs --budget, such as --budget 60% or --budget 8GiB")
    return budget


def _points(plan: Plan, count: int, solver: str, option: list[str] | None, time_limit: float) -> tuple[Figures, ...]:
    """Figures at so many budgets, for the curve."""
    from rematch.foresight.tradeoff import pareto_of
    from rematch.solvers import DEFAULT_SOLVER

    if not count:
        return ()
    if plan.graph is None:
        raise RematchError("--trade-off searches the plan's graph; give it too: --graph FILE")
    chosen = make_solver(solver or DEFAULT_SOLVER, option or [])
    return pareto_of(plan.graph, count, solver=chosen, time_limit=min(time_limit, _CURVE_SECONDS)).points
