"""Options: the ways to run a block, what each costs its surroundings, and the operators that it stands for.

`undominated([option_of(block_graph, schedule) for schedule in schedules])`

`rotor` and `hiremate` solve a block as a small graph of its own (`blocks.gap_graph`): its forward pass, then a *gap*
that stands for all that happens until the block's gradients arrive, then its backward pass. A schedule of that graph is
an *option*. Its operators are numbered as in the small graph, which equal blocks have in common: an option that was
found for one of them serves all, and `Option.ops_of` gives the operators of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import le
from typing import TypeVar

import numpy as np

from rematch.graph import Graph, Schedule, simulate
from rematch.solvers.common.blocks import BlockGraph, total_bytes

# Moves of local search for one option, per operator of the block. On the blocks of GPT, ResNet and U-Net graphs more
# moves rarely found a faster schedule.
MOVES_PER_OP = 600

_Priced = TypeVar("_Priced")


@dataclass(frozen=True)
class Option:
    """A way to run a block: forward and, later, backward.

    No peak has the block's input; the backward's peak has the gradients that arrive and what was saved.
    """

    saved_bytes: int  # held over the gap, besides the block's input and output
    forward_seconds: float
    forward_peak_bytes: int
    backward_seconds: float
    backward_peak_bytes: int
    forward: tuple[int, ...] = ()  # operators before and after the gap, by their number in the block's small graph
    backward: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    @property
    def figures(self) -> tuple[float, ...]:
        """What options are compared by, less being better."""
        return self.seconds, self.saved_bytes, self.forward_peak_bytes, self.backward_peak_bytes

    def ops_of(self, block_graph: BlockGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The whole graph's operators, forward and backward, for the block that `block_graph` was made of."""
        names = block_graph.ops
        return tuple(names[op] for op in self.forward), tuple(names[op] for op in self.backward)


def option_of(block_graph: BlockGraph, schedule: Schedule) -> Option:
    """Price a schedule of a block's small graph."""
    gap = block_graph.gap
    seen = simulate(block_graph.graph, schedule).checked()
    steps = schedule.steps
    seconds = np.where(steps >= 0, block_graph.graph.arrays.seconds[np.maximum(steps, 0)], 0.0)  # frees take none
    at = int(np.flatnonzero(steps == gap)[0])
    held_bytes = int(seen.timeline_bytes[at]) - block_graph.graph.ops[gap].workspace_bytes
    return Option(
        saved_bytes=held_bytes - passing_bytes(block_graph),
        forward_seconds=float(seconds[:at].sum()),
        forward_peak_bytes=int(seen.timeline_bytes[:at].max(initial=0)),
        backward_seconds=float(seconds[at + 1 :].sum()),
        backward_peak_bytes=int(seen.timeline_bytes[at + 1 :].max(initial=0)),
        forward=tuple(steps[:at][steps[:at] >= 0].tolist()),
        backward=tuple(steps[at + 1 :][steps[at + 1 :] >= 0].tolist()),
    )


def passing_bytes(block_graph: BlockGraph) -> int:
    """The bytes of the block's output and of the gradients that arrive for it."""
    gap = block_graph.graph.ops[block_graph.gap]
    return total_bytes(block_graph.graph, {*gap.inputs, *gap.outputs})


def with_saving_limit(block_graph: BlockGraph, peak_bytes: int, saved_bytes: int) -> Graph:
    """The small graph that, in a budget of `peak_bytes`, leaves at most `saved_bytes` to save anything in over the gap.

    The gap gets a workspace that takes the rest, so that any solver that keeps a budget can look for such an option.
    """
    ops = list(block_graph.graph.ops)
    taken = max(0, peak_bytes - passing_bytes(block_graph) - saved_bytes)
    ops[block_graph.gap] = replace(ops[block_graph.gap], workspace_bytes=taken)
    return replace(block_graph.graph, ops=tuple(ops))


def undominated(priced: Iterable[_Priced], figures: Callable[[_Priced], tuple[float, ...]]) -> list[_Priced]:
    """Those that no other equals or beats in every figure; of equal ones the first."""
    kept: dict[tuple[float, ...], _Priced] = {}
    for price in priced:
        own = figures(price)
        if not any(all(map(le, other, own)) for other in kept):
            kept = {other: known for other, known in kept.items() if not all(map(le, own, other))}
            kept[own] = price
    return list(kept.values())


class Flattening:
    """The operators of a whole graph, written block by block.

    `once` operators of a block run in its first forward pass only, wherever that comes.
    """

    def __init__(self, graph: Graph) -> None:
        self.ops: list[int] = []
        self._graph = graph
        self._begun: set[int] = set()

    def is_first(self, block: int) -> bool:
        """Whether the forward pass of the block with this number has not run yet."""
        return block not in self._begun

    def forward(self, block: int, ops: Sequence[int], once: Sequence[int]) -> None:
        self.ops += with_once_ops(self._graph, ops, once) if self.is_first(block) else ops
        self._begun.add(block)

    def loss(self) -> None:
        self.ops.append(self._graph.arrays.loss)

    def backward(self, ops: Sequence[int]) -> None:
        self.ops += ops


def with_once_ops(graph: Graph, ops: Sequence[int], once: Sequence[int]) -> list[int]:
    """`ops` with each of `once`, in default order, as soon as it can run and at the latest before it is needed."""
    makers, position = graph.arrays.producer, graph.arrays.position
    missing = {*ops, *once}  # that have not run
    waiting = list(once)
    merged: list[int] = []

    def run(op: int) -> None:
        merged.append(op)
        missing.discard(op)

    for op in ops:
        needed = {int(makers[value]) for value in graph.ops[op].inputs}
        while waiting and (
            not needed.isdisjoint(waiting)
            or (position[waiting[0]] < position[op] and _is_ready(graph, waiting[0], missing))
        ):
            run(waiting.pop(0))
        run(op)
    return [*merged, *waiting]


def _is_ready(graph: Graph, op: int, missing: set[int]) -> bool:
    """Whether all that the operator reads has been made."""
    makers = graph.arrays.producer
    return all(int(makers[value]) not in missing for value in graph.ops[op].inputs)
