"""`rematch link`: a graph with a link to host memory, of a given speed or of a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rematch.cli.console import app, say
from rematch.cli.inputs import GraphFile, load_graph
from rematch.errors import RematchError

if TYPE_CHECKING:
    from rematch.graph import Link


@app.command()
def link(
    graph: GraphFile,
    speed: Annotated[str, typer.Argument(help='How fast values move to host memory: "55GB/s", or a device: "h200".')],
    host: Annotated[str, typer.Option(help='How much host memory a schedule may use: "64GiB".')],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Save the linked graph here.")],
    back: Annotated[str, typer.Option(help="How fast they move back.", show_default="the same speed")] = "",
) -> None:
    """Give GRAPH a link to host memory: rematch link gpt.json 55GB/s --host 64GiB -o linked.json"""
    from dataclasses import replace

    from rematch.files import require_writable
    from rematch.graph.formats import save_graph
    from rematch.planning.budget import parse_size
    from rematch.report.text import describe_graph

    require_writable(output)
    linked = replace(load_graph(graph, plain=False), link=_link_of(speed, back, parse_size(host)))
    save_graph(linked, output)
    say(describe_graph(linked))


def _link_of(speed: str, back: str, host_bytes: int) -> Link:
    from rematch.graph import Link
    from rematch.planning.budget import parse_size

    if speed.endswith("/s"):
        out_speed, in_speed = (float(parse_size(text.removesuffix("/s"))) for text in (speed, back or speed))
        return Link(out_speed, in_speed, host_bytes)
    if back:
        raise RematchError(f"--back {back} goes with a speed; {speed!r} is not one (55GB/s), and devices have both")
    from rematch.capture.link import link_to

    return link_to(speed, host_bytes)
