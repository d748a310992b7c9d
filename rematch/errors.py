"""What went wrong, in words a user can act on: the input, the limit, the nearest value that works, the next step."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class RematchError(Exception):
    """Base of every error rematch raises on purpose; the command line prints it as one line and exits with 2."""


class GraphError(RematchError):
    """A graph that cannot be: a cycle, an unknown value, a negative size, two producers."""


class ScheduleError(RematchError):
    """A schedule that cannot be built or converted, or that the oracle refused."""


class FormatError(RematchError):
    """A file that is not what it should be."""


class BudgetError(RematchError):
    """A budget that cannot be read ("8GB of", "-3", "0%")."""


class BudgetInfeasible(BudgetError):
    """A budget no schedule can keep; the message names the limit and the nearest budget that works, if one is known."""

    def __init__(self, message: str, *, feasible_from_bytes: int | None = None) -> None:
        super().__init__(message)
        self.feasible_from_bytes = feasible_from_bytes


class DeviceError(RematchError):
    """A device whose speed and memory we do not know."""


class CaptureError(RematchError):
    """A module that cannot be captured or run as planned; the message names the place and the ways around it."""


class SolverError(RematchError):
    """An unknown solver, one that does not apply to this graph, or an option it does not have."""


def unknown_name(what: str, name: str, known: Sequence[str]) -> str:
    """`unknown solver 'gready'; did you mean 'greedy'? known: noremat, greedy`"""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {what} {name!r}; {hint}known: {', '.join(known) or 'none'}"
