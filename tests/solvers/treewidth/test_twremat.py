"""TWRemat's sequences keep every rule of a graph, its memory grows with the logarithm, pruning only ever helps."""

from __future__ import annotations

import random
from math import ceil, log2

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from rematch.errors import SolverError
from rematch.graph import Graph, Op, Phase, Schedule, Value, simulate
from rematch.graph.generators import FAMILIES, chain, feed_forward, gpt
from rematch.graph.model import Ints
from rematch.solvers import Deadline, Problem, Status, solve, verify
from rematch.solvers.common.pruning import in_turn, pruned
from rematch.solvers.exhaustive import Exhaustive
from rematch.solvers.treewidth.elimination import decompose
from rematch.solvers.treewidth.tree_decomposition import TreeDecomposition, operator_neighbours
from rematch.solvers.treewidth.twremat import (
    OutOfTime,
    Recursion,
    TWRemat,
    _operators_read,
    _operators_wanted,
    trade_off,
)
from tests.captures import capture_of
from tests.problems import changed_resident, held_for_the_loss, mirror_graphs, peak_bytes, tiny_problems
from tests.solvers.treewidth.paths import as_tree
from tests.strategies import graphs, plain_graphs, sequences


def seen_of(graph: Graph, sequence: Ints) -> tuple[float, int]:
    """Time and peak of a sequence, which the oracle finds valid."""
    seen = simulate(graph, Schedule.from_ops(graph, sequence)).checked()
    return seen.seconds, seen.peak_bytes


def unit(graph: Graph) -> Graph:
    """As the paper has it: every output one unit large and one unit of time, no workspace, nothing resident."""
    ops = tuple(Op(op.name, 1.0, op.inputs, op.outputs, 0, op.phase, op.once) for op in graph.ops)
    values = tuple(Value(value.name, 0 if value.resident else 1, value.resident) for value in graph.values)
    return Graph(ops, values)


@given(st.one_of(graphs(max_ops=10), mirror_graphs(), plain_graphs(max_ops=10)), st.booleans())
def test_every_k_keeps_the_rules_and_the_ends_are_as_they_should_be(graph: Graph, by_time: bool) -> None:
    recursion = Recursion.of(graph, by_time=by_time)
    times = [seen_of(graph, recursion.sequence(stop_below))[0] for stop_below in recursion.stops]
    assert recursion.sequence(recursion.stops[-1]).tolist() == list(graph.order)  # k = n: no recomputation
    assert recursion.sequence(10**6).tolist() == list(graph.order)
    assert times[-1] == graph.baseline_seconds
    assert (np.diff(recursion.runs) <= 0).all()


@given(plain_graphs(max_ops=12))
def test_plain_graphs_run_exactly_as_planned_and_slower_with_smaller_k(graph: Graph) -> None:
    recursion = Recursion.of(graph)
    lengths = [len(recursion.sequence(stop_below)) for stop_below in recursion.stops]
    assert lengths == recursion.runs.tolist()
    times = [point.seconds for point in trade_off(graph, recursion)]
    assert times == sorted(times, reverse=True)


def test_algorithm_1_on_a_chain_by_hand() -> None:
    """Five operators in a row, and the last reads the first too; X* is {1, 2, 4}.

    1 calls for 0, 2 runs, 4 calls for 3, which needs more while it runs, and for 0 again.
    """
    ops = tuple(Op(str(i), 1.0, reads, (i,)) for i, reads in enumerate([(), (0,), (1,), (2,), (0, 3)]))
    graph = Graph(ops, tuple(Value(str(i), 1) for i in range(5)))
    bags = as_tree([frozenset({0, 1, 4}), frozenset({1, 2, 4}), frozenset({2, 3, 4})])
    recursion = Recursion.of(graph, bags)
    assert recursion.stops == [1, 2, 4]
    assert recursion.sequence(1).tolist() == recursion.sequence(3).tolist() == [0, 1, 2, 3, 0, 4]
    assert recursion.sequence(4).tolist() == [0, 1, 2, 3, 4]
    assert [(point.stop_below, point.seconds) for point in trade_off(graph, recursion)] == [
        (1, 6.0),
        (2, 6.0),
        (4, 5.0),
    ]


def test_figure_1_of_the_paper() -> None:
    """A, B, C, D, E need four units in this order; three are enough if A is computed twice."""
    reads = {"A": (), "B": (0,), "C": (1,), "D": (1, 2), "E": (0, 3)}
    ops = tuple(Op(name, 1.0, inputs, (i,)) for i, (name, inputs) in enumerate(reads.items()))
    problem = Problem(Graph(ops, tuple(Value(name, 1) for name in reads)), 3)
    assert peak_bytes(problem.graph) == 4
    assert solve(problem, "twremat").schedule is not None


@pytest.mark.parametrize("layers", [50, 200, 800])
def test_memory_stays_within_theorem_5(layers: int) -> None:
    """(M_in + (k + 1) M_max) per level of recursion, of which there are at most log2(n) + 1, and the loss before."""
    graph = unit(chain(layers=layers))
    width = decompose(operator_neighbours(graph)).width
    most_inputs = max(len(op.inputs) for op in graph.ops)
    _, peak = seen_of(graph, Recursion.of(graph).sequence(1))
    assert peak <= (most_inputs + width + 1) * (ceil(log2(len(graph.ops))) + 2) + 1


def k_tree(width: int, count: int, seed: int) -> tuple[Graph, TreeDecomposition]:
    """Each vertex reads the `width` vertices of a clique of earlier ones; a bag is a vertex and what it reads."""
    generator = random.Random(seed)
    bags = [tuple(range(width + 1))]
    edges: list[tuple[int, int]] = []
    reads: list[tuple[int, ...]] = [tuple(range(vertex)) for vertex in range(width + 1)]
    for vertex in range(width + 1, count):
        host = len(bags) - 1 - generator.randrange(min(3, len(bags)))  # deep rather than wide
        reads.append(tuple(sorted(generator.sample(bags[host], width))))
        edges.append((host, len(bags)))
        bags.append((*reads[-1], vertex))
    ops = tuple(Op(str(vertex), 1.0, read, (vertex,)) for vertex, read in enumerate(reads))
    graph = Graph(ops, tuple(Value(str(vertex), 1) for vertex in range(count)))
    return graph, TreeDecomposition(tuple(map(frozenset, bags)), tuple(edges))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_theorem_5_on_random_k_trees(width: int) -> None:
    """Memory of (M_in + (k + 1) M_max) for each level, and at most (k + 2)^levels runs of any operator."""
    for seed in range(5):
        graph, decomposition = k_tree(width, 60, seed)
        levels = ceil(log2(len(decomposition.bags))) + 1
        sequence = Recursion.of(graph, decomposition).sequence(1)
        _, peak = seen_of(graph, sequence)
        assert peak <= (2 * width + 1) * levels + len(_operators_wanted(graph, _operators_read(graph)))
        assert np.bincount(sequence).max() <= (width + 2) ** levels
        assert len(sequence) > len(graph.ops)  # so that there is something to bound


def test_one_k_without_pruning_is_the_papers_schedule() -> None:
    graph = chain(layers=40)
    recursion = Recursion.of(graph)
    ops = recursion.sequence(3)
    peak = simulate(graph, Schedule.from_ops(graph, ops)).peak_bytes
    assert peak < peak_bytes(graph)
    solution = solve(Problem(graph, peak), "twremat", k=3, pruned=False)
    assert solution.schedule == Schedule.from_ops(graph, ops)
    with pytest.raises(SolverError, match="k of at least 1"):
        solve(Problem(graph, peak), "twremat", k=0)


def test_an_expired_deadline_ends_planning() -> None:
    graph = chain(layers=400)
    with pytest.raises(OutOfTime):
        Recursion.of(graph, deadline=Deadline(0.0))
    solution = solve(Problem(graph, peak_bytes(graph) // 2), "twremat", time_limit=0.0)
    assert solution.schedule is None


def test_peaks_of_deep_networks_grow_far_more_slowly_than_depth() -> None:
    shallow, deep = feed_forward(layers=20), feed_forward(layers=320)
    peaks = [min(point.peak_bytes - graph.resident_bytes for point in trade_off(graph)) for graph in (shallow, deep)]
    targets = [sum(graph.values[target].size_bytes for target in graph.targets) for graph in (shallow, deep)]
    assert peaks[1] - targets[1] < 3 * (peaks[0] - targets[0])


@given(tiny_problems())
def test_never_beats_the_truth(problem: Problem) -> None:
    truth = solve(problem, Exhaustive(order="any"))
    solution = solve(problem, "twremat")
    seen = verify(problem, solution)
    if seen is not None:
        assert truth.lower_bound_seconds is not None
        assert seen.seconds >= truth.lower_bound_seconds - 1e-9
        assert solution.status is Status.FEASIBLE or seen.seconds == truth.lower_bound_seconds


@pytest.mark.parametrize("problem", [held_for_the_loss(), changed_resident()])
def test_what_a_loss_or_an_update_needs_is_made_before_it(problem: Problem) -> None:
    """In any order nothing needs to be recomputed: what is large comes first."""
    assert solve(problem, "twremat").status is Status.OPTIMAL


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_a_schedule_for_every_family(family: str) -> None:
    graph = FAMILIES[family]()
    percent = 95 if family == "random_layered" else 80
    solution = solve(Problem(graph, peak_bytes(graph) * percent // 100), "twremat")
    assert solution.status is Status.FEASIBLE
    assert "tree decomposition" in solution.log[0].message


def test_captured_modules_keep_their_rules_for_every_k() -> None:
    """Batch norm's statistics change in place, and dropout's random states are taken once and in order."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))]
    graph = capture_of(nn.Sequential(*layers), torch.rand(4, 8)).graph
    assert graph.arrays.once.sum() > 1
    recursion = Recursion.of(graph)
    for stop_below in recursion.stops:
        seconds, peak = seen_of(graph, recursion.sequence(stop_below))
        pruned_seconds, pruned_peak = seen_of(graph, pruned(graph, recursion.sequence(stop_below), 0))
        assert pruned_seconds <= seconds and pruned_peak <= peak


def test_weighs_time_and_bags() -> None:
    graph = gpt(layers=2)
    by_bags, by_time = Recursion.of(graph), Recursion.of(graph, by_time=True)
    assert by_bags.sequence(1).tolist() != by_time.sequence(1).tolist()


def test_the_heuristic_is_a_choice() -> None:
    graph = gpt(layers=2)
    solution = solve(Problem(graph, peak_bytes(graph) // 2), TWRemat(heuristic="min-degree"))
    assert solution.log[0].message.startswith("min-degree tree decomposition")


def test_deep_graphs_do_not_exhaust_the_stack() -> None:
    graph = chain(layers=3000)
    assert seen_of(graph, Recursion.of(graph).sequence(1))[1] < peak_bytes(graph) / 30


# Pruning and turns, which other methods share


@given(st.one_of(graphs(max_ops=9), mirror_graphs()), st.data())
def test_in_turn_makes_any_topological_sequence_valid(graph: Graph, data: st.DataObject) -> None:
    """Random runs, each after those it reads at first, with no regard for what may run once or when."""
    a = graph.arrays
    runs: list[int] = []
    for op in graph.order:
        runs.append(op)
        runs += data.draw(st.lists(st.sampled_from(runs), max_size=3))
    ordered = in_turn(graph, np.array(runs, dtype=np.int32))
    seen_of(graph, ordered)
    free = ~a.once & (a.once_until == a.once.sum())
    if not graph.recompute_after_loss:
        assert [op for op in ordered if free[op]] == [op for op in runs if free[op]]


@given(st.one_of(graphs(max_ops=9), mirror_graphs()), st.data())
def test_in_turn_puts_first_runs_in_order_that_have_to_be(graph: Graph, data: st.DataObject) -> None:
    """Any order in which operators come after those they read."""
    waiting, runs = data.draw(st.permutations(graph.order)), list[int]()
    made = {index for index, value in enumerate(graph.values) if value.resident}
    while waiting:
        op = next(op for op in waiting if made.issuperset(graph.ops[op].inputs))
        waiting.remove(op)
        made.update(graph.ops[op].outputs)
        runs += [op, *data.draw(st.lists(st.sampled_from([*runs, op]), max_size=1))]
    limit = data.draw(st.integers(0, 30))
    seen_of(graph, pruned(graph, in_turn(graph, np.array(runs, dtype=np.int32)), limit))


@given(graphs(max_ops=9), st.data())
def test_in_turn_leaves_a_valid_sequence_as_it_is(graph: Graph, data: st.DataObject) -> None:
    sequence = data.draw(sequences(graph))
    if len(set(sequence)) == len(graph.ops):
        assert in_turn(graph, np.array(sequence, dtype=np.int32)).tolist() == sequence


def test_in_turn_runs_before_an_update_what_reads_the_old_contents() -> None:
    problem = changed_resident()  # make x, make y, shrink y, update, use x
    late = np.array([1, 2, 3, 0, 4], dtype=np.int32)
    assert in_turn(problem.graph, late).tolist() == [1, 2, 0, 3, 4]


@given(st.one_of(graphs(max_ops=9), mirror_graphs()), st.data())
def test_pruning_is_never_slower_and_keeps_the_limit_or_the_peak_it_found(graph: Graph, data: st.DataObject) -> None:
    sequence = np.array(data.draw(sequences(graph, max_extra=12)), dtype=np.int32)
    if len(set(sequence.tolist())) < len(graph.ops):
        return
    seconds, peak = seen_of(graph, sequence)
    limit = data.draw(st.integers(0, 2 * peak))
    shorter = pruned(graph, sequence, limit)
    pruned_seconds, pruned_peak = seen_of(graph, shorter)
    assert pruned_seconds <= seconds
    assert pruned_peak <= max(limit, peak)
    unlimited = pruned(graph, sequence, 2**55)
    assert len(unlimited) <= len(shorter) <= len(sequence)
    assert seen_of(graph, unlimited)[0] == graph.baseline_seconds  # with enough memory nothing is computed again


@given(st.one_of(graphs(max_ops=9), mirror_graphs()), st.data())
def test_what_pruning_leaves_cannot_go_one_by_one(graph: Graph, data: st.DataObject) -> None:
    """After pruning, no single run can be left out: the oracle finds it missing, or the peak above the limit.

    First runs of operators that take their turns stay in any case.
    """
    sequence = np.array(data.draw(sequences(graph, max_extra=12)), dtype=np.int32)
    if len(set(sequence.tolist())) < len(graph.ops):
        return
    shorter = pruned(graph, sequence, 0)
    _, peak = seen_of(graph, shorter)
    first = set(np.unique(shorter, return_index=True)[1].tolist())
    for at in range(len(shorter)):
        if at in first and graph.arrays.turn[shorter[at]] >= 0:
            continue
        without = simulate(graph, Schedule.from_ops(graph, np.delete(shorter, at)))
        assert not without.valid or without.peak_bytes > peak


def test_pruning_takes_the_costly_recomputation_first() -> None:
    """Room for one of two values to stay: the slow one does."""
    ops = (
        Op("slow", 9.0, (), (0,)),
        Op("quick", 1.0, (), (1,)),
        Op("use", 1.0, (0, 1), ()),
        Op("large", 1.0, (), (2,)),
        Op("use again", 1.0, (0, 1), ()),
    )
    graph = Graph(ops, (Value("slow", 2), Value("quick", 2), Value("large", 4)))
    both_again = np.array([0, 1, 2, 3, 0, 1, 4], dtype=np.int32)
    assert pruned(graph, both_again, 5).tolist() == both_again.tolist()
    assert pruned(graph, both_again, 6).tolist() == [0, 1, 2, 3, 1, 4]
    assert pruned(graph, both_again, 8).tolist() == [0, 1, 2, 3, 4]


def test_a_held_value_is_not_made_again_after_the_loss() -> None:
    ops = (
        Op("make", 1.0, (), (0,)),
        Op("loss", 1.0, (0,), (1,), phase=Phase.LOSS),
        Op("back", 1.0, (0, 1), (2,), phase=Phase.BACKWARD),
    )
    graph = Graph(ops, tuple(Value(op.name, 4) for op in ops), targets=frozenset({2}), held=frozenset({0}))
    assert pruned(graph, np.array([0, 1, 0, 2], dtype=np.int32), 0).tolist() == [0, 1, 2]
