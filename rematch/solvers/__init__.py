"""Solvers: one file a method, found by name. Nothing here imports torch."""

from rematch.solvers.base import (
    DEFAULT_SOLVER,
    DEFAULT_TIME_LIMIT,
    BoundScope,
    Deadline,
    OnProgress,
    Problem,
    Progress,
    Solution,
    Solver,
    Status,
    make_solver,
    register,
    solve,
    solver_class,
    solver_names,
    verify,
)

__all__ = [
    "DEFAULT_SOLVER",
    "DEFAULT_TIME_LIMIT",
    "BoundScope",
    "Deadline",
    "OnProgress",
    "Problem",
    "Progress",
    "Solution",
    "Solver",
    "Status",
    "make_solver",
    "register",
    "solve",
    "solver_class",
    "solver_names",
    "verify",
]
