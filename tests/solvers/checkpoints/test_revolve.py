"""Binomial checkpointing: as few steps as its closed form says, which no other way to place checkpoints undercuts."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, strategies as st

from rematch.graph import Graph, Op, Phase, simulate
from rematch.graph.generators import chain
from rematch.solvers import Problem, Status, solve
from rematch.solvers.checkmate.solver import unit_chain
from rematch.solvers.checkpoints.revolve import fewest_steps, reversals, revolve_policy
from rematch.solvers.common.policy import schedule_keeping
from rematch.solvers.rotor.chain import Alone, ChainBlock, ChainTable
from tests.problems import peak_bytes


@cache
def fewest_by_recursion(steps: int, checkpoints: int) -> int:
    """The dynamic programme: go some steps, keep the state there, reverse what is behind it, then what is before it."""
    if steps == 1:
        return 0
    if checkpoints == 1:
        return steps * (steps - 1) // 2
    return min(
        ahead + fewest_by_recursion(steps - ahead, checkpoints - 1) + fewest_by_recursion(ahead, checkpoints)
        for ahead in range(1, steps)
    )


@given(st.integers(1, 50), st.integers(1, 10))
def test_the_closed_form_is_the_optimum_of_the_dynamic_programme(steps: int, checkpoints: int) -> None:
    assert fewest_steps(steps, checkpoints) == fewest_by_recursion(steps, checkpoints)


@given(st.integers(1, 30), st.integers(1, 8))
def test_rotor_on_unit_chains_is_revolve(steps: int, checkpoints: int) -> None:
    """Rotor counts the state it works on and not the one at the start, which makes as many."""
    step = ChainBlock(1, 0, 0, 1.0, 0, 0, (), (Alone(0.0, 0),))
    table = ChainTable.of([step] * steps, checkpoints, 1)
    assert table.seconds[checkpoints] == fewest_steps(steps, checkpoints)


@given(st.integers(1, 60), st.integers(0, 12))
def test_reversals_take_the_fewest_steps(count: int, checkpoints: int) -> None:
    """Reversing `count` states beyond a given one: each is reached from the nearest kept state before it."""
    steps = 0
    before: list[int] = []
    for expected, (state, kept) in zip(reversed(range(count)), reversals(count, checkpoints), strict=True):
        assert state == expected
        assert len(kept) <= checkpoints
        nearest = max((other for other in before if other <= state), default=-1)
        steps += state - nearest
        assert all(nearest <= other or other in before for other in kept)  # new ones are passed on the way
        before = [other for other in kept if other < state]
    assert steps == fewest_steps(count + 1, checkpoints + 1)


@pytest.mark.parametrize("checkpoints", [0, 1, 2, 3, 5, 12])
def test_a_unit_chain_takes_the_fewest_steps(checkpoints: int) -> None:
    layers = 12
    graph = as_training(unit_chain(layers))
    schedule = schedule_keeping(graph, revolve_policy(graph, checkpoints))
    forward = simulate(graph, schedule).checked().counts[:layers].sum()
    assert forward == fewest_steps(layers + 1, checkpoints + 1)


def as_training(graph: Graph) -> Graph:
    """The unit chain with its second half marked as the backward pass."""
    half = len(graph.ops) // 2
    phases = [Phase.FORWARD] * half + [Phase.LOSS] + [Phase.BACKWARD] * half
    ops = [
        Op(op.name, op.seconds, op.inputs, op.outputs, phase=phase) for op, phase in zip(graph.ops, phases, strict=True)
    ]
    return Graph(tuple(ops), graph.values)


def test_memory_grows_with_the_logarithm_of_the_depth() -> None:
    """Four times the layers in the memory of a few more states, where keeping everything takes four times as much."""
    small, large = chain(layers=25, vary_percent=0), chain(layers=100, vary_percent=0)
    state = large.values[0].size_bytes
    budget = peak_bytes(small) * 30 // 100
    assert solve(Problem(small, budget), "revolve").status is Status.FEASIBLE
    assert solve(Problem(large, budget + 2 * state), "revolve").status is Status.FEASIBLE
    assert peak_bytes(large) > 3 * peak_bytes(small)
