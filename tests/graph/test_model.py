"""Graphs are checked when made, and the message names the offender; derived figures and arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from rematch.errors import GraphError
from rematch.graph import Graph, Op, Phase, Value
from rematch.graph.generators import chain
from rematch.graph.model import compressed_rows
from tests.reference import before, is_once, mutations, resident_bytes
from tests.strategies import graphs, renumbered

A, B = Value("a", 1), Value("b", 1)
WEIGHTS = Value("weights", 1, resident=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Graph((), (Value("a", -1),)), "'a' (number 0) has -1 bytes"),
        (lambda: Graph((), (Value("a", 2**60),)), "'a'"),
        (lambda: Graph((), (Value("a", 2**56, resident=True),) * 17, name="g"), "the values of graph 'g' have"),
        (lambda: Graph((), (Value("a", 1.5),)), "'a' has a size of 1.5"),  # type: ignore[arg-type]
        (lambda: Graph((), (Value("a", True),)), "'a' has a size of True"),
        (lambda: Graph((), (), targets=frozenset({3})), "target value 3 does not exist"),
        (lambda: Graph((), (), held=frozenset({-1})), "held value -1 does not exist"),
        (lambda: Graph((Op("f", math.nan, (), ()),), ()), "'f' takes nan seconds"),
        (lambda: Graph((Op("f", math.inf, (), ()),), ()), "'f' takes inf seconds"),
        (lambda: Graph((Op("f", -1.0, (), ()),), ()), "'f' takes -1.0 seconds"),
        (lambda: Graph((Op("f", 1e300, (), ()),), ()), "'f' takes 1e+300 seconds"),
        (lambda: Graph((Op("f", 1.0, (), (), workspace_bytes=-8),), ()), "'f' has -8 bytes of workspace"),
        (lambda: Graph((Op("f", 1.0, (), (), flops=math.nan),), ()), "'f' has nan flops"),
        (lambda: Graph((Op("f", 1.0, (7,), ()),), (A,)), "'f' reads value 7, unknown"),
        (lambda: Graph((Op("f", 1.0, (), (7,)),), (A,)), "'f' produces value 7, unknown"),
        (lambda: Graph((Op("f", 1.0, (), (), once=True, mutates=(7,)),), (A,)), "'f' mutates value 7, unknown"),
        (lambda: Graph((Op("f", 1.0, (), (0,)),), (WEIGHTS,)), "'f' produces 'weights', which is resident"),
        (
            lambda: Graph((Op("f", 1.0, (), (0,)), Op("g", 1.0, (), (0,))), (A,)),
            "'a' has two producers, 'f' and 'g'",
        ),
        (lambda: Graph((Op("f", 1.0, (), (0, 0)),), (A,)), "'a' has two producers"),
        (
            lambda: Graph((Op("f", 1.0, (), (), mutates=(0,)),), (WEIGHTS,)),
            "'f' mutates its input, so it must be marked",
        ),
        (
            lambda: Graph((Op("f", 1.0, (), (0,), once=True, mutates=(0,)),), (A,)),
            "'f' mutates 'a', which is not resident",
        ),
        (lambda: Graph((), (A,)), "'a' (number 0) has no producer"),
        (lambda: Graph((Op("f", 1.0, (), ()),), (), order=(0, 0)), "each of the 1 operators once; it has 2 entries"),
        (lambda: Graph((Op("f", 1.0, (), ()),), (), order=(1,)), "each of the 1 operators once"),
        (
            lambda: Graph((Op("f", 1.0, (1,), (0,)), Op("g", 1.0, (), (1,))), (A, B)),
            "runs 'f' before 'g', which produces its input 'b'",
        ),
        (lambda: Graph((Op("f", 1.0, (0,), (0,)),), (A,)), "cycle: 'f' -> 'f'"),
        (lambda: Graph((Op("f", 1.0, (1,), (0,)), Op("g", 1.0, (0,), (1,))), (A, B)), "cycle: "),
        (
            lambda: Graph((Op("l", 1.0, (), (), phase=Phase.LOSS), Op("m", 1.0, (), (), phase=Phase.LOSS)), ()),
            "'l' and 'm' are both the loss",
        ),
        (lambda: Graph((Op("f", 1.0, (), (0,)),), (A,), held=frozenset({0})), "held values need a loss operator"),
        (
            lambda: Graph((Op("l", 1.0, (), (), phase=Phase.LOSS), Op("f", 1.0, (), (), once=True)), ()),
            "'f' is forward and runs once",
        ),
        (
            lambda: Graph((Op("l", 1.0, (), (0,), phase=Phase.LOSS),), (A,), held=frozenset({0})),
            "held value 'a' is produced by 'l'",
        ),
    ],
)
def test_refuses_what_cannot_be_and_names_it(make: Callable[[], Graph], words: str) -> None:
    with pytest.raises(GraphError) as caught:
        make()
    assert words in str(caught.value)


def test_a_cycle_is_shown_in_the_direction_of_the_data() -> None:
    ops = (Op("f", 1.0, (2,), (0,)), Op("g", 1.0, (0,), (1,)), Op("h", 1.0, (1,), (2,)))
    with pytest.raises(GraphError) as caught:
        Graph(ops, (A, B, Value("c", 1)))
    shown = str(caught.value).removeprefix("the graph has a cycle: ").split(" -> ")
    assert shown[0] == shown[-1]
    assert set(pairwise(shown)) == {("'f'", "'g'"), ("'g'", "'h'"), ("'h'", "'f'")}


@given(graphs())
def test_arrays_say_what_the_graph_says(graph: Graph) -> None:
    a = graph.arrays
    free = [v for v, value in enumerate(graph.values) if not value.resident]
    for index, op in enumerate(graph.ops):
        assert a.inputs_of(index).tolist() == [v for v in op.inputs if v in free]
        assert a.outputs_of(index).tolist() == list(op.outputs)
        assert all(a.producer[value] == index for value in op.outputs)
        assert a.once[index] == is_once(graph, index)
        assert graph.order[a.position[index]] == index
        needs = [v for v in {*op.inputs, *op.outputs} if v in free]
        own = sum(graph.values[v].size_bytes for v in needs) + op.workspace_bytes
        assert graph.op_bytes[index] == resident_bytes(graph) + own
    for value in range(len(graph.values)):
        readers = [op for op in graph.order if value in graph.ops[op].inputs and value in free]
        assert a.users_of(value).tolist() == readers
        assert a.target[value] == (value in graph.targets and value in free)
        assert a.held[value] == (value in graph.held and value in free)


@given(graphs())
def test_windows_admit_an_operator_exactly_where_its_inputs_have_the_right_contents(graph: Graph) -> None:
    once = [op for op in graph.order if is_once(graph, op)]
    for op in graph.order:
        for count in range(len(once) + 1):
            if op in once:
                allowed = once[count : count + 1] == [op]
            else:
                allowed = all(
                    mutations(graph, value, set(once[:count])) == mutations(graph, value, before(graph, op))
                    for value in graph.ops[op].inputs
                )
            assert allowed == (graph.arrays.once_from[op] <= count <= graph.arrays.once_until[op])
        stages = [s for s in range(len(graph.ops) + 1) if _once_before(graph, s) <= graph.arrays.once_until[op]]
        assert graph.arrays.last_stage[op] == max(stages)


def _once_before(graph: Graph, stage: int) -> int:
    return sum(is_once(graph, op) for op in graph.order[:stage])


@given(graphs())
def test_fingerprint_ignores_what_differs_between_machines_and_nothing_else(graph: Graph) -> None:
    elsewhere = tuple(replace(op, seconds=op.seconds + 1, workspace_bytes=op.workspace_bytes + 1) for op in graph.ops)
    assert replace(graph, ops=elsewhere, name="other").fingerprint == graph.fingerprint
    first = graph.ops[0]
    for changed in (
        replace(graph, ops=(replace(first, name="renamed"), *graph.ops[1:])),
        replace(graph, values=(*graph.values, Value("more", 1, resident=True))),
        renumbered(graph, [*range(1, len(graph.ops)), 0]) if len(graph.ops) > 1 else None,
    ):
        assert changed is None or changed.fingerprint != graph.fingerprint


def test_fingerprint_tells_apart_rules_that_schedules_keep_and_is_what_it_was_without_them() -> None:
    plain = chain(2)
    assert plain.fingerprint == "3367b85afb8d4b1027a7e56e017dd4aff9a2ac9e5ebf22001ede7c82c2d046de"
    first = replace(plain.ops[0], random=True)
    others = (replace(plain, recompute_after_loss=True), replace(plain, ops=(first, *plain.ops[1:])))
    assert len({graph.fingerprint for graph in (plain, *others)}) == 3


def test_recompute_after_loss_needs_a_loss() -> None:
    with pytest.raises(GraphError, match="needs a loss operator"):
        Graph((Op("f", 1.0, (), (0,)),), (A,), recompute_after_loss=True)


@given(graphs())
def test_first_stage_is_behind_the_first_computation_and_the_loss_where_that_is_asked_for(graph: Graph) -> None:
    for position, op in enumerate(graph.order):
        after_loss = graph.order.index(graph.loss) if graph.recompute_after_loss and graph.loss is not None else -1
        assert graph.arrays.first_stage[op] == max(position, after_loss) + 1


def test_figures() -> None:
    ops = (Op("f", 1.5, (0,), (1,), workspace_bytes=2), Op("g", 2.0, (0, 1, 1), (2,)))
    graph = Graph(ops, (Value("w", 10, resident=True), Value("x", 4), Value("y", 8)))
    assert graph.baseline_seconds == 3.5
    assert graph.op_bytes.tolist() == [16, 22]
    assert graph.largest_op_bytes == 22
    assert (graph.end_bytes, replace(graph, targets=frozenset({0, 2})).end_bytes) == (10, 18)
    assert graph.loss is None
    assert Graph((), (WEIGHTS,)).largest_op_bytes == 1


def test_is_frozen() -> None:
    graph = Graph((Op("f", 1.0, (), (0,)),), (A,))
    with pytest.raises(FrozenInstanceError):
        graph.name = "x"  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        graph.arrays.size[0] = 5


def test_compressed_rows() -> None:
    starts, entries = compressed_rows([[3, 5], [], [4]])
    assert (starts.tolist(), entries.tolist()) == ([0, 2, 2, 3], [3, 5, 4])
    assert starts.dtype == entries.dtype == np.int32
