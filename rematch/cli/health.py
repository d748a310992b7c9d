"""`rematch demo` and `rematch doctor`: does it work here?"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rematch.cli.console import app, exit_with, say


@app.command()
def demo() -> None:
    """Train a small GPT in half its memory, side by side with plain training."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else PyTorch remarks that it cannot count older memory
    from rematch.demo import run_demo

    if not run_demo(say):
        exit_with(1, "the demo should have shown equal training within the budget; please report this")


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip the self-test, which takes up to a minute.")] = False,
) -> None:
    """Show versions, solvers and devices, and check that solving and training work here."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from rematch.doctor import run_doctor

    if not run_doctor(say, self_test=not quick):
        exit_with(1, "something does not work here; the lines marked FAILED say what")
