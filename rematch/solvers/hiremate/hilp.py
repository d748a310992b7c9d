"""H-ILP: the fastest way to run a level within a budget, by integer programming.

`solve_level(level, budget_bytes, deadline=Deadline(10.0))`

J. Gusak et al., "HiRemate: hierarchical approach for efficient re-materialization of neural networks", ICML 2025,
section 3.2.2 and appendix B. `hilp_model` has the program and what we changed in it, `pricing` judges what comes out.

The paper gives the program to Gurobi, for minutes. HiGHS gets a schedule to begin with, and programs that grow:

1. everything once, each layer with the option that is best for the level (`shape_model`);
2. the same for a few shapes in which forwards are repeated in groups (`shapes`), the most promising ones;
3. H-ILP in which a forward may run again only shortly before its backward, and then H-ILP itself, with at most N_o
   options: those of the schedule so far, and others as far apart from them as possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rematch.solvers.base import Deadline
from rematch.solvers.common.highs import minimise
from rematch.solvers.hiremate.hilp_model import HilpModel
from rematch.solvers.hiremate.level import Level, LevelSolution, Pass, Run
from rematch.solvers.hiremate.pricing import Judge, price
from rematch.solvers.hiremate.shape_model import ShapeModel
from rematch.solvers.hiremate.shapes import Fitter, shapes

__all__ = ["heuristic", "price", "solve_level"]

_TOLERANCE = 1e-6  # percent of the least seconds
_SHARE_OF_SHAPES = 0.5  # of the time, at most
_BEST_SHAPES = 3  # whose options are chosen by a program after the greedy choice
_AHEAD = (1, 4)  # backward passes before its own from which on a forward may run again; then any


def solve_level(
    level: Level,
    budget_bytes: int,
    *,
    deadline: Deadline,
    start: Sequence[Run] | None = None,
    corrections: bool = True,
    repeat_backward: bool = False,
    gap_target: float = 1e-6,
    most_options: int | None = None,
) -> LevelSolution | None:
    """The fastest runs found, or None. `proved` if no runs of the program's kind beat them by more than `gap_target`.

    `start` are runs to improve on; `gap_target` is a share of the level's least seconds. Without `corrections` memory
    is overestimated by H-ILP, and the program is smaller. `most_options` is N_o, how many options H-ILP itself may
    choose from; None is all of them.
    """
    judge = Judge(level)
    if budget_bytes < judge.given_bytes:
        return None
    known = _within(judge, budget_bytes, start)
    if known is None:
        known = _by_shapes(judge, budget_bytes, deadline.within(_SHARE_OF_SHAPES * deadline.remaining))
    allowed = max(_TOLERANCE, 100.0 * gap_target)
    chosen = _narrowed(level, known, most_options)
    narrow = Judge(_with_options(level, chosen))
    for ahead in (*(ahead for ahead in _AHEAD if ahead < len(level.backward_order)), None):
        if known is not None and known.seconds <= judge.least_seconds * (1.0 + gap_target):
            return replace(known, proved=True)
        if deadline.expired:
            return known
        share = 1.0 if ahead is None else 1.0 / 3.0
        model = HilpModel(narrow, budget_bytes, corrections=corrections, repeat_backward=repeat_backward, ahead=ahead)
        found = minimise(
            model.program,
            deadline=deadline.within(share * deadline.remaining),
            cutoff=math.inf if known is None else known.seconds * model.percent - allowed,
            absolute_gap=allowed,
            start=None if known is None else model.point_of(_renumbered(known.runs, chosen)),
        )
        better = (
            None if found.point is None else _within(judge, budget_bytes, _original(model.runs_at(found.point), chosen))
        )
        refused = found.point is not None and better is None  # over budget within the solver's tolerance
        known = _faster(known, better)
    is_whole = all(len(of) == len(layer.options) for of, layer in zip(chosen, level.layers, strict=True))
    return None if known is None else replace(known, proved=is_whole and found.finished and not refused)


def _within(judge: Judge, budget_bytes: int, runs: Sequence[Run] | None) -> LevelSolution | None:
    """What the runs cost, unless they break the budget."""
    if runs is None:
        return None
    solution = judge.price(runs)
    return solution if solution.peak_bytes <= budget_bytes else None


# --- fewer options ----------------------------------------------------------------------------------------------------


def _narrowed(level: Level, known: LevelSolution | None, most: int | None) -> list[list[int]]:
    """Per layer, the numbers of the options that H-ILP may choose from, fastest and those in use among them."""
    every = [list(range(len(layer.options))) for layer in level.layers]
    if most is None or sum(map(len, every)) <= most:
        return every
    used: list[set[int]] = [set() for _ in level.layers]
    for run in known.runs if known is not None else ():
        if run.of is not Pass.LOSS:
            used[run.layer].add(run.option)
    kept = []
    for layer, of_layer in zip(level.layers, used, strict=True):
        fastest = min(
            range(len(layer.options)),
            key=lambda o: layer.options[o].forward_seconds + layer.options[o].backward_seconds,
        )
        kept.append({fastest, *of_layer})
    # One more option at a time for the layer with the most left out, the one furthest from those it has.
    while sum(map(len, kept)) < most:
        number = max(range(len(kept)), key=lambda n: (len(every[n]) - len(kept[n]), -n))
        phantoms = [option.phantom_bytes for option in level.layers[number].options]
        left = (option for option in every[number] if option not in kept[number])
        kept[number].add(max(left, key=lambda o: min(abs(phantoms[o] - phantoms[k]) for k in kept[number])))
    return [sorted(of) for of in kept]


def _with_options(level: Level, chosen: Sequence[Sequence[int]]) -> Level:
    layers = (
        replace(layer, options=tuple(layer.options[option] for option in of))
        for layer, of in zip(level.layers, chosen, strict=True)
    )
    return replace(level, layers=tuple(layers))


def _renumbered(runs: Iterable[Run], chosen: Sequence[Sequence[int]]) -> list[Run]:
    return [run if run.of is Pass.LOSS else replace(run, option=chosen[run.layer].index(run.option)) for run in runs]


def _original(runs: Iterable[Run], chosen: Sequence[Sequence[int]]) -> list[Run]:
    return [run if run.of is Pass.LOSS else replace(run, option=chosen[run.layer][run.option]) for run in runs]


# --- shapes -----------------------------------------------------------------------------------------------------------


def heuristic(level: Level, budget_bytes: int, *, deadline: Deadline | None = None) -> tuple[Run, ...] | None:
    """Runs within the budget that need no H-ILP, or None."""
    found = _by_shapes(Judge(level), budget_bytes, deadline or Deadline())
    return None if found is None else found.runs


def _by_shapes(judge: Judge, budget_bytes: int, deadline: Deadline) -> LevelSolution | None:
    """The best of a few shapes, with options chosen by a program for the most promising ones."""
    once, *others = dict.fromkeys(shapes(judge))
    plain = Fitter(judge, once)
    fits = plain.fit(budget_bytes, deadline)
    best = _best_options(judge, once, budget_bytes, plain if fits else None, deadline.within(deadline.remaining / 4))
    fitters = sorted((Fitter(judge, shape) for shape in others), key=lambda fitter: fitter.seconds)
    fitted: list[Fitter] = []
    for fitter in fitters:
        most_seconds = math.inf if best is None else best.seconds
        if deadline.expired or fitter.seconds >= most_seconds:
            break
        if fitter.fit(budget_bytes, deadline):
            fitted.append(fitter)
    for fitter in sorted(fitted, key=lambda fitter: fitter.seconds)[:_BEST_SHAPES]:
        found = _best_options(judge, fitter.shape, budget_bytes, fitter, deadline.within(deadline.remaining / 2))
        best = _faster(best, found)
    return best


def _faster(*found: LevelSolution | None) -> LevelSolution | None:
    return min((solution for solution in found if solution is not None), key=lambda s: s.seconds, default=None)


def _best_options(
    judge: Judge, shape: Sequence[tuple[int, int]], budget_bytes: int, known: Fitter | None, deadline: Deadline
) -> LevelSolution | None:
    """A shape with its best options, or with those known if no better ones are found in time."""
    fallback = None if known is None else _within(judge, budget_bytes, known.runs())
    if deadline.expired:
        return fallback
    model = ShapeModel(judge, shape, budget_bytes)
    choice = model.solve(deadline, None if fallback is None or known is None else known.choice)
    return _faster(fallback, None if choice is None else _within(judge, budget_bytes, model.runs(choice)))
