"""Copies to host memory and back: what waits for what, and the memory they use."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from rematch.execute.transfers import HostCopy, HostMemory, Transfers

CPU = torch.device("cpu")


def sent(memory: HostMemory, tensor: torch.Tensor) -> HostCopy:
    copy = memory.transfers(tensor.device).send(tensor)
    assert copy is not None
    return copy


def test_all_of_a_storage_goes_there_and_back() -> None:
    memory = HostMemory(2**20)
    whole = torch.randn(64, 64, dtype=torch.complex64)
    before = whole.clone()
    copy = sent(memory, whole[3:5].t())
    whole.zero_()
    copy.let_go()
    assert copy.tensor() is None
    copy.fetch()
    back = copy.tensor()
    assert back is not None and back.dtype is torch.complex64
    assert torch.equal(back.view(64, 64), before)


def test_buffers_are_bounded_shared_by_size_and_come_back() -> None:
    memory = HostMemory(100_000)
    first, second = sent(memory, torch.zeros(40_000, dtype=torch.uint8)), sent(memory, torch.zeros(10_000))
    assert memory.lent_bytes == memory.taken_bytes == 80_000
    assert memory.transfers(CPU).send(torch.zeros(40_000, dtype=torch.uint8)) is None
    assert "takes all of" in str(memory.shortage) and not memory.exhausted
    address = first.host.data_ptr()
    del first
    assert (memory.lent_bytes, memory.taken_bytes) == (40_000, 80_000)
    assert sent(memory, torch.ones(40_000, dtype=torch.uint8)).host.data_ptr() == address
    large = sent(memory, torch.zeros(60_000, dtype=torch.uint8))  # what lies idle makes room
    assert memory.taken_bytes == memory.lent_bytes == 100_000
    del second, large
    gc.collect()
    assert memory.lent_bytes == 0


class Stream:
    """Notes what it is told to wait for; an event stands for all that its stream was told before."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[str] = []
        self.device = CPU
        self.device_index = 0

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"wait for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.told.append(f"wait for {event.what}")


class Event:
    count = 0

    def record(self, stream: Stream) -> None:
        Event.count += 1
        self.what = f"copy {Event.count} ({stream.name})"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stream]:
    """CUDA's streams, stood in for; the copies are those of a CPU."""
    made = {name: Stream(name) for name in ("computing", "out", "in")}
    new = iter((made["out"], made["in"]))
    Event.count = 0

    def change(stream: Stream) -> None:
        if stream is not made["computing"]:
            stream.told.append("copy")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(new))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_stream", change)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made["computing"])
    return made


class Runtime:
    """What pins memory."""

    def cudaHostRegister(self, *_: Any) -> int:
        return 0


def test_copies_wait_for_what_they_read_and_others_for_the_copies(
    streams: dict[str, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    transfers = Transfers(HostMemory(2**20), torch.device("cuda"))
    transfers.device = CPU
    computing, out, back = streams.values()
    copy = transfers.send(torch.ones(100))
    assert copy is not None
    assert (computing.told, out.told) == ([], ["wait for computing", "copy"])
    copy.let_go()  # whoever gets the memory now computes after the copy
    assert set(computing.told) == {"wait for copy 1 (out)"}
    computing.told.clear()
    copy.fetch()
    assert back.told == ["wait for computing", "wait for copy 1 (out)", "copy"]
    assert not computing.told
    copy.tensor()
    assert set(computing.told) == {"wait for copy 2 (in)"}
    computing.told.clear()
    copy.let_go()
    assert not computing.told  # it waits already

    del copy
    out.told.clear()
    again = transfers.send(torch.ones(100))  # the same buffer
    assert out.told == ["wait for computing", "wait for copy 1 (out)", "wait for copy 2 (in)", "copy"]
    assert again is not None
    again.fetch()
    del again  # in the middle of two copies
    assert {"wait for copy 3 (out)", "wait for copy 4 (in)"} == set(computing.told)


def test_memory_that_cannot_be_pinned_is_a_shortage(
    streams: dict[str, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Runtime):
        def cudaHostRegister(self, *_: Any) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    memory = HostMemory(2**20)
    transfers = Transfers(memory, torch.device("cuda"))
    assert transfers.send(torch.ones(100)) is None
    assert memory.exhausted and "ulimit -l" in str(memory.shortage) and memory.taken_bytes == 0


def test_pages_are_pinned_no_longer_when_the_machine_has_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: set[int] = set()

    class Cuda:
        def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
            assert address not in pinned
            pinned.add(address)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            pinned.remove(address)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    memory = HostMemory(2**20)
    lent = memory.lend(2**16, pinned=True)
    assert lent is not None and pinned == {lent[0].data_ptr()}
    del memory  # the tensor still shows the pages
    gc.collect()
    assert pinned == {lent[0].data_ptr()}
    del lent
    gc.collect()
    assert not pinned
