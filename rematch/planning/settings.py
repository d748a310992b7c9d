"""What the user asked for, as data; `rematch.remat` describes each.

`Settings(budget="8GiB")`
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rematch.solvers.base import DEFAULT_SOLVER, DEFAULT_TIME_LIMIT, Solver
from rematch.units import count_of

AUTO, TAPE, REPLAY, COMPILED = "auto", "tape", "replay", "compiled"
ENGINES = (AUTO, TAPE, REPLAY, COMPILED)
RESPECT, REPLACE = "respect", "replace"  # regions under torch.utils.checkpoint
# What the user's own loss allocates until it is measured: so many times what it reads. A cross entropy holds
# the logarithms of its probabilities and the gradient of its logits, each as large as the logits.
ASSUMED_LOSS = 2.0


@dataclass(frozen=True)
class Settings:
    """See the module."""

    budget: str | int | float
    solver: str | Solver = DEFAULT_SOLVER
    options: dict[str, Any] = field(default_factory=dict)
    time_limit: float = DEFAULT_TIME_LIMIT
    reserve_bytes: int = 0
    accumulate: bool = False
    device: str | None = None  # the name of one in the table of devices, to plan for it without having it
    progress: bool | None = None
    engine: str = AUTO
    cache: bool = True  # whether plans of earlier starts are used, and this one kept for later ones
    keep: tuple[str, ...] = ()  # patterns of submodules and operators that are never recomputed
    recompute: tuple[str, ...] = ()  # and of those that always are
    checkpoints: str = RESPECT  # what becomes of regions under torch.utils.checkpoint
    offload: bool | str | int = False  # how much host memory values may move to; True for what the host can spare
    chunk_loss: int = 1  # slices of the tokens in which a head and its cross entropy run

    @property
    def pins(self) -> tuple[str, ...]:
        """The patterns in words."""
        named = {"keep": self.keep, "recompute": self.recompute}
        return tuple(f"{what}: {', '.join(patterns)}" for what, patterns in named.items() if patterns)

    @property
    def about_chunks(self) -> tuple[str, ...]:
        """What becomes of the head and the loss, in words."""
        if self.chunk_loss == 1:
            return ()
        return (f"chunk_loss: the head and its cross entropy in {self.chunk_loss} slices, equal up to rounding",)

    def about_checkpoints(self, regions: int) -> tuple[str, ...]:
        """What becomes of so many regions under torch.utils.checkpoint, in words."""
        if not regions:
            return ()
        done = "run by this plan" if self.checkpoints == REPLACE else "stay as they are"
        return (f"checkpoints: {self.checkpoints}; {count_of(regions, 'region')} under torch.utils.checkpoint {done}",)
