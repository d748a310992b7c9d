"""Pieces: backward operators go with their forward operators, run in turn on every level, and borders are complete."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rematch.graph import Graph, Phase, Schedule, baseline, simulate
from rematch.graph.generators import FAMILIES, random_layered, training_graph
from rematch.solvers.common.blocks import gap_graph
from rematch.solvers.common.options import with_once_ops
from rematch.solvers.common.pruning import in_turn
from rematch.solvers.hiremate import make_partitioner
from rematch.solvers.hiremate.pieces import Piece, Pieces, lasting_values, pieces_of
from tests.captures import ReadsItsStatistics, capture_of
from tests.modules import Net, batch

TRAINING = {
    "feed_forward": FAMILIES["feed_forward"](layers=6),
    "gpt": FAMILIES["gpt"](layers=3),
    "encoder_decoder": FAMILIES["encoder_decoder"](encoder_layers=2, decoder_layers=2),
    "unet": FAMILIES["unet"](depth=3),
}


def cut(graph: Graph) -> Pieces:
    return pieces_of(graph, make_partitioner("hpartition", most_top=4, most_lower=3).partition(graph))


def bottom(piece: Piece) -> list[Piece]:
    """The pieces without children, in the order they run forward."""
    return [piece] if not piece.children else [leaf for child in piece.children for leaf in bottom(child)]


def run_in_turn(pieces: Pieces) -> list[int]:
    graph, leaves = pieces.graph, bottom(pieces.root)
    forward = [op for leaf in leaves for op in with_once_ops(graph, leaf.block.forward, leaf.block.once)]
    backward = [op for leaf in reversed(leaves) for op in leaf.block.backward]
    assert graph.loss is not None
    return [*forward, graph.loss, *backward]


def check(graph: Graph) -> None:
    pieces = cut(graph)
    sequence = run_in_turn(pieces)
    assert sorted(sequence) == list(range(len(graph.ops)))
    simulate(graph, Schedule.from_ops(graph, in_turn(graph, np.array(sequence, dtype=np.int32)))).checked()
    for piece in pieces.root.walk():
        check_border(graph, piece)
        for place, child in enumerate(piece.children):
            earlier = {value for other in piece.children[:place] for value in other.block.returned}
            assert earlier.isdisjoint(child.block.gradients), "gradients flow from the last child to the first"


def check_border(graph: Graph, piece: Piece) -> None:
    """What a piece reads is its own, resident, lasting, or named as coming from elsewhere; and the other way round."""
    block, own = piece.block, set(piece.ops)
    made = {value for op in own for value in graph.ops[op].outputs}
    read = {value for op in (*block.forward, *block.backward) for value in graph.ops[op].inputs}
    residents = {number for number, value in enumerate(graph.values) if value.resident}
    assert read - made - residents - lasting_values(graph) == {*block.input, *block.gradients}
    read_elsewhere = {v for op in set(range(len(graph.ops))) - own for v in graph.ops[op].inputs}
    passed_on = {*block.output, *block.returned, *block.kept}
    assert made & read_elsewhere <= passed_on | lasting_values(graph) | {
        v for op in piece.part.forward for v in graph.ops[op].outputs if graph.ops[op].phase is not Phase.FORWARD
    }
    simulate(gap_graph(graph, block).graph, baseline(gap_graph(graph, block).graph)).checked()


@pytest.mark.parametrize("family", TRAINING)
def test_pieces_of_every_family(family: str) -> None:
    check(TRAINING[family])


@given(st.integers(3, 30), st.integers(0, 1000))
def test_pieces_of_random_graphs(nodes: int, seed: int) -> None:
    check(training_graph(random_layered(nodes, seed=seed)))


@pytest.mark.parametrize("module", [Net, ReadsItsStatistics])
def test_pieces_of_captured_modules(module: type) -> None:
    """Dropout, batch norm and buffers: operators that run once and values that last."""
    sample = batch() if module is Net else batch()[:, :5]
    check(capture_of(module(), sample).graph)


def test_base_counts_what_lasts() -> None:
    graph = TRAINING["gpt"]
    pieces = cut(graph)
    lasting = sum(graph.values[value].size_bytes for value in pieces.lasting)
    assert pieces.base_bytes == graph.resident_bytes + lasting
