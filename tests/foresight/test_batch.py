"""The largest batch: one that really trains inside the budget, and more than without recomputation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rematch
from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.graph.transforms import between
from rematch.solvers.minimum import surely_needed_bytes
from tests.modules import Net, batch, mean_square

OPTIONS: dict[str, Any] = {"loss": mean_square, "device": "h200", "time_limit": 1.0}


def test_the_largest_batch_fits_and_a_larger_one_is_not_plain(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    found = rematch.max_batch(net, batch, budget="1MB", close_enough=0.05, **OPTIONS)
    assert found.batch > found.without_recomputation > 0
    plan = rematch.plan(net, batch(found.batch), budget="1MB", engine="tape", **OPTIONS)
    assert plan.figures.peak_bytes <= 1_000_000
    for more, fits in ((0, True), (1, False)):
        graph = rematch.trace(net, batch(found.without_recomputation + more), loss=mean_square, device="h200")
        assert (simulate(graph, baseline(graph)).peak_bytes <= found.budget_bytes) == fits
    assert found.impossible_from is None or found.impossible_from > found.batch
    assert repr(found) == str(found)
    assert f"{found.without_recomputation} without recomputation" in str(found)
    assert json.loads(json.dumps(found.to_data()))["batch"] == found.batch
    found.plot(tmp_path / "batch.svg")
    assert "plain training" in (tmp_path / "batch.svg").read_text()


def test_a_graph_between_two_batches_has_the_sizes_of_a_recorded_one() -> None:
    net = Net()
    small, large, third = (rematch.trace(net, batch(size), loss=mean_square, device="h200") for size in (2, 4, 64))
    guessed = between(small, large, batches=(2, 4), batch=64)
    assert guessed.fingerprint == third.fingerprint
    assert guessed.values == third.values


class Scratching(Net):
    """Needs scratch memory that grows fast among small batches and no more among large ones, as libraries do."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        scratch = x.new_zeros(1000 * min(len(x), 12) ** 2)
        return super().forward(x + scratch.sum(), scale)


def test_a_line_through_small_batches_is_not_believed_for_large_ones() -> None:
    torch.manual_seed(0)
    found = rematch.max_batch(Scratching(), batch, budget="1MB", close_enough=0.2, **{**OPTIONS, "time_limit": 0.4})
    small, large = (rematch.trace(Scratching(), batch(size), loss=mean_square, device="h200") for size in (2, 4))
    believed = between(small, large, batches=(2, 4), batch=found.batch)
    assert surely_needed_bytes(believed) > 1_000_000, "a line through them would have this batch impossible"
    assert found.peak_bytes <= 1_000_000


def test_host_memory_makes_room_for_more_samples() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(512, 512), nn.GELU())))

    def sample(size: int) -> torch.Tensor:
        return torch.empty(size, 512, device="meta")

    asked: dict[str, Any] = {**OPTIONS, "budget": "300MB", "close_enough": 0.02, "extra_forward_passes": 0.1}
    alone, with_host = (rematch.max_batch(net, sample, offload=offload, **asked) for offload in (False, "1GiB"))
    assert with_host.batch > alone.batch
    plan = rematch.plan(net, sample(with_host.batch), budget="300MB", offload="1GiB", engine="tape", **OPTIONS)
    assert plan.figures.peak_bytes <= 300_000_000
    assert plan.moved is not None


class Fickle(Net):
    """Runs something else for more than three samples."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x.sin() if len(x) > 3 else x, scale)


@pytest.mark.parametrize(
    ("model", "budget", "said"),
    [
        (Net, "50%", "depends on the batch; give bytes"),
        (Net, "1KB", "not even one sample of Net"),
        (Fickle, "1MB", "other operators at a batch of 4 than at 2"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(model: type[nn.Module], budget: str, said: str) -> None:
    with pytest.raises(rematch.RematchError, match=said):
        rematch.max_batch(model(), batch, budget=budget, **OPTIONS)


def test_on_a_card_its_allocator_must_have_places_for_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Places:
        """Loses a fifth of the memory in holes."""

        def __init__(self, *_: object) -> None:
            pass

        def needed_bytes(self, graph: Graph, schedule: Schedule) -> int:
            return int(1.2 * simulate(graph, schedule).peak_bytes)

    monkeypatch.setattr("rematch.planning.planner.Places", Places)
    monkeypatch.setattr("rematch.planning.planner.Planner._has_allocator", lambda *_: True)
    monkeypatch.setattr("rematch.planning.planner.Planner.outside_bytes", lambda *_: 0)
    torch.manual_seed(0)
    found = rematch.max_batch(Net(), batch, budget="1MB", close_enough=0.2, **{**OPTIONS, "time_limit": 0.4})
    assert 0 < 1.2 * found.peak_bytes <= 1_000_000


def test_the_allocator_is_asked_as_training_will_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr("rematch.foresight.batch.use_expandable_segments", asked.append)
    options = {**OPTIONS, "time_limit": 0.2, "close_enough": 0.5}
    rematch.max_batch(Net(), batch, budget="1MB", **options)
    assert asked == []  # for a card that is not there, nothing of this process matters
    rematch.max_batch(Net(), batch, budget="1MB", **{**options, "device": None})
    assert asked == [torch.device("cpu")]
