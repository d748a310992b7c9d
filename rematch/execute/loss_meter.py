"""What the user's own loss allocates, measured in the first step between forward's end and backward's start.

`meter.forward_ended()` ... `meter.backward_starts(told)`, where `told` gets the bytes at the highest moment and those
still there, at once or when backward has ended. `meter.watch_until_backward_ends(told)` measures all that is to come,
backward included.

On CUDA the allocator's running maximum is read and never reset, for it is the user's. It tells only maxima above all
earlier ones, which are those that matter. On CPU the profiler records allocations, unless someone else is profiling. It
cannot be stopped inside a backward (see `PeakMemory`), so the one that is measured is followed outside. The profiler
sees one thread only: a backward in another thread is not measured, and the profiler ends when its own thread next calls
a module of ours.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from rematch.capture.memory import PeakMemory

_TRIES = 3
_autograd: Any = torch.autograd
_starting = threading.Lock()


def give_up_measuring() -> None:
    """End a measurement that waits for a backward, which may never come: nothing else can be measured meanwhile."""
    if LossMeter.recording is not None:
        LossMeter.recording._stop(tell=False)


class LossMeter:
    """One for each kind of call; `waiting` until it has measured once or given up."""

    recording: LossMeter | None = None  # the one that the profiler works for

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waiting = True
        self.running = False
        self._tries = 0
        self._memory: PeakMemory | None = None
        self._thread: threading.Thread | None = None  # that the profiler watches
        self._engine: Any = None  # autograd's, while ours stands in for it
        self._depth = 0  # of backwards inside others, in that thread
        self._told: Callable[[int, int], None] | None = None
        self.whole_bytes: int | None = None  # on CPU, the most at once until a backward had ended, unless it failed,
        self.leaves: list[torch.Tensor] = []  # and the parameters that it was for
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
            self.running = True
        else:
            self._start_profiler()

    def watch_until_backward_ends(self, told: Callable[[int, int], None]) -> bool:
        """On CPU, watch this thread from now on; `told` gets the same. False where somebody else profiles."""
        self._stop()
        self._start_profiler()
        if self.running:
            self._told = told
        return self.running

    def _start_profiler(self) -> None:
        """Unless someone profiles, or another measurement is under way."""
        with _starting:
            if LossMeter.recording is not None or _autograd._profiler_enabled():
                return
            self._memory = PeakMemory(self.device)
            self._memory.start()
            self._thread = threading.current_thread()
            self._engine = _autograd._engine_run_backward
            _autograd._engine_run_backward = self._run_backward
            LossMeter.recording = self
            weakref.finalize(self, _stop_in, self._thread, self._memory)  # also when the program ends before
            self.running = True

    def backward_starts(self, told: Callable[[int, int], None]) -> bool:
        """`told` gets the most bytes at once since `forward_ended`, and those still there; False if none knows."""
        self.waiting = self.running = False
        if self.device.type == "cuda":
            highest = torch.cuda.max_memory_allocated(self.device)
            now = torch.cuda.memory_allocated(self.device)
            told(max(highest if highest > self._highest else 0, now) - self._allocated, now - self._allocated)
        elif self._memory is not None and self._thread is threading.current_thread():
            self._memory.mark()
            self._told = told
        else:
            return False
        return True

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        own = int(self._thread is threading.current_thread())
        self._depth += own
        ended = False
        if own and self._depth == 1:
            self.leaves = _leaves_behind(args[0])
        try:
            result = self._engine(*args, **kwargs)
            ended = True
            return result
        finally:
            self._depth -= own
            self._stop(ended=ended)

    def _stop(self, *, tell: bool = True, ended: bool = False) -> None:
        """End the profiler, if this is its thread or its thread has ended; else only what all threads see.

        Inside a backward of its thread, when that has ended.
        """
        self.running = False
        if self._memory is None or self._thread is None or self._depth:
            return
        here = self._thread is threading.current_thread()
        if _autograd._engine_run_backward == self._run_backward:
            _autograd._engine_run_backward = self._engine
        memory, told, self._told = self._memory, self._told, None
        if here:
            memory.stop()
        if here or not self._thread.is_alive():
            self._memory = None
            LossMeter.recording = None
        if here and tell and told is not None:
            self.whole_bytes = memory.peak_bytes if ended else None
            told(*(memory.at_mark or (memory.peak_bytes, memory.end_bytes)))
        self.leaves = []


def _leaves_behind(roots: Sequence[torch.Tensor | GradientEdge]) -> list[torch.Tensor]:
    """The parameters that the roots of a backward were computed from."""
    waiting: list[Any] = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        waiting += [] if node in seen else [before for before, _ in node.next_functions]
        seen.add(node)
    return [node.variable for node in seen if hasattr(node, "variable")]


def _stop_in(thread: threading.Thread, memory: PeakMemory) -> None:
    if thread is threading.current_thread():
        memory.stop()
