"""Moccasin: recomputation as retention intervals, solved by constraint programming (CP-SAT).

`solve(Problem(graph, budget_bytes), Moccasin(computations=2, seed=1), time_limit=30).schedule`

B. Bartan, H. Li, H. Teague, C. Lott, B. Dilkina, "Moccasin: Efficient Tensor Rematerialization for Neural Networks"
(ICML 2023). Operator v is computed up to C_v times. Computation i starts an interval [s_v^i, e_v^i], in which its
result is in memory, if a_v^i:

    minimise    sum of w_v a_v^i                                                                  (1)
    subject to  s_v^i <= e_v^i,  e_v^i <= s_v^(i+1),  a_v^1 = 1                                   (2) (3) (7)
                sum of m_v over active intervals around event t <= M, for every t: cumulative     (4)
                each active s_v^i lies in an active interval of each u that v reads: reservoir    (5) (10)
                no two start at the same event                                                    (6)

Events are 1 ... sum of C_v (9) with `order="any"`; with `order="default"` they are stages (11), each of which ends with
the first computation of the next operator in default order and has a place for each operator before it. Phase 1
minimises max(peak, M) (12), (13), and phase 2 starts from its schedule. A schedule given as `start`, else the greedy
one, takes the place of phase 1 where it keeps the budget, and is where phase 1 starts from where it does not;
`begin="phase 1"` is the paper's way.

What our graphs have beyond the paper's: an end for each output of an operator; workspace as a demand of one event; the
budget less the residents; targets, which the end reads; held values, which the loss and the end read and which are not
freed in between; operators marked once, with C_v = 1, in their turn; readers of what is mutated, in their windows.

Deviations:

* All stages are equally long, so that an event is n x stage + position: an affine function of the stage, a variable
  with a plain range. Numbered as in (11), a start has a hole after each of its values, and CP-SAT's presolve of
  ResNet50 took 26 s instead of 1 s.
* (5) is a literal for each pair of a reading and an interval, `precedences="reservoir"` is (10). There an interval lets
  go after e_u instead of at it, as (5) has it, and one reservoir serves all computations of a reader.
* (6) is a no-overlap of events instead of an alldifferent, so that inactive computations take no place.
* a_v^(i+1) implies a_v^i, of no loss since the intervals of an operator can be renumbered, and a computation after the
  first serves some use.
* C_v is raised to what the start needs, and is 1 for operators that make nothing that weighs.
* Stages may have several `passes` through the operators before (the paper: one). With enough passes and computations
  any schedule with first computations in default order can be written so; without, the bound speaks of fewer schedules,
  and `bound_scope` says so.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from rematch.errors import SolverError, unknown_name
from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.solvers.base import BoundScope, Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.common.local_search import recomputations_of, schedule_of
from rematch.solvers.common.order import Order
from rematch.solvers.default.greedy import Greedy, greedy_schedule
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.minimum import surely_needed_bytes
from rematch.solvers.moccasin.model import Events, FreeEvents, Precedences, RetentionModel, StagedEvents, without_vain

Begin = Literal["greedy", "phase 1"]

_COST_UNITS = 2**40  # the time of running everything once, where times are not whole numbers
_ANY_NUMBER = 2**30  # of computations
_POLL_SECONDS = 0.05  # between two looks at Ctrl-C and the clock


@dataclass(frozen=True)
class Moccasin(Solver):
    """With one worker, a search that is not cut short by the clock is the same every time."""

    computations: int = 2  # C_v
    computations_of_each: tuple[int, ...] = ()  # C_v of each operator, instead
    order: Order = "default"
    passes: int = 1
    begin: Begin = "greedy"
    start: Schedule | None = field(default=None, repr=False)  # to begin with, instead
    precedences: Precedences = "literals"
    workers: int = 2
    seed: int = 0

    name: ClassVar[str] = "moccasin"
    paper: ClassVar[str] = "Bartan et al., Moccasin: Efficient Tensor Rematerialization for Neural Networks, ICML 2023"

    def __post_init__(self) -> None:
        for option, number, least in (
            ("computations", min((self.computations, *self.computations_of_each)), 1),
            ("passes", self.passes, 1),
            ("workers", self.workers, 1),
            ("seed", self.seed, 0),
        ):
            if number < least:
                raise SolverError(f"solver 'moccasin' cannot have {option}={number}; {least} is the least")
        for option, choice, known in (
            ("order", self.order, get_args(Order)),
            ("begin", self.begin, get_args(Begin)),
            ("precedences", self.precedences, get_args(Precedences)),
        ):
            if choice not in known:
                raise SolverError(unknown_name(f"{option} of solver 'moccasin'", choice, known))

    def prepare(self) -> None:
        from ortools.sat.python import cp_model  # noqa: F401  # takes a second to load

        Greedy().prepare()

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        given = self.first_schedule(problem, deadline)
        start = self.as_modelled(problem.graph, given)
        limits = self.limits(problem.graph, start)
        incumbent = Incumbent(problem, deadline, on_progress, scope=self.scope(problem.graph, limits))
        if problem.budget_bytes < surely_needed_bytes(problem.graph):
            incumbent.prove_infeasible(self.name, BoundScope.ANY_ORDER)
        incumbent.offer(baseline(problem.graph), "noremat")
        for schedule in (given, start):
            incumbent.offer(schedule, "greedy" if self.start is None else "start")
        search = _Search(self, incumbent, start, limits)
        search.keep_the_budget()
        search.save_time()
        return incumbent.solution(self.name)

    def first_schedule(self, problem: Problem, deadline: Deadline) -> Schedule:
        """What the search is to start from, within the budget or not."""
        if self.start is not None:
            return self.start
        return baseline(problem.graph) if self.begin == "phase 1" else greedy_schedule(problem, deadline)

    def as_modelled(self, graph: Graph, schedule: Schedule) -> Schedule:
        """The schedule, or one much like it, as the model can have it: nothing in vain, and in stages."""
        useful = without_vain(graph, schedule)
        if self.order == "any" or StagedEvents(graph, self.passes).place(useful) is not None:
            return useful
        return without_vain(graph, schedule_of(graph, recomputations_of(graph, useful)))

    def limits(self, graph: Graph, start: Schedule) -> list[int]:
        """C_v of each operator: what was asked for or what the start needs, but not more than can be of use."""
        count = len(graph.ops)
        asked = self.computations_of_each or (self.computations,) * count
        if len(asked) != count:
            raise SolverError(
                f"computations_of_each of solver 'moccasin' has {len(asked)} numbers, but {graph.name!r} has {count} "
                "operators; give one for each, or computations for all of them"
            )
        needed = np.bincount(start.ops, minlength=count).tolist()
        return [min(max(asked[op], needed[op]), useful) for op, useful in enumerate(self._useful(graph))]

    def _useful(self, graph: Graph) -> list[int]:
        """How many computations of each operator there can be."""
        weighs = [any(graph.values[value].size_bytes for value in op.outputs) for op in graph.ops]
        repeatable = [weighs[op] and not graph.arrays.once[op] for op in range(len(graph.ops))]
        if self.order == "any":
            return [_ANY_NUMBER if again else 1 for again in repeatable]
        staged = StagedEvents(graph, self.passes)
        return [1 + len(staged.slots(op, 1)) if again else 1 for op, again in enumerate(repeatable)]

    def events(self, graph: Graph, limits: Sequence[int]) -> Events:
        return FreeEvents(graph, limits) if self.order == "any" else StagedEvents(graph, self.passes)

    def scope(self, graph: Graph, limits: Sequence[int]) -> BoundScope:
        """Which schedules the model has."""
        all_stages = self.order == "default" and self.passes == 1 and list(limits) == self._useful(graph)
        return BoundScope.STAGES if all_stages else BoundScope.LIMITED


class _Search:
    """The two phases of one solve."""

    def __init__(self, options: Moccasin, incumbent: Incumbent, start: Schedule, limits: Sequence[int]) -> None:
        self._options, self._incumbent = options, incumbent
        self._graph, self._budget_bytes = incumbent.problem.graph, incumbent.problem.budget_bytes
        self._start, self._limits = start, limits

    def keep_the_budget(self) -> None:
        """Phase 1: minimise how far the peak is above the budget."""
        start_bytes = simulate(self._graph, self._start).peak_bytes
        if self._incumbent.over or start_bytes <= self._budget_bytes:
            return
        model = self._model()
        peak = model.limit_memory(self._budget_bytes, start_bytes)
        self._minimise("phase 1", model, peak.variable, lambda least: self._learn_peak(least > peak.floor))

    def _learn_peak(self, over_budget: bool) -> None:
        if over_budget and self._incumbent.schedule is None:
            self._incumbent.prove_infeasible(Moccasin.name)
        elif over_budget:  # the model has none of the schedules that keep the budget, so nothing faster either
            self._incumbent.raise_bound(math.inf, Moccasin.name)

    def save_time(self) -> None:
        """Phase 2: minimise the time."""
        if self._incumbent.over:
            return
        model = self._model()
        model.limit_memory(self._budget_bytes, self._budget_bytes)
        costs = WholeCosts.of(self._graph, self._limits)
        again = sum(costs.of_op[c.op] * c.active for several in model.of_op for c in several[1:])
        self._minimise(
            "phase 2", model, again, lambda cost: self._incumbent.raise_bound(costs.percent(cost), Moccasin.name)
        )

    def _model(self) -> RetentionModel:
        events = self._options.events(self._graph, self._limits)
        return RetentionModel(self._graph, events, self._limits, self._options.precedences)

    def _minimise(self, phase: str, model: RetentionModel, objective: Any, on_bound: Callable[[float], None]) -> None:
        """Solve the model from the start, which the best schedule found replaces.

        Every schedule found is offered, and `on_bound` hears how low the objective may still go.
        """
        from ortools.sat.python import cp_model

        class Offer(cp_model.CpSolverSolutionCallback):
            def on_solution_callback(callback) -> None:  # `self` is the search
                self._start = Schedule.from_ops(self._graph, model.sequence(callback.value))
                self._incumbent.offer(self._start, Moccasin.name)

        model.hint(self._start)
        model.program.minimize(objective)
        self._incumbent.tell(Moccasin.name, f"{phase}: {ModelSize.of(model)}")
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = self._options.workers
        solver.parameters.random_seed = self._options.seed
        solver.parameters.max_time_in_seconds = self._incumbent.deadline.remaining
        solver.parameters.catch_sigint_signal = False  # whoever set the deadline listens for it
        solver.best_bound_callback = on_bound
        status = _solve_until(lambda: self._incumbent.over, solver, model.program, Offer())
        if status == cp_model.OPTIMAL:
            on_bound(solver.objective_value)


def _solve_until(over: Callable[[], bool], solver: Any, program: Any, callback: Any) -> Any:
    """Solve in a thread of its own, because a search in compiled code does not let this one see Ctrl-C or the clock."""
    status: list[Any] = []
    thread = threading.Thread(target=lambda: status.append(solver.solve(program, callback)), name="rematch moccasin")
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if over():
            solver.stop_search()
    return status[0]


@dataclass(frozen=True)
class WholeCosts:
    """Times of operators as whole numbers, which CP-SAT needs."""

    of_op: tuple[int, ...]
    unit_percent: float  # of the time of running everything once
    rounding: float  # how much a sum of them may be too large

    @staticmethod
    def of(graph: Graph, limits: Sequence[int]) -> WholeCosts:
        seconds, total = graph.arrays.seconds, graph.baseline_seconds or 1.0
        if total < _COST_UNITS and np.array_equal(seconds, np.rint(seconds)):
            unit, rounding = float(math.gcd(*seconds.astype(np.int64).tolist()) or 1), 0.0
        else:
            unit, rounding = total / _COST_UNITS, 0.5 * (sum(limits) - len(limits))
        return WholeCosts(tuple(np.rint(seconds / unit).astype(np.int64).tolist()), 100.0 * unit / total, rounding)

    def percent(self, cost: float) -> float:
        """At least this much is the extra time of recomputations that cost that much."""
        return (cost - self.rounding) * self.unit_percent


@dataclass(frozen=True)
class ModelSize:
    """Table 1: how large a model is."""

    booleans: int
    integers: int
    constraints: int

    @staticmethod
    def of(model: RetentionModel) -> ModelSize:
        domains = [tuple(variable.domain) for variable in model.program.proto.variables]
        booleans = sum(domain == (0, 1) for domain in domains)
        constants = sum(domain[0] == domain[-1] for domain in domains)
        return ModelSize(booleans, len(domains) - booleans - constants, len(model.program.proto.constraints))

    def __str__(self) -> str:
        return f"{self.booleans} Boolean and {self.integers} integer variables, {self.constraints} constraints"
