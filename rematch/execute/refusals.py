"""What is said where no schedule keeps the budget.

`raise explained(smaller(infeasible, of_other_graph), recorded, settings)`
"""

from __future__ import annotations

import math

from rematch.capture.recorded_graph import RecordedGraph
from rematch.errors import BudgetInfeasible
from rematch.planning.settings import REPLACE, Settings
from rematch.units import count_of


def smaller(infeasible: BudgetInfeasible, other: BudgetInfeasible | None) -> BudgetInfeasible:
    """Of two refusals of one step, the one that names the smaller budget."""
    return infeasible if other is None else min(infeasible, other, key=_named_bytes)


def _named_bytes(infeasible: BudgetInfeasible) -> float:
    return math.inf if infeasible.feasible_from_bytes is None else infeasible.feasible_from_bytes


def explained(infeasible: BudgetInfeasible, recorded: RecordedGraph, settings: Settings) -> BudgetInfeasible:
    """With a word on regions under torch.utils.checkpoint, which make a budget harder to keep than it need be."""
    if not recorded.recording.checkpoints or settings.checkpoints == REPLACE:
        return infeasible
    regions = count_of(recorded.recording.checkpoints, "region")
    return BudgetInfeasible(
        f"{infeasible}\n  {regions} under torch.utils.checkpoint stay as they are, and each is computed again as a "
        "whole; checkpoints='replace' has the plan choose instead",
        feasible_from_bytes=infeasible.feasible_from_bytes,
    )
