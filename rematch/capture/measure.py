"""The cost of operators, measured on the real device and remembered on disk.

`with measuring(torch.device("cpu")) as measurer: measurer.profile(call).cost.seconds`

Each distinct call runs on tensors made for it (numbers between 0 and 1, integers and booleans zero, so that every index
is in range), never on the user's, and the random state is put back. One run is watched for memory and for what it
returns, for real results differ from traced ones in strides; then the median of some more is its time.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rematch.cache import RecordStore
from rematch.capture.aten import clones_storage, with_state_of_forward
from rematch.capture.cost import Call, Cost, Profile, results_of
from rematch.capture.estimate import node_of
from rematch.capture.joint.traced import tensors_of
from rematch.capture.memory import PeakMemory, allocated_bytes
from rematch.capture.roofline import flops
from rematch.errors import RematchError

_SECONDS_PER_CALL = 0.08  # of measuring; short operators are repeated as often as fits
_MOST_RUNS = 30
_FEWEST_RUNS = 3


class Measurer:
    """Measures each distinct call once, ever: what it learns is kept on disk."""

    notes: tuple[str, ...] = ()

    def __init__(self, device: torch.device, on_call: Callable[[str], None] | None) -> None:
        self._device = device
        self._on_call = on_call
        name = f"costs-{conditions(device)}.json"  # what holds under one condition says nothing about another
        self._store = RecordStore(Profile, name, is_usable=lambda known: bool(known.results))

    def profile(self, call: Call) -> Profile:
        known = self._store.records
        if call.key not in known:
            if self._on_call is not None:
                self._on_call(str(call.target))
            with _random_state_kept(self._device):
                known[call.key] = _measured(call, self._device)
        return known[call.key]

    def save(self) -> None:
        self._store.save()


@contextmanager
def measuring(device: torch.device, on_call: Callable[[str], None] | None = None) -> Iterator[Measurer]:
    """A profiler of calls on `device`; what it learns is stored when the block ends, also by an error."""
    measurer = Measurer(device, on_call)
    with _untouched(device):
        try:
            yield measurer
        finally:
            measurer.save()


@contextmanager
def _untouched(device: torch.device) -> Iterator[None]:
    """No tracing modes inside, and the random state afterwards as before."""
    with _disable_current_modes(), _random_state_kept(device):
        yield


def _random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _measured(call: Call, device: torch.device) -> Profile:
    """Measure here, or in a thread of its own while the user profiles this one: two profilers cannot share a thread."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _measure(call, device)
    found: list[Profile | RematchError] = []

    def work() -> None:
        try:
            found.append(_measure(call, device))
        except RematchError as error:
            found.append(error)

    thread = threading.Thread(target=work, name="rematch measures")
    thread.start()
    thread.join()
    if isinstance(found[0], RematchError):
        raise found[0]
    return found[0]


def _measure(call: Call, device: torch.device) -> Profile:
    whole = clones_storage(call.target)
    tensors = [_stand_in(tensor, whole and place == 0) for place, tensor in enumerate(call.tensors)]
    args, kwargs = call.arguments(tensors)
    run = call.target._op if isinstance(call.target, torch._ops.OpOverload) else call.target
    try:
        with below_autograd():
            args = tuple(with_state_of_forward(call.target, args))
            run(*args, **kwargs)  # the first run may plan, compile or load
            with PeakMemory(device) as used:
                returned = run(*args, **kwargs)
            results = results_of(returned, tensors)
            fresh = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_of(returned)}
            for tensor in tensors:
                fresh.pop(tensor.untyped_storage()._cdata, None)
            fresh_bytes = sum(allocated_bytes(size, device) for size in fresh.values())
            del returned
            seconds = _median_seconds(lambda: run(*args, **kwargs), device)
    except Exception as error:
        raise RematchError(
            f"operator {call.target} could not be measured on {device}: {str(error).splitlines()[0]}; "
            f"it was called as {call.key}"
        ) from error
    workspace_bytes = max(0, used.peak_bytes - fresh_bytes)
    return Profile(Cost(seconds, workspace_bytes, _flops(call)), results)


def _flops(call: Call) -> float | None:
    """Counted on fake tensors, whose kernels refuse some calls that the real ones take."""
    try:
        return flops(node_of(call))
    except Exception:
        return None


@contextmanager
def below_autograd() -> Iterator[None]:
    """As eager training runs its kernels: autograd has been passed, but gradients are wanted (some kernels ask)."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def _stand_in(like: torch.Tensor, whole: bool) -> torch.Tensor:
    """A real tensor of the same shape, strides and type; conjugated or negated lazily where `like` is.

    It has memory up to its own end, or as much as `like` is part of if the `whole` of that matters.
    """
    offset = int(like.storage_offset())
    extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    length = offset + (extent if like.numel() else 0)
    if whole:
        length = int(like.untyped_storage().nbytes()) // like.element_size()
    if like.dtype.is_floating_point or like.dtype.is_complex:
        flat = torch.rand(length, device=like.device, dtype=torch.float32).to(like.dtype)
    else:
        flat = torch.zeros(length, device=like.device, dtype=like.dtype)
    made = flat.as_strided(like.shape, like.stride(), offset)
    made = torch._conj(made) if like.is_conj() else made
    return torch._neg_view(made) if like.is_neg() else made


def _median_seconds(run: Callable[[], Any], device: torch.device) -> float:
    timed = _timed_on_cuda if device.type == "cuda" else _timed_on_cpu
    first = timed(run)
    times = [first]
    runs = max(_FEWEST_RUNS, min(_MOST_RUNS, int(_SECONDS_PER_CALL / max(first, 1e-7))))
    if first > 1.0:
        runs = 1
    while len(times) < runs:
        times.append(timed(run))
    return statistics.median(times)


def _timed_on_cpu(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    returned = run()
    seconds = time.perf_counter() - started
    del returned
    return seconds


def _timed_on_cuda(run: Callable[[], Any]) -> float:
    """Time on the device between two events; the queue is filled first, so that launching does not count."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(200_000)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def conditions(device: torch.device) -> str:
    """What must be the same for a measurement to hold, as part of a file name."""
    import re

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        flags = f"tf32-{int(torch.backends.cuda.matmul.allow_tf32)}{int(torch.backends.cudnn.allow_tf32)}"
        flags += f"-benchmark-{int(torch.backends.cudnn.benchmark)}"
    else:
        import platform

        name = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
        flags = f"threads-{torch.get_num_threads()}"
    deterministic = int(torch.are_deterministic_algorithms_enabled())
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{name}-{flags}-deterministic-{deterministic}-torch-{torch.__version__}")
