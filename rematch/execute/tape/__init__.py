"""The tape engine: the user's own forward, and backward from this call's own notes.

`run(module.forward, (batch,), {}, plan=drop_all(observe(module, (batch,), {})))`

A dispatch mode follows forward's operators and notes those that the plan names; saved-tensor hooks drop what the plan
drops, and bring it back in backward by running the noted operators again. Nothing is traced or guarded, so nothing can
be stale: where forward takes another path than the planned one, the tape keeps what comes. Where a card is faster than
that, blocks run as Dynamo captures them, under its guards.
"""

from rematch.execute.tape.blocks import Blocks
from rematch.execute.tape.observe import Observation, drop, drop_all, observe
from rematch.execute.tape.plan import Budget, ContentKey, Parting, TapePlan, UnpackEvent
from rematch.execute.tape.run import can_run, run

__all__ = [
    "Blocks",
    "Budget",
    "ContentKey",
    "Observation",
    "Parting",
    "TapePlan",
    "UnpackEvent",
    "can_run",
    "drop",
    "drop_all",
    "observe",
    "run",
]
