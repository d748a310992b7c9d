"""Real values out of a recording: the few operators that lead to a number which Python reads, run on the real sample.

`Evaluator(calls).value(ref)`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from rematch.capture.aten import without_running_statistics
from rematch.capture.recording import RecordedCall, TensorRef


class Evaluator:
    """Knows the real contents of storages that were given, and computes others by the calls that made them."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        self._calls = calls
        self._contents: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._makers: dict[tuple[int, int], int] = {}
        self._indexed = 0

    def give(self, storage: int, real: torch.Tensor) -> None:
        """The first contents of `storage` are those of this tensor's."""
        self._contents[storage, 0] = real.untyped_storage()

    def value(self, ref: TensorRef) -> torch.Tensor:
        """A real tensor that shows what `ref` does."""
        with _disable_current_modes(), torch.no_grad():
            return self._show(ref)

    def run(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What `target` returns for the real contents of its arguments."""
        with _disable_current_modes(), torch.no_grad():
            real_args, real_kwargs = pytree.tree_map_only(TensorRef, self._show, (args, kwargs))
            return target(*real_args, **real_kwargs)

    def _show(self, ref: TensorRef) -> torch.Tensor:
        storage = self._content(ref.storage, ref.version)
        like = ref.tensor
        empty = torch.empty(0, dtype=like.dtype, device=storage.device)
        shown = empty.set_(storage, like.storage_offset(), like.shape, like.stride())  # type: ignore[call-overload]
        shown = torch._conj(shown) if like.is_conj() else shown
        return torch._neg_view(shown) if like.is_neg() else shown

    def _content(self, storage: int, version: int) -> torch.UntypedStorage:
        self._index()
        wanted = [(storage, version)]
        while wanted:  # by hand: a slice can be deeper than Python's stack
            content = wanted[-1]
            if content in self._contents:
                wanted.pop()
                continue
            call = self._calls[self._makers[content]]
            missing = [
                (ref.storage, ref.version) for ref in call.inputs if (ref.storage, ref.version) not in self._contents
            ]
            if missing:
                wanted.extend(missing)
            else:
                self._compute(call)
        return self._contents[storage, version]

    def _index(self) -> None:
        """Which call made which contents."""
        for position in range(self._indexed, len(self._calls)):
            call = self._calls[position]
            if call is None:
                return
            for storage in call.makes:
                self._makers[storage, 0] = position
            for ref in call.inputs:
                if ref.storage in call.writes:
                    self._makers[ref.storage, ref.version + 1] = position
            self._indexed = position + 1

    def _compute(self, call: RecordedCall) -> None:
        """Run a call; what it writes in place is written into a copy."""
        copies: dict[int, torch.UntypedStorage] = {}
        for ref in call.inputs:
            if ref.storage in call.writes and ref.storage not in copies:
                copies[ref.storage] = self._contents[ref.storage, ref.version].clone()
                self._contents[ref.storage, ref.version + 1] = copies[ref.storage]

        def show(ref: TensorRef) -> torch.Tensor:
            if ref.storage in copies:
                return self._show(TensorRef(ref.storage, ref.version + 1, ref.tensor))
            return self._show(ref)

        given = without_running_statistics(call.target, call.args) or call.args  # the user's must not be updated
        args, kwargs = pytree.tree_map_only(TensorRef, show, (given, call.kwargs))
        returned = call.target(*args, **kwargs)
        flat = returned if isinstance(returned, (tuple, list)) else (returned,)
        for made, leaf in zip(call.outputs, flat, strict=True):
            if made is not None and made.storage in call.makes:
                self._contents.setdefault((made.storage, 0), leaf.untyped_storage())
