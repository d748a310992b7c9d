"""From a graph to a plan: budget, known plans, solve, and what to say when it does not fit.

`Planner(Settings(budget="8GiB")).plan(graph, device, engine="tape")`

Plans are kept, one for each graph. A graph that was planned before gets its plan again. A new one keeps everything if
that fits; else the schedules there are get a try, for another batch size often allows the same one; else it is solved.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]
import torch
from torch.utils._python_dispatch import _disable_current_modes

from rematch.errors import BudgetInfeasible
from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.graph.model import ALREADY_ALLOCATED
from rematch.planning.budget import describe_largest_need, parse_budget
from rematch.planning.host import host_bytes
from rematch.planning.pins import Pinned, pin
from rematch.planning.places import Places, as_it_is
from rematch.planning.placing import Hunt, Judged, instead_of, keeps, most_compact, with_what_fits
from rematch.planning.plan import Plan
from rematch.planning.settings import AUTO, Settings
from rematch.report.progress import solving_progress
from rematch.signals import signals_end
from rematch.solvers.base import Deadline, Problem, Solution, Solver, Status, solve, verify
from rematch.units import format_bytes

if TYPE_CHECKING:
    from rematch.solvers.minimum import BudgetRange

log = logging.getLogger("rematch")

_MARGIN = 0.05  # of the device's memory that budget="auto" leaves free, for fragmentation and what is not counted
_ALLOCATOR_SHARE = 0.005  # of a budget: CUDA's allocator gives a tensor a block that may be larger than asked for
_SMALL_BYTES = 1024  # left to the few numbers that kernels wrap as tensors for a moment
_MINIMUM_SECONDS = 10.0  # to look for the smallest budget when the one asked for does not work,
_MINIMUM_SECONDS_PER_OP = 0.01  # or more for a large graph, whose minimum cuts take long
_INTERRUPTED_NOTE = "plan: the best when a signal ended the search; another search may find a faster one"
_EVERYTHING_KEPT = "everything kept"
_MOST_ADAPTATIONS = 4  # of schedules to the engine that runs them, until one keeps the budget
_MOST_LEFT_TO_ALLOCATOR = 0.15  # of a budget, for memory that is free in pieces too small to use
_LAST_RESORT_SHARE = 0.5  # of the time limit: to look for the smallest peak where nothing else has a place
_MOST_FOR_PLACES = 0.05  # of a step: what a schedule may cost more only because it needs less of the allocator,
_NEARLY_PLACED = 0.01  # unless the others need so much more of it than there is, and this one fits
_GROWN = 1.02  # times the budget that a plan was made for: with more, a faster one may be there
_TIGHTEST: dict[str, Schedule] = {}  # by the fingerprint of the graph; see `budget_range`
_IMPOSSIBLE: dict[tuple[str, bytes], int] = {}  # budgets proved to be too small, for graphs with the same bytes
_CLOSE = 1.006  # times a budget that is proved to be too small: no search looks for a smaller one than this
SMALLEST = "the search for small budgets"  # what found a schedule with the smallest peak


class Planner:
    """Plans graphs for one module within one budget, and remembers its plans."""

    def __init__(self, settings: Settings, required: Plan | None = None) -> None:
        self.settings = settings
        self.plans: list[Plan] = [] if required is None else [required]
        self.required = required  # the plan that the next training graph must be the one of
        self.withheld_bytes = 0  # of a budget in bytes: by so much a measured peak was above it
        self.host_bytes = host_bytes(settings.offload)  # that values may move to
        self.whole_bytes: int | None = None  # what a percentage is of: eager's peak on the first training graph
        self._device: torch.device | None = None  # of the engine, while there is one to plan for,
        self._as_run: Callable[[Schedule], Schedule] = as_it_is  # and how that runs schedules

    def plan(
        self,
        graph: Graph,
        device: torch.device,
        *,
        engine: str,
        notes: tuple[str, ...] = (),
        placed: bool = True,
        adapted: Callable[[Schedule], Schedule] | None = None,
    ) -> Plan:
        """The plan for a training graph; `BudgetInfeasible` if there is none.

        Not `placed` if whoever runs the schedule allocates in an order of its own. `adapted` makes of a schedule the
        one that the engine will run.
        """
        if self.required is not None:
            self.required.check(graph)
            known, self.required = self.required, None
            self.whole_bytes = known.figures.baseline_peak_bytes + _SMALL_BYTES
            return known
        problem = Problem(graph, self.budget_bytes(graph, device))
        planned = self._planned_before(problem, engine)
        if planned is None:
            with self._for_engine(device, adapted or as_it_is):
                found = self._without_search(problem) or self._searched(problem, device)
                found, stopped = self._placed(problem, found, device) if placed else (found, False)
                found = found if adapted is None else self._runnable(problem, found, device)
            if found.interrupted or stopped:
                log.warning("%s: %s", graph.name, _INTERRUPTED_NOTE)
                notes = (*notes, _INTERRUPTED_NOTE)
            pins = self.settings.pins if found.solver != _EVERYTHING_KEPT else ()
            planned = Plan.from_solution(problem, found, (*notes, *pins), engine)
        return self.remember(planned)

    @contextmanager
    def _for_engine(self, device: torch.device, as_run: Callable[[Schedule], Schedule]) -> Iterator[None]:
        """Plan for an engine that runs schedules so; it is not kept, for it may know a whole recording."""
        self._device, self._as_run = device, _remembering(as_run)
        try:
            yield
        finally:
            self._device, self._as_run = None, as_it_is

    def least_memory_plan(
        self, graph: Graph, device: torch.device, *, engine: str, notes: tuple[str, ...] = ()
    ) -> Plan:
        """The plan with the smallest peak that can be found, over the budget as it may be."""
        found = self._smallest(graph, 0)
        assert found.schedule is not None
        peak_bytes = simulate(graph, found.schedule).peak_bytes
        problem = Problem(graph, max(peak_bytes, self.budget_bytes(graph, device)))
        return self.remember(Plan.from_solution(problem, found, notes, engine))

    def adopt(self, plan: Plan, graph: Graph, device: torch.device) -> bool:
        """Keep a plan of an earlier start, if it is for `graph` and keeps the budget, and that has not grown much."""
        if plan.graph_fingerprint != graph.fingerprint:
            return False
        problem = Problem(graph, self.budget_bytes(graph, device))
        grown = problem.budget_bytes > _GROWN * plan.figures.budget_bytes
        if (grown and (plan.recomputed or plan.moved)) or not keeps(plan.schedule, problem):
            return False
        self.remember(plan.drawn_from(graph))
        return True

    def _planned_before(self, problem: Problem, engine: str) -> Plan | None:
        """The plan that this graph has already, if it still keeps the budget."""
        for known in self.plans:
            same = known.graph_fingerprint == problem.graph.fingerprint and known.engine == engine
            if same and keeps(known.schedule, problem):
                return known if known.graph is not None else known.drawn_from(problem.graph)
        return None

    def _without_search(self, problem: Problem) -> Solution | None:
        """Everything kept, or the schedule of another shape, if that fits."""
        everything = baseline(problem.graph)
        asks = isinstance(self.settings.solver, Solver)  # a solver object of the user's own is always asked
        free = not asks and not self.settings.recompute
        if free and simulate(problem.graph, everything).peak_bytes <= problem.budget_bytes:
            bound = problem.graph.baseline_seconds
            return Solution(everything, Status.OPTIMAL, _EVERYTHING_KEPT, lower_bound_seconds=bound)
        for known in reversed(self.plans):
            if _same_shape(known, problem.graph) and keeps(known.schedule, problem):
                return Solution(known.schedule, Status.FEASIBLE, f"{known.figures.solver}, for another shape")
        return None

    def _searched(self, problem: Problem, device: torch.device) -> Solution:
        """What the solver finds; raises `BudgetInfeasible`."""
        s = self.settings
        pinned = pin(problem.graph, s.keep, s.recompute)
        inside = Problem(pinned.graph, problem.budget_bytes)
        if _is_impossible(inside):  # say at once what no search can find
            raise self._infeasible(inside, device, tightest(inside.graph, 0)[1], proved=True)
        found = self._solved(inside, s.time_limit)
        if found.schedule is None:
            found = self._last_resort(inside, device, found)
        return _unpinned(problem, found, pinned)

    def _searched_in(self, problem: Problem, seconds: float) -> Solution | None:
        """What the solver finds in so much time, if it finds something."""
        pinned = pin(problem.graph, self.settings.keep, self.settings.recompute)
        inside = Problem(pinned.graph, problem.budget_bytes)
        found = None if _is_impossible(inside) else self._solved(inside, seconds)
        return None if found is None or found.schedule is None else _unpinned(problem, found, pinned)

    def _solved(self, problem: Problem, seconds: float) -> Solution:
        """What the solver says."""
        s = self.settings
        with solving_progress(problem.graph.baseline_seconds, s.progress) as on_progress:
            return solve(problem, s.solver, time_limit=seconds, on_progress=on_progress, **s.options)

    def _placed(self, problem: Problem, found: Solution, device: torch.device) -> tuple[Solution, bool]:
        """What was found, or a solution near it or for a smaller budget that CUDA's allocator has places for.

        A process that may reserve no more than the budget can then train. Where no such solution comes up, the one
        that needs the least is taken. Also says whether a signal ended the search for it.
        """
        if not self._has_allocator(device) or self.settings.budget == AUTO:
            return found, False
        places = Places(device, self._as_run)

        def judged(schedule: Schedule) -> float | None:
            run = simulate(problem.graph, self._as_run(schedule))
            inside = run.valid and run.peak_bytes <= problem.budget_bytes
            return run.seconds if inside and places.suffice(problem.graph, schedule, self._cap_bytes) else None

        assert found.schedule is not None
        if judged(found.schedule) is not None:
            return found, False
        waiting, needed_bytes = Deadline(), places.needed_bytes(problem.graph, found.schedule)
        excess = needed_bytes / max(1, self._cap_bytes) - 1
        hunt = self.hunt(problem, found, judged, excess=excess, time_limit=self.settings.time_limit)
        best = hunt.best or self._least_needing(problem, hunt, places)
        if best is not found:
            best = instead_of(found, best, found.solve_seconds + waiting.elapsed)
            verify(problem, best)
        return best, hunt.interrupted

    def hunt(self, problem: Problem, found: Solution, judged: Judged, *, excess: float, time_limit: float) -> Hunt:
        """What a search for places comes by, which is over; Ctrl-C ends it with what it has. See `Hunt`."""
        made = Hunt(
            problem,
            found,
            self._searched_in,
            judged,
            time_limit=time_limit,
            excess=excess,
            near=not self.settings.pins,
            seed=self.settings.options.get("seed", getattr(self.settings.solver, "seed", 0)),
        )
        with signals_end(made.interrupt):
            made.run()
        return made

    def _least_needing(self, problem: Problem, hunt: Hunt, places: Places) -> Solution:
        """Where nothing has a place: what needs the least, if it is not much slower only because of that.

        One that fits is worth waiting for where the others need far more than there is. The smallest peak is looked
        for only where searches came close to it.
        """
        graph, cap_bytes = problem.graph, self._cap_bytes
        needed = [(places.needed_bytes(graph, one.schedule), number) for number, one in enumerate(hunt.searches)]
        least_bytes, number = min(needed)
        best = hunt.searches[number]
        if hunt.at_the_end and not hunt.interrupted:
            enough_bytes = int((1 - _MOST_LEFT_TO_ALLOCATOR) * cap_bytes)
            compact = self._smallest(graph, enough_bytes, _LAST_RESORT_SHARE * self.settings.time_limit)
            hunt.look_near(compact)
            compact = hunt.best or compact
            more_seconds = _seconds(graph, compact) - _seconds(graph, best)
            needed_bytes = cap_bytes if hunt.best else places.needed_bytes(graph, compact.schedule)
            is_better = needed_bytes < least_bytes and more_seconds <= _MOST_FOR_PLACES * graph.baseline_seconds
            if is_better or needed_bytes <= cap_bytes < (1 - _NEARLY_PLACED) * least_bytes:
                best = compact
        return best

    def _runnable(self, problem: Problem, found: Solution, device: torch.device) -> Solution:
        """The solution as its engine runs it, which may be slower than it was found to be, and no proof covers that.

        Where the engine's own order takes more memory than there is, it is a solution for a budget smaller by as much;
        if none of those keeps the budget either, the first is run all the same, and the log says so.
        """
        graph, bound, tight_bytes, first = problem.graph, found.lower_bound_seconds, problem.budget_bytes, found
        for searches_left in reversed(range(_MOST_ADAPTATIONS)):
            assert found.schedule is not None
            seen, schedule = simulate(graph, found.schedule), self._as_run(found.schedule)
            run = simulate(graph, schedule).checked()
            excess_bytes = run.peak_bytes - problem.budget_bytes
            if excess_bytes <= 0:
                status = Status.FEASIBLE if run.seconds > seen.seconds else found.status
                return replace(found, schedule=schedule, status=status)
            tight_bytes -= excess_bytes
            if not searches_left:
                break
            try:
                tighter = self._searched(Problem(graph, tight_bytes), device)
            except BudgetInfeasible:
                break
            found = replace(tighter, status=Status.FEASIBLE, lower_bound_seconds=bound)
        log.warning("%s: steps may take up to %s more than the budget", graph.name, format_bytes(excess_bytes))
        return first

    def _smallest(self, graph: Graph, enough_bytes: int, most_seconds: float = math.inf) -> Solution:
        """The schedule with the smallest peak that can be found in that time, whatever it costs; see `tightest`.

        For an engine on a card, it is of the schedules with about that peak the one that needs least of its allocator,
        unless the time is limited: to tell that of schedules that recompute most takes long.
        """
        pinned = pin(graph, self.settings.keep, self.settings.recompute)
        schedule = pinned.schedule_of(tightest(pinned.graph, enough_bytes, most_seconds)[0])
        device, free = self._device, most_seconds == math.inf and not self.settings.pins
        if device is not None and self._has_allocator(device) and free:
            schedule = most_compact(graph, schedule, Places(device, self._as_run))
        return Solution(schedule, Status.FEASIBLE, SMALLEST)

    def _last_resort(self, problem: Problem, device: torch.device, failed: Solution) -> Solution:
        """Where a solver found nothing, the search for the smallest budget may have; else it has one to name."""
        schedule, peak_bytes = tightest(problem.graph, problem.budget_bytes)
        if peak_bytes <= problem.budget_bytes:
            by = f"{failed.solver}, then the search for small budgets"
            return Solution(with_what_fits(problem, schedule), Status.FEASIBLE, by, log=failed.log)
        possible_bytes = min(peak_bytes, failed.feasible_from_bytes or peak_bytes)
        raise self._infeasible(problem, device, possible_bytes, proved=failed.status is Status.INFEASIBLE)

    def remember(self, plan: Plan) -> Plan:
        """Keep a plan for the graph that it was made for."""
        self.plans = [known for known in self.plans if known.graph_fingerprint != plan.graph_fingerprint]
        self.plans.append(plan)
        return plan

    def forget(self, plan: Plan) -> None:
        """Let go of a plan that another one replaces."""
        self.plans = [known for known in self.plans if known is not plan]

    def budget_bytes(self, graph: Graph, device: torch.device) -> int:
        """What tensors may take on the device at the peak."""
        if self.settings.budget == AUTO:
            return graph.resident_bytes + available_bytes(device, self.settings.device)
        if self.whole_bytes is None:
            self.whole_bytes = simulate(graph, baseline(graph)).peak_bytes + _SMALL_BYTES
        asked = parse_budget(self.settings.budget, self.whole_bytes) - self.withheld_bytes
        return max(0, int(asked * self._usable_share(device)) - _SMALL_BYTES)

    def excess_bytes(self, peak_bytes: int) -> int:
        """How far a measured peak is above the budget; 0 within it, and where the budget is what the device has."""
        if self.settings.budget == AUTO or self.whole_bytes is None:
            return 0
        return max(0, peak_bytes + self.settings.reserve_bytes - parse_budget(self.settings.budget, self.whole_bytes))

    def exceeded_by(self, graph: Graph, schedule: Schedule, device: torch.device) -> int:
        """How many bytes more than the budget a schedule takes, or needs so that CUDA's allocator has places for it."""
        excess_bytes = simulate(graph, schedule).peak_bytes - self.budget_bytes(graph, device)
        if self._has_allocator(device) and self.settings.budget != AUTO:
            needed_bytes = Places(device, as_it_is).needed_bytes(graph, schedule)
            excess_bytes = max(excess_bytes, needed_bytes - self._cap_bytes)
        return max(0, excess_bytes)

    @property
    def _cap_bytes(self) -> int:
        """What a process may reserve: the budget as the user has it, unless that is what the device has free."""
        return parse_budget(self.settings.budget, self.whole_bytes or 1)

    def budget_for(self, peak_bytes: int, device: torch.device) -> int:
        """The budget to ask for, so that tensors may take `peak_bytes`."""
        return math.ceil((peak_bytes + _SMALL_BYTES) / self._usable_share(device))

    def _usable_share(self, device: torch.device) -> float:
        """Of a budget in bytes, what tensors may take."""
        return 1 - _ALLOCATOR_SHARE if self._has_allocator(device) else 1.0

    def _has_allocator(self, device: torch.device) -> bool:
        """Whether CUDA's allocator, here and now, gives tensors their places."""
        return device.type == "cuda" and self.settings.device is None

    def _infeasible(
        self, problem: Problem, device: torch.device, possible_bytes: int, proved: bool
    ) -> BudgetInfeasible:
        """The limit, what dominates it, the smallest budget that works and what to try."""
        verdict = "cannot be kept" if proved else "could not be kept in the time there was"
        works_bytes = self.budget_for(possible_bytes, device)
        if self._has_allocator(device):
            as_run = as_it_is if self.settings.pins else self._as_run  # pins make another graph
            places = Places(device, as_run)
            schedule = most_compact(problem.graph, tightest(problem.graph, possible_bytes)[0], places)
            run_bytes = self.budget_for(simulate(problem.graph, as_run(schedule)).peak_bytes, device)
            works_bytes = max(works_bytes, run_bytes, places.needed_bytes(problem.graph, schedule))
        return BudgetInfeasible(
            f"a budget of {format_bytes(problem.budget_bytes)} {verdict} by {problem.graph.name}: "
            f"the smallest that was found to work is {works_bytes} bytes ({format_bytes(works_bytes)}).\n"
            f"  {describe_largest_need(problem.graph)}\n"
            f"  Try budget={works_bytes}, a smaller batch, or a shorter sequence or lower resolution"
            + ("" if proved else ", or a longer time_limit")
            + (f"\n  The pins count in this: {'; '.join(self.settings.pins)}" if self.settings.pins else ""),
            feasible_from_bytes=works_bytes,
        )

    def outside_bytes(self, graph: Graph, device: torch.device, state_bytes: int = 0) -> int:
        """Memory in use that is not part of the graph, and what the user asked to leave free.

        On CUDA the allocator tells; elsewhere it is the state of optimizers that were seen or announced.
        """
        reserve_bytes = self.settings.reserve_bytes
        if not self._has_allocator(device):
            return reserve_bytes + state_bytes
        _load_libraries(device)
        counted = sum(value.size_bytes for value in graph.values if value.resident and value.role != ALREADY_ALLOCATED)
        return reserve_bytes + max(state_bytes, torch.cuda.memory_allocated(device) - counted)


def _remembering(as_run: Callable[[Schedule], Schedule]) -> Callable[[Schedule], Schedule]:
    """The same, which does not work twice if it is asked twice in a row."""
    last: list[Schedule] = []

    def remembered(schedule: Schedule) -> Schedule:
        if not last or last[0] is not schedule:
            last[:] = schedule, as_run(schedule)
        return last[1]

    return remembered


def _seconds(graph: Graph, found: Solution) -> float:
    assert found.schedule is not None
    return simulate(graph, found.schedule).seconds


@cache
def _load_libraries(device: torch.device) -> None:
    """Have cuBLAS allocate its workspace now, in this thread and in backward's: it stays, and belongs to the peak.

    Not by a product without a bias in this thread, which takes a workspace of its own that many models never need.
    """
    with _disable_current_modes(), torch.enable_grad():
        matrix = torch.ones(16, 16, device=device, requires_grad=True)
        torch.nn.functional.linear(matrix, matrix, matrix[0]).sum().backward()


def _unpinned(problem: Problem, found: Solution, pinned: Pinned) -> Solution:
    """A solution of the pinned problem as one of the problem itself, as the oracle sees it."""
    assert found.schedule is not None
    found = replace(found, schedule=pinned.schedule_of(found.schedule))
    verify(problem, found)
    return found


def _same_shape(plan: Plan, graph: Graph) -> bool:
    return plan.graph_ops == len(graph.ops) and plan.graph_values == len(graph.values)


def available_bytes(device: torch.device, planned_for: str | None) -> int:
    """What budget="auto" may use beyond what is resident: the device's free memory, less a margin."""
    if planned_for is not None:
        from rematch.capture.devices import find_device

        return int(find_device(planned_for).memory_bytes * (1 - _MARGIN))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused - _MARGIN * total)
    memory = psutil.virtual_memory()
    return int(memory.available - _MARGIN * memory.total)


def tightest(graph: Graph, enough_bytes: int, most_seconds: float = math.inf) -> tuple[Schedule, int]:
    """The schedule with the smallest peak that can be found, and that peak; one that has `enough_bytes` will do."""
    known = _TIGHTEST.get(graph.fingerprint)
    known_bytes = math.inf if known is None else simulate(graph, known).peak_bytes
    if known is None or known_bytes > max(enough_bytes, _CLOSE * _impossible_bytes(graph)):
        seconds = max(_MINIMUM_SECONDS, _MINIMUM_SECONDS_PER_OP * len(graph.ops))
        known = budget_range(graph, min(seconds, most_seconds)).schedule
    return known, simulate(graph, known).peak_bytes


def budget_range(graph: Graph, seconds: float) -> BudgetRange:
    """Which budgets can be kept, as far as a search of so many seconds can tell.

    What was found is remembered, so that whoever is told of a budget can have it, however busy the machine is then.
    """
    from rematch.solvers.minimum import smallest_budget

    found = smallest_budget(graph, Deadline(seconds))
    known = _TIGHTEST.get(graph.fingerprint)
    known_bytes = found.feasible_from_bytes if known is None else simulate(graph, known).peak_bytes
    if known is not None and known_bytes < found.feasible_from_bytes:
        found = replace(found, feasible_from_bytes=known_bytes, schedule=known)
    _TIGHTEST[graph.fingerprint] = found.schedule
    if _proofs_hold(graph):
        _IMPOSSIBLE[_with_bytes(graph)] = max(_impossible_bytes(graph), found.infeasible_up_to_bytes)
    return found


def _is_impossible(problem: Problem) -> bool:
    """Whether it is known without a search that no schedule keeps the budget."""
    from rematch.solvers.minimum import surely_needed_bytes

    graph = problem.graph
    return max(surely_needed_bytes(graph), _impossible_bytes(graph) + 1) > problem.budget_bytes


def _impossible_bytes(graph: Graph) -> int:
    """The largest budget that a search has proved to be too small."""
    return _IMPOSSIBLE.get(_with_bytes(graph), -1) if _proofs_hold(graph) else -1


def _proofs_hold(graph: Graph) -> bool:
    """Whether all schedules are in default order and without host memory, as those are that proofs are about."""
    return graph.recompute_after_loss and graph.link is None


def _with_bytes(graph: Graph) -> tuple[str, bytes]:
    """The fingerprint, and what it leaves out of the bytes that operators need."""
    return graph.fingerprint, graph.op_bytes.tobytes()
