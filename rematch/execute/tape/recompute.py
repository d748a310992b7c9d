"""Bringing dropped contents back in backward.

`Backward(plan).unpack(handle)` for each handle that autograd asks for

Calls run again below autograd and autocast, on this forward's own notes. One lock serves all, for autograd asks from
one thread for each device, and a random call borrows the generator that everybody draws from.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from rematch.execute.tape.contents import (
    Content,
    Handle,
    Note,
    Ref,
    Saved,
    copy_with_storage,
    modified_in_place,
    show,
)
from rematch.execute.tape.eviction import Ledger
from rematch.execute.tape.plan import ContentKey, EventStep, TapePlan
from rematch.execute.tape.threads import thread

_LOCK = threading.RLock()


class _AsInForward:
    """Kernels run as they ran below autograd and autocast, and no tape notes them; entered for every access."""

    __slots__ = ("_no_autocast", "_no_autograd", "_wants_gradients", "_was_not_forward")

    def __enter__(self) -> None:
        self._was_not_forward, thread.not_forward = thread.not_forward, True
        self._wants_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # some kernels ask
        self._no_autocast = torch._C._DisableAutocast()
        self._no_autocast.__enter__()
        self._no_autograd = torch._C._AutoDispatchBelowAutograd()  # from here on, and not from its entering
        self._no_autograd.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._no_autograd.__exit__(*raised)
        self._no_autocast.__exit__(*raised)
        torch._C._set_grad_enabled(self._wants_gradients)
        thread.not_forward = self._was_not_forward


_graph_is_kept: Any = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]


class Backward:
    """What the handles of one forward share."""

    __slots__ = ("contents", "event", "ledger", "notes", "plan")

    def __init__(self, plan: TapePlan | None, ledger: Ledger | None) -> None:
        self.plan = plan if plan is not None and plan.events else None  # None: on demand
        self.ledger = ledger
        self.event = 0
        # Weakly, so that what backward needs no more goes as soon as its handles do.
        self.notes: dict[int, weakref.ref[Note]] = {}
        self.contents: dict[ContentKey, weakref.ref[Content]] = {}

    def expect(self, note: Note) -> None:
        """Know a note and what it makes by their places in the plan."""
        self.notes[note.position] = weakref.ref(note)
        for index, content in note.outputs:
            self.contents[note.position, index] = content

    def unpack(self, handle: Handle) -> torch.Tensor:
        """The tensor that autograd saved."""
        with _LOCK:
            saved = handle.saved
            if saved.witness._version != saved.version:
                size = handle.layout[0]
                raise modified_in_place(saved.witness.type(), size, saved.witness._version, saved.version)
            last = self.plan is not None and self._next_event(saved.content)
            value = self._value_of(saved)
            if last:
                saved.content.let_go()
            # Above the keys that count versions, so that a backward which writes to what it gets is found out.
            with torch.no_grad():
                return show(value, handle.layout)

    def _value_of(self, saved: Saved) -> torch.Tensor:
        value = saved.content.value
        if value is not None:
            return value
        value = saved.value
        if value is None:
            with _AsInForward():
                value = _Recomputation(self).bring_back(saved.content)
        elif value._version != saved.value_version:
            raise modified_in_place(value.type(), value.shape, value._version, saved.value_version)
        if self.ledger is not None:
            self.ledger.used(saved)
        return value

    def _next_event(self, content: Content) -> bool:
        """Do what the plan has for this access; where backward takes another order, go on by demand.

        Returns whether the content is to be let go of as it is handed over.
        """
        assert self.plan is not None
        number = self.event
        self.event += 1
        if number >= len(self.plan.events):
            return False
        event = self.plan.events[number]
        if event.content != content.key:
            self.plan = None
            return False
        if event.steps:
            with _AsInForward():
                _Recomputation(self).follow(event.steps, () if _graph_is_kept() else event.done)
        return event.last

    def content(self, key: ContentKey) -> Content | None:
        """A content by its name in the plan, if anything still needs it."""
        found = self.contents.get(key)
        return None if found is None else found()

    def note(self, call: int) -> Note | None:
        """A note by its place in the plan, if anything still needs it."""
        found = self.notes.get(call)
        return None if found is None else found()


class _Recomputation:
    """Calls that run again for one access."""

    def __init__(self, backward: Backward) -> None:
        self.backward = backward
        self.at_hand: dict[Content, torch.Tensor] = {}  # for as long as this access takes
        self.private: set[Content] = set()  # those of them that nobody else can see
        self.planned = False  # by the steps of an event, not on demand

    def follow(self, steps: tuple[EventStep, ...], done: tuple[int, ...]) -> None:
        """The steps of an event, as far as anything still needs them; what is left stays for later accesses.

        What the calls in `done` need is let go as soon as they have run.
        """
        self.planned = True
        places = {step: place for place, step in enumerate(steps)}  # of each call, the last
        last_runs = {places[call] for call in done}
        for place, step in enumerate(steps):
            if isinstance(step, int):
                self._run_planned(step, place in last_runs)
            elif len(step) == 3:
                fetched = self.backward.content(step[1:])
                if fetched is not None:
                    fetched.fetch()
            else:
                freed = self.backward.content(step)
                if freed is not None:
                    self.at_hand.pop(freed, None)
                    self.private.discard(freed)
                    freed.let_go()
        for content in self.private:
            content.value = self.at_hand[content]

    def _run_planned(self, call: int, last: bool) -> None:
        note = self.backward.note(call)
        if note is not None:
            self._run(note)
            if last:
                note.forget()

    def bring_back(self, wanted: Content) -> torch.Tensor:
        """Compute a content again, from what is there."""
        notes = self._missing(wanted)
        uses: dict[Content, int] = {wanted: 1}
        for note in notes:
            for content in _sources(note):
                uses[content] = uses.get(content, 0) + 1
        for note in notes:
            self._run(note)
            for content in _sources(note):
                uses[content] -= 1
                if not uses[content] and not self.planned:
                    self.at_hand.pop(content, None)
        value = self._known(wanted)
        assert value is not None
        return value

    def _missing(self, wanted: Content) -> list[Note]:
        """The calls that must run, in the order of forward."""
        found: dict[int, Note] = {}
        pending = [wanted]
        while pending:
            content = pending.pop()
            known = self._known(content)
            if known is None and content.copy is not None:
                content.fetch()
                known = content.available()
            if known is not None:
                if not self.planned:
                    self.at_hand[content] = known  # the budget may evict it meanwhile
                continue
            note = content.note
            assert note is not None, "what no note makes is held or in host memory"
            if note.forgotten:
                raise RuntimeError(
                    "backward goes through parts of this graph again, or in another order than planned, after what "
                    "they need was let go. Call the first backward with retain_graph=True"
                )
            if note.position not in found:
                found[note.position] = note
                pending += _sources(note)
        return [found[position] for position in sorted(found)]

    def _known(self, content: Content) -> torch.Tensor | None:
        known = self.at_hand.get(content)
        return content.available() if known is None else known

    def _needed(self, content: Content) -> torch.Tensor:
        """A content that a call reads, computed again if the plan has left that to us."""
        known = self._known(content)
        return self.bring_back(content) if known is None else known

    def _run(self, note: Note) -> None:
        bases: dict[Content, torch.Tensor] = {}
        target = note.target
        if target is not None:
            bases[target.content] = self._memory_for(note, target)

        args = [self._resolved(argument, bases) for argument in note.args]
        kwargs = {name: self._resolved(argument, bases) for name, argument in note.kwargs.items()}
        if note.draw is None:
            returned = note.operator.run(*args, **kwargs)
        else:
            with note.draw.restored():
                returned = note.operator.run(*args, **kwargs)
        results = returned if isinstance(returned, (tuple, list)) else (returned,)
        for index, found in note.outputs:
            content = found()
            if content is not None:
                self._put(content, bases[target.content] if target is not None else results[index])

    def _resolved(self, argument: Any, bases: dict[Content, torch.Tensor]) -> Any:
        """An argument of a note as the call takes it. No closure: one that calls itself is garbage for a collector."""
        if type(argument) is Ref:
            base = bases.get(argument.content)
            if base is None:
                base = bases[argument.content] = self._needed(argument.content)
            return argument.shown(base)
        return [self._resolved(entry, bases) for entry in argument] if type(argument) is list else argument

    def _memory_for(self, note: Note, target: Ref) -> torch.Tensor:
        """What an in-place call writes to: the content before, in memory that nobody else reads."""
        if note.memory is not None:
            size, device = note.memory
            return torch.empty(size, dtype=torch.uint8, device=device)
        before = target.content
        known = self._needed(before)
        if before in self.private:
            del self.at_hand[before]
            self.private.discard(before)
            return known
        return copy_with_storage(known)

    def _put(self, content: Content, value: torch.Tensor) -> None:
        if self.planned:
            if self._known(content) is None:
                self.at_hand[content] = value
                self.private.add(content)
            return
        self.at_hand[content] = value
        saved = None if content.saved is None else content.saved()
        if saved is None or content.available() is not None:
            self.private.add(content)
            return
        saved.put(value)
        if self.backward.ledger is not None:
            saved.size_bytes = value.untyped_storage().nbytes()
            self.backward.ledger.keep(saved)


def _sources(note: Note) -> list[Content]:
    """The contents that must be there before a call can run."""
    found = note.reads()
    if note.target is not None and note.memory is None:
        found.append(note.target.content)
    return found
