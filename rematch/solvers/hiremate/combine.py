"""Put solved pieces side by side as one level, let H-ILP choose, and write its choice out as operators.

`combined(children, gap, budget_bytes, most_options=60, deadline=deadline)`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rematch.graph import Graph
from rematch.solvers.base import Deadline
from rematch.solvers.common.blocks import Block, BlockGraph
from rematch.solvers.common.options import Flattening, Option
from rematch.solvers.hiremate.hilp import solve_level
from rematch.solvers.hiremate.level import Layer, Level, Pass
from rematch.solvers.hiremate.options import layer_option


@dataclass(frozen=True)
class Solved:
    """A piece, its small graph and its options."""

    block: Block
    part: BlockGraph
    options: tuple[Option, ...]

    @property
    def recomputed(self) -> set[int]:
        """The whole graph's operators that some option computes again for its backward."""
        return {self.part.ops[op] for option in self.options for op in set(option.forward) & set(option.backward)}


@dataclass(frozen=True)
class Gap:
    """What lies between forward and backward of a level: the loss, or all that the level above does meanwhile."""

    reads: frozenset[int]  # values
    makes: frozenset[int]
    final: frozenset[int]  # values of the level that must be there at the end
    sizes: dict[int, int]  # of what it makes
    seconds: float = 0.0
    overhead_bytes: int = 0

    @staticmethod
    def loss_of(graph: Graph) -> Gap:
        """At the top. What the loss reads and lasts is not the level's business."""
        assert graph.loss is not None
        loss = graph.ops[graph.loss]
        return Gap(
            reads=frozenset(loss.inputs),
            makes=frozenset(loss.outputs),
            final=graph.targets,
            sizes={value: graph.values[value].size_bytes for value in loss.outputs},
            seconds=loss.seconds,
            overhead_bytes=loss.workspace_bytes,
        )

    @staticmethod
    def of(block: Block, part: BlockGraph, overhead_bytes: int) -> Gap:
        """Below the top, for a piece whose surroundings take so many bytes meanwhile."""
        sizes = {name: value.size_bytes for name, value in zip(part.values, part.graph.values, strict=True)}
        return Gap(
            reads=frozenset(block.output),
            makes=frozenset(block.gradients),
            final=frozenset((*block.returned, *block.kept)),
            sizes={value: sizes[value] for value in block.gradients},
            overhead_bytes=overhead_bytes,
        )


@dataclass(frozen=True)
class PieceRun:
    """A piece's forward or backward with one of its options; no piece stands for the gap."""

    of: Pass
    piece: int = -1
    option: Option | None = None


def combined(
    children: Sequence[Solved],
    gap: Gap,
    budget_bytes: int,
    *,
    most_options: int,
    deadline: Deadline,
    corrections: bool = True,
) -> list[PieceRun] | None:
    """The children in turn, each with an option, as H-ILP has them; None if it finds no way within the budget."""
    chosen = [child.options for child in children]
    level = _level(children, chosen, gap)
    found = solve_level(level, budget_bytes, deadline=deadline, corrections=corrections, most_options=most_options)
    if found is None:
        return None
    return [
        PieceRun(run.of) if run.of is Pass.LOSS else PieceRun(run.of, run.layer, chosen[run.layer][run.option])
        for run in found.runs
    ]


def _level(children: Sequence[Solved], chosen: Sequence[Sequence[Option]], gap: Gap) -> Level:
    sizes = dict(gap.sizes)
    for child in children:
        passing = {*child.block.output, *child.block.returned, *child.block.kept}
        named = zip(child.part.values, child.part.graph.values, strict=True)
        sizes |= {name: value.size_bytes for name, value in named if name in passing}
    data_of = {value: number for number, value in enumerate(sizes)}

    def data(values: Iterable[int]) -> frozenset[int]:
        return frozenset(data_of[value] for value in values if value in data_of)

    layers = []
    for child, options in zip(children, chosen, strict=True):
        block = child.block
        seen = [layer_option(block, child.part, option, data_of) for option in options]
        layers.append(
            Layer(
                options=tuple(seen),
                forward_reads=data(_read_by_forward(child.part)),
                forward_makes=data(block.output),
                backward_makes=data((*block.returned, *block.kept)),
                has_backward=bool(block.backward),
            )
        )
    return Level(
        layers=tuple(layers),
        data_bytes=tuple(sizes.values()),
        backward_order=tuple(number for number in reversed(range(len(children))) if layers[number].has_backward),
        loss_reads=data(gap.reads),
        loss_makes=data(gap.makes),
        loss_seconds=gap.seconds,
        loss_overhead_bytes=gap.overhead_bytes,
        final=data(gap.final),
    )


def _read_by_forward(part: BlockGraph) -> set[int]:
    """Values from elsewhere that the forward pass of a piece reads."""
    forward = part.graph.ops[: part.gap]
    made = {value for op in forward for value in op.outputs}
    return {part.values[value] for op in forward for value in op.inputs if value not in made}


def operators_of(graph: Graph, children: Sequence[Solved], steps: Sequence[PieceRun]) -> list[int]:
    """The operators that the steps of the top level stand for, those that run once where a piece runs first."""
    written = Flattening(graph)
    for step in steps:
        if step.option is None:
            written.loss()
            continue
        child = children[step.piece]
        forward, backward = step.option.ops_of(child.part)
        if step.of is Pass.BACKWARD:
            written.backward(backward)
        else:
            written.forward(step.piece, forward, child.block.once)
    return written.ops
