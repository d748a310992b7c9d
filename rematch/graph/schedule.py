"""A schedule: which operator to compute, and which value to free or to move, step by step.

`Schedule.from_ops(graph, graph.order)` computes everything once and frees each value after its last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rematch.errors import ScheduleError
from rematch.graph.model import Graph, Ints


@dataclass(frozen=True, slots=True)
class Compute:
    """Run operator `op`: its outputs are allocated anew."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Give back the memory of `value`."""

    value: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Begin to copy `value` out to host memory. It stays on the device until it is freed."""

    value: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Allocate `value` on the device and begin to copy it back from host memory, where it stays too."""

    value: int


Step = Compute | Free | Offload | Fetch

OFFLOADS, FETCHES = 2**29, 2**30  # added to a value's number in steps that move it; no graph has as many values


@dataclass(frozen=True, eq=False)
class Schedule:
    """A sequence of steps, valid or not: `simulate` is the judge.

    `steps` is its array form: an operator's index computes it, the complement `~value` (negative) frees a value,
    `~(OFFLOADS + value)` begins to copy it to host memory and `~(FETCHES + value)` back. So computations are the steps
    that are not negative. Iterating gives `Compute`, `Free`, `Offload` and `Fetch`.
    """

    steps: Ints

    def __post_init__(self) -> None:
        try:
            steps = np.array(self.steps, dtype=np.int32)
        except OverflowError as error:
            raise ScheduleError("a step is beyond 2**31, and no operator or value has such a number") from error
        if steps.ndim != 1:
            raise ScheduleError(f"a schedule is one sequence of steps, not an array of {steps.ndim} dimensions")
        steps.flags.writeable = False
        object.__setattr__(self, "steps", steps)

    @staticmethod
    def of(steps: Iterable[Step]) -> Schedule:
        """`Schedule.of([Compute(0), Free(1)])`"""
        return Schedule(np.array([_number_of(step) for step in steps], dtype=np.int32))

    @staticmethod
    def from_ops(graph: Graph, ops: ArrayLike) -> Schedule:
        """Compute `ops` in turn and free every value right after its last use before it is computed again.

        Frees after one operator are in ascending order of value. Targets, and held values from the loss on, stay.
        """
        from rematch.graph import kernels

        sequence = np.asarray(ops, dtype=np.int32)
        if sequence.size and not (sequence.min() >= 0 and sequence.max() < len(graph.ops)):
            raise ScheduleError(f"operators are numbered 0 to {len(graph.ops) - 1}")
        values = graph.arrays.pick(kernels.Values)
        dying = np.empty(len(values.target), dtype=np.int32)
        backwards, count = kernels.steps_with_frees(sequence, values, values.target | values.held, dying)
        return Schedule(backwards[:count][::-1])

    @property
    def ops(self) -> Ints:
        """The operators in the order they run, all else left out."""
        return self.steps[self.steps >= 0]

    @property
    def moves(self) -> bool:
        """Whether it moves any value to host memory or back."""
        return bool((self.steps <= ~OFFLOADS).any())

    def without_moves(self) -> Schedule:
        """Itself; `ScheduleError` if it moves values, for whoever knows only computing and freeing."""
        if self.moves:
            raise ScheduleError("the schedule moves values to host memory, which cannot be written in this form")
        return self

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return map(step_of, self.steps.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and np.array_equal(self.steps, other.steps)

    def __hash__(self) -> int:
        return hash(self.steps.tobytes())


def step_of(number: int) -> Step:
    """What a number in `Schedule.steps` stands for."""
    if number >= 0:
        return Compute(number)
    if ~number >= FETCHES:
        return Fetch(~number - FETCHES)
    return Offload(~number - OFFLOADS) if ~number >= OFFLOADS else Free(~number)


def _number_of(step: Step) -> int:
    if isinstance(step, Compute):
        return step.op
    offset = {Free: 0, Offload: OFFLOADS, Fetch: FETCHES}[type(step)]
    return ~(offset + step.value)


def baseline(graph: Graph) -> Schedule:
    """Every operator once, in default order: the schedule without recomputation."""
    return Schedule.from_ops(graph, graph.order)
