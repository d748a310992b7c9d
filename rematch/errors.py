"""What went wrong, in words a user can act on: the input, the limit, the nearest value that works, the next step."""

from __future__ import annotations


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
    """A budget no schedule can keep; the message names the limit and the nearest budget that works."""


class SolverError(RematchError):
    """An unknown solver, one that does not apply to this graph, or an option it does not have."""
