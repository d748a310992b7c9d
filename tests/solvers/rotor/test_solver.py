"""Rotor on graphs: cuts, blocks and options are what they say, and no schedule is faster than the truth."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

import rematch
from rematch.errors import SolverError
from rematch.graph import Graph, Phase, Schedule, simulate
from rematch.graph.generators import chain, encoder_decoder, feed_forward, gpt, random_layered, unet
from rematch.graph.matrices import stage_of_each_compute
from rematch.solvers import Problem, Status, solve
from rematch.solvers.base import Deadline
from rematch.solvers.checkpoints.articulation import articulation_points
from rematch.solvers.common.blocks import GRADIENTS, BlockChain, cut_into_blocks, gap_graph
from rematch.solvers.rotor.chain import ChainTable
from rematch.solvers.rotor.solver import (
    Rotor,
    Searched,
    loss_block,
    operators_of,
    saving_all,
    slots_worth_trying,
    solved,
)
from tests.examples import examples
from tests.modules import Net, batch
from tests.problems import check_against_truth, fewest_seconds, mirror_graphs, peak_bytes, tiny_problems

GRAPHS = (gpt(layers=3), feed_forward(layers=5), encoder_decoder(2, 2), unet(depth=2, convolutions=1), chain(layers=9))


def blocks_of(graph: Graph, most_blocks: int = 128) -> BlockChain:
    cut = cut_into_blocks(graph, most_blocks)
    assert cut is not None
    return cut


# Cuts and blocks


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_blocks_share_out_the_operators_in_default_order(graph: Graph) -> None:
    blocks = blocks_of(graph).blocks
    forward = [op for block in blocks for op in sorted((*block.forward, *block.once), key=graph.order.index)]
    backward = [op for block in reversed(blocks) for op in block.backward]
    assert [*forward, graph.loss, *backward] == list(graph.order)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_a_block_reads_itself_and_what_it_is_given(graph: Graph) -> None:
    cut = blocks_of(graph)
    for before, block in pairwise((None, *cut.blocks)):
        assert block is not None
        made = {value for op in (*block.forward, *block.backward) for value in graph.ops[op].outputs}
        given_to = {*(before.output if before else ()), *block.gradients, *cut.fixed}
        kept = {value for later in cut.blocks for value in later.kept}
        for op in (*block.forward, *block.backward):
            read = {value for value in graph.ops[op].inputs if not graph.values[value].resident}
            assert read <= made | given_to | kept


def test_cuts_lie_behind_articulation_points() -> None:
    for graph in (gpt(layers=3), chain(layers=9), feed_forward(layers=4)):
        cut = blocks_of(graph)
        points = set(articulation_points(graph).tolist())
        assert len(cut.blocks) > 3
        for block in cut.blocks[:-1]:
            assert {int(graph.arrays.producer[value]) for value in block.output} <= points


def test_equal_layers_are_blocks_of_their_own() -> None:
    cut = blocks_of(gpt(layers=4))
    assert [len(block.forward) for block in cut.blocks][2:7] == [6, 9, 6, 9, 6]
    assert len(blocks_of(gpt(layers=4), most_blocks=5).blocks) <= 5


def test_cuts_are_made_at_values_that_the_backward_pass_reads() -> None:
    """The backward of a relu reads its result, that of a product its input; what is in between, nothing."""
    graph = feed_forward(layers=4)
    makers = [graph.arrays.producer[block.output[0]] for block in blocks_of(graph).blocks[:-1]]
    assert [graph.ops[op].name for op in makers] == ["0.relu", "1.relu", "2.relu"]


def test_a_relu_is_differentiated_with_the_product_that_reads_it() -> None:
    """Its backward reads its result alone, which the block behind keeps as its input."""
    graph = feed_forward(layers=3)
    backward = [[graph.ops[op].name for op in block.backward] for block in blocks_of(graph).blocks]
    assert backward == [
        ["0.linear.backward"],
        ["1.linear.backward", "0.relu.backward"],
        ["2.relu.backward", "2.linear.backward", "1.relu.backward"],
    ]


def test_a_mask_that_all_layers_read_does_not_tie_them_together() -> None:
    """It is small and fixed; were it large, the layers would be one block."""
    graph = with_shared_value(chain(layers=8), size_bytes=1)
    large = with_shared_value(chain(layers=8), size_bytes=10**6)
    assert len(blocks_of(graph).blocks) >= 8
    assert len(blocks_of(graph).fixed) == 1
    assert len(blocks_of(large).blocks) < 4


def with_shared_value(graph: Graph, size_bytes: int) -> Graph:
    """The graph with a first operator whose value every forward operator reads."""
    shared = len(graph.values)
    ops = [replace(op, inputs=(*op.inputs, shared)) if op.phase is Phase.FORWARD else op for op in graph.ops]
    first = replace(graph.ops[0], name="mask", inputs=(), outputs=(shared,))
    mask = replace(graph.values[0], name="mask", size_bytes=size_bytes)
    order = (len(graph.ops), *graph.order)
    return replace(graph, ops=(*ops, first), values=(*graph.values, mask), order=order)


# Options


def test_options_trade_memory_for_time_and_cost_what_they_say() -> None:
    graph = gpt(layers=2)
    block = blocks_of(graph).blocks[2]
    everything = solved(graph, block, saving_all).for_chain.options
    options = solved(graph, block, Searched(0, Deadline(60)).fine).for_chain.options
    assert len(everything) == 1
    assert len(options) > 4
    assert min(option.saved_bytes for option in options) < everything[0].saved_bytes / 4
    fastest = everything[0].forward_seconds + everything[0].backward_seconds
    assert all(option.forward_seconds + option.backward_seconds >= fastest - 1e-12 for option in options)


def test_equal_blocks_are_searched_once() -> None:
    graph = gpt(layers=3)
    blocks = blocks_of(graph).blocks
    search = Searched(0, Deadline(60)).coarse
    assert search(gap_graph(graph, blocks[2])) is search(gap_graph(graph, blocks[4]))
    assert search(gap_graph(graph, blocks[2])) is not search(gap_graph(graph, blocks[3]))


def test_a_part_has_the_operators_of_its_block_and_pays_for_nothing_else() -> None:
    graph = feed_forward(layers=3)
    for block in blocks_of(graph).blocks:
        part = gap_graph(graph, block)
        assert part.ops == (*block.forward, GRADIENTS, *block.backward)
        assert part.graph.resident_bytes == 0
        assert sum(value.size_bytes for value in part.graph.values) < sum(value.size_bytes for value in graph.values)


# Schedules


def check_the_table_is_conservative(graph: Graph, cut: BlockChain, slots: int, slot_bytes: int) -> None:
    """Every solution of the table is a valid schedule, and its peak is no higher than the slots allow."""
    for find in (saving_all, Searched(0, Deadline(60)).fine):
        parts = [solved(graph, block, find) for block in cut.blocks]
        table = ChainTable.of([*(part.for_chain for part in parts), loss_block(cut)], slots, slot_bytes)
        for count in slots_worth_trying(table):
            schedule = Schedule.from_ops(graph, operators_of(cut, parts, table.steps(count)))
            assert simulate(graph, schedule).checked().peak_bytes <= cut.base_bytes + count * slot_bytes


@pytest.mark.parametrize("graph", [gpt(layers=2), feed_forward(layers=5)], ids=lambda graph: graph.name)
def test_the_table_is_conservative(graph: Graph) -> None:
    check_the_table_is_conservative(graph, blocks_of(graph), 60, peak_bytes(graph) // 60)


@given(mirror_graphs(max_layers=5))
@examples(60)
def test_the_table_is_conservative_on_small_graphs(graph: Graph) -> None:
    cut = cut_into_blocks(graph, 128)
    assume(cut is not None)
    assert cut is not None
    check_the_table_is_conservative(graph, cut, 60, 1)


@st.composite
def uniform_chains(draw: st.DrawFn, max_layers: int = 5) -> Graph:
    """Chains of one size, with small whole times."""
    layers = draw(st.integers(2, max_layers))
    graph = chain(layers=layers)
    sizes = [draw(st.integers(1, 6))] * layers
    times = draw(st.lists(st.integers(1, 5), min_size=layers, max_size=layers))
    backward = [2 * layers - op for op in range(len(graph.ops))]
    values = [
        replace(value, size_bytes=sizes[index] if index < layers else 1 if index == layers else sizes[backward[index]])
        for index, value in enumerate(graph.values)
    ]
    ops = [
        replace(op, seconds=float(times[index]) if index < layers else 0.0 if index == layers else 2.0)
        for index, op in enumerate(graph.ops)
    ]
    return replace(graph, ops=tuple(ops), values=tuple(values))


@given(uniform_chains(), st.data())
@examples(60)
def test_finds_the_optimum_of_chains(graph: Graph, data: st.DataObject) -> None:
    """With slots of a byte. Among values of several sizes, what is best of all may free one that it has kept before its
    layer was run back, which rotor never does; see `test_chain` for the best that does not.
    """
    problem = Problem(graph, data.draw(st.integers(graph.largest_op_bytes, peak_bytes(graph))))
    truth = fewest_seconds(problem)
    solution = solve(problem, Rotor(slots=problem.budget_bytes))
    assert (solution.schedule is None) == (truth is None)
    if solution.schedule is not None and truth is not None:
        assert truth <= simulate(graph, solution.schedule).seconds <= truth


@given(tiny_problems() | st.builds(Problem, mirror_graphs(), st.integers(5, 40)))
@examples(100)
def test_never_claims_more_than_the_truth(problem: Problem) -> None:
    assume(Rotor().applicable(problem))
    check_against_truth(problem, solve(problem, Rotor(slots=60)))


@given(mirror_graphs(), st.integers(5, 40))
@examples(60)
def test_first_computations_are_in_default_order(graph: Graph, budget_bytes: int) -> None:
    problem = Problem(graph, budget_bytes)
    assume(Rotor().applicable(problem))
    schedule = solve(problem, Rotor(slots=60)).schedule
    if schedule is not None:
        assert len(stage_of_each_compute(graph, schedule)) == len(schedule.ops)


@pytest.mark.parametrize("percent", [60, 45])
@pytest.mark.parametrize("graph", [chain(layers=40), feed_forward(layers=12)], ids=lambda graph: graph.name)
def test_is_at_least_as_fast_as_chen_and_revolve(graph: Graph, percent: int) -> None:
    problem = Problem(graph, peak_bytes(graph) * percent // 100)
    found = solve(problem, "rotor").schedule
    assert found is not None
    for name in ("chen_greedy", "revolve"):
        other = solve(problem, name).schedule
        assert other is None or simulate(graph, found).seconds <= simulate(graph, other).seconds


def test_a_deep_network_in_a_tenth_of_its_memory() -> None:
    graph = gpt(layers=24)
    solution = solve(Problem(graph, peak_bytes(graph) // 10), "rotor")
    assert solution.status is Status.FEASIBLE
    assert solution.schedule is not None
    assert simulate(graph, solution.schedule).seconds < 1.5 * graph.baseline_seconds


def test_more_slots_use_more_of_the_memory() -> None:
    graph = chain(layers=30)
    problem = Problem(graph, peak_bytes(graph) * 40 // 100)

    def seconds(slots: int) -> float:
        schedule = solve(problem, Rotor(slots=slots)).schedule
        return np.inf if schedule is None else simulate(graph, schedule).seconds

    assert seconds(2000) <= seconds(500) < seconds(15)


def test_a_captured_network_with_batch_norm_and_dropout() -> None:
    """Random states and running statistics are made in the first pass only."""
    graph = rematch.trace(Net(depth=4), batch(), device="a100")
    cut = blocks_of(graph)
    assert any(block.once for block in cut.blocks)
    solution = solve(Problem(graph, peak_bytes(graph) * 70 // 100), "rotor")
    assert solution.schedule is not None
    assert repeated(graph, solution.schedule)


def repeated(graph: Graph, schedule: Schedule) -> list[str]:
    return [graph.ops[op].name for op, times in enumerate(simulate(graph, schedule).counts) if times > 1]


def test_refuses_what_is_no_sequence_of_blocks() -> None:
    graph = random_layered(nodes=12)
    with pytest.raises(
        SolverError, match="needs a training step whose forward pass is a sequence of two or more blocks"
    ):
        solve(Problem(graph, peak_bytes(graph)), "rotor")
    with pytest.raises(SolverError, match="at least 1 slot"):
        Rotor(slots=0)
