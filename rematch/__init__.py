"""Train inside a memory budget: solve for the recomputation schedule instead of guessing it.

`model = rematch.remat(model, batch, budget="8GiB")`

The names below are the public ones; `rematch.graph`, `rematch.solvers` and `rematch.errors` hold the rest. All but the
errors load on first use, so that `import rematch` takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rematch.errors import (
    BudgetError as BudgetError,
    BudgetInfeasible as BudgetInfeasible,
    CaptureError as CaptureError,
    RematchError as RematchError,
    ScheduleError as ScheduleError,
)

__version__ = "0.1.0"

if TYPE_CHECKING:  # type checkers cannot read the table below; a test keeps the two equal
    from rematch import graph as graph, solvers as solvers
    from rematch.api import (
        apply as apply,
        plan as plan,
        plans_of as plans_of,
        remat as remat,
        trace as trace,
    )
    from rematch.foresight.batch import max_batch as max_batch
    from rematch.foresight.memory import memory as memory
    from rematch.foresight.tradeoff import min_budget as min_budget, pareto as pareto
    from rematch.planning.plan import Plan as Plan

_LAZY = {
    "Plan": "rematch.planning.plan",
    "apply": "rematch.api",
    "graph": "rematch",
    "max_batch": "rematch.foresight.batch",
    "memory": "rematch.foresight.memory",
    "min_budget": "rematch.foresight.tradeoff",
    "pareto": "rematch.foresight.tradeoff",
    "plan": "rematch.api",
    "plans_of": "rematch.api",
    "remat": "rematch.api",
    "solvers": "rematch",
    "trace": "rematch.api",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rematch' has no attribute {name!r}")
    home = _LAZY[name]
    found = import_module(f"rematch.{name}") if home == "rematch" else getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
