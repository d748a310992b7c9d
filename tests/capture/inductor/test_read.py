"""What inductor's joint graph becomes as a graph of buffers and fused kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rematch.capture.inductor.read import FusedCapture, read_fused
from rematch.capture.measure import measuring
from rematch.graph import Op, Phase, baseline, simulate
from tests.inductor_graphs import joint_graph
from tests.modules import BATCH, WIDTH, Net, batch


def read(module: nn.Module, sample: torch.Tensor) -> FusedCapture:
    joint, count = joint_graph(module, sample)
    with measuring(torch.device("cpu")) as measurer:
        return read_fused(joint, forward_outputs=count, static=frozenset(), profile=measurer.profile)


def ops_of(capture: FusedCapture, target: str, phase: Phase = Phase.FORWARD) -> list[Op]:
    found = zip(capture.graph.ops, capture.made, strict=True)
    return [op for op, made in found if made and target in str(made[0].target) and op.phase is phase]


@pytest.fixture(scope="module")
def net() -> FusedCapture:
    torch.manual_seed(0)
    return read(Net(depth=2), batch())


def test_pointwise_chains_hold_no_memory_between_products() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(F.gelu(self.first(x)) * 2 + 1))

    capture = read(Chain(), torch.randn(4, 8))
    forward = [op for op in capture.graph.ops if op.phase is Phase.FORWARD]
    assert [len(op.outputs) for op in forward] == [1, 1, 1]  # a product, all that lies between, a product
    names = [str(made[0].target) for made in capture.made[:3]]
    assert "addmm" in names[0] and "addmm" in names[2]
    assert "addmm" not in names[1]


def test_the_graph_is_valid_and_backward_reads_what_forward_made(net: FusedCapture) -> None:
    assert simulate(net.graph, baseline(net.graph)).valid
    made_before = {value for op in net.graph.ops if op.phase is Phase.FORWARD for value in op.outputs}
    read_after = {value for op in net.graph.ops if op.phase is Phase.BACKWARD for value in op.inputs}
    assert made_before & read_after


def test_a_dropout_is_kept_as_a_mask_of_one_byte_each(net: FusedCapture) -> None:
    masks = [net.graph.values[op.outputs[0]].size_bytes for op in ops_of(net, "aten.gt")]
    assert masks == [2 * WIDTH * BATCH, 2 * WIDTH * BATCH]


def test_seeds_and_running_statistics_are_computed_once(net: FusedCapture) -> None:
    assert all(op.once for op in ops_of(net, "inductor_seeds") + ops_of(net, "copy_"))
    assert len(ops_of(net, "inductor_seeds")) == 1
    assert len(ops_of(net, "copy_")) == 6  # mean, variance and count of two batch norms
    assert not any(op.once for op in ops_of(net, "addmm"))


def test_products_are_measured_and_the_rest_counts_traffic(net: FusedCapture) -> None:
    assert all(op.flops for op in ops_of(net, "addmm"))
    fused = ops_of(net, "aten.var_mean")
    assert fused and all(op.seconds > 0 and op.flops is None for op in fused)
    assert any("GiB/s" in note for note in net.notes)


def test_copies_in_channels_last_order_are_counted() -> None:
    layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU())
    capture = read(layers, torch.randn(2, 4, 8, 8))
    copies = [value for value in capture.graph.values if "channels-last" in value.name]
    weight_bytes, input_bytes = 4 * 8 * 3 * 3 * 4, 2 * 4 * 8 * 8 * 4
    assert [value.size_bytes for value in copies] == [weight_bytes + input_bytes]  # kernels of one pixel are not copied
