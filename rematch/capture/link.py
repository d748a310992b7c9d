"""How fast values move between a device and host memory, measured once and remembered on disk.

`link_to(torch.device("cuda"), host_bytes=64 * 2**30)`, `link_to("h200", host_bytes=64 * 2**30)`

The engines copy through pinned memory, so pinned memory is what we measure: copies out alone, copies in alone, and both
at once. On a CPU a copy from memory to memory stands in for the link. A device that is not here has figures in the
table of `rematch.capture.devices`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rematch.cache import RecordStore
from rematch.capture.devices import LinkSpeeds, find_device
from rematch.errors import RematchError
from rematch.graph import Link

_COPY_BYTES = 32 * 2**20  # large enough for the full speed of a link
_COPIES = 4  # queued for one figure
_REPEATS = 4


def link_to(device: torch.device | str, host_bytes: int) -> Link:
    """The link between `device` and so much host memory.

    A `torch.device` is measured here, unless that was done before; a name is looked up in the table of devices.
    `DeviceError` for a name that the table does not have.
    """
    speeds = _known_speeds(device) if isinstance(device, str) else measured_speeds(device)
    return Link(speeds.out_bytes_per_second, speeds.in_bytes_per_second, host_bytes)


def _known_speeds(name: str) -> LinkSpeeds:
    speeds = find_device(name).link
    return measured_speeds(torch.device("cpu")) if speeds is None else speeds


def measured_speeds(device: torch.device) -> LinkSpeeds:
    """The speeds of a device's link; measured the first time that anyone asks for them on such a machine."""
    store = RecordStore(LinkSpeeds, "links.json", is_usable=_is_usable)
    key = _machine_with(device)
    if key not in store.records:
        with _disable_current_modes(), torch.no_grad():  # a recorded tensor would be timed instead of a real one
            store.records[key] = _measure(device)
        store.save()
    return store.records[key]


def _is_usable(speeds: LinkSpeeds) -> bool:
    every = (speeds.out_bytes_per_second, speeds.in_bytes_per_second, speeds.both_bytes_per_second)
    return all(1.0 <= speed < 1e18 for speed in every)


def _machine_with(device: torch.device) -> str:
    """The device, and the cores of its machine: with a home folder for many machines, most of what tells them apart."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{name}, {os.cpu_count()} cores"


def _measure(device: torch.device) -> LinkSpeeds:
    there = [torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [_host_buffer(device) for _ in range(2)]

    def out() -> None:
        here[0].copy_(there[0], non_blocking=True)

    def back() -> None:
        there[1].copy_(here[1], non_blocking=True)

    return LinkSpeeds(*(_bytes_per_second(copies, device) for copies in ([out], [back], [out, back])))


def _host_buffer(device: torch.device) -> torch.Tensor:
    """Memory to copy to and from, written once so that the machine has really given it."""
    try:
        return torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise RematchError(
            f"the link of {device} could not be measured: {_COPY_BYTES >> 20} MiB of pinned host memory cannot be had "
            f"({str(error).splitlines()[0]}); free host memory, or raise the limit of locked memory (ulimit -l)"
        ) from error


def _bytes_per_second(directions: list[Callable[[], None]], device: torch.device) -> float:
    """The speed of each direction while all of `directions` copy: the fastest of a few tries, as noise only adds."""
    timed = _seconds_on_cuda if device.type == "cuda" else _seconds_on_cpu
    timed(directions, device)
    return _COPIES * _COPY_BYTES / min(timed(directions, device) for _ in range(_REPEATS))


def _seconds_on_cpu(directions: list[Callable[[], None]], device: torch.device) -> float:
    """One after the other: all copies of a CPU share its memory's speed."""
    started = time.perf_counter()
    for _ in range(_COPIES):
        for copy in directions:
            copy()
    return max(time.perf_counter() - started, 1e-9)


def _seconds_on_cuda(directions: list[Callable[[], None]], device: torch.device) -> float:
    """Each direction on a stream of its own, until the last one has ended."""
    torch.cuda.synchronize(device)
    begun = [torch.cuda.Event(enable_timing=True) for _ in directions]
    ended = [torch.cuda.Event(enable_timing=True) for _ in directions]
    for copy, begin, end in zip(directions, begun, ended, strict=True):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            begin.record()
            for _ in range(_COPIES):
                copy()
            end.record()
    torch.cuda.synchronize(device)
    return max(begin.elapsed_time(end) for begin in begun for end in ended) / 1000
