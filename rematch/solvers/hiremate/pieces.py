"""The parts of a hierarchy with their backward operators, and the values that cross their borders.

`pieces_of(graph, make_partitioner("hpartition").partition(graph))`

A partition is of the forward pass. A backward operator goes where the forward operator does that it differentiates
(`layers.backward_of`), or further to the beginning: never before an operator whose gradients it reads. So on every
level the backward passes of the children, last child first, are in topological order.

Values that must last or cannot be computed again (held ones, targets, those of operators that run once) are *lasting*:
the first pass makes them, they stay, and no level decides anything about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from rematch.graph import Graph, Phase
from rematch.solvers.common.blocks import Block, total_bytes
from rematch.solvers.common.layers import backward_of
from rematch.solvers.hiremate.partition import Part


@dataclass(frozen=True)
class Piece:
    """A part, all its operators and what passes its border; its children in topological order."""

    part: Part
    block: Block
    children: tuple[Piece, ...]

    @property
    def ops(self) -> tuple[int, ...]:
        """All operators, forward first, each pass in default order."""
        return (*self.part.forward, *self.block.backward)

    def walk(self) -> Iterator[Piece]:
        """This piece and all below, each after its children."""
        waiting, found = [self], []
        while waiting:
            piece = waiting.pop()
            found.append(piece)
            waiting += piece.children
        return reversed(found)


@dataclass(frozen=True)
class Pieces:
    """A graph as a hierarchy of pieces."""

    graph: Graph
    root: Piece
    lasting: frozenset[int]

    @property
    def base_bytes(self) -> int:
        """What is there, sooner or later, whatever the levels do."""
        return self.graph.resident_bytes + total_bytes(self.graph, self.lasting)


def pieces_of(graph: Graph, root: Part) -> Pieces:
    """The hierarchy under `root` with backward operators."""
    lasting = lasting_values(graph)
    cutter = _Cutter(graph, root, lasting)
    return Pieces(graph, cutter.piece(root), lasting)


def lasting_values(graph: Graph) -> frozenset[int]:
    """Values of the forward pass that stay once they are made."""
    a = graph.arrays
    return frozenset(
        value
        for index, op in enumerate(graph.ops)
        if op.phase is Phase.FORWARD
        for value in op.outputs
        if a.last_stage[index] < len(graph.ops) or a.target[value] or a.held[value]
    )


class _Cutter:
    """Every operator has a place in the order in which the hierarchy runs forward, in which each part is a stretch."""

    def __init__(self, graph: Graph, root: Part, lasting: frozenset[int]) -> None:
        self._graph, self._lasting = graph, lasting
        in_turn = list(_forward_in_turn(root))
        self._place = _places(graph, in_turn)
        self._backward: list[list[int]] = [[] for _ in in_turn]  # per place, in default order
        for op in graph.order:
            if graph.ops[op].phase is Phase.BACKWARD:
                self._backward[self._place[op]].append(op)
        self._makers = graph.arrays.producer.tolist()

    def piece(self, root: Part) -> Piece:
        """Children before parents, without recursion: hierarchies can be deep."""
        made: dict[int, Piece] = {}
        for part in reversed(list(root.walk())):
            made[id(part)] = Piece(part, self._block(part), tuple(made.pop(id(child)) for child in part.children))
        return made[id(root)]

    def _block(self, part: Part) -> Block:
        graph, position = self._graph, self._graph.arrays.position
        first = min(self._place[op] for op in part.forward)
        stretch = range(first, first + len(part.forward))
        backward = sorted(chain.from_iterable(self._backward[at] for at in stretch), key=position.__getitem__)
        once = [op for op in part.forward if self._lasting.issuperset(graph.ops[op].outputs)]
        forward = [op for op in part.forward if not self._lasting.issuperset(graph.ops[op].outputs)]
        made_forward = [v for op in forward for v in graph.ops[op].outputs if v not in self._lasting]
        made_backward = [v for op in backward for v in graph.ops[op].outputs]
        read = dict.fromkeys(v for op in (*forward, *backward) for v in graph.ops[op].inputs)
        foreign = [v for v in read if self._is_foreign(v, stretch)]
        return Block(
            forward=tuple(forward),
            once=tuple(once),
            backward=tuple(backward),
            input=tuple(v for v in foreign if graph.ops[self._makers[v]].phase is Phase.FORWARD),
            output=tuple(v for v in made_forward if self._is_read_outside(v, stretch)),
            gradients=tuple(v for v in foreign if graph.ops[self._makers[v]].phase is not Phase.FORWARD),
            returned=tuple(
                v for v in made_backward if self._is_read_outside(v, stretch) and not graph.arrays.target[v]
            ),
            kept=tuple(v for v in made_backward if graph.arrays.target[v]),
        )

    def _is_foreign(self, value: int, stretch: range) -> bool:
        """Whether it is made by a piece elsewhere, or by the loss."""
        maker = self._makers[value]
        return maker >= 0 and value not in self._lasting and self._place.get(maker, -1) not in stretch

    def _is_read_outside(self, value: int, stretch: range) -> bool:
        a = self._graph.arrays
        readers = a.users_of(value).tolist()
        return any(self._place.get(reader, -1) not in stretch for reader in readers)


def _forward_in_turn(root: Part) -> Iterator[int]:
    """Forward operators as the hierarchy runs them: one part after the other on every level."""
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if part.children:
            waiting += reversed(part.children)
        else:
            yield from part.forward


def _places(graph: Graph, in_turn: Sequence[int]) -> dict[int, int]:
    """Per forward and backward operator its place; no backward operator has a later one than what it reads has."""
    place = {op: at for at, op in enumerate(in_turn)}
    differentiated = backward_of(graph)
    makers = graph.arrays.producer
    for op in graph.order:
        if graph.ops[op].phase is Phase.BACKWARD:
            own = place.get(int(differentiated[op]), len(in_turn) - 1)
            place[op] = min([own, *_places_of_gradients(graph, place, makers[list(graph.ops[op].inputs)].tolist())])
    return place


def _places_of_gradients(graph: Graph, place: dict[int, int], makers: Iterable[int]) -> Iterator[int]:
    return (place[maker] for maker in makers if maker >= 0 and graph.ops[maker].phase is Phase.BACKWARD)
