"""Which budgets can be kept: the largest one proved impossible and the smallest one a schedule was found for.

`smallest_budget(graph, Deadline(10)).feasible_from_bytes`

From below by what first computations need whatever is recomputed (`least_memory`) and by the linear relaxation of the
epoch model, which halves the range in between; from above by local search for budgets that fall step by step
(`descent`), which begins with nothing of forward kept (`from_scratch`), and by schedules that keep what minimum cuts
say (`frugal`). On tiny graphs the exhaustive search does both, down to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.solvers.base import Deadline, Problem
from rematch.solvers.common.highs import minimise
from rematch.solvers.common.least_memory import finally_needed_bytes, most_needed_bytes
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.default.descent import Descent
from rematch.solvers.default.epoch_model import EpochModel, Refinement
from rematch.solvers.default.epochs import first_moments
from rematch.solvers.default.from_scratch import from_scratch
from rematch.solvers.default.frugal import STYLES, frugal_schedule
from rematch.solvers.exhaustive import MOST_OPERATORS, leanest_schedule

_CLOSE = 0.005  # of the budget: the range is not narrowed further than this
_FIRST_SHARE = 0.4  # of the time, to search before anything is proved: little time is best spent so
_CUTS_SHARE = 0.3  # of the time left then, for the cuts
_FRUGAL_SHARE = 0.5  # of the time left then, for schedules from cuts
_PROGRAMS_SHARE = 0.4  # of the time left then, for linear programs
_MOMENTS = 8  # at which the program that proves a budget impossible enforces memory
_FIRST_MOVES = 10_000  # of local search, before the first look at the clock
_MOVES = 2_000  # of local search between two looks at the clock


@dataclass(frozen=True)
class BudgetRange:
    """No schedule in default order keeps `infeasible_up_to_bytes`; `schedule` keeps `feasible_from_bytes`."""

    infeasible_up_to_bytes: int
    feasible_from_bytes: int
    schedule: Schedule


def surely_needed_bytes(graph: Graph) -> int:
    """A budget below this is impossible in any order: the largest operator, or what must be alive towards the end."""
    return max(graph.largest_op_bytes, graph.end_bytes, finally_needed_bytes(graph))


def smallest_budget(graph: Graph, deadline: Deadline, *, seed: int = 0, exhaustive: bool = True) -> BudgetRange:
    """Close in on the smallest feasible budget from both sides until `deadline`; tiny graphs by `exhaustive` search."""
    if exhaustive and len(graph.ops) <= MOST_OPERATORS:
        impossible, schedule = leanest_schedule(graph, "default", deadline)
        return BudgetRange(
            max(impossible, surely_needed_bytes(graph) - 1), simulate(graph, schedule).peak_bytes, schedule
        )
    impossible = surely_needed_bytes(graph) - 1
    if deadline.expired:
        plain = baseline(graph)
        return BudgetRange(impossible, simulate(graph, plain).peak_bytes, plain)
    descent = Descent(Problem(graph, impossible + 1), seed=seed)
    scratch = from_scratch(graph)
    if scratch is not None:
        descent.adopt(scratch)
    descent.run(_FIRST_MOVES)  # whatever loading compiled code takes, some moves are made
    _descend(descent, impossible, deadline.within(_FIRST_SHARE * deadline.remaining))
    if not deadline.expired:
        precedence = Precedence.of(graph)
        needed = most_needed_bytes(precedence, deadline.within(_CUTS_SHARE * deadline.remaining))
        impossible = max(impossible, needed - 1)
        frugal = _leanest_frugal(
            precedence, impossible, descent.peak_bytes, deadline.within(_FRUGAL_SHARE * deadline.remaining)
        )
        if frugal is not None:
            descent.adopt(frugal)
        impossible = _raise_impossible(
            precedence, impossible, descent.peak_bytes, deadline.within(_PROGRAMS_SHARE * deadline.remaining)
        )
    _descend(descent, impossible, deadline)
    return BudgetRange(impossible, descent.peak_bytes, descent.leanest)


def _leanest_frugal(precedence: Precedence, impossible: int, possible: int, deadline: Deadline) -> Schedule | None:
    """The schedule for the smallest budget, of those that halve the range, that `frugal` finds one for."""
    leanest: Schedule | None = None
    for style in STYLES:  # one after the other, as the first ones often suffice and a failure takes longest
        failed, budget = impossible, impossible + 1
        while possible - failed > max(1, _CLOSE * possible) and not deadline.expired:
            found = frugal_schedule(Problem(precedence.graph, budget), deadline, precedence, [style])
            if found is None:
                failed = budget
            else:
                leanest, possible = found, simulate(precedence.graph, found).peak_bytes
            budget = (failed + possible) // 2
    return leanest


def _descend(descent: Descent, impossible: int, deadline: Deadline) -> None:
    """Look for leaner schedules, as long as that may help."""
    while not (deadline.expired or descent.finished or descent.stuck):
        if descent.peak_bytes - impossible <= _CLOSE * descent.peak_bytes:
            break
        descent.run(_MOVES)


def _raise_impossible(precedence: Precedence, impossible: int, possible: int, deadline: Deadline) -> int:
    """The largest budget found for which even the linear relaxation has no point."""
    high = possible
    while high - impossible > max(1, _CLOSE * high) and not deadline.expired:
        middle = (impossible + high) // 2
        moments = first_moments(Problem(precedence.graph, middle), _MOMENTS)
        model = EpochModel(precedence, middle, Refinement(moments))
        if moments and minimise(model.program, deadline=deadline, relaxed=True).infeasible:
            impossible = middle
        else:
            high = middle
    return impossible
