"""Which saved contents to drop where no plan says so.

M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen, Z. Tatlock: Dynamic Tensor
Rematerialization, ICLR 2021. Whenever saved contents take more than the budget, the one with the least

    h(t) = c(t) / (m(t) * s(t))

goes: c is the cost of computing it from its parents (the paper's h_DTR_local), m its size and s how long ago it was
last used. We count time in calls instead of seconds, so that the same program drops the same contents in each run,
consider only what autograd saved, for the rest is Python's to let go, and, as the paper's section 4 has it, look at a
random sample of all candidates.
"""

from __future__ import annotations

import random
import weakref

import torch

from rematch.execute.tape.contents import Saved
from rematch.execute.tape.plan import Budget

_SAMPLE = 64  # candidates looked at for each eviction


class KeptForGood:
    """A saved tensor that cannot be computed again, and its version."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self.tensor = tensor
        self.version = version


class Ledger:
    """What saved contents take, and the rule by which they go."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.kept_bytes = 0
        self.clock = 0
        self._kept: dict[int, tuple[weakref.ref[Saved], int]] = {}
        self._for_good: dict[int, tuple[weakref.ref[KeptForGood], int]] = {}
        self._random = random.Random(0)

    def keep_for_good(self, tensor: torch.Tensor, version: int, size_bytes: int) -> KeptForGood:
        """Count what cannot be dropped, until autograd lets go of what this returns."""
        kept = KeptForGood(tensor, version)
        key = id(kept)
        self._for_good[key] = weakref.ref(kept, lambda _: self._forget_for_good(key)), size_bytes
        self.kept_bytes += size_bytes
        self._evict(None)
        return kept

    def _forget_for_good(self, key: int) -> None:
        _, size_bytes = self._for_good.pop(key)
        self.kept_bytes -= size_bytes

    def keep(self, saved: Saved) -> None:
        """Count a content that has just been saved or brought back; others may have to go for it."""
        key = id(saved)
        self._kept[key] = weakref.ref(saved, lambda _: self._forget(key)), saved.size_bytes
        self.kept_bytes += saved.size_bytes
        self.used(saved)
        self._evict(saved)

    def used(self, saved: Saved) -> None:
        """Note that a content was just read."""
        self.clock += 1
        saved.last_use = self.clock

    def _forget(self, key: int) -> None:
        _, size_bytes = self._kept.pop(key, (None, 0))
        self.kept_bytes -= size_bytes

    def _evict(self, new: Saved | None) -> None:
        while self.kept_bytes > self.budget.saved_bytes:
            candidates = list(self._kept.values())
            if len(candidates) > _SAMPLE:
                candidates = self._random.sample(candidates, _SAMPLE)
            alive = [saved for found, _ in candidates if (saved := found()) is not None and saved is not new]
            if not alive:
                return
            self._drop(min(alive, key=self._score))

    def _score(self, saved: Saved) -> float:
        note = saved.content.note
        assert note is not None, "what cannot be computed again is never counted here"
        return note.cost / (max(saved.size_bytes, 1) * (self.clock - saved.last_use + 1))

    def _drop(self, saved: Saved) -> None:
        saved.value = None
        self._forget(id(saved))
