"""What the user wants kept or recomputed whatever it costs, as constraints that every solver respects.

`pinned = pin(graph, keep=("*.attn",), recompute=("*.mlp.act",)); pinned.schedule_of(solution.schedule)`

A pattern names operators, or submodules with all that is in them. What is kept runs once. What is recomputed has a
second operator in the pinned graph, which makes for backward what forward's operator no longer has to keep. A schedule
of the pinned graph becomes one of the graph itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from rematch.errors import RematchError
from rematch.graph import Graph, Op, Phase, Schedule, Value


@dataclass(frozen=True)
class Pinned:
    """A graph with constraints. `original` tells which operator of the user's graph each of its operators is."""

    unpinned: Graph
    graph: Graph
    original: tuple[int, ...]

    def schedule_of(self, schedule: Schedule) -> Schedule:
        """A schedule of the pinned graph as one of the graph without pins."""
        if len(self.graph.ops) == len(self.unpinned.ops):
            return schedule
        return Schedule.from_ops(self.unpinned, [self.original[op] for op in schedule.ops.tolist()])


def pin(graph: Graph, keep: Sequence[str], recompute: Sequence[str]) -> Pinned:
    """The graph under these constraints; `RematchError` names a pattern that cannot be followed."""
    if not keep and not recompute:
        return Pinned(graph, graph, tuple(range(len(graph.ops))))
    kept = {op for pattern in keep for op in _forward_ops(graph, "keep", pattern)}
    again: set[int] = set()
    for pattern in recompute:
        matched = _forward_ops(graph, "recompute", pattern)
        both = sorted(kept.intersection(matched))
        if both:
            raise RematchError(f"recompute={pattern!r} and keep= both name {graph.ops[both[0]].name!r}; leave out one")
        possible = [op for op in matched if _can_repeat(graph, op)]
        if not possible:
            raise RematchError(
                f"recompute={pattern!r} cannot be followed: nothing that it names is both needed by backward and "
                "free to run again (outputs, in-place writes and operators without a rule for it are not)"
            )
        again.update(possible)
    ops = [replace(op, once=True) if index in kept else op for index, op in enumerate(graph.ops)]
    return _Doubling(replace(graph, ops=tuple(ops))).doubled(
        sorted(again, key=graph.arrays.position.__getitem__), graph
    )


def _forward_ops(graph: Graph, what: str, pattern: str) -> list[int]:
    found = [index for index, op in enumerate(graph.ops) if op.phase is Phase.FORWARD and _matches(op, pattern)]
    if not found:
        raise RematchError(
            f"{what}={pattern!r} names no operator and no submodule that forward of {graph.name} runs; patterns are "
            "like 'layers.*.mlp' or 'gelu*'"
        )
    return found


def _matches(op: Op, pattern: str) -> bool:
    inside = (pattern, f"{pattern}.*")
    return fnmatchcase(op.name, pattern) or any(fnmatchcase(op.module_path, one) for one in inside)


def _can_repeat(graph: Graph, op: int) -> bool:
    """Whether backward needs what the operator makes, and the operator may run again by then."""
    a = graph.arrays
    readers = [int(a.position[user]) for value in graph.ops[op].outputs for user in _late_readers(graph, value)]
    pinned = any(value in graph.targets or value in graph.held for value in graph.ops[op].outputs)
    return bool(readers) and not pinned and not a.once[op] and int(a.last_stage[op]) >= min(readers)


def _late_readers(graph: Graph, value: int) -> list[int]:
    """Operators after the loss that read a value."""
    a = graph.arrays
    loss_at = int(a.position[graph.loss]) if graph.loss is not None else len(graph.ops)
    return [int(user) for user in a.users_of(value) if a.position[user] > loss_at]


class _Doubling:
    """Adds a second operator for each that is to run again, later ones first: their second runs read earlier ones'."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: list[Op] = list(graph.ops)
        self.values: list[Value] = list(graph.values)
        self.original = list(range(len(graph.ops)))
        self.order = list(graph.order)
        self.late = set(graph.order[graph.order.index(graph.loss) + 1 :]) if graph.loss is not None else set()

    def doubled(self, again: list[int], unpinned: Graph) -> Pinned:
        for op in reversed(again):
            self._double(op)
        graph = replace(self.graph, ops=tuple(self.ops), values=tuple(self.values), order=tuple(self.order))
        return Pinned(unpinned, graph, tuple(self.original))

    def _double(self, op: int) -> None:
        first = self.ops[op]
        copies = {}
        for value in first.outputs:
            copies[value] = len(self.values)
            self.values.append(replace(self.values[value], name=f"{self.values[value].name}.again", role=""))
        readers = [late for late in self.late if copies.keys() & set(self.ops[late].inputs)]
        for reader in readers:
            inputs = tuple(copies.get(value, value) for value in self.ops[reader].inputs)
            self.ops[reader] = replace(self.ops[reader], inputs=inputs)
        second = len(self.ops)
        again = replace(first, name=f"{first.name}.again", outputs=tuple(copies.values()), once=True, random=False)
        self.ops.append(replace(again, phase=Phase.BACKWARD))
        self.original.append(op)
        self.order.insert(min(map(self.order.index, readers)), second)
        self.late.add(second)
