"""Cached memory goes back between steps where CUDA's allocator has run out of it, and only there."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import rematch
from rematch.execute.compaction import STEPS, Compaction
from tests.modules import Net, batch, mean_square

CUDA = torch.device("cuda")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """An allocator that counts: how often it had to give memory back by itself, and how often it was told to."""
    counts = {"num_alloc_retries": 0, "emptied": 0, "capturing": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counts)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(counts["capturing"]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: counts.__setitem__("emptied", counts["emptied"] + 1))
    return counts


def steps(compaction: Compaction, card: dict[str, int], number: int, *, retries: int) -> None:
    for _ in range(number):
        compaction.before_step(CUDA)
        card["num_alloc_retries"] += retries


def test_memory_goes_back_where_the_allocator_ran_out(card: dict[str, int]) -> None:
    compaction = Compaction()
    steps(compaction, card, 5 * STEPS, retries=0)
    assert card["emptied"] == 0
    steps(compaction, card, 3 * STEPS, retries=1)
    assert 2 <= card["emptied"] <= 3
    before = card["emptied"]
    steps(compaction, card, 3 * STEPS, retries=0)
    assert card["emptied"] <= before + 1  # of what happened after the last look


def test_nothing_is_freed_while_a_graph_is_captured(card: dict[str, int]) -> None:
    compaction = Compaction()
    card["capturing"] = 1
    steps(compaction, card, 4 * STEPS, retries=1)
    assert card["emptied"] == 0


def test_modules_look_before_each_step_and_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[torch.device] = []
    monkeypatch.setattr(Compaction, "before_step", lambda self, device: looked.append(device))
    net = rematch.remat(Net(), batch(), budget="70%", time_limit=0.5)
    for module in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        mean_square(module(batch())).backward()
    assert looked == [torch.device("cpu")] * 3


def test_compiled_graphs_look_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[torch.device] = []
    monkeypatch.setattr(Compaction, "before_step", lambda self, device: looked.append(device))
    model = torch.compile(Net(), backend="rematch", options={"budget": "1GiB"})
    for _ in range(2):
        mean_square(model(batch())).backward()
    with torch.no_grad():
        model(batch())
    assert looked == [torch.device("cpu")] * 2
