"""The command line: `rematch solve graph.json --budget 50%`.

Everything heavy is imported inside the commands, so that `rematch --help` answers at once. What a user can get wrong
becomes one line on standard error and exit status 2; a search without a schedule is exit status 1. Results are saved
before they are printed, so that nothing that happens to standard output loses them.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any, NoReturn

import typer

from rematch import __version__
from rematch.cli import (  # which add their commands
    cache as cache,
    health as health,
    link as link,
    models as models,
    report as report,
    show as show,
    solve as solve,
)
from rematch.cli.console import app
from rematch.signals import ends_process


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


def main() -> None:
    """The `rematch` script."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # they are None where they were closed
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without bars shows "?" instead
    signal.signal(signal.SIGTERM, _terminate)
    app(prog_name="rematch")


@ends_process
def _terminate(number: int, frame: Any) -> NoReturn:
    """Leave through `finally`, so that nothing half-written stays behind."""
    sys.exit(128 + number)
