"""How much memory a piece of work takes, measured.

`with PeakMemory(torch.device("cpu")) as used: work()` and then `used.peak_bytes`: the most that was allocated at any
moment beyond what was there at the start.

On CUDA the allocator counts. On CPU nobody does, so the profiler records each allocation and we add them up; that works
only while nobody else profiles.
"""

from __future__ import annotations

from types import TracebackType

import torch


class PeakMemory:
    """Context manager; `peak_bytes` and `end_bytes` are there after it, relative to its start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self.end_bytes = 0
        self._profiler: torch.autograd.profiler.profile | None = None
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
            self._profiler = torch.autograd.profiler.profile(profile_memory=True)
            self._profiler.__enter__()

    def stop(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._start_bytes
            self.end_bytes = torch.cuda.memory_allocated(self.device) - self._start_bytes
            return
        if self._profiler is None:
            return
        self._profiler.__exit__(None, None, None)
        events = self._profiler.kineto_results.events() if self._profiler.kineto_results is not None else []
        self._profiler = None
        allocated = 0
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            allocated += event.nbytes()
            self.peak_bytes = max(self.peak_bytes, allocated)
        self.end_bytes = allocated
