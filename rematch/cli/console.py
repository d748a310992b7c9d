"""What every command needs: the group of commands, its errors as one line, and printing that cannot harm a terminal."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from rematch.errors import RematchError
from rematch.units import printable

_LONGEST_LINE = 2000  # of an error, before it is cut


class _OutputError(Exception):
    """Standard output takes no more: a closed pipe, a full disk."""


class OneLineErrors(TyperGroup):
    """A command group whose errors, ours and those of usage, are one line on standard error and exit status 2."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except RematchError as error:
            exit_with(2, str(error))
        except typer.TyperException as error:
            said = error.format_message().rstrip(".")
            if not said:  # `rematch` alone: the help is printed already
                sys.exit(0)
            exit_with(2, f"{said}; see rematch --help")
        except _OutputError as error:
            _drop_output()
            if isinstance(error.__cause__, BrokenPipeError):  # the reader, such as `head`, has seen enough
                sys.exit(128 + signal.SIGPIPE)
            exit_with(2, f"cannot write to standard output: {error}")
        sys.exit(code or 0)


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train inside a memory budget: solve for the recomputation schedule instead of guessing it.",
)


def _drop_output() -> None:
    """Forget what standard output has not taken, or Python would try again, and complain, as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print lines in which file names and the like may not act on the terminal."""
    try:
        typer.echo("\n".join(printable(line) for line in text.split("\n")))
        sys.stdout.flush()
    except OSError as error:
        raise _OutputError((error.strerror or str(error)).lower()) from error


def warn(text: str) -> None:
    with suppress(OSError):  # nobody reads standard error
        typer.echo(f"rematch: {text}", err=True)


def exit_with(status: int, text: str) -> NoReturn:
    lines = [printable(line, _LONGEST_LINE) for line in text.split("\n")]
    warn("\n".join(lines))
    sys.exit(status)
