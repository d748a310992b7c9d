"""The forward pass of a training step as the paper's graph: one source, one sink, an operator to a vertex.

`next(readings(graph)).dag`

The paper's networks have one input and one output. The operators of a captured step have not: each layer casts its own
weights, a mask is made once and read everywhere, statistics are updated on the side. There are two ways to read such a
graph, and both give valid checkpoints:

- *attached*: one more vertex before everything that reads no operator, and one behind everything that none reads. A
  mask then ties all layers together.
- *core*: only operators between the input and the output that most others hang on. What else hangs on one of them alone
  is part of its vertex, and what hangs on several is kept and belongs to no vertex.

A vertex weighs what its operators make and what is not in memory anyhow: targets, held values, and what is made by
operators that may not run again weigh nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rematch.graph import Graph
from rematch.graph.model import Bools, Ints
from rematch.solvers.common.forward_pass import forward_ops
from rematch.solvers.feng_huang.segments import Dag, segments_between

KEPT = -1  # instead of a segment


@dataclass(frozen=True, eq=False)
class Reading:
    """A graph, and the operators that each vertex of it stands for, if any."""

    dag: Dag
    members: tuple[tuple[int, ...], ...]

    def segment_of_ops(self, graph: Graph, checkpoints: Collection[int]) -> Ints:
        """The segment that each operator is computed again with, or `KEPT`."""
        segment = np.full(len(graph.ops), KEPT, dtype=np.int32)
        for number, between in enumerate(segments_between(self.dag, checkpoints)):
            for vertex in between.inside:
                segment[list(self.members[vertex])] = number
        return segment


def readings(graph: Graph) -> Iterator[Reading]:
    """The forward pass as attached, and, where that differs, as its core."""
    ops = [int(op) for op in forward_ops(graph)]
    reads = _reads_among(graph, ops)
    yield _reading(graph, reads, {op: (op,) for op in ops})
    core = _core(ops, reads)
    if len(core) < len(ops):
        yield _reading(graph, reads, _grouped_around_core(ops, reads, core))


def may_run_again(graph: Graph) -> Bools:
    """Operators that do not have to run once and do not read what is changed before the backward pass begins."""
    a = graph.arrays
    behind_loss = a.position[a.loss] + 1 if a.loss >= 0 else 0
    return np.asarray(~a.once & (a.last_stage >= behind_loss))


def may_leave(graph: Graph) -> Bools:
    """Values that need not stay in memory: those an operator can make again and that are not kept anyhow."""
    a = graph.arrays
    return np.asarray((a.producer >= 0) & may_run_again(graph)[a.producer] & ~a.target & ~a.held)


def _reads_among(graph: Graph, ops: Sequence[int]) -> dict[int, list[int]]:
    """For each operator in `ops`, in their order, the others among them whose values it reads."""
    a = graph.arrays
    among = set(ops)
    rows = ((op, a.producer[a.inputs_of(op)].tolist()) for op in ops)
    return {op: list(dict.fromkeys(maker for maker in makers if maker in among)) for op, makers in rows}


def _reading(graph: Graph, reads: dict[int, list[int]], members: dict[int, tuple[int, ...]]) -> Reading:
    """The graph of the operators that `members` are listed for, with one more vertex at either end."""
    a = graph.arrays
    vertex = {op: number for number, op in enumerate(members, start=1)}
    last = len(vertex) + 1
    edges = [(vertex[maker], vertex[op]) for op in vertex for maker in reads[op] if maker in vertex]
    read, reading = {maker for maker, _ in edges}, {reader for _, reader in edges}
    edges += [(0, number) for number in vertex.values() if number not in reading]
    edges += [(number, last) for number in vertex.values() if number not in read]
    if not vertex:
        edges = [(0, last)]
    leaving, again = may_leave(graph), may_run_again(graph)
    sizes, seconds = [0], [0.0]
    for ops in members.values():
        made = [value for op in ops for value in a.outputs_of(op) if leaving[value]]
        sizes.append(int(a.size[made].sum()))
        seconds.append(float(sum(a.seconds[op] for op in ops if again[op])))
    return Reading(Dag.of([*sizes, 0], edges, [*seconds, 0.0]), ((), *members.values(), ()))


def _core(ops: Sequence[int], reads: dict[int, list[int]]) -> set[int]:
    """Operators on the way from the input to the output that most others hang on."""
    readers: dict[int, list[int]] = {op: [] for op in ops}
    for op, makers in reads.items():
        for maker in makers:
            readers[maker].append(op)
    behind = _reached(reversed(ops), readers)
    before = _reached(ops, reads)
    if not ops:
        return set()
    source = max((op for op in ops if not reads[op]), key=lambda op: behind[op].bit_count())
    sinks = (op for op in ops if not readers[op] and behind[source] >> op & 1)
    sink = max(sinks, key=lambda op: before[op].bit_count())
    between = behind[source] & before[sink]
    return {op for op in ops if between >> op & 1}


def _reached(ops: Iterable[int], steps: dict[int, list[int]]) -> dict[int, int]:
    """What can be reached from each operator, itself included, as bits; `ops` have those a step leads to first."""
    reached: dict[int, int] = {}
    for op in ops:
        bits = 1 << op
        for following in steps[op]:
            bits |= reached[following]
        reached[op] = bits
    return reached


def _grouped_around_core(ops: Sequence[int], reads: dict[int, list[int]], core: set[int]) -> dict[int, tuple[int, ...]]:
    """The operators of the core, each with what hangs on it alone."""
    neighbours: dict[int, set[int]] = {op: set(makers) for op, makers in reads.items()}
    for op, makers in reads.items():
        for maker in makers:
            neighbours[maker].add(op)
    members = {op: [op] for op in ops if op in core}
    unseen = set(ops) - core
    for first in ops:
        if first not in unseen:
            continue
        unseen.remove(first)
        group, tied = [first], set()
        for op in group:  # grows by its neighbours outside of the core
            tied |= neighbours[op] & core
            group += neighbours[op] & unseen
            unseen -= neighbours[op]
        if len(tied) == 1:
            members[tied.pop()] += group
    return {op: tuple(group) for op, group in members.items()}
