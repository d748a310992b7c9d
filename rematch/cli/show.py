"""`rematch show` and `generate`: graphs and plans in words and pictures, and graphs to try things with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rematch.cli.console import app, say
from rematch.cli.inputs import Plain, load_graph, noted, parse_pairs
from rematch.cli.solve import checked
from rematch.errors import FormatError, RematchError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from rematch.graph import Graph, Schedule
    from rematch.planning.plan import Plan


def _complete_family(incomplete: str) -> list[str]:
    from rematch.graph.generators import FAMILIES

    return [name for name in FAMILIES if name.startswith(incomplete)]


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
            drawn = graph_of(plan, file, graph, plain)
            _draw(drawn, plan.schedule, plan.figures.budget_bytes, dot, plot)
        say(str(plan))
    else:
        loaded = noted(graph_from_json(data, str(file), plain=plain), file)
        _draw(loaded, None, None, dot, plot)
        say(describe_graph(loaded))


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
        say("\n\n".join(_describe_family(name, make) for name, make in FAMILIES.items()))
        return
    make = FAMILIES.get(family.replace("-", "_"))
    if make is None:
        raise RematchError(unknown_name("family", family, list(FAMILIES)))
    if output is not None:
        require_writable(output)
    made = make(**_parse_parameters(family, make, parameters or []))
    if output is not None:
        save_graph(made, output)
    say(describe_graph(made))


def graph_of(plan: Plan, plan_path: Path, graph_path: Path | None, plain: bool) -> Graph:
    """The graph that the plan of a file is drawn with, if it is the plan's own."""
    if graph_path is None:
        raise FormatError(f"{plan_path} is a plan; to draw it, give its graph too: --graph FILE")
    graph = load_graph(graph_path, plain)
    checked(plan, plan_path, graph, graph_path)
    return graph


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


def _parse_parameters(family: str, make: Callable[..., Graph], pairs: list[str]) -> dict[str, Any]:
    from typing import get_type_hints

    kinds = {name: kind for name, kind in get_type_hints(make).items() if name != "return"}
    return parse_pairs(pairs, f"parameter of {family!r}", kinds)


def _describe_family(name: str, make: Callable[..., Graph]) -> str:
    """The family's docstring, with the defaults of its parameters where it explains them."""
    import inspect

    text = inspect.getdoc(make) or ""
    for parameter in inspect.signature(make).parameters.values():
        text = text.replace(f"\n{parameter.name}: ", f"\n{parameter.name}={parameter.default}  ")
    return f"{name}\n" + "\n".join(f"    {line}".rstrip() for line in text.splitlines())
