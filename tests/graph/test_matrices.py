"""Checkmate's R and S: exact round trips, the paper's reading of them, and schedules or matrices that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rematch.errors import ScheduleError
from rematch.graph import Graph, Op, Phase, Schedule, Value, baseline, simulate
from rematch.graph.generators import chain
from rematch.graph.matrices import Matrices, from_matrices, to_matrices
from tests.strategies import graphs, staged_sequences


@given(st.data(), graphs())
def test_schedule_to_matrices_and_back(data: st.DataObject, graph: Graph) -> None:
    schedule = Schedule.from_ops(graph, data.draw(staged_sequences(graph)))
    matrices = to_matrices(graph, schedule)
    assert from_matrices(graph, matrices) == schedule
    assert matrices.R.sum() == len(schedule.ops)


@given(st.data(), graphs())
def test_matrices_to_schedule_and_back(data: st.DataObject, graph: Graph) -> None:
    """Also for an S that keeps values longer than anybody needs them."""
    kept = to_matrices(graph, Schedule.from_ops(graph, data.draw(staged_sequences(graph))))
    R, S = kept.R, kept.S.copy()
    for stage in range(1, len(S)):
        for value in range(len(graph.values)):
            producer = graph.arrays.producer[value]
            there = S[stage - 1, value] or (producer >= 0 and R[stage - 1, producer])
            S[stage, value] |= there and data.draw(st.booleans())
    matrices = Matrices(R, S)
    schedule = from_matrices(graph, matrices)
    assert to_matrices(graph, schedule) == matrices
    assert simulate(graph, schedule).peak_bytes >= simulate(graph, from_matrices(graph, kept)).peak_bytes


def test_chain_by_hand() -> None:
    graph = chain(2, vary_percent=0)
    matrices = to_matrices(graph, Schedule.from_ops(graph, [0, 1, 2, 0, 3, 0, 4]))
    assert matrices.R.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 0, 1],
    ]
    layer0, layer1, loss, backward1 = 0, 1, 2, 3
    kept = [set(), {layer0}, {layer1}, {layer1, loss}, {layer1, backward1}]
    assert [set(np.flatnonzero(row)) for row in matrices.S] == kept


def test_a_target_made_again_at_the_end_has_a_stage_of_its_own() -> None:
    graph = Graph((Op("f", 1.0, (), (0,)), Op("g", 1.0, (), (1,))), (Value("x", 1), Value("y", 1)), frozenset({0}))
    schedule = Schedule.from_ops(graph, [0, 1, 0])
    matrices = to_matrices(graph, schedule)
    assert matrices.R.astype(int).tolist() == [[1, 0], [0, 1], [1, 0]]
    assert from_matrices(graph, matrices) == schedule
    assert to_matrices(graph, baseline(graph)).R.shape == (2, 2)


def test_a_spurious_checkpoint_is_freed_in_its_stage() -> None:
    graph = chain(2)
    plain = to_matrices(graph, baseline(graph))
    S = plain.S.copy()
    S[1:4, 0] = True  # layer0 is read by layer1 and, after the loss, by the backward of layer0 only
    S[4, 0] = True
    wasteful = Matrices(plain.R, S)
    assert to_matrices(graph, from_matrices(graph, wasteful)) == wasteful
    assert hash(wasteful) == hash(Matrices(plain.R.copy(), S.copy()))
    assert plain != "matrices"


def test_empty_graph() -> None:
    graph = Graph((), (Value("w", 1, resident=True),))
    matrices = to_matrices(graph, baseline(graph))
    assert (matrices.R.shape, matrices.S.shape) == ((0, 0), (0, 1))
    assert from_matrices(graph, matrices) == baseline(graph)


@pytest.fixture
def pair() -> Graph:
    """Two independent operators and one that reads both."""
    ops = (Op("f", 1.0, (), (0,)), Op("g", 1.0, (), (1,)), Op("h", 1.0, (0, 1), (2,)))
    return Graph(ops, (Value("x", 1), Value("y", 1), Value("z", 1)))


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([1, 0, 2], "operator 'g' is first computed before 'f'"),
        ([0, 0, 1, 0, 0, 2], "operator 'f' is computed twice in stage 2"),
        ([0, 1, 1, 0, 2], "stage 2 computes 'g' before 'f'"),
        ([0, 1], "operator 'h' never runs"),
    ],
)
def test_schedules_that_are_no_stages(pair: Graph, ops: list[int], words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        to_matrices(pair, Schedule.from_ops(pair, ops))
    assert words in str(caught.value)


def test_an_operator_twice_in_a_stage_with_another_between(pair: Graph) -> None:
    with pytest.raises(ScheduleError, match="'f' is computed twice in stage 2"):
        to_matrices(pair, Schedule.from_ops(pair, [0, 1, 0, 1, 0, 2]))


@pytest.mark.parametrize(
    ("R", "S", "words"),
    [
        (np.eye(2), np.zeros((2, 3)), "R has shape (2, 2)"),
        (np.eye(3), np.zeros((2, 3)), "S (2, 3)"),
        (np.diag([1, 0, 1]), np.zeros((3, 3)), "R does not compute 'g' in stage 1"),
        (np.array([[1, 0, 1], [0, 1, 0], [0, 0, 1]]), np.zeros((3, 3)), "R computes 'h' in stage 0"),
        (np.eye(3), np.array([[0, 1, 0]] + [[0, 0, 0]] * 2), "S has 'y' in memory at the beginning of stage 0"),
        (np.eye(3), np.array([[0, 0, 0], [0, 0, 0], [1, 1, 0]]), "S has 'x' in memory at the beginning of stage 2"),
        (np.eye(3), np.array([[0, 0, 0], [1, 0, 0], [1, 0, 0]]), "'h' reads 'y', which is not alive"),
    ],
)
def test_matrices_that_are_no_schedule(pair: Graph, R: np.ndarray, S: np.ndarray, words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_matrices(pair, Matrices(R.astype(np.bool_), S.astype(np.bool_)))
    assert words in str(caught.value)


def test_a_held_value_must_be_kept_after_the_loss() -> None:
    ops = (Op("f", 1.0, (), (0,)), Op("loss", 1.0, (0,), (1,), phase=Phase.LOSS), Op("g", 1.0, (1,), (2,)))
    graph = Graph(ops, (Value("y", 1), Value("t", 1), Value("g", 1)), held=frozenset({0}))
    matrices = to_matrices(graph, baseline(graph))
    S = matrices.S.copy()
    S[2, 0] = False
    with pytest.raises(ScheduleError, match="held from the loss on"):
        from_matrices(graph, Matrices(matrices.R, S))
