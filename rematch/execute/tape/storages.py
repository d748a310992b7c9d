"""Which content each storage has now.

`storages.noted[storage_address(tensor)]` while forward runs

Storages are told apart by their addresses, and each that is known is referred to weakly: its memory goes when the
program lets go of it, its address is not given to another.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from rematch.execute.tape.contents import Content, storage_address

_FEWEST = 256  # storages known before a look for dead ones is worth it


class _Addresses:
    """Addresses that no other storage gets as long as they are here."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.look_again = _FEWEST

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.held:
            address: Any = storage._weak_ref()
            self.held.add(address)

    def free_dead(self) -> list[int]:
        """Give the addresses of dead storages back."""
        dead = [address for address in self.held if torch.UntypedStorage._expired(address)]
        for address in dead:
            self._free(address)
        self.look_again = max(_FEWEST, 2 * len(self.held))
        return dead

    def clear(self) -> None:
        for address in list(self.held):
            self._free(address)

    def _free(self, address: int) -> None:
        self.held.discard(address)
        torch.UntypedStorage._free_weak_ref(address)


class Storages:
    """The current contents, during one forward."""

    def __init__(self) -> None:
        self.noted: dict[int, Content] = {}
        # Contents that no note makes live as long as a note reads them, and not until forward ends.
        self.unknown: dict[int, weakref.ref[Content]] = {}
        self._addresses = _Addresses()
        self._made: set[int] = set()

    def made(self, tensor: torch.Tensor) -> None:
        """A call that is not noted has made the storage of `tensor`, and forward will write to it."""
        storage = tensor.untyped_storage()
        self._addresses.add(storage)
        self._made.add(storage._cdata)

    def is_of_this_forward(self, tensor: torch.Tensor) -> bool:
        """Whether we have seen the storage of `tensor` being made, so that no other forward knows it."""
        address = storage_address(tensor)
        return address in self._made or address in self.noted

    def put(self, storage: torch.UntypedStorage, address: int, content: Content) -> None:
        """A noted call has written `content` to the storage."""
        addresses = self._addresses
        if address not in addresses.held:
            addresses.add(storage)
            if len(addresses.held) >= addresses.look_again:
                for dead in addresses.free_dead():
                    self.noted.pop(dead, None)
                    self._made.discard(dead)
        self.noted[address] = content

    def forget(self, tensor: torch.Tensor) -> None:
        """Somebody has written to the storage of `tensor`."""
        self.noted.pop(storage_address(tensor), None)

    def before_write(self, tensor: torch.Tensor, counted: int = 0) -> None:
        """Somebody is about to write to the storage of `tensor`: what notes read of it must not go with that.

        `counted` says how often autograd has counted this write already.
        """
        address = storage_address(tensor)
        found = self.unknown.pop(address, None)
        for content in (self.noted.get(address), None if found is None else found()):
            if content is not None and content.copy is not None:
                content.let_go()  # the write comes after the copy out
                continue
            if content is None or content.held is None or content.owns_memory:
                continue
            if content.note is not None and not content.constant:
                content.held = None  # it can be computed again
            elif content.held._version in (content.held_version, content.held_version + counted):
                content.hold_copy(content.held)

    def clear(self) -> None:
        """Forward has ended."""
        self.noted.clear()
        self.unknown.clear()
        self._made.clear()
        self._addresses.clear()


class _Changing:
    """Storages without gradients that some forward writes to: buffers, running statistics, caches.

    The next forward may write to them before this one's backward has run, so notes take a copy of what they read there.
    """

    def __init__(self) -> None:
        self._addresses = _Addresses()
        self._lock = threading.Lock()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            if storage._cdata not in self._addresses.held:
                self._addresses.add(storage)
                if len(self._addresses.held) >= self._addresses.look_again:
                    self._addresses.free_dead()

    def __contains__(self, address: int) -> bool:
        return address in self._addresses.held


CHANGING = _Changing()
