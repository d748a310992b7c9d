"""A forward under a tape.

`run(module.forward, (batch,), {}, plan=plan, budget=None, parted=None)`
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from rematch.execute.tape.blocks import Blocks
from rematch.execute.tape.plan import Budget, Parting, TapePlan
from rematch.execute.tape.tape import Tape, unpack
from rematch.execute.tape.transforms import transforms_allowed
from rematch.execute.transfers import HostMemory


def run(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    plan: TapePlan | None,
    budget: Budget | None = None,
    parted: Callable[[Parting], None] | None = None,
    blocks: Blocks | None = None,
    host: HostMemory | None = None,
) -> Any:
    """What `forward` returns; autograd keeps of it what the plan keeps, and backward recomputes the rest.

    Where forward leaves the plan, or from its start without one, everything that comes is kept, or dropped by the rule
    of `eviction` to stay within the budget; `parted` is then called once, after forward. `blocks` are those parts of
    the module that may run as captured, for one and the same plan. `host` is where values go that the plan moves.
    """
    if not can_run():
        return forward(*args, **kwargs)
    tape = Tape(plan, budget, host)
    try:
        with tape.watching:
            tape.watching.enter_context(_no_collections())
            if blocks is not None:
                tape.watching.enter_context(blocks.watched_by(tape))
            tape.watching.enter_context(tape)
            tape.watching.enter_context(transforms_allowed())
            tape.watching.enter_context(saved_tensors_hooks(tape.pack, unpack))
            returned = forward(*args, **kwargs)
    finally:
        parting = tape.finish()
    if parting is not None and parted is not None:
        parted(parting)
    return returned


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the garbage collector away while notes are made.

    They live until backward. A collector that meets them before counts them among what lives long, although backward
    frees them, and so looks through the whole process every few steps, which takes longer than a step.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def can_run() -> bool:
    """Whether autograd would save anything now, and lets us see it: function transforms forbid the hooks."""
    return (
        torch.is_grad_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    )
