"""The peak memory of a training step through one compiled graph, measured while the user's own step runs.

`outputs = meter.forward(run, args)`; after backward, `meter.peak_bytes`

On CUDA the allocator tells, from the start of forward to the end of backward. On CPU a profiler watches forward, and
then all that follows until backward has ended, with what the loss takes between them. Where a step runs through several
graphs, it watches forward and backward of each, and what is alive around them is added up. Autograd calls us before
the graph's own backward node and when all of backward has ended, so neither compiled code nor a cache of it is touched.
(A hook behind the node would keep tangents in memory that compiled code lets go.) Someone else's profiler leaves
nothing to measure with: `peak_bytes` stays None, and the next step is another chance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from rematch.capture.memory import PeakMemory
from rematch.execute.loss_meter import LossMeter

_BACKWARD_NODE = "CompiledFunctionBackward"
_ALIVE = "rematch"  # in the metadata of that node
_autograd: Any = torch.autograd
Storages = dict[int, int]  # bytes of each


class _Alive:
    """Lives as long as a node of autograd's graph."""


class Outside:
    """What is known of a step outside of one graph, where no allocator tells."""

    def __init__(self) -> None:
        self.between_bytes = 0  # taken between forward and backward beside tangents: the same in every step
        self.alone = True  # no other graph has been seen in the step, so the rest of it can be measured in one piece


class StepMeter:
    """Measures one step. `held_bytes` were saved by other graphs before, `given` are parameters and inputs."""

    def __init__(
        self,
        device: torch.device,
        held_bytes: int,
        given: Storages,
        on_end: Callable[[], None],
        outside: Outside,
    ) -> None:
        self.device = device
        self.held_bytes = held_bytes
        self.peak_bytes: int | None = None
        self.saved_bytes = 0  # that forward leaves for backward, and its results
        self.unused: tuple[int, ...] = ()  # places of results that backward had no gradient for
        self.unused_bytes = 0
        self.between_bytes = 0  # taken between forward and backward beside tangents
        self.tangent_bytes = 0
        self.returned_bytes = 0  # of what forward saves, the results that the user has
        self._given = given
        self._around_bytes = held_bytes + sum(given.values())
        self._on_end = on_end
        self._outside = outside
        self._rest: LossMeter | None = None  # of the step, after forward
        self.forward_peak_bytes = 0
        self._backward: PeakMemory | None = None
        self._handles: list[Any] = []
        self._results: list[tuple[int, int, int]] = []  # place, place among the node's results, bytes
        self._returned: list[tuple[StorageWeakRef, int]] = []  # each storage with its bytes
        self._dropped_bytes = 0  # of what forward returned, gone when backward began
        self._alive: weakref.ref[_Alive] | None = None  # until nobody can call backward any more

    @property
    def pending(self) -> bool:
        """Whether backward can still come: its node in autograd's graph is there."""
        return self._alive is not None and self._alive() is not None

    @property
    def around_bytes(self) -> int:
        """What was there before forward, and is there still."""
        return self._around_bytes

    @property
    def own_peak_bytes(self) -> int:
        """What the call itself takes at its peak, its tangents included, if whoever got its results holds them.

        Where several graphs share a step, small things around them are not seen, such as what FSDP gathers.
        """
        return (self.peak_bytes or 0) + self._dropped_bytes - self._around_bytes

    @property
    def at_loss_bytes(self) -> int:
        """What is alive when forward has ended."""
        return self._around_bytes + self.saved_bytes

    def forward(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `run`, and be ready for its backward."""
        if self.device.type != "cuda" and _autograd._profiler_enabled():
            return run(*args)
        with PeakMemory(self.device) as used:
            outputs = run(*args)
        self.forward_peak_bytes, self.saved_bytes = used.peak_bytes, used.end_bytes
        if self.device.type == "cuda":
            self.forward_peak_bytes = torch.cuda.max_memory_allocated(self.device)
            self._around_bytes = torch.cuda.memory_allocated(self.device) - self.saved_bytes
            torch.cuda.reset_peak_memory_stats(self.device)
        node = next(_backward_nodes(outputs), None)
        if node is not None:
            self._results = [
                (place, result.output_nr, result.nbytes)
                for place, result in enumerate(outputs)
                if isinstance(result, torch.Tensor) and result.grad_fn is node
            ]
            self.returned_bytes = sum(size for _, _, size in self._results)
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in _tensors(outputs)}
            self._returned = [(StorageWeakRef(storage), storage.nbytes()) for storage in storages.values()]
            node.metadata[_ALIVE] = alive = _Alive()
            self._alive = weakref.ref(alive)
            self._handles = [node.register_prehook(self._starts)]
            if self.device.type == "cuda":
                return outputs
            if self._outside.alone:
                self._rest = LossMeter(self.device)
                self._rest.forward_ended()
            else:
                self._handles.append(node.register_hook(self._ends))
        return outputs

    def forget(self) -> None:
        """No backward came; measure nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _starts(self, tangents: tuple[Any, ...]) -> None:
        given = storages_of(_tensors(tangents))
        unused = [(place, size) for place, number, size in self._results if tangents[number] is None]
        self.unused, self.unused_bytes = tuple(place for place, _ in unused), sum(size for _, size in unused)
        self.tangent_bytes = tangent_bytes = sum(given.values())
        self._dropped_bytes = sum(size for storage, size in self._returned if storage.expired())
        if self.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self.device)
            self.between_bytes = max(0, peak_bytes - self.at_loss_bytes - tangent_bytes)
        elif self._outside.alone:
            if self._rest is not None and self._rest.running:
                self._outside.alone = self._rest.backward_starts(self._step_ended)  # not where another thread calls us
                if self._outside.alone:
                    return
        elif not _autograd._profiler_enabled():
            self.between_bytes = self._outside.between_bytes
            self._backward = PeakMemory(self.device)
            self._backward.start()
        if len(self._handles) == 1:
            _autograd.Variable._execution_engine.queue_callback(self._ends)

    def _ends(self, *_: Any) -> None:
        self.forget()
        if self.device.type == "cuda":
            # The peak has been running since forward ended: what the loss took is part of it.
            torch.cuda.synchronize(self.device)
            self.peak_bytes = max(self.forward_peak_bytes, torch.cuda.max_memory_allocated(self.device))
        elif self._backward is not None:
            self._backward.stop()
            held_bytes = self.saved_bytes - self._dropped_bytes
            in_backward = held_bytes + self.tangent_bytes + self._backward.peak_bytes
            in_loss = self.saved_bytes + self.tangent_bytes + self.between_bytes
            self.peak_bytes = self._around_bytes + max(self.forward_peak_bytes, in_loss, in_backward)
        self._on_end()

    def _step_ended(self, loss_bytes: int, _: int) -> None:
        assert self._rest is not None
        self.between_bytes = self._outside.between_bytes = max(0, loss_bytes - self.tangent_bytes)
        self._around_bytes = self.held_bytes + sum({**storages_of(self._rest.leaves), **self._given}.values())
        if self._rest.whole_bytes is not None:
            rest_bytes = self.saved_bytes + self._rest.whole_bytes
            self.peak_bytes = self._around_bytes + max(self.forward_peak_bytes, rest_bytes)
        self._rest = None
        self.forget()
        self._on_end()


def storages_of(tensors: Iterable[torch.Tensor]) -> Storages:
    """What lies behind tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _backward_nodes(outputs: Any) -> Iterator[Any]:
    """The autograd nodes of compiled graphs right behind `outputs`, perhaps through views."""
    waiting: list[Any] = [tensor.grad_fn for tensor in _tensors(outputs) if tensor.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == _BACKWARD_NODE:
            yield node
        elif len(seen) < 64:
            waiting += [following for following, _ in node.next_functions]
