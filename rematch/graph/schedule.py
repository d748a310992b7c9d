"""A schedule: which operator to compute or which value to free, step by step.

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


@dataclass(frozen=True, eq=False)
class Schedule:
    """A sequence of compute and free steps, valid or not: `simulate` is the judge.

    `steps` is its array form: an operator's index computes it, the complement `~value` (negative) frees a value.
    Iterating gives `Compute` and `Free`.
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
    def of(steps: Iterable[Compute | Free]) -> Schedule:
        """`Schedule.of([Compute(0), Free(1)])`"""
        return Schedule(np.array([s.op if isinstance(s, Compute) else ~s.value for s in steps], dtype=np.int32))

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
        """The operators in the order they run, frees left out."""
        return self.steps[self.steps >= 0]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Compute | Free]:
        for step in self.steps.tolist():
            yield Compute(step) if step >= 0 else Free(~step)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and np.array_equal(self.steps, other.steps)

    def __hash__(self) -> int:
        return hash(self.steps.tobytes())


def baseline(graph: Graph) -> Schedule:
    """Every operator once, in default order: the schedule without recomputation."""
    return Schedule.from_ops(graph, graph.order)
