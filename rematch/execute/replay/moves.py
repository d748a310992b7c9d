"""What generated code calls to move values to host memory and back.

`leaving = send(key, tensor)`, `host = host_of(leaving)`, `let_go(leaving)`
`arriving = fetch(key, "cuda:0", host)`, `tensor = arrived(arriving)`

A value crosses from forward to backward as a tensor in host memory that lies there as it lay on the device. Where there
is no room, that tensor is the value itself: it stays. Generated code names the host memory by a number.
"""

from __future__ import annotations

import weakref

import torch

from rematch.execute.tape.contents import layout_of, show
from rematch.execute.transfers import HostCopy, HostMemory, UnderWay

_HOSTS: weakref.WeakValueDictionary[int, HostMemory] = weakref.WeakValueDictionary()


def key_of(host: HostMemory) -> int:
    """The number of a host memory, as long as it lives."""
    _HOSTS[id(host)] = host
    return id(host)


class Leaving:
    """A value on its way out."""

    __slots__ = ("copy", "host")

    def __init__(self, host: torch.Tensor, copy: HostCopy | None) -> None:
        self.host = host
        self.copy = copy


def send(key: int, tensor: torch.Tensor) -> Leaving:
    """Begin to copy a value out."""
    copy = _HOSTS[key].transfers(tensor.device).send(tensor)
    return Leaving(tensor, None) if copy is None else Leaving(show(copy.host, layout_of(tensor)), copy)


def host_of(leaving: Leaving) -> torch.Tensor:
    """The value in host memory."""
    return leaving.host


def let_go(leaving: Leaving) -> None:
    """Hold no more of the device's memory, once the copy out has ended."""
    if leaving.copy is not None:
        leaving.copy.let_go()


class Arriving:
    """A value on its way in."""

    __slots__ = ("copy", "like")

    def __init__(self, like: torch.Tensor, copy: UnderWay | None) -> None:
        self.like = like
        self.copy = copy


def fetch(key: int, device: str, host: torch.Tensor) -> Arriving:
    """Begin to copy a value in."""
    memory = _HOSTS[key]
    if not memory.has_lent(host):
        return Arriving(host, None)
    return Arriving(host, memory.transfers(torch.device(device)).fetch(host, host.dtype))


def arrived(arriving: Arriving) -> torch.Tensor:
    """The value on the device, as it lay there before."""
    return arriving.like if arriving.copy is None else show(arriving.copy.settled(), layout_of(arriving.like))
