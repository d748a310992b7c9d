"""The default: greedy for a first schedule, then local search and the epoch relaxation side by side.

`solve(problem, "auto", time_limit=60)`

Local search (as in `anneal`) finds good schedules fast and proves nothing; the relaxation (`epochs`) proves, and its
lifted schedules are often optimal, or nearly within the budget. They run in two threads, whose inner loops are compiled
and let go of Python's lock, and share one incumbent: the relaxation searches only below the best schedule known, and
each lifted schedule that breaks the budget goes to the local search to repair. The relaxation comes first without whole
numbers, which takes seconds for 50,000 operators. A tiny graph needs none of this: it is searched exhaustively first,
which takes well under a second (`exhaustive=False` leaves that out, so that the other parts can be tested on graphs
whose optimum is known).

If nothing is found by then and nothing proved, the solver asks whether some first computation needs more than the
budget whatever is recomputed (`least_memory`). If not, a schedule is made that keeps nothing of forward
(`from_scratch`) or what minimum cuts say (`frugal`), or published methods that need little time are asked in turn (tree
decompositions, checkpoints, chains of blocks), each for a share of the time, and a second local search makes two passes
through each stage, for budgets that no single pass can keep, while a third lowers the budget step by step (`descent`).
Where nothing was found, the last part of the time goes to saying which budgets can be kept. The solution's log tells
what was tried, what it found, and why the search ended.

The search ends when schedule and bound are within `gap` points of extra time of each other, when what the bound leaves
to gain is worth less than the wait (`incumbent` weighs the two), or at the deadline. `gap=0` searches for the proof
until the deadline.

`order="any"` lets first computations leave the default order. The search then has the default order for half of the
time and one that holds less memory for the rest (`orders`), and the bound is one that holds for every order; the log
has that of the default order.

Where the graph has a link to host memory, recomputation alone has a third of the time. The rest goes to schedules that
also move values, and to a bound that holds for these (`transfers`).

With `threads=1` the two take turns, the local search for `iterations` moves each time, so that a run that is not cut
short by the clock is the same every time.
"""

from __future__ import annotations

import math
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import get_args

from rematch.errors import ScheduleError, SolverError, unknown_name
from rematch.graph import Schedule, baseline
from rematch.solvers.base import (
    BoundScope,
    Deadline,
    OnProgress,
    Problem,
    Solution,
    Solver,
    Status,
    ignore_progress,
    make_solver,
)
from rematch.solvers.common.least_memory import most_needed_bytes
from rematch.solvers.common.local_search import LocalSearch
from rematch.solvers.common.order import Order
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.common.pruning import offer_in_default_order
from rematch.solvers.default.anneal import Anneal
from rematch.solvers.default.descent import Descent
from rematch.solvers.default.epochs import relax_epochs, search_epochs
from rematch.solvers.default.from_scratch import from_scratch
from rematch.solvers.default.frugal import frugal_schedule
from rematch.solvers.default.greedy import Greedy, greedy_schedule
from rematch.solvers.default.orders import any_order_bound, lighter_order
from rematch.solvers.exhaustive import Exhaustive
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.minimum import smallest_budget, surely_needed_bytes
from rematch.solvers.transfers.joint import search_jointly

_MOVES_AT_ONCE = 20_000  # of local search, between two looks at what the relaxation found
_DEFAULT_ORDER_SHARE = 0.5  # of the time, with order="any"
_ANY_ORDER_BOUND_SHARE = 0.3  # of the time that is left then, at most
_ALONE_SHARE = 1 / 3  # of the time, for recomputation alone where values can move too
_MOVES_OF_ONE_PASS = 60_000  # without a schedule, before stages get a second pass
_HEAD_START_SECONDS = 1.0  # of local search before the relaxation, whose work a good cut-off shortens
_EXHAUSTIVE_SHARE = 0.5  # of the time limit at most, for a tiny graph
_GREEDY_SHARE = 0.05  # of the time limit at most
_GREEDY_SECONDS = 2.0  # and at most: its time grows with the square of the graph
_OTHERS = ("twremat", "feng_huang", "rotor")  # in the order of the time they take
_OTHERS_SHARE = 0.1  # of the time left, for each of them
_BUDGETS_SHARE = 0.15  # of the time limit, kept for the smallest budget when nothing is found
_BUDGETS_SECONDS = 9.0  # at most


@dataclass(frozen=True)
class Auto(Solver):
    """Near-optimal in seconds, with a proof of how near."""

    name = "auto"
    moves_values = True
    paper = "our own: greedy, anneal and epochs together, and published methods where these find nothing"

    seed: int = 0
    threads: int = 2
    iterations: int = 200_000  # moves of local search in a turn, with one thread
    moments: int = 6  # of the relaxation's first round
    gap: float = 0.1  # points of extra time: how close to the bound is good enough

    order: Order = "default"  # of first computations
    exhaustive: bool = True  # search tiny graphs exhaustively before anything else

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise SolverError(unknown_name("order of solver 'auto'", self.order, get_args(Order)))
        if not 0.0 <= self.gap < math.inf:
            raise SolverError(f"solver 'auto' cannot have gap={self.gap}; give 0 or more points of extra time")

    def prepare(self) -> None:
        Greedy().prepare()
        Anneal().prepare()

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        if problem.graph.link is not None:
            return self._with_link(problem, deadline, on_progress)
        if self.order == "any":
            if problem.graph.recompute_after_loss:  # first computations are the user's own, in their own order
                return replace(self, order="default").solve(problem, deadline=deadline, on_progress=on_progress)
            return self._in_any_order(problem, deadline, on_progress)
        reserve = min(_BUDGETS_SHARE * deadline.remaining, _BUDGETS_SECONDS)
        incumbent = Incumbent(
            problem, deadline, on_progress, gap=self.gap, give_up_seconds=deadline.remaining - reserve
        )
        if problem.budget_bytes < surely_needed_bytes(problem.graph):
            incumbent.prove_infeasible(self.name, BoundScope.ANY_ORDER)
        incumbent.offer(baseline(problem.graph), "noremat")
        self._search_exhaustively(incumbent)
        if not incumbent.over:
            seconds = min(_GREEDY_SHARE * deadline.remaining, _GREEDY_SECONDS)
            incumbent.offer(greedy_schedule(problem, deadline.within(seconds)), "greedy")
        if not incumbent.over:
            self.improve(incumbent)
        incumbent.tell(self.name, incumbent.reason or "nothing is left to try")
        solution = incumbent.solution(self.name)
        if solution.schedule is not None:
            return solution
        known = smallest_budget(
            problem.graph, deadline.within(_BUDGETS_SECONDS), seed=self.seed, exhaustive=self.exhaustive
        )
        return replace(
            solution,
            infeasible_up_to_bytes=max(
                known.infeasible_up_to_bytes, problem.budget_bytes if incumbent.infeasible else 0
            ),
            feasible_from_bytes=known.feasible_from_bytes,
        )

    def _with_link(self, problem: Problem, deadline: Deadline, on_progress: OnProgress) -> Solution:
        """The best of recomputation alone and of schedules that also move values, with a bound for both."""
        incumbent = Incumbent(problem, deadline, on_progress, gap=self.gap, patient=True)
        if problem.budget_bytes < surely_needed_bytes(problem.graph):
            incumbent.prove_infeasible(self.name, BoundScope.ANY_ORDER)
            return incumbent.solution(self.name)
        alone = self.solve(
            problem.without_link(),
            deadline=deadline.within(_ALONE_SHARE * deadline.remaining),
            on_progress=ignore_progress,
        )
        if alone.schedule is not None:
            incumbent.offer(alone.schedule, "recomputation alone")
        if not incumbent.over:
            search_jointly(incumbent, seed=self.seed, threads=self.threads)
        incumbent.tell(self.name, incumbent.reason or "nothing is left to try")
        found = incumbent.solution(self.name)
        if found.schedule is not None:
            return found
        infeasible_up_to_bytes = problem.budget_bytes if incumbent.infeasible else None
        return replace(
            found, infeasible_up_to_bytes=infeasible_up_to_bytes, feasible_from_bytes=alone.feasible_from_bytes
        )

    def _in_any_order(self, problem: Problem, deadline: Deadline, on_progress: OnProgress) -> Solution:
        """The best over the default order and a lighter one, with a bound for every order."""
        in_order = replace(self, order="default")
        incumbent = Incumbent(problem, deadline, on_progress, gap=self.gap, scope=BoundScope.ANY_ORDER)
        self._search_exhaustively(incumbent)
        if incumbent.closed:
            incumbent.tell(self.name, incumbent.reason)
            return incumbent.solution(self.name)
        lighter = lighter_order(problem.graph)
        seconds = deadline.remaining * (1.0 if lighter is None else _DEFAULT_ORDER_SHARE)
        solution = in_order.solve(problem, deadline=deadline.within(seconds), on_progress=on_progress)
        decided = solution.status in (Status.OPTIMAL, Status.INFEASIBLE)
        if decided and solution.bound_scope is BoundScope.ANY_ORDER:
            return solution  # no other order could do better
        self._offer(incumbent, solution, "the default order")
        bound = any_order_bound(problem, deadline.within(_ANY_ORDER_BOUND_SHARE * deadline.remaining))
        if bound is not None and bound.infeasible:
            incumbent.prove_infeasible(self.name)
        elif bound is not None and bound.finished:
            incumbent.raise_bound(bound.bound, self.name)
        if lighter is not None and not incumbent.over:
            other = Problem(replace(problem.graph, order=lighter), problem.budget_bytes)
            self._offer(
                incumbent, in_order.solve(other, deadline=deadline, on_progress=ignore_progress), "a lighter order"
            )
        incumbent.tell(self.name, incumbent.reason or "nothing is left to try")
        found = incumbent.solution(self.name)
        return replace(found, feasible_from_bytes=solution.feasible_from_bytes) if found.schedule is None else found

    def _offer(self, incumbent: Incumbent, solution: Solution, order: str) -> None:
        """Offer what was found for one order, and tell how far it is proved to be the best for that order."""
        if solution.schedule is not None:
            incumbent.offer(solution.schedule, self.name)
        if solution.lower_bound_seconds is not None:
            extra = (solution.lower_bound_seconds / (incumbent.problem.graph.baseline_seconds or 1.0) - 1.0) * 100.0
            incumbent.tell(self.name, f"{order}: at least +{extra:.3f} %")

    def _search_exhaustively(self, incumbent: Incumbent) -> None:
        """The fastest schedule of a tiny graph, or the proof that there is none, as far as there is time."""
        solver = Exhaustive(order=self.order)
        if incumbent.over or not self.exhaustive or not solver.applicable(incumbent.problem):
            return
        deadline = incumbent.deadline.within(_EXHAUSTIVE_SHARE * incumbent.deadline.remaining)
        found = solver.solve(incumbent.problem, deadline=deadline, on_progress=ignore_progress)
        if found.schedule is not None:
            incumbent.offer(found.schedule, solver.name)
            incumbent.raise_bound(incumbent.overhead_percent, solver.name)
        elif found.status is Status.INFEASIBLE:
            incumbent.prove_infeasible(solver.name)

    def improve(self, incumbent: Incumbent) -> None:
        """Local search and the relaxation from what is known, until the search is over."""
        if self.threads > 1:
            self._side_by_side(incumbent)
        else:
            self._in_turns(incumbent)

    def _side_by_side(self, incumbent: Incumbent) -> None:
        lifted: queue.SimpleQueue[Schedule] = queue.SimpleQueue()
        worker = _LocalSearchThread(incumbent, lifted, self.seed)
        worker.start()
        worker.join(min(_HEAD_START_SECONDS, 0.1 * incumbent.deadline.remaining))
        chosen = relax_epochs(incumbent, on_lift=lifted.put)
        _ask_others(incumbent)
        search_epochs(incumbent, moments=self.moments, chosen=chosen, on_lift=lifted.put)
        while worker.is_alive() and not incumbent.over:
            worker.join(0.05)
        if worker.error is not None:
            raise worker.error

    def _in_turns(self, incumbent: Incumbent) -> None:
        searches = _Searches(incumbent, self.seed)

        def take_a_turn() -> None:
            for _ in range(0, self.iterations, _MOVES_AT_ONCE):
                if incumbent.over:
                    return
                searches.run()

        def repair(lifted: Schedule) -> None:
            searches.adopt(lifted)
            take_a_turn()

        take_a_turn()
        chosen = relax_epochs(incumbent, on_lift=repair)
        _ask_others(incumbent)
        search_epochs(incumbent, moments=self.moments, chosen=chosen, on_lift=repair)


def _ask_others(incumbent: Incumbent) -> None:
    """If there is no schedule: first computations may need too much; then published methods, until one finds some."""
    if incumbent.schedule is None and not incumbent.over:
        _look_for_a_proof(incumbent)
    if incumbent.schedule is None and not incumbent.over:
        _offer_lean_schedules(incumbent)
    for name in _OTHERS:
        solver = make_solver(name)
        if incumbent.schedule is not None or incumbent.over or not solver.applicable(incumbent.problem):
            continue
        deadline = incumbent.deadline.within(_OTHERS_SHARE * incumbent.deadline.remaining)
        found = solver.solve(incumbent.problem, deadline=deadline, on_progress=ignore_progress)
        if found.schedule is None:
            incumbent.tell(name, "no schedule within the budget")
        elif not offer_in_default_order(incumbent, found.schedule.ops, name):
            incumbent.offer(found.schedule, name)  # better than none, though local search cannot start from it


def _offer_lean_schedules(incumbent: Incumbent) -> None:
    """Those that keep nothing of forward, and what minimum cuts say: the first is there at once, the second faster."""
    _offer_lean(incumbent, from_scratch(incumbent.problem.graph), "from scratch")
    deadline = incumbent.deadline.within(_OTHERS_SHARE * incumbent.deadline.remaining)
    _offer_lean(incumbent, frugal_schedule(incumbent.problem, deadline), "frugal")


def _offer_lean(incumbent: Incumbent, schedule: Schedule | None, by: str) -> None:
    if schedule is None or not offer_in_default_order(incumbent, schedule.ops, by):
        incumbent.tell(by, "no schedule within the budget that is faster")


def _look_for_a_proof(incumbent: Incumbent) -> None:
    """Whether some first computation needs more than the budget, whatever is recomputed."""
    deadline = incumbent.deadline.within(_OTHERS_SHARE * incumbent.deadline.remaining)
    budget_bytes = incumbent.problem.budget_bytes
    if most_needed_bytes(Precedence.of(incumbent.problem.graph), deadline, budget_bytes) > budget_bytes:
        incumbent.prove_infeasible("auto")


class _LocalSearchThread(threading.Thread):
    """Local search until the incumbent's search is over, from the best schedule known and every lifted one."""

    def __init__(self, incumbent: Incumbent, lifted: queue.SimpleQueue[Schedule], seed: int) -> None:
        super().__init__(name="rematch local search", daemon=True)  # it may be compiling when the deadline comes
        self.error: Exception | None = None
        self._incumbent, self._lifted, self._seed = incumbent, lifted, seed

    def run(self) -> None:
        try:
            self._search()
        except Exception as error:
            self.error = error

    def _search(self) -> None:
        incumbent = self._incumbent
        searches = _Searches(incumbent, self._seed)
        while not (incumbent.over or searches.finished):
            if not self._lifted.empty():
                searches.adopt(self._lifted.get())
            elif incumbent.schedule is not None and incumbent.seconds < searches.best_seconds:
                with suppress(ScheduleError):  # first computations in another order than the search keeps to
                    searches.adopt(incumbent.schedule)
            searches.run()


class _Searches:
    """Local search for the incumbent; where it finds nothing for long, in turns with others until one does.

    The others are one with two passes through each stage, and one for budgets that fall step by step. The one that
    finds a schedule goes on alone.
    """

    def __init__(self, incumbent: Incumbent, seed: int) -> None:
        self._incumbent, self._seed = incumbent, seed
        self._searches = [LocalSearch(incumbent.problem, seed=seed, start=incumbent.schedule)]
        self._descent: Descent | None = None
        self._offer(self._searches[0])

    @property
    def finished(self) -> bool:
        return self._searches[0].finished

    @property
    def best_seconds(self) -> float:
        return min(search.best_seconds or math.inf for search in self._searches)

    def adopt(self, schedule: Schedule) -> None:
        self._searches[0].adopt(schedule)
        if self._descent is not None:
            self._descent.adopt(schedule)

    def run(self) -> None:
        """Some moves, and what they found offered to the incumbent."""
        search = self._searches[0]
        search.run(_MOVES_AT_ONCE)
        self._offer(search)
        if search.best is not None:
            self._searches, self._descent = [search], None
        elif self._descent is not None:
            self._searches.reverse()
            self._descend(self._descent)
        elif self._incumbent.schedule is None and search.moves >= _MOVES_OF_ONE_PASS:
            self._searches.insert(0, LocalSearch(self._incumbent.problem, seed=self._seed, passes=2))
            self._descent = Descent(self._incumbent.problem, seed=self._seed)

    def _descend(self, descent: Descent) -> None:
        descent.run(_MOVES_AT_ONCE)
        if descent.found is not None:
            self._searches, self._descent = [descent.search()], None
            self._offer(self._searches[0])

    def _offer(self, search: LocalSearch) -> None:
        if search.best is not None and (search.best_seconds or math.inf) < self._incumbent.seconds:
            self._incumbent.offer(search.best, "anneal")
