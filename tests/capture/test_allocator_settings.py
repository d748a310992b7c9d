"""Expandable segments are asked for once, and never against the user's own settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rematch.capture import memory

CUDA = torch.device("cuda")


@pytest.fixture(params=["can tell", "cannot tell"])
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings of an allocator that stands for CUDA's, which before torch 2.12 did not tell them."""
    given = [""]
    calls = {"_accelerator_setAllocatorSettings": lambda asked: given.__setitem__(0, asked)}
    if request.param == "can tell":
        calls["_accelerator_getAllocatorSettings"] = lambda: given[0]
    monkeypatch.setattr(memory, "torch", SimpleNamespace(_C=SimpleNamespace(**calls)))
    monkeypatch.setattr(memory, "_ASKED", [])
    monkeypatch.setattr(memory.sys, "platform", "linux")
    for name in memory._ALLOCATOR_CONF:
        monkeypatch.delenv(name, raising=False)
    memory._make_segments_expandable.cache_clear()
    return given


def test_segments_become_expandable(settings: list[str]) -> None:
    memory.use_expandable_segments(torch.device("cpu"))
    assert not memory.has_expandable_segments()
    memory.use_expandable_segments(CUDA)
    assert settings == ["expandable_segments:True,large_segment_size_mb:12"]
    assert memory.has_expandable_segments()
    assert memory.large_segment_bytes() == 12 * 2**20


def test_the_size_of_pages_is_the_users(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "large_segment_size_mb:32")
    settings[0] = "large_segment_size_mb:32"  # as PyTorch reads it
    memory.use_expandable_segments(CUDA)
    assert settings == ["large_segment_size_mb:32,expandable_segments:True"]
    assert memory.large_segment_bytes() == 32 * 2**20


def test_pytorch_takes_what_we_ask_for() -> None:
    """The real parser, which knows the settings on machines without a card too."""
    before = memory._allocator_settings()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:True,large_segment_size_mb:{memory._PAGE_MIB}")
    torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False,large_segment_size_mb:20")


@pytest.mark.parametrize("name", memory._ALLOCATOR_CONF)
def test_what_the_user_has_said_stays(settings: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "expandable_segments:False")
    memory.use_expandable_segments(CUDA)
    assert settings == [""]
    assert not memory.has_expandable_segments()


def test_a_pytorch_without_settings_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "torch", SimpleNamespace(_C=SimpleNamespace()))
    monkeypatch.setattr(memory, "_ASKED", [])
    memory._make_segments_expandable.cache_clear()
    memory.use_expandable_segments(CUDA)
    assert not memory.has_expandable_segments()
