"""What a tape is told: a plan for a known path of forward, or a budget for an unknown one.

`TapePlan(calls=(aten.mm.default, aten.relu.default), noted=frozenset({1}), dropped=frozenset({(1, 0)}))`

A *content* is what a storage holds between two writes. It is named by the call that wrote it, counted from 0 over the
`calls` of the plan, and the place among what this call returns: `(3, 0)` is the first result of the fourth call. An
in-place operator writes a new content of an old storage, `x.relu_()` in call 5 the content `(5, 0)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rematch.execute.tape.operators import Operator, operator_of

ContentKey = tuple[int, int]
FETCH = "fetch"
EventStep = int | ContentKey | tuple[str, int, int]


@dataclass(frozen=True)
class UnpackEvent:
    """One access of backward to a dropped content.

    `steps` come first, in turn: a number is a call to run again, a content is one to let go of, and one with `FETCH`
    before it is one to begin to bring back from host memory. What an event computes or fetches lives until a later step
    lets go of it, or until backward needs it no more. With `last`, the tape lets go of the accessed content too as it
    hands it over: it lives only as long as autograd uses it. `done` are calls that do not run again after this event,
    so that nothing needs to be held for them.
    """

    content: ContentKey
    steps: tuple[EventStep, ...] = ()
    last: bool = False
    done: tuple[int, ...] = ()


@dataclass(frozen=True)
class TapePlan:
    """What a tape does along one known path of forward.

    `calls` are the operators as a dispatch mode sees them, without views and reads of values: an eager tensor and a
    recorded one differ in when they come. The tape notes those in `noted`, so that they can run again, and
    keeps no content in `dropped` for backward. A content can be dropped if its call is noted and, where it was written
    in place, the calls that made what was there before.

    Without `events`, backward recomputes on demand, and what it computes lives until its last use. `shapes` holds, for
    some noted calls, the shape of the first result; another shape is another path. `dropped_later` are contents in
    `dropped` that stay until an event lets go of them. `rewritten` are calls whose first
    result forward itself writes over later: such memory changes within this forward and in no other.

    `moved` are contents in `dropped` that are copied to host memory when autograd saves them, whether their calls are
    noted or not. They stay on the device until a call comes that `leaving` names: before it the tape lets go of them.

    Where everything is kept, a tape only watches for another path. `readings` are then the values that forward reads:
    once all of them have come and are the same again, no data can lead to another path, and nobody need watch.

    The plan may hold for a forward that `splits_products`; see `rematch.execute.split_products`.
    """

    calls: tuple[Any, ...]
    noted: frozenset[int]
    dropped: frozenset[ContentKey]
    events: tuple[UnpackEvent, ...] = ()
    dropped_later: frozenset[ContentKey] = frozenset()
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    rewritten: frozenset[int] = frozenset()
    moved: frozenset[ContentKey] = frozenset()
    leaving: Mapping[int, tuple[ContentKey, ...]] = field(default_factory=dict)  # `len(calls)`: as forward ends
    readings: tuple[str, ...] | None = None
    splits_products: bool = False

    @property
    def only_watches(self) -> bool:
        """Whether a tape has nothing to do but to watch, and is told until when."""
        return self.readings is not None

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The calls, each with what the tape has to know when it comes."""
        moved: dict[int, list[int]] = {}
        for position, index in self.moved:
            moved.setdefault(position, []).append(index)
        return tuple(self._step(position, call, moved.get(position, ())) for position, call in enumerate(self.calls))

    def _step(self, position: int, call: Any, moved: Sequence[int]) -> Step:
        operator = operator_of(call)
        noted = position in self.noted and operator.repeats
        rewritten = position in self.rewritten
        needed = operator if noted or rewritten or moved or operator.writes else None
        step = Step(call, operator.run, needed, noted, self.shapes.get(position), rewritten)
        step.moved, step.leaving = tuple(moved), self.leaving.get(position, ())
        return step


class Step:
    """One call of a plan, laid out for a quick look."""

    __slots__ = ("call", "leaving", "moved", "noted", "operator", "rewritten", "run", "shape")

    def __init__(
        self,
        call: Any,
        run: Callable[..., Any],
        operator: Operator | None,
        noted: bool,
        shape: tuple[int, ...] | None,
        rewritten: bool,
    ) -> None:
        self.call = call
        self.run = run
        self.operator = operator  # None: just run it
        self.noted = noted
        self.shape = shape
        self.rewritten = rewritten
        self.moved: tuple[int, ...] = ()  # which of its results go to host memory
        self.leaving: tuple[ContentKey, ...] = ()  # contents that have to be there when it comes


@dataclass(frozen=True)
class Parting:
    """Forward left the plan at call `position`; `calls` is what it ran in the end, from its start."""

    position: int
    calls: tuple[Any, ...]


@dataclass(frozen=True)
class Budget:
    """How many bytes the contents saved for backward may take where no plan says what to keep.

    `seconds(operator, args, kwargs)` is what a call takes; without it, the bytes that it touches stand in.
    """

    saved_bytes: int
    seconds: Callable[[Any, tuple[Any, ...], dict[str, Any]], float] | None = None
