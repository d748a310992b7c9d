"""What tracing believes about results, corrected by what kernels really return.

`with corrections.applied(): trace()`

Fake kernels give some results other strides than the real ones (batch norm, some backward kernels, fills of memory
that is not contiguous). Composite operators look at strides to choose what they run: `linear` is one kernel on a
contiguous input and three on another. So wrong strides are not only a matter of views; they lead to other kernels than
eager's, and the trace has to be made again with the right ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rematch.capture.cost import Call, Profile, Result

_MOST_TRACES = 8  # each trace can bring out new calls; a model that never settles is taken as it is


class TraceAgain(Exception):
    """The graph was traced with wrong strides; the corrections know better now."""


class Corrections:
    """Results by call, as they really are."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Result | None, ...]] = {}
        self._operators: set[Any] = set()
        self._traces = 0

    def learn(self, wrong: dict[str, Profile]) -> None:
        """Take note of calls whose results were traced wrongly; `TraceAgain` if there is something new among them."""
        new = {key: profile.results for key, profile in wrong.items() if key not in self._known}
        self._traces = self._traces + 1 if new else 0
        if not new or self._traces > _MOST_TRACES:
            return
        self._known.update(new)
        self._operators = {key.partition("(")[0] for key in self._known}
        raise TraceAgain

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Fake kernels return what the real ones do, as far as it is known."""
        if not self._known:
            yield
            return
        believed = FakeTensorMode.dispatch

        def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            returned = believed(mode, func, types, args, kwargs)
            if str(func) not in self._operators:
                return returned
            results = self._known.get(Call.made(func, args, kwargs or {}).key)
            return returned if results is None else _corrected(returned, results, mode)

        with patch.object(FakeTensorMode, "dispatch", dispatch):
            yield


def _corrected(returned: Any, results: tuple[Result | None, ...], mode: FakeTensorMode) -> Any:
    if isinstance(returned, (tuple, list)):
        if len(returned) != len(results):
            return returned
        return type(returned)(_restrided(leaf, result, mode) for leaf, result in zip(returned, results, strict=True))
    return _restrided(returned, results[0], mode)


def _restrided(leaf: Any, result: Result | None, mode: FakeTensorMode) -> Any:
    if result is None or not isinstance(leaf, torch.Tensor):
        return leaf
    if tuple(leaf.shape) == result.shape and leaf.stride() == result.stride:
        return leaf
    with mode:
        return torch.empty_strided(result.shape, result.stride, dtype=leaf.dtype, device=leaf.device)
