"""Saved tensors in pinned host memory, copied on streams beside computation, as trainers do it.

`forward = StreamedSaves(model).around(block.forward)`

What autograd saves inside goes to host memory on a stream of its own, except for parameters and small tensors. The
device's copy is dropped once the copy out has ended; no more than a few are waited for at a time. In backward a tensor
comes back on another stream when it is asked for, and the ones that were saved before it are fetched ahead. Around a
checkpointed block it offloads the block's inputs, which are all that such a block saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_WAITING = 5  # copies out that the device still holds
_AHEAD = 2  # tensors fetched before they are asked for


class Saved:
    """A tensor on its way to host memory, there, or on its way back."""

    def __init__(self, owner: StreamedSaves, tensor: torch.Tensor, place: int) -> None:
        self.owner, self.place, self.taken = owner, place, False
        self.device_tensor: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        self.host = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=owner.streams is not None
        )
        self.left = owner.copy(self.host, tensor, outwards=True)

    def fetch(self) -> None:
        """Begin to bring it back, unless that has begun."""
        if self.device_tensor is None:
            self.device_tensor = torch.empty_strided(
                self.host.size(), self.host.stride(), dtype=self.host.dtype, device=self.owner.device
            )
            self.arrived = self.owner.copy(self.device_tensor, self.host, outwards=False)

    def take(self) -> torch.Tensor:
        """The tensor on the device, for the current stream."""
        self.fetch()
        self.taken = True
        made, self.device_tensor = self.device_tensor, None
        assert made is not None, "it was fetched"
        if self.arrived is not None:
            torch.cuda.current_stream(self.owner.device).wait_event(self.arrived)
        return made


class StreamedSaves:
    """The saved tensors of one training step after the other."""

    def __init__(self, model: nn.Module, smallest_bytes: int = 2**20) -> None:
        self.device = device = next(model.parameters()).device
        self._smallest_bytes = smallest_bytes
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        on_cuda = device.type == "cuda"
        self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if on_cuda else None  # out, back
        self._saved: list[Saved] = []  # of the step, in the order of forward
        self._leaving: deque[tuple[torch.Tensor, Saved]] = deque()
        self._in_backward = False

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` with what it saves in host memory."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return forward(*args, **kwargs)

        return run

    def copy(self, to: torch.Tensor, source: torch.Tensor, *, outwards: bool) -> torch.cuda.Event | None:
        """Copy after all that the current stream has been given; returns the event of its end."""
        if self.streams is None:
            to.copy_(source)
            return None
        stream = self.streams[0 if outwards else 1]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._in_backward:  # a new step
            self._saved, self._in_backward = [], False
        storage = tensor.untyped_storage()
        if tensor.device != self.device or storage.data_ptr() in self._parameters:
            return tensor
        if tensor.nbytes < self._smallest_bytes or storage.nbytes() > 2 * tensor.nbytes:  # a view frees nothing
            return tensor
        for held, saved in self._leaving:  # saved twice, as the input of several layers is
            if held.data_ptr() == tensor.data_ptr() and held.size() == tensor.size() == saved.host.size():
                return saved
        saved = Saved(self, tensor, len(self._saved))
        self._saved.append(saved)
        self._leaving.append((tensor, saved))
        if len(self._leaving) > _WAITING:
            self._drop()
        return saved

    def _drop(self) -> None:
        """Let go of the tensor that left first; what reuses its memory comes after the copy."""
        _, saved = self._leaving.popleft()
        if saved.left is not None:
            torch.cuda.current_stream(self.device).wait_event(saved.left)

    def _unpack(self, packed: Any) -> torch.Tensor:
        self._in_backward = True
        while self._leaving:
            self._drop()
        if not isinstance(packed, Saved):
            kept: torch.Tensor = packed
            return kept
        made = packed.take()
        for ahead in self._saved[max(0, packed.place - _AHEAD) : packed.place]:
            if not ahead.taken:
                ahead.fetch()
        return made
