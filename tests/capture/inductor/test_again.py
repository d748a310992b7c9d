"""What running a fused operator again in backward reads for nothing."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Node

from rematch.capture.inductor.again import FreeReads
from rematch.capture.inductor.buffers import Buffers, find_buffers
from tests.inductor_graphs import joint_graph


def found_in(module: nn.Module, sample: torch.Tensor) -> Buffers:
    joint, count = joint_graph(module, sample)
    return find_buffers(joint, forward_outputs=count)


def argument_of_last(found: Buffers, target: object) -> tuple[Node, Node]:
    """What the last forward product reads, and the first product."""
    products = [node for node in found.buffers if node.target is target and node in found.forward]
    (between,) = [node for node in products[-1].all_input_nodes if node in found.buffers]
    return between, products[0]


def test_an_activation_is_computed_again_by_the_kernel_of_its_own_gradient() -> None:
    found = found_in(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8))
    activation, product = argument_of_last(found, torch.ops.aten.addmm.default)
    assert FreeReads(found).of(activation) == {product}


def test_a_gradient_that_waits_for_the_product_cannot_do_it() -> None:
    # One kernel computes both gradients of a convolution, and that of the activation before it comes after.
    layers = nn.Sequential(nn.Conv2d(3, 3, 3), nn.GELU(), nn.Conv2d(3, 3, 3))
    found = found_in(layers, torch.randn(2, 3, 8, 8))
    activation, product = argument_of_last(found, torch.ops.aten.convolution.default)
    assert product in found.leaves_of(activation.all_input_nodes)
    assert FreeReads(found).of(activation) == set()
