"""Guesses of what a backward operator differentiates, against tapes and modules, which know."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

import rematch
from rematch.graph import Graph, Phase
from rematch.graph.generators import chain, encoder_decoder, feed_forward, gpt, random_layered, unet
from rematch.solvers.common.layers import backward_of
from tests.modules import Net, batch
from tests.problems import mirror_graphs
from tests.strategies import graphs

TAPES = (gpt(layers=3), unet(depth=2, convolutions=1), feed_forward(layers=4), encoder_decoder(2, 2))


def differentiated(graph: Graph) -> dict[int, int]:
    """A tape calls the backward of `x` `x.backward`."""
    forward = {op.name: index for index, op in enumerate(graph.ops) if op.phase is Phase.FORWARD}
    named = {index: op.name.removesuffix(".backward") for index, op in enumerate(graph.ops)}
    return {index: forward[name] for index, name in named.items() if name != graph.ops[index].name}


def without_modules(graph: Graph) -> Graph:
    return replace(graph, ops=tuple(replace(op, module_path="") for op in graph.ops))


@pytest.mark.parametrize("modules", [True, False])
@pytest.mark.parametrize("graph", TAPES, ids=lambda graph: graph.name)
def test_finds_the_operator_or_the_one_behind_it(graph: Graph, modules: bool) -> None:
    """What an operator made is also read by the next, so that a backward that reads nothing else may go to either."""
    found = backward_of(graph if modules else without_modules(graph))
    late = [int(found[index]) - truth for index, truth in differentiated(graph).items()]
    assert set(late) <= {0, 1}
    assert late.count(0) > len(late) / 2


def test_sums_of_gradients_belong_where_their_gradients_come_from() -> None:
    graph = gpt(layers=2)
    found = backward_of(graph)
    sums = [index for index, op in enumerate(graph.ops) if op.name.endswith(".accumulate")]
    assert sums
    for index in sums:
        gradients = [graph.arrays.producer[value] for value in graph.ops[index].inputs]
        assert found[index] == min(found[maker] for maker in gradients if found[maker] >= 0)


def test_a_chain_of_checkmates_kind() -> None:
    """The backward of a layer reads its own result and the next layer's: it differentiates the next layer."""
    graph = chain(layers=5)
    assert backward_of(graph).tolist() == [-1] * 6 + [4, 4, 3, 2, 1]


class Layer(nn.Module):
    """A residual around attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0].tanh()


class Attention(nn.Module):
    """Layers that all read one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


@pytest.mark.parametrize(("module", "sample"), [(Net(), batch()), (Attention(), torch.rand(2, 6, 8))])
def test_captured_operators_belong_to_their_modules_blocks(module: nn.Module, sample: torch.Tensor) -> None:
    """Without module paths, the guess still lies in the right part of the right module."""
    graph = rematch.trace(module, sample, device="a100")
    checked = 0
    for guessed in (graph, without_modules(graph)):
        found = backward_of(guessed)
        for index, op in enumerate(graph.ops):
            if op.phase is Phase.BACKWARD and op.module_path:
                assert layer_of(graph, int(found[index])) == layer_of(graph, index)
                checked += 1
    assert checked > 20


def layer_of(graph: Graph, op: int) -> str:
    """The block of the module, or the module itself for those outside of blocks."""
    return ".".join(graph.ops[op].module_path.split(".")[:2])


@given(mirror_graphs() | graphs())
def test_runs_back_through_the_forward_pass(graph: Graph) -> None:
    found = backward_of(graph)
    position = graph.arrays.position
    for index, op in enumerate(graph.ops):
        assert (found[index] >= 0) <= (op.phase is Phase.BACKWARD)
        assert found[index] < 0 or graph.ops[found[index]].phase is Phase.FORWARD
    guesses = [found[index] for index in graph.order if found[index] >= 0]
    assert (np.diff(position[guesses]) <= 0).all()


def test_no_backward_no_guess() -> None:
    assert (backward_of(random_layered(nodes=12)) == -1).all()
