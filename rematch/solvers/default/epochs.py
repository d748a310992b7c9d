"""Epoch-aggregated Checkmate: a small relaxation with a proved bound, lifted to schedules and refined until they meet.

Our own method, in the frame of P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization" (MLSys 2020): the default order of first computations cuts a schedule into n stages, and Checkmate
has variables R (computed in a stage) and S (in memory at its start) for each. Here memory is enforced only at K chosen
*moments* tau_1 < ... < tau_K, each the first computation at some position; the stages between two are one *epoch*:

    minimise    sum of seconds(w) again[e,w]
    keep[k,v]   = 1 if v is alive while tau_k first runs      (v made by then; 1 for the inputs and outputs of tau_k)
    again[e,w]  = 1 if w runs in epoch e, and did so before   (w first computed by tau_e)
    (memory)    sum of bytes(v) keep[k,v] + workspace(tau_k) <= budget - residents
    (carry)     keep[e+1,v] <= keep[e,v] + again[e,producer(v)]                            for v made by tau_e
    (inputs)    1 <= keep[e,v] + again[e,producer(v)]           for v made by tau_e, read by a first computation in e
                again[e,w] <= keep[e,v] + again[e,producer(v)]  for v that w reads

*It is a relaxation.* Take any valid schedule whose first computations follow the order and which computes nothing in
vain, however often and in whatever order it recomputes inside an epoch, and read the variables off it. (memory) is the
oracle's rule at tau_k with part of what is alive left out. (carry): a value alive while tau_(e+1) runs and made by
tau_e was either not computed in e, and then it was alive all through e, and so while tau_e ran (an operator frees
nothing before it ends); or it was. (inputs): the same for the moment of the reading. The objective counts each
repetition at least once, so the program's dual bound is a lower bound, and an infeasible program proves that no such
schedule keeps the budget. Leaving out `keep` or `again` where nothing after tau can use the value only removes what a
schedule that computes nothing in vain does not do. Operators marked once, and readers of what is mutated, have no
`again` after their last stage; held values have keep = 1 from the loss on; targets are read at the end. Where the graph
recomputes only after the loss, operators have no `again` in epochs that end before it, and what a first computation
reads before the producer may run again was kept: keep[e,v] = 1.

Four things make it tighter, each added only where it is violated or pays:

* *Moments*: more of them. A moment splits an epoch, and both halves satisfy the argument above.
* *Stages*: memory at position q inside epoch e, without variables of its own. A value made before q and read after q by
  a first computation of e is alive at q or computed again in e: bytes(v) (1 - again[e,producer(v)]); one kept at
  tau_(e+1) counts bytes(v) (keep[e+1,v] - again[e,producer(v)]), which is at most its true share. Producers first
  computed in e itself get a variable that says that they run twice in e, with its cost.
* *Repeats*: memory while w is computed again in e. With across[e,v] >= keep[e+1,v] - again[e,producer(v)] (kept at the
  end and not computed in e, hence alive all through e): sum of bytes(v) across[e,v] over what w does not touch + (bytes
  w touches + workspace) again[e,w] <= budget - residents.
* *Suffixes*: for each moment, all that follows is also one epoch, to which (inputs) applies with later[e,w] in place of
  again, where later[e,w] <= again[e,w] + later[e+1,w]. For whole numbers this is implied. For fractions it is not: half
  a recomputation in each of two epochs could lean twice on the same half of a kept input. It lifts the linear
  relaxation of random layered graphs by a third.

Before any of it is solved in whole numbers, a few rounds of the linear relaxation give a bound, and starts for the
local search, within seconds also for 50,000 operators (`relax_epochs`). They also choose the moments: a handful at
which memory has a price bounds better than many that are spread, and a program with few moments is solved to the end.

The point found is *lifted*: each chosen operator runs just before its first use in its epoch. If the oracle finds the
lifted schedule within the budget, it costs what the program says and is optimal; else the places where it breaks are
refined. The bound is valid for schedules whose first computations follow the default order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np

from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.graph.matrices import stage_of_each_compute
from rematch.graph.model import Floats, Longs
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.common.highs import Minimum, minimise
from rematch.solvers.common.precedence import Precedence
from rematch.solvers.default.epoch_model import EpochModel, Refinement
from rematch.solvers.incumbent import Incumbent

_TOLERANCE = 1e-6  # percent of the baseline time: the program's own accuracy
_SUFFIXES_PAY = 0.05  # of the gap between cut-off and linear relaxation that they must close
_NEW_MOMENTS, _NEW_STAGES, _NEW_REPEATS = 3, 16, 6  # a round
_FIRST_ROUND = 0.15  # of the time: what a program may take before its best point so far is lifted and refined
_ROUND_GROWTH = 1.5  # of that, after each round that was cut short
_MOST_COLUMNS = 150_000  # in whole numbers: on larger programs HiGHS is deaf to time limits for up to minutes
_RELAXED_SHARE = 0.5  # of the time, for the linear relaxation alone
_RELAXED_MOMENTS = 12  # at most
_ROUNDS_IN_VAIN = 4  # of the linear relaxation, which raise no bound, before it ends
_HIGHER = 0.02  # of the gap: by how much chosen moments must raise the relaxation above that of spread ones
_CHOSEN_FIRST_ROUND = 0.7  # of the time, for a program with chosen moments, which are few and need no others soon
_CLOSE = 0.01  # of the extra time: what is left between schedule and bound when the linear relaxation has done its part
_NEARLY = 0.05  # of the budget: by how much a rounded schedule may exceed it and still be worth repairing
_FAR = 0.05  # the same, with which it is worth looking at where the schedule is held back
_TIGHT = 0.01  # of the budget: a schedule with less left over is held back there
_TIGHT_SPREAD = 200  # tight ones, this part
_SPREAD = 40  # new moments of the linear relaxation keep this part of the graph away from others, if they can


@dataclass(frozen=True)
class Epochs(Solver):
    """The relaxation alone, without local search: `auto` runs both."""

    name = "epochs"
    paper = "our own, in the frame of Jain et al., Checkmate, MLSys 2020"

    moments: int = 6  # of the first round

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        incumbent = Incumbent(problem, deadline, on_progress)
        incumbent.offer(baseline(problem.graph), self.name)
        search_epochs(incumbent, moments=self.moments, chosen=relax_epochs(incumbent))
        return incumbent.solution(self.name)


def relax_epochs(
    incumbent: Incumbent, *, on_lift: Callable[[Schedule], None] = lambda schedule: None
) -> tuple[int, ...]:
    """Rounds of the linear relaxation alone, from one moment on: a bound in seconds where whole numbers take minutes.

    With one moment the program is a minimum cut but for its row of memory, so that nearly all columns come out whole;
    with more, suffixes keep the bound as high. Points are rounded and lifted. The next round enforces memory where the
    lifted schedule breaks and, as long as the bound is far below the best schedule known, where that one has no memory
    left. It no longer does so at moments whose row of memory has no price: without them the bound is as high and the
    program smaller. `on_lift` sees the schedules that nearly keep the budget: repairing the others takes longer than
    finding a schedule anew. Once the incumbent is close to the bound only whole numbers can tell more.

    Returns the moments with a price in the round with the highest bound.
    """
    problem = incumbent.problem
    precedence = Precedence.of(problem.graph)
    deadline = incumbent.deadline.within(_RELAXED_SHARE * incumbent.deadline.remaining)
    moments = first_moments(problem, 1)
    before: tuple[int, ...] = ()
    highest, priced, idle, in_vain = -math.inf, moments, set[int](), 0

    def hand_on(schedule: Schedule) -> None:
        if simulate(problem.graph, schedule).peak_bytes <= (1.0 + _NEARLY) * problem.budget_bytes:
            on_lift(schedule)

    while moments != before and len(moments) <= _RELAXED_MOMENTS and in_vain < _ROUNDS_IN_VAIN:
        if _close(incumbent) or deadline.expired:
            break
        model = EpochModel(precedence, problem.budget_bytes, Refinement(moments, suffixes=True))
        found = minimise(model.program, deadline=deadline, relaxed=True, interrupt=lambda: incumbent.over)
        if found.infeasible:
            incumbent.prove_infeasible("epochs")
        if found.infeasible or not found.finished or found.point is None:
            break
        size = f"{len(moments)} moments, {model.program.column_count} columns"
        incumbent.tell("epochs", f"linear relaxation, {size}: +{found.bound:.3f} %")
        incumbent.raise_bound(found.bound, "epochs")
        broken = _offer_lifted(found.point, model, incumbent, hand_on)
        before = _priced_moments(model, found)
        idle.update(set(moments) - set(before))
        in_vain += 1
        if found.bound > highest + _TOLERANCE:
            highest, priced, in_vain = found.bound, before, 0
        moments = more_moments(before, _tight_places(incumbent), broken, idle, len(problem.graph.ops))
    return priced


def _tight_places(incumbent: Incumbent) -> list[BrokenPlace]:
    """First computations that hold the best schedule known back, the tightest first, if it is far above the bound."""
    if incumbent.schedule is None or _close(incumbent, _FAR):
        return []
    problem = incumbent.problem
    places = broken_places(Problem(problem.graph, int((1.0 - _TIGHT) * problem.budget_bytes)), incumbent.schedule)
    return [place for place in places if place.first]


def _priced_moments(model: EpochModel, found: Minimum) -> tuple[int, ...]:
    """The moments at which more memory would lower the bound."""
    if found.prices is None:
        return model.refinement.moments
    priced = np.abs(found.prices[model.memory_rows]) > _TOLERANCE
    return tuple(model.moments[priced].tolist())


def _close(incumbent: Incumbent, share: float = _CLOSE) -> bool:
    """Whether the search is over, or a schedule is known whose extra time is that of the bound but for a `share`."""
    extra = incumbent.overhead_percent
    return incumbent.over or (math.isfinite(extra) and extra - incumbent.bound_percent <= share * extra)


def more_moments(
    moments: tuple[int, ...], tight: list[BrokenPlace], broken: list[BrokenPlace], idle: set[int], count: int
) -> tuple[int, ...]:
    """The moments, and a few more: in turns the tightest and the worst broken place that are not close to others.

    Broken places come in crowds, one of which stands for all; tight ones do not. If all are close to moments, the worst
    broken one is added.
    """
    tight_stages, broken_stages = (
        [place.stage for place in places if place.stage < count and place.stage not in idle.union(moments)]
        for places in (tight, broken)
    )
    kinds = cycle(((tight_stages, count // _TIGHT_SPREAD), (broken_stages, count // _SPREAD)))
    chosen = list(moments)
    for stages, apart in islice(kinds, 2 * _NEW_MOMENTS):
        far = (stage for stage in stages if all(abs(stage - other) > apart for other in chosen))
        if len(chosen) < len(moments) + _NEW_MOMENTS:
            chosen += islice(far, 1)
    if len(chosen) == len(moments):
        chosen += broken_stages[:1]
    return tuple(sorted(chosen))


def search_epochs(
    incumbent: Incumbent,
    *,
    moments: int = 6,
    chosen: tuple[int, ...] = (),
    on_lift: Callable[[Schedule], None] = lambda schedule: None,
) -> None:
    """Rounds of solving, lifting and refining, until the incumbent is closed or its deadline has come.

    The first round has the moments that the linear relaxation `chosen`, if its bound is higher with them than with as
    many as `moments` spread over the graph. `on_lift` sees every lifted schedule that breaks the budget: a good place
    for a local search to start from.
    """
    problem = incumbent.problem
    precedence = Precedence.of(problem.graph)
    refinement = Refinement(moments=first_moments(problem, moments))
    seconds = _FIRST_ROUND * incumbent.deadline.remaining
    if _chosen_pay(EpochModel(precedence, problem.budget_bytes, refinement), incumbent, chosen):
        refinement = Refinement(chosen, suffixes=True)
        seconds = _CHOSEN_FIRST_ROUND * incumbent.deadline.remaining
    useful = refinement  # the last one that raised the bound
    while refinement.moments and not incumbent.over:
        model = EpochModel(precedence, problem.budget_bytes, refinement)
        if model.program.column_count > _MOST_COLUMNS:
            incumbent.tell("epochs", f"{model.program.column_count} columns are too many for whole numbers")
            return
        known = incumbent.bound_seconds
        found = _minimise(model, incumbent, incumbent.deadline.within(seconds))
        if found.infeasible:
            incumbent.prove_infeasible("epochs")
        if incumbent.over:
            return
        if incumbent.bound_seconds > known:
            useful = refinement
        elif not found.finished and useful != refinement:  # too fine for the time that is left
            refinement, seconds = useful, incumbent.deadline.remaining
            continue
        finer = refinement
        if found.point is not None:
            finer = _learn_from(found.point, model, incumbent, on_lift)
        if found.finished and finer == refinement:
            incumbent.tell("epochs", "the relaxation cannot be refined where its schedule breaks")
            return
        if not found.finished:
            nothing_learned = finer == refinement
            seconds = incumbent.deadline.remaining if nothing_learned else _ROUND_GROWTH * seconds
            if not finer.suffixes and _suffixes_pay(EpochModel(precedence, problem.budget_bytes, finer), incumbent):
                finer = replace(finer, suffixes=True)
        refinement = finer


def _learn_from(
    point: Floats, model: EpochModel, incumbent: Incumbent, on_lift: Callable[[Schedule], None]
) -> Refinement:
    """Lift a point, and say where the relaxation is too coarse if the schedule breaks the budget."""
    broken = _offer_lifted(point, model, incumbent, on_lift)
    return refine(model.refinement, broken, len(incumbent.problem.graph.ops))


def _offer_lifted(
    point: Floats, model: EpochModel, incumbent: Incumbent, on_lift: Callable[[Schedule], None]
) -> list[BrokenPlace]:
    """Offer the lifted schedule if it keeps the budget, else hand it on; returns where it breaks."""
    schedule = lift(model, point)
    broken = broken_places(incumbent.problem, schedule)
    if broken:
        on_lift(schedule)
    else:
        incumbent.offer(schedule, "epochs")
    return broken


def first_moments(problem: Problem, count: int) -> tuple[int, ...]:
    """The highest places of the memory profile without recomputation, spread over all that is over the budget."""
    schedule = baseline(problem.graph)
    memory = simulate(problem.graph, schedule).timeline_bytes[schedule.steps >= 0]
    over = np.flatnonzero(memory > problem.budget_bytes)
    reach = len(over) // (2 * count)
    chosen: list[int] = []
    for position in over[np.argsort(-memory[over], kind="stable")].tolist():
        if len(chosen) < count and all(abs(position - other) > reach for other in chosen):
            chosen.append(position)
    return tuple(sorted(chosen))


def _chosen_pay(spread: EpochModel, incumbent: Incumbent, chosen: tuple[int, ...]) -> bool:
    """Whether the bound, which the chosen moments gave, is above the linear relaxation of spread ones."""
    if not chosen or incumbent.over or spread.program.column_count > _MOST_COLUMNS:
        return False
    deadline = incumbent.deadline.within(_FIRST_ROUND * incumbent.deadline.remaining)
    found = minimise(spread.program, deadline=deadline, relaxed=True, interrupt=lambda: incumbent.over)
    if found.infeasible or not found.finished:
        return False
    missing = min(incumbent.overhead_percent, 2.0 * found.bound) - found.bound
    return incumbent.bound_percent - found.bound > _HIGHER * missing


def _suffixes_pay(model: EpochModel, incumbent: Incumbent) -> bool:
    """Whether they lift the linear relaxation by a good part of what is missing."""
    plain = minimise(model.program, deadline=incumbent.deadline, relaxed=True)
    if plain.infeasible or not math.isfinite(plain.bound):
        return False
    tight = EpochModel(model.precedence, model.budget_bytes, replace(model.refinement, suffixes=True))
    lifted = minimise(tight.program, deadline=incumbent.deadline, relaxed=True)
    missing = min(incumbent.overhead_percent, 2.0 * plain.bound) - plain.bound
    return lifted.infeasible or lifted.bound - plain.bound > _SUFFIXES_PAY * missing


def _minimise(model: EpochModel, incumbent: Incumbent, deadline: Deadline) -> Minimum:
    suffixes = " and suffixes" if model.refinement.suffixes else ""
    incumbent.tell(
        "epochs",
        f"{len(model.moments)} moments, {len(model.refinement.stages)} stages, {len(model.refinement.repeats)} repeats"
        f"{suffixes}: {model.program.column_count} columns, {model.program.row_count} rows",
    )
    found = minimise(
        model.program,
        deadline=deadline,
        cutoff=incumbent.overhead_percent - _TOLERANCE,
        interrupt=lambda: incumbent.over,
        on_bound=lambda bound: incumbent.raise_bound(min(bound, incumbent.overhead_percent), "epochs"),
        absolute_gap=_TOLERANCE,
    )
    if math.isfinite(found.bound):
        incumbent.raise_bound(found.bound, "epochs")
    return found


def lift(model: EpochModel, point: Floats) -> Schedule:
    """The schedule that runs each operator the point computes again just before its first use in the epoch."""
    graph = model.precedence.graph
    order = graph.arrays.order
    position = graph.arrays.position
    count = len(graph.ops)
    repeated: list[set[int]] = [set() for _ in range(count + 1)]  # per stage, operators
    for epoch, chosen in model.recomputations(point):
        for op, stage in first_uses(graph, chosen, int(model.moments[epoch]), int(model.ends[epoch])).items():
            repeated[stage].add(op)
    for (epoch, op), column in model.twice.items():
        if point[column] > 0.5:
            repeated[_second_use(model, epoch, op)].add(op)
    sequence: list[int] = []
    for stage, ops in enumerate(repeated):
        sequence.extend(sorted(ops, key=position.__getitem__))
        sequence.extend(order[stage : stage + 1].tolist())
    return Schedule.from_ops(graph, sequence)


def first_uses(graph: Graph, chosen: list[int], moment: int, end: int) -> dict[int, int]:
    """The stage in which each chosen operator of an epoch is first needed there, by a first computation or another."""
    a = graph.arrays
    stages: dict[int, int] = {}
    for op in sorted(chosen, key=a.position.__getitem__, reverse=True):  # readers before what they read
        stage = min(end, int(a.last_stage[op]))
        for user in _readers(graph, op):
            first = int(a.position[user])
            stage = min(stage, first if first > moment else stages.get(user, stage))
        stages[op] = max(stage, int(a.first_stage[op]))
    return stages


def _readers(graph: Graph, op: int) -> list[int]:
    """Operators that read what `op` makes; the loss reads what is held."""
    a = graph.arrays
    readers: list[int] = []
    for value in a.outputs_of(op).tolist():
        readers.extend(a.users_of(value).tolist())
        if a.held[value]:
            readers.append(a.loss)
    return readers


def _second_use(model: EpochModel, epoch: int, op: int) -> int:
    """The first use of an operator's values after a stage of its first epoch at which memory is enforced."""
    a = model.precedence.graph.arrays
    begin = int(a.position[op])
    end = model.end_of(epoch)
    enforced = min(stage for stage in model.refinement.stages if begin < stage < end)
    uses = [int(a.position[user]) for user in _readers(model.precedence.graph, op)]
    second = min([use for use in uses if enforced < use <= end] + [end, int(a.last_stage[op])])
    return max(second, int(a.first_stage[op]))


@dataclass(frozen=True)
class BrokenPlace:
    """A computation of a lifted schedule that runs over budget."""

    excess_bytes: int
    stage: int
    op: int
    first: bool  # the operator's first computation


def broken_places(problem: Problem, schedule: Schedule) -> list[BrokenPlace]:
    """Where a schedule breaks the budget, worst first."""
    memory: Longs = simulate(problem.graph, schedule).checked().timeline_bytes[schedule.steps >= 0]
    stages = stage_of_each_compute(problem.graph, schedule)
    ops = schedule.ops
    position = problem.graph.arrays.position
    return sorted(
        (
            BrokenPlace(
                int(memory[i]) - problem.budget_bytes, int(stages[i]), int(ops[i]), bool(position[ops[i]] == stages[i])
            )
            for i in np.flatnonzero(memory > problem.budget_bytes)
        ),
        key=lambda place: -place.excess_bytes,
    )


def refine(refinement: Refinement, broken: list[BrokenPlace], count: int) -> Refinement:
    """Look more closely where the lifted schedule breaks: a moment at the worst place, rows at others, then moments."""
    stages, repeats, moments = set(refinement.stages), set(refinement.repeats), set(refinement.moments)
    for place in broken:
        new_moment = len(moments) < len(refinement.moments) + _NEW_MOMENTS
        if place.first and (place is broken[0] or place.stage in stages):
            if new_moment:
                moments.update(closest_new_moment(moments, place.stage, count))
        elif place.first and place.stage not in moments:
            if len(stages) < len(refinement.stages) + _NEW_STAGES:
                stages.add(place.stage)
        elif not place.first and (place.op, place.stage) not in repeats:
            if len(repeats) < len(refinement.repeats) + _NEW_REPEATS:
                repeats.add((place.op, place.stage))
        elif new_moment:
            moments.update(closest_new_moment(moments, place.stage, count))
    return replace(
        refinement,
        moments=tuple(sorted(moments)),
        stages=frozenset(stages - moments),
        repeats=frozenset(repeats),
    )


def closest_new_moment(moments: set[int], stage: int, count: int) -> list[int]:
    """The position nearest to `stage` that is not a moment yet, earlier ones first; none if all are."""
    for distance in range(count):
        for position in (stage - distance, stage + distance):
            if 0 <= position < count and position not in moments:
                return [position]
    return []
