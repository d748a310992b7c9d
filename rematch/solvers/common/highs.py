"""Mixed-integer programs in HiGHS, behind one small door.

model = LinearModel()
x = model.columns(cost=np.array([1.0, 2.0]))
model.rows(np.array([[x[0], x[1]]]), np.array([1.0, 1.0]), lower=1.0)
minimise(model, deadline=Deadline(10)).bound
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rematch.errors import SolverError
from rematch.graph.model import Floats, Ints
from rematch.solvers.base import Deadline

ABSENT = -1  # in place of a column: no such term
# The rule of HiGHS's presolve that substitutes columns by equations, as a bit of its option: with it, versions 1.11 to
# 1.13 call some tiny programs with whole columns infeasible, or a dearer point the cheapest.
_AGGREGATOR = 1 << 12
_INTERIOR_FROM = 30_000  # columns: an interior point method is faster than the simplex from here on, on epoch models


class LinearModel:
    """A program with binary or continuous columns in [0, 1] (or wider), built a batch of columns or rows at a time."""

    def __init__(self) -> None:
        self.column_count = 0
        self.row_count = 0
        self._cost: list[Floats] = []
        self._bounds: list[tuple[Floats, Floats]] = []
        self._integer: list[NDArray[np.bool_]] = []
        self._row_lengths: list[Ints] = []
        self._indices: list[Ints] = []
        self._coefficients: list[Floats] = []
        self._row_bounds: list[tuple[Floats, Floats]] = []

    def columns(self, cost: Floats, lower: ArrayLike = 0.0, upper: ArrayLike = 1.0, *, integer: bool = True) -> Ints:
        """Add one column per entry of `cost`; returns their indices."""
        count = len(cost)
        self._cost.append(np.asarray(cost, dtype=np.float64))
        self._bounds.append((_filled(lower, count), _filled(upper, count)))
        self._integer.append(np.full(count, integer))
        self.column_count += count
        return np.arange(self.column_count - count, self.column_count, dtype=np.int32)

    def rows(
        self, columns: Ints, coefficients: ArrayLike, lower: ArrayLike = -math.inf, upper: ArrayLike = math.inf
    ) -> None:
        """Add a row per row of `columns`, whose entries may be ABSENT; coefficients broadcast to its shape."""
        present = columns != ABSENT
        self._row_lengths.append(present.sum(axis=1).astype(np.int32))
        self._indices.append(columns[present].astype(np.int32))
        self._coefficients.append(np.broadcast_to(np.asarray(coefficients, dtype=np.float64), columns.shape)[present])
        self._row_bounds.append((_filled(lower, len(columns)), _filled(upper, len(columns))))
        self.row_count += len(columns)

    def to_highs(self, *, relaxed: bool) -> Any:
        import highspy

        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = self.column_count, self.row_count
        program.col_cost_ = _joined(self._cost)
        program.col_lower_ = _joined([lower for lower, _ in self._bounds])
        program.col_upper_ = _joined([upper for _, upper in self._bounds])
        program.row_lower_ = _joined([lower for lower, _ in self._row_bounds])
        program.row_upper_ = _joined([upper for _, upper in self._row_bounds])
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.concatenate(([0], np.cumsum(_joined(self._row_lengths)))).astype(np.int32)
        matrix.index_ = _joined(self._indices).astype(np.int32)
        matrix.value_ = _joined(self._coefficients)
        if not relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            program.integrality_ = [kinds[integer] for integer in _joined(self._integer).tolist()]
        return program


@dataclass(frozen=True)
class Minimum:
    """What a minimisation ended with."""

    finished: bool  # solved to the end rather than stopped by deadline or interrupt
    infeasible: bool  # there is no point at all (only without a cut-off)
    bound: float  # no point below the cut-off costs less than this; -inf if unknown
    objective: float = math.inf
    point: Floats | None = field(default=None, repr=False)  # the best point found
    prices: Floats | None = field(default=None, repr=False)  # per row, what a unit more of its limit changes; relaxed
    reduced_costs: Floats | None = field(default=None, repr=False)  # per column, what a unit more of it adds; relaxed


def minimise(
    model: LinearModel,
    *,
    deadline: Deadline,
    cutoff: float = math.inf,
    relaxed: bool = False,
    interrupt: Callable[[], bool] = lambda: False,
    on_bound: Callable[[float], None] = lambda bound: None,
    absolute_gap: float = 1e-6,
    start: Mapping[int, float] | None = None,
) -> Minimum:
    """Minimise; only points that cost less than `cutoff` are of interest.

    `interrupt` is asked again and again while the search runs, and ends it by answering True. With `relaxed`, columns
    need not be whole. `start` gives some columns of a point to begin with; HiGHS finds the others.
    """
    if relaxed:
        return Relaxation(model, interior=model.column_count >= _INTERIOR_FROM).minimise(deadline, interrupt)
    highs = _loaded(model, relaxed=False)
    options = {"time_limit": max(deadline.remaining, 0.01), "mip_rel_gap": 0.0, "mip_abs_gap": absolute_gap}
    if math.isfinite(cutoff):
        options["objective_bound"] = cutoff
    for name, value in options.items():
        highs.setOptionValue(name, value)
    if start:
        highs.setSolution(len(start), np.array(list(start), dtype=np.int32), np.array(list(start.values())))

    def look(event: Any) -> None:
        on_bound(float(event.data_out.mip_dual_bound))
        if deadline.expired or interrupt():
            event.interrupt()

    highs.cbMipInterrupt.subscribe(look)
    highs.run()
    return _read(highs, cutoff)


class Relaxation:
    """A program whose columns need not be whole, minimised again and again, each time from where the last one ended.

    With `interior` each time begins anew, by an interior point method that ends in a vertex.
    """

    def __init__(self, model: LinearModel, *, interior: bool = False) -> None:
        self._highs = _loaded(model, relaxed=True)
        if interior:
            self._highs.setOptionValue("solver", "ipm")
            self._highs.setOptionValue("presolve", "off")  # on epoch models of this size it takes longer than the rest
        self._interrupt: Callable[[], bool] = lambda: False
        for event in (self._highs.cbSimplexInterrupt, self._highs.cbIpmInterrupt):
            event.subscribe(self._look)

    def _look(self, event: Any) -> None:
        event.data_in.user_interrupt = self._interrupt()  # HiGHS remembers a yes from one run to the next

    def limit(self, rows: Ints, upper: Floats) -> None:
        """Change the upper ends of rows that have no lower ones."""
        for row, end in zip(rows.tolist(), upper.tolist(), strict=True):
            self._highs.changeRowBounds(row, -math.inf, end)

    def minimise(self, deadline: Deadline, interrupt: Callable[[], bool] = lambda: False) -> Minimum:
        import highspy

        # HiGHS counts the time of all runs of one instance together.
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + max(deadline.remaining, 0.01))
        self._interrupt = interrupt
        self._highs.run()
        status = self._highs.getModelStatus()
        optimal, infeasible = (
            status == state for state in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
        )
        objective, point = _best_point(self._highs)
        solution = self._highs.getSolution()
        prices, reduced = (np.array(dual) if optimal else None for dual in (solution.row_dual, solution.col_dual))
        bound = objective if optimal else -math.inf
        return Minimum(optimal or infeasible, infeasible, bound, objective, point, prices, reduced)


def _loaded(model: LinearModel, *, relaxed: bool) -> Any:
    import highspy

    if model.column_count == 0:
        model.columns(np.zeros(1))  # HiGHS answers nothing about a program without columns
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    if not relaxed:
        highs.setOptionValue("presolve_rule_off", _AGGREGATOR)
    if highs.passModel(model.to_highs(relaxed=relaxed)) == highspy.HighsStatus.kError:
        raise SolverError("HiGHS refused the program: a row names a column twice, or one that does not exist")
    return highs


def _best_point(highs: Any) -> tuple[float, Floats | None]:
    import highspy

    info = highs.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return math.inf, None
    return float(info.objective_function_value), np.array(highs.getSolution().col_value)


def _read(highs: Any, cutoff: float) -> Minimum:
    import highspy

    status = highs.getModelStatus()
    ended = (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
    objective, point = _best_point(highs)
    if status == highspy.HighsModelStatus.kInfeasible:
        return Minimum(True, math.isinf(cutoff), cutoff, math.inf, None)
    bound = float(highs.getInfo().mip_dual_bound)
    # Nodes above the cut-off are thrown away unseen, so nothing above it is proved.
    return Minimum(status in ended, False, min(bound, objective, cutoff), objective, point)


def _filled(entry: ArrayLike, count: int) -> Floats:
    return np.broadcast_to(np.asarray(entry, dtype=np.float64), (count,))


def _joined(parts: list[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0)
