"""Copies between a device and host memory, beside computation, and the host memory that they use.

`copy = memory.transfers(tensor.device).send(tensor)`, then `copy.let_go()`, `copy.fetch()` and `copy.tensor()`

Copies run on two streams of their own, one for each direction, so that neither waits for the other or for computation.
Four rules keep them from reading what is not there yet, and from writing to what others still read:

1. A copy out begins after all that the current stream was given before it, and so after whatever wrote the memory.
2. The memory it reads is held until the current stream has been told to wait for the copy (`let_go`). Whoever gets that
   memory next uses it on the current stream, and so after the copy. The host does not wait.
3. A copy in writes to memory that was allocated for the current stream, where others may have had it before. So it also
   begins after all that the current stream was given, and after the copy out. Whoever reads or frees that memory first
   tells the current stream to wait for the copy.
4. A buffer in host memory serves the next value only after the copy in that reads it.

An object that dies with a copy under way does what rule 2 or 3 asks, so that exceptions need no care. On a CPU there
are no streams: copies are done when the call returns.

A step has hundreds of copies, and where the host is what a step waits for, each call that starts one counts: storages
are copied without tensors around them, and streams are changed without a context.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rematch.units import format_bytes

_PORTABLE = 1  # memory that is pinned for all CUDA devices


class HostMemory:
    """Buffers in host memory, pinned where a CUDA device copies to them; at most `limit_bytes` of them.

    A buffer is lent as a tensor of bytes and comes back when that tensor dies. Buffers are kept for later values of
    the same size, as the next step has them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0  # from the machine
        self.shortage: str | None = None  # why a value found no room
        self.exhausted = False  # the machine has no more, whatever the limit is
        self._transfers: dict[torch.device, Transfers] = {}
        self._idle: dict[int, list[_Buffer]] = {}
        self._lent: dict[int, _Buffer] = {}  # by address
        self._lock = threading.Lock()

    @property
    def lent_bytes(self) -> int:
        """What values take now."""
        with self._lock:
            self._take_back()
            return sum(buffer.size_bytes for buffer in self._lent.values())

    def transfers(self, device: torch.device) -> Transfers:
        """The copies between a device and this memory."""
        found = self._transfers.get(device)
        if found is None:
            found = self._transfers[device] = Transfers(self, device)
        return found

    def lend(self, size_bytes: int, *, pinned: bool) -> tuple[torch.Tensor, _Buffer] | None:
        """A tensor of so many bytes, and its buffer; None where there is no room, and `shortage` says why."""
        with self._lock:
            idle = self._idle.get(size_bytes)
            if not idle:
                self._take_back()
                idle = self._idle.get(size_bytes)
            buffer = idle.pop() if idle else self._new(size_bytes, pinned)
            if buffer is None:
                return None
            lent = torch.frombuffer(buffer, dtype=torch.uint8)
            buffer.shown = StorageWeakRef(lent.untyped_storage())
            self._lent[buffer.address] = buffer
        return lent, buffer

    def has_lent(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor shows one of these buffers."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._lent

    def buffer_of(self, lent: torch.Tensor) -> _Buffer:
        """The buffer behind a tensor that was lent."""
        return self._lent[lent.untyped_storage().data_ptr()]

    def _take_back(self) -> None:
        """Find the buffers that no tensor shows any more."""
        for buffer in [buffer for buffer in self._lent.values() if buffer.shown is None or buffer.shown.expired()]:
            del self._lent[buffer.address]
            self._idle.setdefault(buffer.size_bytes, []).append(buffer)

    def _new(self, size_bytes: int, pinned: bool) -> _Buffer | None:
        for size in list(self._idle):
            while self._idle[size] and self.taken_bytes + size_bytes > self.limit_bytes:
                self._idle[size].pop()
                self.taken_bytes -= size
        if self.taken_bytes + size_bytes > self.limit_bytes:
            self.shortage = f"what forwards without a backward have moved takes all of {format_bytes(self.limit_bytes)}"
            return None
        try:
            buffer = _Buffer(size_bytes, pinned)
        except (OSError, ValueError, RuntimeError) as error:
            self.shortage = f"the machine gave {format_bytes(self.taken_bytes)} and no more ({error})"
            self.exhausted = True
            return None
        self.taken_bytes += size_bytes
        return buffer


class _Buffer(mmap.mmap):
    """Pages of host memory of their own, with the copies that use them last.

    The machine has them back when nobody holds them any more. CUDA must have let go of them by then: what it still took
    for pinned could not be pinned for the next that gets these pages.
    """

    _pinned = False

    def __new__(cls, size_bytes: int, pinned: bool) -> _Buffer:
        return super().__new__(cls, -1, size_bytes)

    def __init__(self, size_bytes: int, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self.address = np.frombuffer(self, dtype=np.uint8).ctypes.data
        self.copies: list[Any] = []  # events of the last copy out and the last copy in
        self.shown: StorageWeakRef | None = None  # what it was lent as
        if pinned:
            _check(torch.cuda.cudart().cudaHostRegister(self.address, size_bytes, _PORTABLE))
            self._pinned = True

    def __del__(self) -> None:
        if self._pinned:
            with suppress(Exception):  # the interpreter may be ending, and CUDA with it
                for copied in self.copies:
                    copied.synchronize()
                _check(torch.cuda.cudart().cudaHostUnregister(self.address))


def _check(status: Any) -> None:
    if int(status) == 0:
        return
    with suppress(Exception):  # CUDA tells its last error to whoever launches a kernel next
        torch.ones(1, device="cuda")
    raise RuntimeError(f"CUDA cannot pin this memory (error {int(status)}); see `ulimit -l`")


class Transfers:
    """The two directions between one device and some host memory."""

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self.memory = memory
        self.device = device
        self._has_streams = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if self._has_streams else None
        self._into = torch.cuda.Stream(device) if self._has_streams else None

    def send(self, tensor: torch.Tensor) -> HostCopy | None:
        """Begin to copy all of the tensor's storage to host memory; None where there is no room."""
        source = tensor.untyped_storage()
        lent = self.memory.lend(source.nbytes(), pinned=self._has_streams)
        if lent is None:
            return None
        host, buffer = lent
        copied, stream = self._copy(host.untyped_storage(), source, self._out, buffer)
        buffer.copies = [copied] if copied is not None else []
        return HostCopy(self, host, tensor.dtype, UnderWay(source, copied, stream))

    def fetch(self, host: torch.Tensor, dtype: torch.dtype) -> UnderWay:
        """Begin to copy a storage back from host memory, to memory that is allocated now."""
        source = host.untyped_storage()
        size = source.nbytes()
        whole = size % dtype.itemsize == 0
        made = torch.empty(size // dtype.itemsize if whole else size, dtype=dtype if whole else torch.uint8,
                           device=self.device)  # fmt: skip
        buffer = self.memory.buffer_of(host)
        copied, stream = self._copy(made.untyped_storage(), source, self._into, buffer)
        if copied is not None:
            buffer.copies = [*buffer.copies[:1], copied]
        return UnderWay(made, copied, stream)

    def _copy(
        self, target: torch.UntypedStorage, source: torch.UntypedStorage, own: Any, buffer: _Buffer
    ) -> tuple[Any, Any]:
        """Copy on the stream `own`; returns the event of its end and the stream that others compute on."""
        if own is None:
            target.copy_(source)
            return None, None
        computing = torch.cuda.current_stream(self.device)
        own.wait_stream(computing)
        for earlier in buffer.copies:
            own.wait_event(earlier)
        current = torch.cuda.current_device()
        torch.cuda.set_stream(own)
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(computing)
            if current != own.device_index:
                torch.cuda.set_device(current)  # which changing streams has changed
        copied = torch.cuda.Event()
        copied.record(own)
        return copied, computing


class UnderWay:
    """Memory of the device that a copy reads or writes."""

    __slots__ = ("_copied", "_memory", "_stream")

    def __init__(self, memory: torch.Tensor | torch.UntypedStorage, copied: Any, stream: Any) -> None:
        self._memory = memory
        self._copied = copied  # the event of the copy's end; None once the current stream waits for it
        self._stream = stream

    def settled(self) -> Any:
        """The memory, which the current stream may use or free from now on."""
        if self._copied is not None:
            self._stream.wait_event(self._copied)
            current = torch.cuda.current_stream(self._stream.device)
            if current != self._stream:
                current.wait_event(self._copied)
            self._copied = None
        return self._memory

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be ending, and CUDA with it
            self.settled()


class HostCopy:
    """A storage in host memory, from when its copy out begins. The device's memory is held until `let_go`."""

    __slots__ = ("_arriving", "_leaving", "dtype", "host", "transfers")

    def __init__(self, transfers: Transfers, host: torch.Tensor, dtype: torch.dtype, leaving: UnderWay) -> None:
        self.transfers = transfers
        self.host = host
        self.dtype = dtype
        self._leaving: UnderWay | None = leaving
        self._arriving: UnderWay | None = None

    def let_go(self) -> None:
        """Hold no memory of the device any more."""
        self._leaving = self._arriving = None

    def fetch(self) -> None:
        """Begin to bring the storage back, unless that was done."""
        if self._arriving is None:
            self._arriving = self.transfers.fetch(self.host, self.dtype)

    def tensor(self) -> torch.Tensor | None:
        """A tensor on the storage that was fetched, to be used on the current stream; None if none was."""
        return None if self._arriving is None else self._arriving.settled()
