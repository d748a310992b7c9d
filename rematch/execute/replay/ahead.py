"""Forward's operators run first, and autograd's notes about them are taken afterwards.

`ahead = Ahead(forward, detached)` is what AOTAutograd calls as forward; `ahead.run(args)` before that has it ready

AOTAutograd notes every parameter before it runs forward, and a card would wait for that: a millisecond for 300 of them.
Where forward gets from it nothing but the arguments of the call, as `hands_over_arguments` tells, forward can have run
before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph as FxGraph, Node

from rematch.capture.joint.traced import is_tangent
from rematch.execute.replay.source import Boxed


class _Thread(threading.local):
    results: Any = None  # of a forward that has run, for whom AOTAutograd will ask in this thread


class Ahead:
    """A compiled forward that may have run when it is called."""

    _boxed_call = True  # it empties the list that it is given

    def __init__(self, forward: Boxed, detached: Iterable[int]) -> None:
        self.forward = forward
        self.detached = tuple(detached)  # arguments
        self._thread = _Thread()
        self._was_called = False

    def run(self, args: Sequence[Any]) -> None:
        """Run forward on the arguments of a call, which comes next; not the first, in which AOTAutograd looks on."""
        if not self._was_called:
            return
        given = list(args)
        for place in self.detached:
            given[place] = given[place].detach()
        with torch._C._DisableAutocast():  # type: ignore[attr-defined]
            self._thread.results = self.forward(given)

    def __call__(self, args: list[Any]) -> Any:
        self._was_called = True
        results, self._thread.results = self._thread.results, None
        if results is None:
            return self.forward(args)
        args.clear()
        return results

    def forget(self) -> None:
        """Drop what nobody has asked for, because the call failed."""
        self._thread.results = None


def hands_over_arguments(joint: FxGraph, returned: Sequence[Any], metadata: Any, count: int) -> bool:
    """Whether forward gets the `count` arguments of a call as they are, and what it returns to the caller is new.

    Not so where AOTAutograd merges arguments, takes subclasses of tensors apart, adds arguments or shows results anew.
    """
    placeholders = [node for node in joint.nodes if node.op == "placeholder"]
    given = [getattr(node.meta.get("desc"), "idx", None) for node in placeholders if not is_tangent(node)]
    returns_given = any(isinstance(node, Node) and node.op == "placeholder" for node in returned)
    return given == list(range(count)) and not returns_given and metadata.num_outputs_aliased == 0


def arguments_of_others(metadata: Any) -> list[int]:
    """Arguments that are results of other operators, whose graph must not live on in what forward saves."""
    return [place for place, info in enumerate(metadata.input_info) if info.requires_grad and not info.is_leaf]
