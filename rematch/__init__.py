"""Train inside a memory budget: solve for the recomputation schedule instead of guessing it.

`model = rematch.remat(model, batch, budget="8GiB")`

Everything public is here by name and loaded when first used, so that `import rematch` stays instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # what the table below says, once more for type checkers and editors
    from rematch.api import (
        apply as apply,
        plan as plan,
        plans_of as plans_of,
        remat as remat,
        trace as trace,
    )
    from rematch.errors import (
        BudgetError as BudgetError,
        BudgetInfeasible as BudgetInfeasible,
        CaptureError as CaptureError,
        DeviceError as DeviceError,
        FormatError as FormatError,
        GraphError as GraphError,
        RematchError as RematchError,
        ScheduleError as ScheduleError,
        SolverError as SolverError,
    )
    from rematch.graph import (
        Compute as Compute,
        Free as Free,
        Graph as Graph,
        Op as Op,
        Phase as Phase,
        Schedule as Schedule,
        Simulation as Simulation,
        Value as Value,
        baseline as baseline,
        simulate as simulate,
    )
    from rematch.graph.formats import load_graph as load_graph, save_graph as save_graph
    from rematch.planning.budget import parse_budget as parse_budget
    from rematch.planning.plan import Figures as Figures, Plan as Plan
    from rematch.solvers import (
        BoundScope as BoundScope,
        Deadline as Deadline,
        OnProgress as OnProgress,
        Problem as Problem,
        Progress as Progress,
        Solution as Solution,
        Solver as Solver,
        Status as Status,
        register as register,
        solve as solve,
    )
    from rematch.units import format_bytes as format_bytes

_PUBLIC = {
    "rematch.api": ("apply", "plan", "plans_of", "remat", "trace"),
    "rematch.planning.budget": ("parse_budget",),
    "rematch.errors": (
        "BudgetError",
        "BudgetInfeasible",
        "CaptureError",
        "DeviceError",
        "FormatError",
        "GraphError",
        "RematchError",
        "ScheduleError",
        "SolverError",
    ),
    "rematch.graph": (
        "Compute",
        "Free",
        "Graph",
        "Op",
        "Phase",
        "Schedule",
        "Simulation",
        "Value",
        "baseline",
        "simulate",
    ),
    "rematch.graph.formats": ("load_graph", "save_graph"),
    "rematch.planning.plan": ("Figures", "Plan"),
    "rematch.solvers": (
        "BoundScope",
        "Deadline",
        "OnProgress",
        "Problem",
        "Progress",
        "Solution",
        "Solver",
        "Status",
        "register",
        "solve",
    ),
    "rematch.units": ("format_bytes",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rematch' has no attribute {name!r}")
    found = getattr(import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
