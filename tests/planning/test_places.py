"""What CUDA's allocator needs as it works here and now."""

from __future__ import annotations

import pytest
import torch

from rematch.graph import Schedule, baseline, simulate
from rematch.planning import places
from rematch.planning.cuda_allocator import Conditions, least_cap, requests_of
from rematch.planning.places import Places
from tests.planning.test_cuda_allocator import MIB, chain

CUDA = torch.device("cuda")
GRAPH = chain(6, (70, 45, 25))


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> Conditions:
    """How the allocator is found to work."""
    monkeypatch.setattr(places, "has_expandable_segments", lambda: True)
    monkeypatch.setattr(places, "large_segment_bytes", lambda: 50 * MIB)
    monkeypatch.setattr(places, "idle_blocks", lambda device: [30 * MIB] if device == CUDA else [])
    return Conditions(expandable=True, segment=50 * MIB, idle=(30 * MIB,))


def test_the_allocator_is_as_it_was_found_and_has_a_margin(found: Conditions) -> None:
    requests = requests_of(GRAPH, baseline(GRAPH))
    exact_bytes = least_cap(requests, found)
    assert exact_bytes > simulate(GRAPH, baseline(GRAPH)).peak_bytes
    assert Places(CUDA).needed_bytes(GRAPH, baseline(GRAPH)) == pytest.approx(1.02 * exact_bytes)
    assert Places(CUDA).needed_for(requests) == pytest.approx(1.01 * exact_bytes)


def test_what_is_needed_suffices_and_the_bare_cap_does_not(found: Conditions) -> None:
    here, schedule = Places(CUDA), baseline(GRAPH)
    assert here.suffice(GRAPH, schedule, here.needed_bytes(GRAPH, schedule))
    assert not here.suffice(GRAPH, schedule, least_cap(requests_of(GRAPH, schedule), found))


def test_a_schedule_needs_what_it_needs_as_it_is_run() -> None:
    nothing = Schedule.of([])
    here = Places(CUDA, lambda schedule: nothing)
    assert here.needed_bytes(GRAPH, baseline(GRAPH)) == Places(CUDA).needed_bytes(GRAPH, nothing)
    assert here.suffice(GRAPH, baseline(GRAPH), Places(CUDA).needed_bytes(GRAPH, nothing))
