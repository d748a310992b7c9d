"""One forward, watched: what a plan can be made from without a planner.

`plan = drop_all(observe(module, (batch,), {}))`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rematch.execute.tape.contents import Content, Note, storage_address
from rematch.execute.tape.dynamo import keep_dynamo_out
from rematch.execute.tape.operators import Operator
from rematch.execute.tape.plan import Budget, ContentKey, TapePlan
from rematch.execute.tape.tape import Tape, unpack
from rematch.execute.tape.transforms import transforms_allowed


@dataclass(frozen=True)
class Observation:
    """What a forward ran and saved, and what it returned."""

    calls: tuple[Any, ...]
    droppable: tuple[ContentKey, ...]  # contents whose calls can run again, in the order in which they came
    saved: tuple[ContentKey, ...]  # those of them that autograd saved
    returned: Any


def observe(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observation:
    """Run `forward` once, as always, and keep everything."""
    tape = _Observer()
    try:
        with tape, transforms_allowed(), saved_tensors_hooks(tape.pack, unpack):
            returned = forward(*args, **kwargs)
    finally:
        parting = tape.finish()
    assert parting is not None
    return Observation(parting.calls, tuple(tape.droppable), tuple(dict.fromkeys(tape.saved)), returned)


def drop_all(observation: Observation) -> TapePlan:
    """Drop every content that can be computed again, on demand."""
    return drop(observation, frozenset(observation.droppable))


def drop(observation: Observation, dropped: frozenset[ContentKey]) -> TapePlan:
    """Drop these contents, on demand."""
    return TapePlan(observation.calls, frozenset(call for call, _ in observation.droppable), dropped)


class _Observer(Tape):
    """Notes everything and drops nothing."""

    def __init__(self) -> None:
        super().__init__(None, Budget(2**62))
        self.droppable: list[ContentKey] = []
        self.saved: list[ContentKey] = []

    def _note_results(self, note: Note, operator: Operator, returned: Any) -> None:
        super()._note_results(note, operator, returned)
        if not operator.constant:
            self.droppable += [(note.position, index) for index, _ in note.outputs]

    def _note_write(self, note: Note, written: Tensor) -> None:
        super()._note_write(note, written)
        self.droppable.append((note.position, 0))

    @keep_dynamo_out
    def pack(self, tensor: Tensor) -> Any:
        content = self._content_of(tensor)
        if content is not None and content.note is not None and not content.constant:
            self.saved.append((content.note.position, content.index))
        return super().pack(tensor)

    def _content_of(self, tensor: Tensor) -> Content | None:
        if type(tensor) is not Tensor:
            return None
        try:
            content = self.storages.noted.get(storage_address(tensor))
        except RuntimeError:
            return None
        return content if content is not None and content.version == tensor._version else None
