"""Which budgets can be kept: the largest one proved impossible and the smallest one a schedule was found for.

`smallest_budget(graph, Deadline(10)).feasible_from_bytes`

From below by the linear relaxation of the epoch model, from above by local search; both halve the range in between. On
tiny graphs the exhaustive search does both, down to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.solvers.base import Deadline, Problem
from rematch.solvers.common.highs import minimise
from rematch.solvers.common.local_search import LocalSearch
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.default.epoch_model import EpochModel, Refinement
from rematch.solvers.default.epochs import first_moments
from rematch.solvers.exhaustive import MOST_OPERATORS, leanest_schedule

_CLOSE = 0.005  # of the budget: the ranges are not halved further than this
_MOMENTS = 8  # at which the program that proves a budget impossible enforces memory
_MOVES = 2_000  # of local search between two looks at the clock
_MOVES_OF_ONE_PASS = 60_000  # without a schedule, before stages get a second pass, whose moves are slower


@dataclass(frozen=True)
class BudgetRange:
    """No schedule in default order keeps `infeasible_up_to_bytes`; `schedule` keeps `feasible_from_bytes`."""

    infeasible_up_to_bytes: int
    feasible_from_bytes: int
    schedule: Schedule


def surely_needed_bytes(graph: Graph) -> int:
    """A budget below this is impossible in any order: the largest operator, or all that must be alive at the end."""
    return max(graph.largest_op_bytes, graph.end_bytes)


def smallest_budget(graph: Graph, deadline: Deadline, *, seed: int = 0, exhaustive: bool = True) -> BudgetRange:
    """Close in on the smallest feasible budget from both sides until `deadline`; tiny graphs by `exhaustive` search."""
    if exhaustive and len(graph.ops) <= MOST_OPERATORS:
        impossible, schedule = leanest_schedule(graph, "default", deadline)
        return BudgetRange(
            max(impossible, surely_needed_bytes(graph) - 1), simulate(graph, schedule).peak_bytes, schedule
        )
    impossible = surely_needed_bytes(graph) - 1
    schedule = baseline(graph)
    possible = simulate(graph, schedule).peak_bytes
    impossible = _raise_impossible(graph, impossible, possible, deadline.within(0.5 * deadline.remaining))
    low = impossible
    while possible - low > max(1, _CLOSE * possible) and not deadline.expired:
        middle = (low + possible) // 2
        found = _find(Problem(graph, middle), schedule, deadline.within(deadline.remaining / 3), seed)
        if found is None:
            low = middle
        else:
            schedule, possible = found, simulate(graph, found).peak_bytes
    return BudgetRange(impossible, possible, schedule)


def _raise_impossible(graph: Graph, impossible: int, possible: int, deadline: Deadline) -> int:
    """The largest budget found for which even the linear relaxation has no point."""
    precedence = Precedence.of(graph)
    high = possible
    while high - impossible > max(1, _CLOSE * high) and not deadline.expired:
        middle = (impossible + high) // 2
        moments = first_moments(Problem(graph, middle), _MOMENTS)
        model = EpochModel(precedence, middle, Refinement(moments))
        if moments and minimise(model.program, deadline=deadline, relaxed=True).infeasible:
            impossible = middle
        else:
            high = middle
    return impossible


def _find(problem: Problem, start: Schedule, deadline: Deadline, seed: int) -> Schedule | None:
    """A schedule within the budget by local search; after many moves, in turns with one of two passes a stage."""
    searches = [LocalSearch(problem, seed=seed, start=start)]
    while not (deadline.expired or searches[0].finished):
        for search in searches:
            search.run(_MOVES)
            if search.best is not None:
                return search.best
        if len(searches) == 1 and searches[0].moves >= _MOVES_OF_ONE_PASS:
            searches.append(LocalSearch(problem, seed=seed, start=start, passes=2))
    return None
