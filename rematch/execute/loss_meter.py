"""What the user's own loss allocates, measured in the first step between forward's end and backward's start.

`meter.forward_ended()` ... `meter.backward_starts()` returns the bytes at the highest moment and now, or None.

On CUDA the allocator's running maximum is read and never reset, for it is the user's. It tells only maxima above all
earlier ones, which are those that matter. On CPU the profiler records allocations, unless someone else is profiling.
"""

from __future__ import annotations

import weakref

import torch

from rematch.capture.memory import PeakMemory

_TRIES = 3


class LossMeter:
    """One for each compiled graph; `waiting` until it has measured once or given up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waiting = True
        self.running = False
        self._tries = 0
        self._memory: PeakMemory | None = None
        self._allocated = 0
        self._highest = 0

    def forward_ended(self) -> None:
        """Begin to watch; a second forward before any backward begins anew."""
        self._stop()
        self._tries += 1
        if self._tries > _TRIES or not torch.is_grad_enabled():
            self.waiting = self._tries <= _TRIES
            return
        if self.device.type == "cuda":
            self._allocated = torch.cuda.memory_allocated(self.device)
            self._highest = torch.cuda.max_memory_allocated(self.device)
        elif torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return
        else:
            self._memory = PeakMemory(self.device)
            self._memory.start()
            weakref.finalize(self, self._memory.stop)  # also when the program ends before any backward
        self.running = True

    def backward_starts(self) -> tuple[int, int] | None:
        """The most bytes at once since `forward_ended`, and those still there; None if that is not known."""
        measured = None
        if self.device.type == "cuda":
            highest = torch.cuda.max_memory_allocated(self.device)
            now = torch.cuda.memory_allocated(self.device)
            measured = (max(highest if highest > self._highest else 0, now) - self._allocated, now - self._allocated)
        elif self._memory is not None:
            memory = self._memory
            self._stop()
            measured = (memory.peak_bytes, memory.end_bytes)
        self.waiting = self.running = False
        return measured

    def _stop(self) -> None:
        if self._memory is not None:
            self._memory.stop()
            self._memory = None
        self.running = False
