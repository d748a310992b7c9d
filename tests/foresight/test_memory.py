"""The peak of plain training: as eager has it, all of it accounted for, and known without running anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import rematch
from rematch.foresight.memory import Memory, memory_of
from rematch.graph import baseline, simulate
from rematch.graph.generators import gpt
from tests.modules import Net, batch, mean_square
from tests.training import measured_peak, step_of


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def found(net: Net) -> Memory:
    return rematch.memory(net, batch(), loss=mean_square, optimizer=torch.optim.Adam(net.parameters()), device="h200")


def test_it_is_the_peak_that_eager_has(net: Net, found: Memory) -> None:
    step = step_of(batch(), mean_square)
    step(net)
    net.zero_grad()
    measured, _ = measured_peak(torch.device("cpu"), lambda: step(net))
    net.zero_grad()
    before = {"parameters", "buffers", "inputs", "optimizer"}
    predicted = found.peak_bytes - sum(size for role, size in found.by_role.items() if role in before)
    assert predicted == pytest.approx(measured, rel=0.02)


def test_everything_is_accounted_for(net: Net, found: Memory) -> None:
    graph = rematch.trace(net, batch(), loss=mean_square, device="h200")
    seen = simulate(graph, baseline(graph))
    state_bytes = found.by_role["optimizer"]
    parameter_bytes = sum(parameter.nbytes for parameter in net.parameters())
    assert state_bytes == pytest.approx(2 * parameter_bytes, rel=0.02)
    assert found.peak_bytes == seen.peak_bytes + state_bytes
    assert sum(found.by_role.values()) == sum(found.by_module.values()) == found.peak_bytes
    assert found.by_role["parameters"] >= parameter_bytes
    totals = [sum(levels) for levels in zip(*(line.size_bytes for line in found.timelines), strict=True)]
    assert totals == [level + state_bytes for level in seen.timeline_bytes[baseline(graph).steps >= 0].tolist()]
    assert totals.index(max(totals)) == found.position - 1
    assert graph.ops[found.position - 1].name == found.operator
    assert found.by_module["blocks.1.drop"] > found.by_module["head"] > 0


def test_a_graph_tells_it_too() -> None:
    graph = gpt(layers=2)
    found = memory_of(graph, "cpu")
    assert found.peak_bytes == simulate(graph, baseline(graph)).peak_bytes == sum(found.by_role.values())


def test_it_says_so_in_words_data_and_a_picture(found: Memory, tmp_path: Path) -> None:
    assert repr(found) == str(found)
    assert "blocks.*.drop" in str(found)
    assert f"at           {found.operator}" in str(found)
    data = json.loads(json.dumps(found.to_data()))
    assert data["peak_bytes"] == found.peak_bytes
    found.plot(tmp_path / "memory.svg")
    assert "temporaries" in (tmp_path / "memory.svg").read_text()


def test_a_model_that_fits_nowhere_is_no_trouble() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**17, 2**17, bias=False), nn.ReLU(), nn.Linear(2**17, 2**17, bias=False))
        sample = torch.empty(8, 2**17)
    found = rematch.memory(model, sample, loss=torch.sum, device="h200")
    assert found.peak_bytes > 4 * 2 * 2**34


def test_what_cannot_be_answered_is_refused_in_words() -> None:
    with pytest.raises(rematch.RematchError, match="unknown device"):
        rematch.memory(Net(), batch(), device="abacus")
    with pytest.raises(rematch.CaptureError, match="needs a sample"):
        rematch.memory(Net(), None, device="h200")
    with pytest.raises(rematch.CaptureError, match=r"takes a torch\.nn\.Module"):
        rematch.memory(batch(), batch(), device="h200")
