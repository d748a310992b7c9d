"""How much memory a piece of work takes, measured.

`with PeakMemory(torch.device("cpu")) as used: work()` and then `used.peak_bytes`: the most that was allocated at any
moment beyond what was there at the start.

On CUDA the allocator counts. On CPU nobody does, so a profiler records each allocation of this thread and we add
them up; that works only while nobody else profiles. It is the old profiler: the new one prints a line whenever it
starts, and a process that ends while it runs crashes.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from types import TracebackType

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

_ALLOCATOR_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # where users say how the allocator works
_MARK = "rematch: a moment within what is measured"
_EXPANDABLE, _SEGMENT_SIZE = "expandable_segments", "large_segment_size_mb"
_PAGE_MIB = 12  # the smallest multiple of what the driver maps that the allocator takes, so that least is lost in holes
_ASKED: list[str] = []  # settings that we asked for


def allocated_bytes(size_bytes: int, device: torch.device) -> int:
    """What an allocation of `size_bytes` takes: CUDA's allocator hands out multiples of 512 bytes."""
    return -(-size_bytes // 512) * 512 if device.type == "cuda" else size_bytes


def use_expandable_segments(device: torch.device) -> None:
    """Have CUDA's allocator map small pages as needed, so that little memory is lost between blocks.

    Only where the user has not said how segments are to be made, in the variables that PyTorch reads.
    """
    if device.type == "cuda" and not any(_EXPANDABLE in os.environ.get(name, "") for name in _ALLOCATOR_CONF):
        _make_segments_expandable()


def idle_blocks(device: torch.device) -> list[int]:
    """Sizes of the free blocks that CUDA's allocator has between used ones, and so cannot give back."""
    torch.cuda.empty_cache()
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    return [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]


def has_expandable_segments() -> bool:
    """Whether the allocator makes its segments so."""
    return _settings().get(_EXPANDABLE) == "true"


def large_segment_bytes() -> int | None:
    """The size of a page of expandable segments, where somebody has set it."""
    mib = _settings().get(_SEGMENT_SIZE, "")
    return int(mib) * 2**20 if mib.isdecimal() else None


@cache
def _make_segments_expandable() -> None:
    if sys.platform != "linux":
        return
    pages = "" if _SEGMENT_SIZE in _settings() else f"{_SEGMENT_SIZE}:{_PAGE_MIB}"
    asked = ",".join(filter(None, (_allocator_settings(), f"{_EXPANDABLE}:True", pages)))
    with suppress(AttributeError):  # a PyTorch in which settings cannot be changed
        torch._C._accelerator_setAllocatorSettings(asked)
        _ASKED.append(asked)


def _settings() -> dict[str, str]:
    """What the allocator was told, by name; names and values in small letters."""
    told = _allocator_settings().lower().replace(" ", "")
    return dict(entry.split(":", 1) for entry in told.split(",") if ":" in entry)


def _allocator_settings() -> str:
    try:
        return str(torch._C._accelerator_getAllocatorSettings())
    except AttributeError:  # before torch 2.12 nobody tells but those who asked
        return next(filter(None, (*_ASKED, *map(os.environ.get, _ALLOCATOR_CONF))), "")


def random_state_bytes(device: torch.device) -> int:
    """Size of a generator's state: a Mersenne Twister on the CPU, a seed and an offset on CUDA."""
    return 16 if device.type == "cuda" else int(torch.get_rng_state().numel())


class PeakMemory:
    """Context manager; `peak_bytes` and `end_bytes` are there after it, relative to its start.

    On CPU the profiler must be stopped where it was started: autograd's engine puts back the thread's state when it
    returns, and a profiler that was stopped inside a backward comes back broken. There, `mark` the moment: once all is
    measured, `at_mark` has the peak and the end up to it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self.end_bytes = 0
        self.at_mark: tuple[int, int] | None = None
        self._recording = False
        self._start_bytes = 0

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start_bytes = torch.cuda.memory_allocated(self.device)
        else:
            _enable_profiler_legacy(
                ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
            )
            self._recording = True

    def mark(self) -> None:
        """On CPU, note what was taken up to now."""
        with torch.profiler.record_function(_MARK):
            pass

    def stop(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._start_bytes
            self.end_bytes = torch.cuda.memory_allocated(self.device) - self._start_bytes
            return
        if not self._recording:
            return
        self._recording = False
        for thread in _disable_profiler_legacy():
            for event in thread:
                if event.name() == _MARK and self.at_mark is None:
                    self.at_mark = self.peak_bytes, self.end_bytes
                if str(event.kind()) == "memory_alloc":
                    self.end_bytes += event.cpu_memory_usage()
                    self.peak_bytes = max(self.peak_bytes, self.end_bytes)
