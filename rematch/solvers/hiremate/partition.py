"""Hierarchies of the forward pass: what a part is, how to cut a graph into parts, and the registry of ways to do so.

`make_partitioner("hpartition", most_lower=15).partition(graph).children`

A *part* is a set of forward operators. It is either cut further into its children or at the bottom, where its operators
are solved directly. Loss and backward operators belong to no part here: they follow the forward operators they serve.

The parts of a hierarchy can be run one after the other only if contracting every child of a part leaves no cycle among
the children; each child is then convex (Gusak et al., HiRemate, ICML 2025, definition A.1). Two kinds of dependencies
count: an operator reads what another made, or the graph fixes their order although no data passes between them, as
for operators that run once and around mutations (the paper's soft dependencies, C.1.2). Residents have no producer and
so depend on nothing (C.1.3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, ClassVar

from rematch.errors import SolverError
from rematch.graph import Graph
from rematch.solvers.common.forward_pass import forward_ops
from rematch.solvers.registry import Registry

DEFAULT_PARTITIONER = "hpartition"


@dataclass(frozen=True)
class Part:
    """A set of forward operators, in default order, and the parts it is cut into, in topological order.

    Without children the part is at the bottom; with one operator and no children it is an elementary layer.
    """

    forward: tuple[int, ...]
    children: tuple[Part, ...] = ()

    @property
    def width(self) -> int:
        """Nodes of the graph to be solved for this part: its children, or its operators at the bottom."""
        return len(self.children) or len(self.forward)

    @property
    def is_layer(self) -> bool:
        return len(self.forward) == 1 and not self.children

    def walk(self) -> Iterator[Part]:
        """This part and all below, each before its children."""
        waiting = [self]
        while waiting:
            part = waiting.pop()
            yield part
            waiting += reversed(part.children)

    @property
    def depth(self) -> int:
        """Levels from here down, counted as the paper does: a part that is solved directly has one."""
        levels, row = 0, [self]
        while row:
            levels += 1
            row = [child for part in row for child in part.children if not child.is_layer]
        return levels


class Partitioner(ABC):
    """One way to cut a graph. Subclasses are dataclasses whose fields are their options."""

    name: ClassVar[str]

    @abstractmethod
    def partition(self, graph: Graph) -> Part:
        """The root of a hierarchy that `check_partition` accepts."""


_partitioners: Registry[Partitioner] = Registry(
    "partitioner",
    {
        "hpartition": "rematch.solvers.hiremate.hpartition:HPartition",
        "modules": "rematch.solvers.hiremate.partition:Modules",
        "flat": "rematch.solvers.hiremate.partition:Flat",
    },
)


def register_partitioner(partitioner: type[Partitioner]) -> type[Partitioner]:
    """Class decorator: make a partitioner known by its name, from inside or outside the package."""
    return _partitioners.register(partitioner)


def partitioner_names() -> list[str]:
    """The names of all partitioners, built-in ones first."""
    return _partitioners.names()


def make_partitioner(name: str, **options: Any) -> Partitioner:
    """`make_partitioner("hpartition", most_top=40)`"""
    return _partitioners.make(name, **options)


@dataclass(frozen=True)
class Flat(Partitioner):
    """No hierarchy: the whole forward pass is solved directly."""

    name = "flat"

    def partition(self, graph: Graph) -> Part:
        return Part(forward_order(graph))


@dataclass(frozen=True)
class Modules(Partitioner):
    """The module tree of the captured model.

    A module is cut out each time the default order enters it: a stretch of a topological order is convex whatever the
    module reads, and a module that is called twice makes two parts.
    """

    name = "modules"

    def partition(self, graph: Graph) -> Part:
        paths = {op: tuple(filter(None, graph.ops[op].module_path.split("."))) for op in forward_order(graph)}
        position = graph.arrays.position.tolist()
        row = [Part((op,)) for op in paths]
        for depth in range(max(map(len, paths.values()), default=0), 0, -1):
            row = list(_closed_at(depth, row, paths, position))
        return joined(row, position)


def _closed_at(
    depth: int, row: list[Part], paths: dict[int, tuple[str, ...]], position: Sequence[int]
) -> Iterator[Part]:
    """Parts in a row, of which neighbours in one module of this depth become one part."""
    for path, stretch in groupby(row, key=lambda part: paths[part.forward[0]][:depth]):
        if len(path) < depth:
            yield from stretch
        else:
            yield joined(list(stretch), position)


def joined(parts: Sequence[Part], position: Sequence[int]) -> Part:
    """One part with these children, in topological order; `position` is that of each operator in the default order.

    A single child is the part itself, and elementary layers alone make a part at the bottom.
    """
    if len(parts) == 1:
        return parts[0]
    forward = sorted(chain.from_iterable(part.forward for part in parts), key=position.__getitem__)
    return Part(tuple(forward), () if all(part.is_layer for part in parts) else tuple(parts))


def forward_order(graph: Graph) -> tuple[int, ...]:
    """The operators to be partitioned, in default order."""
    return tuple(forward_ops(graph).tolist())


def dependencies(graph: Graph) -> dict[int, list[int]]:
    """Per forward operator, the forward operators it must follow because of data or of order alone, ascending."""
    a = graph.arrays
    forward = forward_order(graph)
    found: dict[int, set[int]] = {op: set() for op in forward}
    producers = a.producer[a.inputs].tolist()
    starts = a.inputs_ptr.tolist()
    for op in forward:
        found[op].update(maker for maker in producers[starts[op] : starts[op + 1]] if maker in found)
    for before, after in _order_alone(graph, forward):
        found[after].add(before)
    return {op: sorted(makers) for op, makers in found.items()}


def _order_alone(graph: Graph, forward: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of forward operators whose order the once count fixes (see `rematch.graph.model`)."""
    a = graph.arrays
    inside = set(forward)
    latest_before: list[int | None] = [None]  # per once count, the last forward operator that it counts
    once = [op for op in graph.order if a.once[op]]
    for op in once:
        latest_before.append(op if op in inside else latest_before[-1])
    earliest_from: list[int | None] = [None]  # per once count, the first forward operator that it does not count
    for op in reversed(once):
        earliest_from.append(op if op in inside else earliest_from[-1])
    earliest_from.reverse()
    for op in forward:
        before, after = latest_before[a.once_from[op]], earliest_from[a.once_until[op]]
        if before is not None:
            yield before, op
        if after is not None and after != op:
            yield op, after


def check_partition(graph: Graph, root: Part) -> None:
    """Raise `SolverError`, naming the part, unless the hierarchy can be run part by part.

    At every level each operator is in one child, and no child needs a later one. Contraction then leaves no cycle, so
    every part is convex.
    """
    expected = forward_order(graph)
    if root.forward != expected:
        raise SolverError(
            f"the root of a partition of {graph.name!r} has {len(root.forward)} operators; it must have the "
            f"{len(expected)} of the forward pass, in default order"
        )
    makers = dependencies(graph)
    for part in root.walk():
        if part.children:
            _check_children(graph, part, makers)


def _check_children(graph: Graph, part: Part, makers: dict[int, list[int]]) -> None:
    position = graph.arrays.position
    members = list(chain.from_iterable(child.forward for child in part.children))
    if sorted(members, key=position.__getitem__) != list(part.forward):
        raise SolverError(
            f"the children of {part_name(graph, part)} have {len(members)} operators, {len(set(members))} of them "
            f"distinct; each of its {len(part.forward)} must be in one child"
        )
    child_of: dict[int, int] = {}
    for number, child in enumerate(part.children):
        if not child.forward or list(child.forward) != sorted(child.forward, key=position.__getitem__):
            raise SolverError(
                f"child {number} of {part_name(graph, part)} must list its operators in default order, at least one"
            )
        child_of |= dict.fromkeys(child.forward, number)
    for op in part.forward:
        for maker in makers[op]:
            if child_of.get(maker, -1) > child_of[op]:
                raise SolverError(
                    f"in {part_name(graph, part)}, operator {graph.ops[op].name!r} of child {child_of[op]} needs "
                    f"{graph.ops[maker].name!r} of child {child_of[maker]}; children must be convex and in "
                    "topological order"
                )


def part_name(graph: Graph, part: Part) -> str:
    """`the part of 12 operators from 'h.0.norm' to 'h.0.add'`"""
    if not part.forward:
        return "the empty part"
    if part.is_layer:
        return f"the layer {graph.ops[part.forward[0]].name!r}"
    first, last = graph.ops[part.forward[0]].name, graph.ops[part.forward[-1]].name
    return f"the part of {len(part.forward)} operators from {first!r} to {last!r}"
