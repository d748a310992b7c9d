"""A training step as a sequence of blocks: where to cut the forward pass, and each block as a small graph of its own.

`cut_into_blocks(graph).blocks`

A cut is a place in the default order of the forward pass that the values of one operator only pass. These are the
articulation points that lie between the network's input and the loss; finding them by what passes each place takes as
little time, keeps to the default order, and lets small values (a mask that all layers read) pass beside the others.
Such values, like those that must or can only be made once, are *fixed*: made in the first pass and kept while needed.
The backward operators of a block are those that differentiate its forward operators (`layers.backward_of`).

Cuts are made at values that the backward pass reads, where there are some: blocks keep their inputs, and others would
be kept for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain

import numpy as np

from rematch.graph import Graph, Op, Phase, Value
from rematch.graph.model import Ints
from rematch.solvers.common.forward_pass import forward_ops
from rematch.solvers.common.layers import backward_of

_SMALL = 0.05  # of the values that a cut is made at: others up to this size together may pass beside them

# In place of an operator: the gradients of a block's output arrive, or its input does.
GRADIENTS, INPUT = -1, -2


@dataclass(frozen=True)
class Block:
    """The operators of a stretch of the forward pass and their backward, and the values that cross its border.

    All lists are in default order.
    """

    forward: tuple[int, ...]  # operators that may run again
    once: tuple[int, ...]  # operators of the first pass only
    backward: tuple[int, ...]
    input: tuple[int, ...]  # values of the block before that this one reads
    output: tuple[int, ...]  # values that the next block, or the loss, reads
    gradients: tuple[int, ...]  # values that come back from the blocks behind
    returned: tuple[int, ...]  # values that go on to the blocks before
    kept: tuple[int, ...]  # values that the backward makes for good


@dataclass(frozen=True)
class BlockChain:
    """A graph as blocks. The loss comes behind the last one."""

    graph: Graph
    blocks: tuple[Block, ...]
    fixed: frozenset[int]  # values that the first pass makes and that stay

    @property
    def base_bytes(self) -> int:
        """What is there whatever the blocks do."""
        return self.graph.resident_bytes + total_bytes(self.graph, self.fixed)


def total_bytes(graph: Graph, values: Iterable[int]) -> int:
    return sum(graph.values[value].size_bytes for value in values)


def cut_into_blocks(graph: Graph, most_blocks: int) -> BlockChain | None:
    """The training step as at most so many blocks; None if it is none, or if its phases are interleaved."""
    phases = [graph.ops[op].phase for op in graph.order]
    if graph.loss is None or phases != sorted(phases, key=list(Phase).index):
        return None
    forward = forward_ops(graph)
    places = list(_cut_places(graph, forward))
    places = [place for place in places if _is_read_back(graph, int(forward[place[1]]))] or places
    starts = _apart(places, len(forward) / most_blocks)
    block_of = _block_of_each_op(graph, forward, starts)
    if block_of is None:
        return None
    fixed = _fixed_values(graph, block_of)
    count = len(starts) + 1
    return BlockChain(graph, tuple(_blocks(graph, block_of, fixed, count)), frozenset(fixed))


def _cut_places(graph: Graph, forward: Ints) -> Iterator[tuple[int, int]]:
    """Places p, before the p-th forward operator, that one operator's values pass, others small beside them.

    Each with the number of that operator.
    """
    passing: dict[int, int] = {}  # number of an operator -> bytes of its values that are read from here on
    largest: list[tuple[int, int]] = []  # a heap of (-bytes, number); those that pass no longer wait to be popped
    total = 0
    readers = _last_readers(graph, forward)
    ends: list[list[int]] = [[] for _ in range(len(forward) + 1)]
    for place in range(1, len(forward)):
        last, size = readers[place - 1]
        if last >= place:
            passing[place - 1] = size
            heappush(largest, (-size, place - 1))
            ends[last].append(place - 1)
            total += size
        for number in ends[place - 1]:
            total -= passing.pop(number)
        while largest and largest[0][1] not in passing:
            heappop(largest)
        if largest and total + largest[0][0] <= -_SMALL * largest[0][0]:
            yield place, largest[0][1]


def _last_readers(graph: Graph, forward: Ints) -> list[tuple[int, int]]:
    """Per forward operator the number of the last one that reads it (the loss is behind all), and the bytes read."""
    numbers = {op: number for number, op in enumerate([*forward.tolist(), graph.arrays.loss])}
    found: list[tuple[int, int]] = []
    for op in forward.tolist():
        last, size = -1, 0
        for value in graph.ops[op].outputs:
            read_by = [numbers[reader] for reader in _users(graph, value) if reader in numbers]
            last = max([last, *read_by])
            size += graph.values[value].size_bytes if read_by else 0
        found.append((last, size))
    return found


def _apart(places: Iterable[tuple[int, int]], least: float) -> list[int]:
    """Places with at least so many operators in between, among them the one whose values pass."""
    chosen: list[int] = []
    for place, maker in places:
        before = chosen[-1] if chosen else 0
        if place - before >= least and maker >= before:
            chosen.append(place)
    return chosen


def _is_read_back(graph: Graph, op: int) -> bool:
    """Whether a backward operator reads a value of it."""
    users = (user for value in graph.ops[op].outputs for user in _users(graph, value))
    return any(graph.ops[user].phase is Phase.BACKWARD for user in users)


def _block_of_each_op(graph: Graph, forward: Ints, starts: Sequence[int]) -> list[int] | None:
    """Per operator the number of its block; the loss is a block of its own behind the last."""
    block_of = [len(starts) + 1] * len(graph.ops)
    for block, ops in enumerate(np.split(forward, starts)):
        for op in ops.tolist():
            block_of[op] = block
    differentiated = backward_of(graph)
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.BACKWARD:
            if differentiated[index] < 0:
                return None
            block_of[index] = block_of[differentiated[index]]
    return _with_output_readers_moved(graph, block_of, len(starts))


def _with_output_readers_moved(graph: Graph, block_of: list[int], last: int) -> list[int]:
    """The first backward operators of a block go to the next if they read nothing of the forward pass but its output.

    The next block has that as its input, and can run them without this one's being computed again.
    """
    backward: list[list[int]] = [[] for _ in range(last + 1)]
    for op in graph.order:
        if graph.ops[op].phase is Phase.BACKWARD:
            backward[block_of[op]].append(op)
    moved = list(block_of)
    for block, ops in enumerate(backward[:-1]):
        for op in ops[: _count_reading_output_only(graph, block_of, ops)]:
            moved[op] = block + 1
    return moved


def _count_reading_output_only(graph: Graph, block_of: Sequence[int], ops: Sequence[int]) -> int:
    """How many of the first of a block's backward operators, the last of them one that does read its output."""
    producer = graph.arrays.producer
    count = 0
    for number, op in enumerate(ops, start=1):
        read = [v for v in graph.ops[op].inputs if producer[v] >= 0 and graph.ops[producer[v]].phase is Phase.FORWARD]
        for value in read:
            ahead = [user for user in _users(graph, value) if graph.ops[user].phase is Phase.FORWARD]
            if block_of[producer[value]] != block_of[op] or all(block_of[user] == block_of[op] for user in ahead):
                return count
        if read:
            count = number
    return count


def _users(graph: Graph, value: int) -> list[int]:
    """Operators that read a value."""
    a = graph.arrays
    readers: list[int] = a.users_of(value).tolist()
    return readers


def _fixed_values(graph: Graph, block_of: Sequence[int]) -> set[int]:
    """Forward values that no block can be left to: they must last, cannot be made again, or are read far away."""
    a = graph.arrays
    return {
        value
        for index, op in enumerate(graph.ops)
        if op.phase is Phase.FORWARD
        for value in op.outputs
        if a.last_stage[index] < len(graph.ops)
        or a.target[value]
        or a.held[value]
        or _is_read_far_away(graph, block_of, value)
    }


def _is_read_far_away(graph: Graph, block_of: Sequence[int], value: int) -> bool:
    """Whether it is read neither in its block nor in the next, or of the next only by backward operators."""
    block = block_of[graph.arrays.producer[value]]
    elsewhere = [user for user in _users(graph, value) if block_of[user] != block]
    only_back = all(graph.ops[user].phase is Phase.BACKWARD for user in elsewhere)
    return bool(elsewhere) and (only_back or any(block_of[user] != block + 1 for user in elsewhere))


def _blocks(graph: Graph, block_of: Sequence[int], fixed: set[int], count: int) -> Iterable[Block]:
    forward: list[list[int]] = [[] for _ in range(count)]
    once: list[list[int]] = [[] for _ in range(count)]
    backward: list[list[int]] = [[] for _ in range(count)]
    for index in graph.order:
        op = graph.ops[index]
        if op.phase is Phase.BACKWARD:
            backward[block_of[index]].append(index)
        elif op.phase is Phase.FORWARD:
            kind = once if fixed.issuperset(op.outputs) else forward
            kind[block_of[index]].append(index)
    outputs = [_read_by_next(graph, block_of, ops, fixed) for ops in forward]
    gradients = _gradients_passing(graph, block_of, count)
    for block in range(count):
        yield Block(
            forward=tuple(forward[block]),
            once=tuple(once[block]),
            backward=tuple(backward[block]),
            input=outputs[block - 1] if block else (),
            output=outputs[block],
            gradients=gradients[block],
            returned=gradients[block - 1] if block else (),
            kept=tuple(v for op in backward[block] for v in graph.ops[op].outputs if graph.arrays.target[v]),
        )


def _read_by_next(graph: Graph, block_of: Sequence[int], ops: Sequence[int], fixed: set[int]) -> tuple[int, ...]:
    return tuple(
        value
        for op in ops
        for value in graph.ops[op].outputs
        if value not in fixed and any(block_of[user] != block_of[op] for user in _users(graph, value))
    )


def _gradients_passing(graph: Graph, block_of: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Per block, values made behind it that its backward operators or those of blocks before it read."""
    a = graph.arrays
    passing: list[list[int]] = [[] for _ in range(count)]
    for value in range(len(graph.values)):
        maker = a.producer[value]
        if maker < 0 or graph.ops[maker].phase is Phase.FORWARD or a.target[value]:
            continue
        first = min((block_of[user] for user in _users(graph, value)), default=count)
        for block in range(first, min(block_of[maker], count)):
            passing[block].append(value)
    return [tuple(values) for values in passing]


@dataclass(frozen=True)
class BlockGraph:
    """A block as a small graph of its own; `ops[i]` and `values[i]` are what its operator and value i stand for."""

    graph: Graph
    ops: tuple[int, ...]
    values: tuple[int, ...]

    @property
    def gap(self) -> int:
        """The operator that stands for the arrival of gradients and all that happens before it."""
        return self.ops.index(GRADIENTS)


def gap_graph(graph: Graph, block: Block, *, like: BlockGraph | None = None) -> BlockGraph:
    """The block's forward pass, the arrival of gradients (with all else that happens in between), its backward pass.

    `like` is that of an equal block, whose small graph is the same.
    """
    sequence = (*block.forward, GRADIENTS, *block.backward)
    if like is None:
        return _block_graph(graph, block, sequence, reads=block.output)
    touched = ((*op.inputs, *op.outputs) for op in _members(graph, block, sequence, block.output))
    return BlockGraph(like.graph, sequence, tuple(dict.fromkeys(chain.from_iterable(touched))))


def backward_graph(graph: Graph, block: Block, *, has_output: bool = False) -> BlockGraph:
    """The block's backward pass and what it needs of the forward pass, with gradients there from the beginning.

    The block's output is computed where it is needed, unless it is there.
    """
    read = {value for op in block.backward for value in graph.ops[op].inputs}
    needed = needed_for(graph, block.forward, read.difference(block.output) if has_output else read)
    return _block_graph(graph, block, (GRADIENTS, *needed, *block.backward), reads=())


def forward_graph(graph: Graph, block: Block, *, has_input: bool) -> BlockGraph:
    """What it takes to make the block's output, up to the arrival of gradients; the input is part of it or paid for.

    The last block, whose output is held, is run forward in the first pass only, and then as a whole.
    """
    again = needed_for(graph, block.forward, block.output) if block.output else block.forward
    return _block_graph(graph, block, (*((INPUT,) if has_input else ()), *again, GRADIENTS), reads=block.output)


def needed_for(graph: Graph, ops: Sequence[int], values: Iterable[int]) -> tuple[int, ...]:
    """Those of `ops`, which are in an order to run, that `values` are made from."""
    wanted = set(values)
    needed: list[int] = []
    for op in reversed(ops):
        if not wanted.isdisjoint(graph.ops[op].outputs):
            needed.append(op)
            wanted.update(graph.ops[op].inputs)
    return tuple(reversed(needed))


def _block_graph(graph: Graph, block: Block, sequence: tuple[int, ...], *, reads: tuple[int, ...]) -> BlockGraph:
    """Values from elsewhere are residents without weight: whoever runs the block pays for them."""
    given = _members(graph, block, sequence, reads)
    members = [op if index < 0 else _anonymous(graph, index) for index, op in zip(sequence, given, strict=True)]
    made = {value for op in members for value in op.outputs}
    numbers: dict[int, int] = {}
    for op in members:
        for value in (*op.inputs, *op.outputs):
            numbers.setdefault(value, len(numbers))
    values = [
        Value("", graph.values[value].size_bytes if value in made else 0, resident=value not in made)
        for value in numbers
    ]
    ops = [
        replace(op, inputs=tuple(numbers[v] for v in op.inputs), outputs=tuple(numbers[v] for v in op.outputs))
        for op in members
    ]
    last = [numbers[value] for value in (*block.returned, *block.kept) if value in numbers]
    return BlockGraph(Graph(tuple(ops), tuple(values), targets=frozenset(last)), sequence, tuple(numbers))


def _members(graph: Graph, block: Block, sequence: Iterable[int], reads: tuple[int, ...]) -> list[Op]:
    """The operators of a sequence, among them the arrivals of gradients and of the input."""
    arrivals = {
        GRADIENTS: Op("gradients", 0.0, reads, block.gradients, once=True),
        INPUT: Op("input", 0.0, (), block.input, once=True),
    }
    return [arrivals[op] if op in arrivals else graph.ops[op] for op in sequence]


def _anonymous(graph: Graph, op: int) -> Op:
    """The operator without what tells it from one of an equal block."""
    once = bool(graph.arrays.last_stage[op] < len(graph.ops))
    given = graph.ops[op]
    return Op(given.class_key, given.seconds, given.inputs, given.outputs, given.workspace_bytes, given.phase, once)
