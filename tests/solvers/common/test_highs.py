"""The door to HiGHS: programs with known answers, and what is claimed when a search is cut off or stopped."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rematch.errors import SolverError
from rematch.solvers import Deadline
from rematch.solvers.common.highs import ABSENT, LinearModel, Relaxation, minimise

COSTS, WEIGHTS, NEEDED = (4.0, 3.0, 5.0), (2.0, 3.0, 4.0), 5.0


def covering(
    costs: tuple[float, ...] = COSTS, weights: tuple[float, ...] = WEIGHTS, needed: float = NEEDED
) -> LinearModel:
    """Choose items of at least `needed` weight, as cheaply as can be."""
    model = LinearModel()
    items = model.columns(np.array(costs))
    model.rows(items[None, :], np.array(weights), lower=needed)
    return model


def hard(items: int = 40) -> LinearModel:
    """Market split, beyond what can be solved here: choose items that meet five sums at once, or nearly so.

    The cost is 1 and the distance from each sum; items 0, 2, 4, ... meet all of them.
    """
    random = np.random.default_rng(1)
    model = LinearModel()
    model.columns(np.array([1.0]), lower=1.0)
    chosen = model.columns(np.zeros(items))
    for weights in random.integers(1, 100, (5, items)).astype(float):
        distance = model.columns(np.array([1.0, 1.0]), upper=math.inf, integer=False)
        row = np.concatenate((chosen, distance))[None, :]
        met = weights[::2].sum()
        model.rows(row, np.append(weights, [1.0, -1.0]), lower=met, upper=met)
    return model


def test_a_small_program() -> None:
    found = minimise(covering(), deadline=Deadline())
    assert (found.finished, found.infeasible) == (True, False)
    assert (found.objective, found.bound) == pytest.approx((7.0, 7.0))
    assert found.point is not None
    assert found.point.tolist() == pytest.approx([1.0, 1.0, 0.0])


def test_relaxed_columns_need_not_be_whole() -> None:
    found = minimise(covering(), deadline=Deadline(), relaxed=True)
    assert (found.finished, found.infeasible) == (True, False)
    assert (found.objective, found.bound) == pytest.approx((5.5, 5.5))  # the second item, and half of the third
    assert found.point is not None
    assert found.point.tolist() == pytest.approx([0.0, 1.0, 0.5])


@pytest.mark.parametrize("relaxed", [True, False])
def test_no_point_at_all_is_infeasible(relaxed: bool) -> None:
    found = minimise(covering(needed=10.0), deadline=Deadline(), relaxed=relaxed)
    assert (found.finished, found.infeasible, found.point, found.objective) == (True, True, None, math.inf)


def test_a_fractional_point_alone_is_infeasible_for_whole_columns_only() -> None:
    model = LinearModel()
    items = model.columns(np.array([1.0, 1.0]))
    model.rows(items[None, :], 2.0, lower=1.0, upper=1.0)
    assert minimise(model, deadline=Deadline()).infeasible
    assert minimise(model, deadline=Deadline(), relaxed=True).objective == pytest.approx(0.5)


def test_a_cut_off_above_the_minimum_changes_nothing() -> None:
    found = minimise(covering(), deadline=Deadline(), cutoff=7.5)
    assert (found.objective, found.bound) == pytest.approx((7.0, 7.0))


@pytest.mark.parametrize("cutoff", [6.9, 5.6])
def test_a_cut_off_below_the_minimum_proves_itself_and_no_more(cutoff: float) -> None:
    found = minimise(covering(), deadline=Deadline(), cutoff=cutoff)
    assert (found.finished, found.infeasible, found.point) == (True, False, None)
    assert found.bound == pytest.approx(cutoff)


def test_nothing_at_all_below_a_cut_off_is_not_called_infeasible() -> None:
    found = minimise(covering(needed=10.0), deadline=Deadline(), cutoff=100.0)
    assert (found.infeasible, found.point) == (False, None)
    assert found.bound <= 100.0


def test_a_relaxation_takes_no_notice_of_the_cut_off() -> None:
    assert minimise(covering(), deadline=Deadline(), cutoff=1.0, relaxed=True).bound == pytest.approx(5.5)


def test_absent_entries_are_left_out_with_their_coefficients() -> None:
    """Two rows of one batch: x >= 1 in the first, whose middle entry is absent, and y + z >= 1 in the second."""
    model = LinearModel()
    x, y, z = model.columns(np.array([1.0, 2.0, 3.0]))
    model.rows(np.array([[x, ABSENT, ABSENT], [ABSENT, z, y]]), [1.0, 1.0, 1.0], lower=1.0)
    model.rows(np.array([[ABSENT, y, z]]), [[7.0, -1.0, 1.0]], lower=0.0)  # z at least y
    found = minimise(model, deadline=Deadline())
    assert found.point is not None
    assert found.point.tolist() == pytest.approx([1.0, 0.0, 1.0])
    assert (model.column_count, model.row_count) == (3, 3)


def test_batches_of_columns_continue_the_numbering() -> None:
    model = LinearModel()
    first = model.columns(np.array([1.0, 1.0]))
    wide = model.columns(np.array([1.0]), lower=2.5, upper=9.0, integer=False)
    assert [*first.tolist(), *wide.tolist()] == [0, 1, 2]
    model.rows(np.concatenate((first, wide))[None, :], 1.0, lower=4.0)
    assert minimise(model, deadline=Deadline()).objective == pytest.approx(4.0)
    model.rows(wide[None, :], 1.0, upper=2.6)
    assert minimise(model, deadline=Deadline()).objective == pytest.approx(4.5)  # both whole, and 2.5 at least


def test_bounds_per_column_fix_it() -> None:
    model = covering()
    fixed = model.columns(np.array([10.0, 10.0]), lower=np.array([0, 1]))
    model.rows(fixed[None, :], 1.0, upper=1.0)
    assert minimise(model, deadline=Deadline()).objective == pytest.approx(17.0)


def test_a_start_is_completed_and_kept_if_nothing_better_is_found() -> None:
    """Items 0, 2, 4, ... meet all five sums at a cost of 1, which no search of this length finds by itself."""
    chosen = {1 + item: float(item % 2 == 0) for item in range(40)}
    found = minimise(hard(), deadline=Deadline(2.0), start=chosen)
    assert found.objective == pytest.approx(1.0)
    assert minimise(covering(), deadline=Deadline(), start={0: 0.0, 1: 0.0}).objective == pytest.approx(7.0)


def test_a_relaxation_goes_on_from_where_it_ended() -> None:
    """Less weight allowed for the same gain: the gain falls with it, and comes back."""
    model = LinearModel()
    items = model.columns(np.array([-4.0, -3.0]))
    model.rows(items[None, :], np.array([2.0, 3.0]), upper=5.0)
    relaxation = Relaxation(model)
    gains = []
    for weight in (5.0, 2.0, 3.5, -1.0, 5.0):
        relaxation.limit(np.array([0], dtype=np.int32), np.array([weight]))
        found = relaxation.minimise(Deadline(10.0))
        gains.append(None if found.infeasible else -found.bound)
    assert gains == [pytest.approx(7.0), pytest.approx(4.0), pytest.approx(5.5), None, pytest.approx(7.0)]


def test_an_interior_point_method_finds_the_same_vertex() -> None:
    inside, along = (Relaxation(hard(), interior=interior).minimise(Deadline()) for interior in (True, False))
    assert inside.finished
    assert inside.bound == pytest.approx(along.bound)
    assert inside.point is not None
    assert np.count_nonzero((inside.point > 1e-6) & (inside.point < 1 - 1e-6)) <= 5 + 10  # rows, and distances


@pytest.mark.parametrize("interior", [True, False])
def test_a_relaxation_that_is_interrupted_claims_nothing(interior: bool) -> None:
    relaxation = Relaxation(hard(), interior=interior)
    stopped = relaxation.minimise(Deadline(), interrupt=lambda: True)
    assert (stopped.finished, stopped.infeasible, stopped.bound) == (False, False, -math.inf)
    assert relaxation.minimise(Deadline()).finished  # the next run is not


def test_a_program_that_names_a_column_twice_is_refused() -> None:
    model = covering()
    model.rows(np.array([[0, 0]], dtype=np.int32), 1.0, upper=1.0)
    with pytest.raises(SolverError, match="names a column twice"):
        minimise(model, deadline=Deadline())


@pytest.mark.parametrize("stop", ["interrupt", "deadline"])
def test_a_search_that_is_stopped_claims_no_more_than_it_has_proved(stop: str) -> None:
    asked: list[bool] = []
    bounds: list[float] = []

    def enough() -> bool:
        asked.append(True)
        return stop == "interrupt" and len(asked) > 5

    deadline = Deadline(0.3 if stop == "deadline" else 60.0)
    found = minimise(hard(), deadline=deadline, interrupt=enough, on_bound=bounds.append)
    assert (found.finished, found.infeasible) == (False, False)
    assert found.bound <= found.objective
    assert found.bound >= max(bounds, default=-math.inf) - 1e-6
    assert stop == "deadline" or len(asked) > 5


def test_stopping_the_deadline_from_outside_stops_the_search() -> None:
    deadline = Deadline(60.0)
    found = minimise(hard(), deadline=deadline, on_bound=lambda bound: deadline.stop())
    assert not found.finished


def test_the_same_program_twice_gives_the_same_point() -> None:
    model = covering(costs=(1.0,) * 8, weights=(1.0,) * 8, needed=4.0)  # many minima
    first, second = (minimise(model, deadline=Deadline()) for _ in range(2))
    assert first.point is not None
    assert second.point is not None
    assert first.point.tolist() == second.point.tolist()
