"""What every solver takes, gives and promises, and the registry that finds one by name.

`solve(Problem(graph, budget_bytes), solver="greedy").schedule`

A solver is one file with one `Solver` class. Its `solve` is deterministic for a seed, stops at the deadline with the
best it has, never changes the problem, and reports what it finds through `on_progress`. `solve()` below is the only
caller: it refuses problems the solver does not apply to, turns Ctrl-C and SIGTERM into an early deadline, and puts the
result before the oracle.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from signal import Signals
from typing import Any, ClassVar

from rematch.errors import ScheduleError, SolverError
from rematch.graph import Graph, Schedule, Simulation, simulate
from rematch.signals import STOP_SIGNALS, signals_end
from rematch.solvers.registry import Registry

DEFAULT_SOLVER = "auto"
DEFAULT_TIME_LIMIT = 60.0
_INTERRUPTED = "stopped by a signal"  # what the log of a search says then


class Status(Enum):
    """How a search ended."""

    OPTIMAL = "optimal"  # the schedule is as fast as the lower bound, within its scope
    FEASIBLE = "feasible"  # a schedule within the budget, perhaps not the fastest
    INFEASIBLE = "infeasible"  # proved: no schedule (of the bound's scope) keeps the budget
    NOT_FOUND = "not found"  # and nothing proved: the method, or its time, came to an end


class BoundScope(Enum):
    """Which schedules a lower bound, or a proof that there is none, speaks of."""

    ANY_ORDER = "any order"
    DEFAULT_ORDER = "first computations in default order"
    STAGES = "stages that run operators in default order, each at most once"
    LIMITED = "a limited number of computations of each operator"
    NOTHING_MOVES = "nothing moves to host memory"


@dataclass(frozen=True)
class Problem:
    """Find the fastest schedule of `graph` whose peak is at most `budget_bytes`.

    If the graph has a link, schedules may move values to host memory too.
    """

    graph: Graph
    budget_bytes: int

    def without_link(self) -> Problem:
        """The same problem for schedules that move nothing."""
        return self if self.graph.link is None else replace(self, graph=replace(self.graph, link=None))


@dataclass(frozen=True)
class Progress:
    """A moment in a search: who speaks, what it did, and the best schedule and bound it knows (None: none yet)."""

    at_seconds: float
    solver: str
    message: str = ""
    best_seconds: float | None = None
    bound_seconds: float | None = None


@dataclass(frozen=True)
class Solution:
    """What a solver found. `schedule` is None unless the status is optimal or feasible."""

    schedule: Schedule | None
    status: Status
    solver: str
    lower_bound_seconds: float | None = None
    bound_scope: BoundScope = BoundScope.DEFAULT_ORDER
    solve_seconds: float = 0.0
    log: tuple[Progress, ...] = ()
    infeasible_up_to_bytes: int | None = None  # the largest budget proved to have no schedule, when that was asked
    feasible_from_bytes: int | None = None  # the smallest budget a schedule was found for

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the search."""
        return was_interrupted(self.log)


def was_interrupted(log: Sequence[Progress]) -> bool:
    """Whether this is the log of a search that a signal ended."""
    return any(progress.message == _INTERRUPTED for progress in log)


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """An `on_progress` that does nothing, for a solver that works for another one, which reports in its place."""


class Deadline:
    """The moment a search must end. `Deadline(2.0).expired` is False for two seconds, or until `stop()` is called."""

    def __init__(self, seconds: float = math.inf, *, outer: Deadline | None = None) -> None:
        self._started = time.monotonic()
        self._end = self._started + seconds
        self._stopped = False
        self._outer = outer

    def within(self, seconds: float) -> Deadline:
        """A deadline in `seconds` that also expires when this one does."""
        return Deadline(seconds, outer=self)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def remaining(self) -> float:
        if self._stopped:
            return 0.0
        own = max(0.0, self._end - time.monotonic())
        return own if self._outer is None else min(own, self._outer.remaining)

    @property
    def expired(self) -> bool:
        return self.remaining <= 0.0

    def stop(self) -> None:
        self._stopped = True


class Solver(ABC):
    """One method. Subclasses are dataclasses whose fields are their options, such as a seed."""

    name: ClassVar[str]
    paper: ClassVar[str]  # authors, title, venue and year; "" for our own
    requires: ClassVar[str] = ""  # what it asks of a graph, in words; "" if it takes any
    moves_values: ClassVar[bool] = False  # whether it uses a graph's link; other solvers are given none

    def applicable(self, problem: Problem) -> bool:
        """Whether this method can be tried on the problem, judged in linear time."""
        return True

    def prepare(self) -> None:  # noqa: B027  # most solvers have nothing to prepare
        """Load and compile what solving needs. It cannot be interrupted, so it is done before the clock starts."""

    @abstractmethod
    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        """Search until done or `deadline` expires; see the module for what is promised."""


_solvers: Registry[Solver] = Registry(
    "solver",
    {
        "noremat": "rematch.solvers.noremat:NoRemat",
        "greedy": "rematch.solvers.default.greedy:Greedy",
        "exhaustive": "rematch.solvers.exhaustive:Exhaustive",
        "anneal": "rematch.solvers.default.anneal:Anneal",
        "epochs": "rematch.solvers.default.epochs:Epochs",
        "auto": "rematch.solvers.default.auto:Auto",
        "poet": "rematch.solvers.poet:Poet",
        "checkmate": "rematch.solvers.checkmate.solver:Checkmate",
        "rounding": "rematch.solvers.checkmate.rounding:Rounding",
        "chen_sqrt": "rematch.solvers.checkpoints.chen:ChenSqrt",
        "chen_greedy": "rematch.solvers.checkpoints.chen:ChenGreedy",
        "ap_sqrt": "rematch.solvers.checkpoints.articulation:ApSqrt",
        "ap_greedy": "rematch.solvers.checkpoints.articulation:ApGreedy",
        "linearized_sqrt": "rematch.solvers.checkpoints.linearized:LinearizedSqrt",
        "linearized_greedy": "rematch.solvers.checkpoints.linearized:LinearizedGreedy",
        "revolve": "rematch.solvers.checkpoints.revolve:Revolve",
        "rotor": "rematch.solvers.rotor.solver:Rotor",
        "moccasin": "rematch.solvers.moccasin.solver:Moccasin",
        "hiremate": "rematch.solvers.hiremate.solver:HiRemate",
        "twremat": "rematch.solvers.treewidth.twremat:TWRemat",
        "pwremat": "rematch.solvers.treewidth.pwremat:PWRemat",
        "feng_huang": "rematch.solvers.feng_huang.solver:FengHuang",
    },
)


def register(solver: type[Solver]) -> type[Solver]:
    """Class decorator: make a solver known by its name, from inside or outside the package."""
    return _solvers.register(solver)


def solver_names() -> list[str]:
    """The names of all solvers, built-in ones first."""
    return _solvers.names()


def solver_class(name: str) -> type[Solver]:
    """The solver of this name; `SolverError` with the nearest name if there is none."""
    return _solvers.find(name)


def make_solver(name: str, **options: Any) -> Solver:
    """`make_solver("anneal", seed=3)`"""
    return _solvers.make(name, **options)


def solve(
    problem: Problem,
    solver: str | Solver = DEFAULT_SOLVER,
    *,
    time_limit: float = DEFAULT_TIME_LIMIT,
    on_progress: OnProgress | None = None,
    enough_seconds: float | None = None,
    stop_signals: Sequence[Signals] = STOP_SIGNALS,
    **options: Any,
) -> Solution:
    """Run one solver on `problem` and verify what it returns.

    The search also ends when a schedule of at most `enough_seconds` is known, or the bound says that there is none.
    The first of `stop_signals`, by default Ctrl-C or SIGTERM, ends the search early with the best so far; a second one
    does what it did before. Handlers of your own are called as ever.
    """
    chosen = _chosen_solver(solver, options)
    if not chosen.applicable(problem):
        raise SolverError(
            f"solver {chosen.name!r} does not apply to {problem.graph.name!r}: it needs {chosen.requires}"
        )
    log: list[Progress] = []

    def record(progress: Progress) -> None:
        log.append(progress)
        if on_progress is not None:
            on_progress(progress)
        if enough_seconds is not None and _decided(progress, enough_seconds):
            deadline.stop()

    started = time.monotonic()
    chosen.prepare()
    deadline = Deadline(time_limit)

    def interrupt() -> None:
        log.append(Progress(deadline.elapsed, chosen.name, _INTERRUPTED))
        deadline.stop()

    posed = problem if chosen.moves_values else problem.without_link()
    with signals_end(interrupt, stop_signals):
        found = chosen.solve(posed, deadline=deadline, on_progress=record)
    if posed is not problem:
        found = _where_nothing_moves(found, problem.graph.baseline_seconds)
    verify(problem, found)
    return replace(found, solve_seconds=time.monotonic() - started, log=(*found.log, *log))


def _where_nothing_moves(found: Solution, baseline_seconds: float) -> Solution:
    """The solution of a problem with a link by a solver that did not know of it: what it proved is of fewer schedules.

    That no schedule is faster than one that computes everything once holds for all.
    """
    bound = found.lower_bound_seconds
    if found.infeasible_up_to_bytes is None and bound is not None and bound <= baseline_seconds:
        return found
    return replace(found, bound_scope=BoundScope.NOTHING_MOVES)


def _chosen_solver(solver: str | Solver, options: dict[str, Any]) -> Solver:
    if isinstance(solver, str):
        return make_solver(solver, **options)
    if options:
        raise SolverError(
            f"solver {solver.name!r} is given as an object, which has its options already; "
            f"pass {', '.join(options)} to {type(solver).__name__}(...) instead"
        )
    return solver


def _decided(progress: Progress, enough_seconds: float) -> bool:
    """Whether a schedule of at most so many seconds is known to be there, or not to be."""
    best, bound = progress.best_seconds, progress.bound_seconds
    return (best is not None and best <= enough_seconds) or (bound is not None and bound > enough_seconds)


def verify(problem: Problem, solution: Solution) -> Simulation | None:
    """The oracle's view of the solution's schedule; raises if it is broken or over budget."""
    if solution.schedule is None:
        return None
    seen = simulate(problem.graph, solution.schedule).checked()
    if seen.peak_bytes > problem.budget_bytes:
        raise ScheduleError(
            f"solver {solution.solver!r} returned a schedule with a peak of {seen.peak_bytes} bytes, "
            f"over the budget of {problem.budget_bytes}"
        )
    return seen
