"""Modules that run the same operators on the same sizes, wired the same way: what is true of one is true of all.

`repeated_blocks(graph)[0].paths == ("h.0", "h.1", "h.2")`

Gusak et al., "HiRemate: hierarchical approach for efficient re-materialization of neural networks", ICML 2025, appendix
C.1.1: operators fall into classes; a block is written down as the classes of its operators in the default order, each
with the block's own numbers of the values it touches; blocks with the same text are the same up to renaming, and a hash
table finds them in time linear in what is written. HiRemate asks this of the parts it cut; we ask it of the modules the
user wrote, and report the largest that repeat. Every operator is written once for each module around it.

Beyond the paper, the text says which values are resident, targets or held, and which are used outside the block, so
that a schedule of one block, renamed, is one of another. `rematch.solvers.hiremate.canonical` asks it of cut parts, in
the same words.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rematch.graph.model import Graph, Op, Phase

Form = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class BlockClass:
    """Modules alike. `ops[i][j]` is what module `paths[i]` runs as its j-th operator, in the default order."""

    paths: tuple[str, ...]
    ops: tuple[tuple[int, ...], ...]


def repeated_blocks(graph: Graph) -> tuple[BlockClass, ...]:
    """Classes of at least two modules that are alike and in no larger such module, in the order they first run."""
    blocks = _blocks(graph)
    writer = BlockWriter(graph)
    by_form: dict[Form, list[str]] = {}
    for path, ops in blocks.items():
        by_form.setdefault(writer.form(ops), []).append(path)
    found: list[BlockClass] = []
    covered: set[str] = set()
    # A module inside another has fewer operators, so larger blocks first means outer blocks first.
    for form in sorted(by_form, key=len, reverse=True):
        free = [path for path in by_form[form] if not any(outer in covered for outer in _prefixes(path))]
        if len(free) > 1:
            covered.update(free)
            found.append(BlockClass(tuple(free), tuple(blocks[path] for path in free)))
    position = graph.arrays.position
    return tuple(sorted(found, key=lambda block: int(position[block.ops[0][0]])))


def _blocks(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Each module's operators and those of modules inside it, without modules that are all of the one around them."""
    ops: dict[str, list[int]] = {}
    for index in graph.order:
        for path in _prefixes(graph.ops[index].module_path):
            ops.setdefault(path, []).append(index)
    return {
        path: tuple(members)
        for path, members in ops.items()
        if "." not in path or len(ops[path.rpartition(".")[0]]) > len(members)
    }


def _prefixes(path: str) -> Iterable[str]:
    """`h`, `h.0`, `h.0.mlp` for `h.0.mlp`; nothing for an operator outside every module."""
    end = path.find(".")
    while end >= 0:
        yield path[:end]
        end = path.find(".", end + 1)
    if path:
        yield path


class BlockWriter:
    """Writes blocks down in numbers that mean the same in every block of one graph.

    `writer.form(ops) == writer.form(others)` says that `ops`, renamed, are `others`. With `by_phase`, forms also tell
    whether what crosses a block's border is made and used before or after the loss, which decides how long a schedule
    of the block keeps it.
    """

    def __init__(self, graph: Graph, *, by_phase: bool = False) -> None:
        self._graph = graph
        self._once = [op for op in graph.order if graph.arrays.once[op]]
        self._after_loss = [by_phase and op.phase is Phase.BACKWARD for op in graph.ops]
        self._class_numbers: dict[tuple[object, ...], int] = {}
        self._op_classes = [self._number("operator", *_op_class(op)) for op in graph.ops]
        self._value_classes = [self._number("value", *self._value_class(value)) for value in range(len(graph.values))]
        self._classes = list(self._class_numbers)
        self._readers = Counter(
            (value, self._after_loss[index]) for index, op in enumerate(graph.ops) for value in set(op.inputs)
        )

    def form(self, ops: Sequence[int]) -> Form:
        """Per operator its class and until when it may run; per value it touches, a number in this block, a class, and
        whether it is made here and used outside, before and after the loss.
        """
        places = {index: place for place, index in enumerate(ops)}
        members = [self._graph.ops[index] for index in ops]
        made = {value for op in members for value in op.outputs}
        inside = Counter(
            (value, self._after_loss[index]) for index in ops for value in set(self._graph.ops[index].inputs)
        )
        numbers: dict[int, int] = {}
        form: list[tuple[int, ...]] = []
        for index, op in zip(ops, members, strict=True):
            words = [self._op_classes[index], self._closed_by(index, places)]
            for value in (*op.inputs, *op.outputs, *op.mutates):
                words += (numbers.setdefault(value, len(numbers)), self._value_classes[value])
                words += (value in made and self._readers[value, late] > inside[value, late] for late in (False, True))
            form.append(tuple(words))
        return tuple(form)

    def key(self, form: Form) -> str:
        """A hash of the form with its classes spelt out, the same in every graph and process."""
        classes = self._classes
        digest = hashlib.sha256()
        for op_class, closed_by, *touched in form:
            numbers, value_classes, leaving = touched[::4], touched[1::4], (touched[2::4], touched[3::4])
            digest.update(repr((classes[op_class], closed_by, numbers, leaving)).encode())
            digest.update(repr([classes[value_class] for value_class in value_classes]).encode())
        return digest.hexdigest()

    def _value_class(self, value: int) -> tuple[object, ...]:
        described, maker = self._graph.values[value], int(self._graph.arrays.producer[value])
        roles = (described.resident, value in self._graph.targets, value in self._graph.held)
        return (int(described.size_bytes), *roles, maker >= 0 and self._after_loss[maker])

    def _closed_by(self, index: int, places: dict[int, int]) -> int:
        """The operator that ends the window of this one: its place in the block, or a negative number for outside."""
        a = self._graph.arrays
        until = int(a.once_until[index])
        if a.once[index] or until == len(self._once):
            return -1
        closing = self._once[until]
        return places.get(closing, -3 if self._after_loss[closing] else -2)

    def _number(self, *described: object) -> int:
        return self._class_numbers.setdefault(described, len(self._class_numbers))


def _op_class(op: Op) -> tuple[object, ...]:
    """What identical operators share. Lengths keep the three lists of values apart."""
    costs = (op.seconds, op.workspace_bytes, op.flops)
    return (op.class_key, op.phase, op.once, *costs, len(op.inputs), len(op.outputs), len(op.mutates))
