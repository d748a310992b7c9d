"""The computation: operators, the values between them, and what must be true of any schedule.

`Graph(ops=(Op("double", 1.0, (0,), (1,)),), values=(Value("x", 4, resident=True), Value("y", 8)))`

A *value* is a storage, named by its index; views of it weigh nothing, their consumers name the storage. An *operator*
reads values and allocates its outputs anew each time it runs. *Resident* values (inputs, parameters) have no
producer and are always there; together they are a constant in every peak. *Targets* must be alive at the end.
*Held* values, the module's outputs, are alive when the loss runs and stay so. An operator marked `once` (the loss,
the mutation of a buffer, a collective) runs exactly once, in default order among its kind. Every other operator runs
at least once and may run again.

A mutation changes a resident value in place. An operator reads the contents the default order shows it, so it may run
only while exactly that many mutations of its inputs have run. Because operators marked `once` run in default order,
how many of them have run so far (the *once count*) tells which mutations have happened, and each operator is allowed in
one window `[once_from, once_until]` of that count. `GraphArrays` holds these windows beside the rest.

A *random* operator draws random numbers, or updates statistics in its first run. It may run again, because whoever runs
it restores the state it drew from, but its first run takes its turn: first runs of operators that are random or marked
once keep the default order among each other.

`recompute_after_loss` restricts schedules to what an engine can run that leaves the forward pass to the user's own
code: first computations of all operators follow the default order, and no operator runs again before the loss has run.

A graph may have a *link* to host memory. Its schedules may then also move values out and back; `clock` says how long
that takes. Neither the link, nor which values can move, nor times are part of the fingerprint: they belong to the
machine and to whoever runs the schedule.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rematch.errors import GraphError
from rematch.graph.link import Link

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_Picked = TypeVar("_Picked", bound=NamedTuple)

# Roles of values that stand for memory outside of what was captured, which differs from run to run.
ALREADY_ALLOCATED = "already allocated"
LOSS_VALUE = "loss"  # what the loss leaves behind besides tangents: its own value, and what that keeps alive

_LARGEST_BYTES = 2**56
_LARGEST_TOTAL_BYTES = 2**60  # of all values, so that no peak comes near the end of int64
_LARGEST_SECONDS = 1e30  # so that no sum over a schedule becomes infinite


class Phase(Enum):
    """Where in a training step an operator belongs."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Value:
    """A storage. `resident` ones have no producer and are never freed. `role` says what it is, for reports.

    One that is not `movable` stays on the device: whoever runs the schedule cannot copy it to host memory, or somebody
    else holds it, so that moving it would free nothing.
    """

    name: str
    size_bytes: int
    resident: bool = False
    role: str = ""
    movable: bool = True


@dataclass(frozen=True, slots=True)
class Op:
    """An operator. `inputs`, `outputs` and `mutates` are indices into `Graph.values`."""

    name: str
    seconds: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace_bytes: int = 0
    phase: Phase = Phase.FORWARD
    once: bool = False
    mutates: tuple[int, ...] = ()
    module_path: str = ""
    class_key: str = ""
    flops: float | None = None
    random: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class GraphArrays:
    """A graph as arrays, for compiled code. Lists of values leave out residents, which no schedule can move.

    Lists per operator or value are in compressed rows: the list of i is `x[x_ptr[i]:x_ptr[i + 1]]`.
    """

    seconds: Floats  # per operator
    workspace: Longs  # per operator
    size: Longs  # per value
    producer: Ints  # per value, -1 for residents
    inputs_ptr: Ints
    inputs: Ints  # distinct values that an operator reads
    outputs_ptr: Ints
    outputs: Ints
    users_ptr: Ints
    users: Ints  # operators that read a value, in default order
    order: Ints  # the default order
    position: Ints  # its inverse
    once: Bools  # per operator
    once_from: Ints  # per operator, the window of the once count in which it may run
    once_until: Ints
    turn: Ints  # per operator, its rank among those whose first runs keep the default order, -1 if its own need not
    first_stage: Ints  # per operator, the first position in the default order just before which it may run again
    last_stage: Ints  # and the last one; smaller than the first if it may not
    target: Bools  # per value
    held: Bools  # per value
    movable: Bools  # per value
    loss: int  # operator, -1 without
    recompute_after_loss: bool
    resident_bytes: int

    def pick(self, kind: type[_Picked]) -> _Picked:
        """The arrays that a named tuple for compiled code has fields for."""
        return kind(*(getattr(self, name) for name in kind._fields))

    def inputs_of(self, op: int) -> Ints:
        """Distinct values that `op` reads."""
        return self.inputs[self.inputs_ptr[op] : self.inputs_ptr[op + 1]]

    def outputs_of(self, op: int) -> Ints:
        """Values that `op` makes."""
        return self.outputs[self.outputs_ptr[op] : self.outputs_ptr[op + 1]]

    def users_of(self, value: int) -> Ints:
        """Operators that read `value`, in default order."""
        return self.users[self.users_ptr[value] : self.users_ptr[value + 1]]


@dataclass(frozen=True)
class Graph:
    """A computation with its default order, checked when made; the module's docstring defines the words.

    Without `order`, the default order is that of `ops`. With `recompute_after_loss`, schedules are only valid if their
    first computations follow the default order and nothing is computed again before the loss has run.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    targets: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    order: tuple[int, ...] = ()
    name: str = ""
    recompute_after_loss: bool = False
    link: Link | None = None  # to host memory
    arrays: GraphArrays = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", tuple(range(len(self.ops))))
        _check_values(self)
        _check_ops(self)
        _check_order(self)
        object.__setattr__(self, "arrays", _arrays(self))
        _check_phases(self)

    @property
    def loss(self) -> int | None:
        """The loss operator, if there is one."""
        return self.arrays.loss if self.arrays.loss >= 0 else None

    @property
    def resident_bytes(self) -> int:
        return self.arrays.resident_bytes

    @property
    def already_allocated_bytes(self) -> int:
        """Of the resident bytes, those of values that no operator knows."""
        return sum(value.size_bytes for value in self.values if value.role == ALREADY_ALLOCATED)

    @cached_property
    def baseline_seconds(self) -> float:
        """Time of running every operator once: no schedule is faster."""
        return float(self.arrays.seconds.sum())

    @cached_property
    def op_bytes(self) -> Longs:
        """Per operator, memory while it runs if nothing else were alive: residents, inputs, outputs, workspace."""
        a = self.arrays
        touched = row_sums(a.size[a.inputs], a.inputs_ptr) + row_sums(a.size[a.outputs], a.outputs_ptr)
        return a.resident_bytes + touched + a.workspace

    @property
    def end_bytes(self) -> int:
        """What is in memory when all has run: residents, targets and held values."""
        a = self.arrays
        return a.resident_bytes + int(a.size[a.target | a.held].sum())

    @property
    def largest_op_bytes(self) -> int:
        """What the hungriest operator needs by itself: no schedule has a lower peak."""
        return int(self.op_bytes.max()) if self.ops else self.resident_bytes

    @cached_property
    def fingerprint(self) -> str:
        """Hash of operator names and all that decides a schedule's validity, and of sizes.

        Left out is what differs between machines for one and the same computation: times, workspace and what was
        allocated before. Names and roles of values do not matter either.
        """
        a = self.arrays
        digest = hashlib.sha256()
        size = a.size.copy()
        outside = (ALREADY_ALLOCATED, LOSS_VALUE)
        size[[index for index, value in enumerate(self.values) if value.role in outside]] = 0
        structure = (a.producer, a.inputs_ptr, a.inputs, a.outputs_ptr, a.outputs, a.order)
        rules = (a.once, a.once_from, a.once_until, a.target, a.held)
        for part in (size, *structure, *rules):
            digest.update(part.tobytes())
        digest.update("\0".join(op.name for op in self.ops).encode("utf-8", "surrogatepass"))
        digest.update(str(a.loss).encode())
        if any(op.random for op in self.ops):  # graphs without keep the fingerprint they had before there were any
            digest.update(b"random" + bytes(op.random for op in self.ops))
        if self.recompute_after_loss:
            digest.update(b"recompute after loss")
        return digest.hexdigest()


def _check_values(graph: Graph) -> None:
    for index, value in enumerate(graph.values):
        size = value.size_bytes
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise GraphError(f"value {value.name!r} has a size of {size!r}; sizes are whole numbers of bytes")
        if not 0 <= size <= _LARGEST_BYTES:
            raise GraphError(f"value {value.name!r} (number {index}) has {size} bytes; 0 to 2**56 is possible")
    total = sum(int(value.size_bytes) for value in graph.values)
    if total > _LARGEST_TOTAL_BYTES:
        raise GraphError(f"the values of graph {graph.name!r} have {total} bytes together; up to 2**60 is possible")
    for role, members in (("target", graph.targets), ("held", graph.held)):
        for member in members:
            if not 0 <= member < len(graph.values):
                raise GraphError(f"{role} value {member} does not exist; the graph has {len(graph.values)} values")


def _check_ops(graph: Graph) -> None:
    producer: dict[int, Op] = {}
    for op in graph.ops:
        if not 0 <= op.seconds <= _LARGEST_SECONDS:  # false for nan too
            raise GraphError(f"operator {op.name!r} takes {op.seconds} seconds; 0 to 1e30 is possible")
        if not 0 <= op.workspace_bytes <= _LARGEST_BYTES:
            raise GraphError(
                f"operator {op.name!r} has {op.workspace_bytes} bytes of workspace; 0 to 2**56 is possible"
            )
        if op.flops is not None and not (math.isfinite(op.flops) and op.flops >= 0):
            raise GraphError(f"operator {op.name!r} has {op.flops} flops; they are finite and not negative")
        for role, listed in (("reads", op.inputs), ("produces", op.outputs), ("mutates", op.mutates)):
            for value in listed:
                if not 0 <= value < len(graph.values):
                    raise GraphError(
                        f"operator {op.name!r} {role} value {value}, unknown: the graph has {len(graph.values)} values"
                    )
        for value in op.outputs:
            if graph.values[value].resident:
                raise GraphError(f"operator {op.name!r} produces {graph.values[value].name!r}, which is resident")
            if value in producer:
                raise GraphError(
                    f"value {graph.values[value].name!r} has two producers, {producer[value].name!r} and {op.name!r}"
                )
            producer[value] = op
        if op.mutates and not op.once:
            raise GraphError(f"operator {op.name!r} mutates its input, so it must be marked once")
        for value in op.mutates:
            if not graph.values[value].resident:
                raise GraphError(
                    f"operator {op.name!r} mutates {graph.values[value].name!r}, which is not resident; "
                    "give the result an output of its own"
                )
    for index, made in enumerate(graph.values):
        if not made.resident and index not in producer:
            raise GraphError(f"value {made.name!r} (number {index}) has no producer and is not resident")


def _check_order(graph: Graph) -> None:
    count = len(graph.ops)
    if sorted(graph.order) != list(range(count)):
        raise GraphError(f"the order must name each of the {count} operators once; it has {len(graph.order)} entries")
    made = [value.resident for value in graph.values]
    for index in graph.order:
        op = graph.ops[index]
        for value in op.inputs:
            if not made[value]:
                _raise_cycle_or_bad_order(graph, op, value)
        for value in op.outputs:
            made[value] = True


def _raise_cycle_or_bad_order(graph: Graph, early: Op, missing: int) -> None:
    """Tell a graph that has no order at all from one whose order is wrong."""
    producer = {value: index for index, op in enumerate(graph.ops) for value in op.outputs}
    waiting = [len({producer[v] for v in op.inputs if v in producer}) for op in graph.ops]
    readers: dict[int, set[int]] = {}
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            if value in producer:
                readers.setdefault(producer[value], set()).add(index)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    while ready:
        for reader in readers.get(ready.pop(), ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    stuck = next((index for index, count in enumerate(waiting) if count > 0), None)
    if stuck is None:
        raise GraphError(
            f"the order runs {early.name!r} before {graph.ops[producer[missing]].name!r}, "
            f"which produces its input {graph.values[missing].name!r}"
        )
    seen: dict[int, None] = {}  # in the order of the walk
    while stuck not in seen:  # walk back among stuck operators until one repeats: that is a cycle
        seen[stuck] = None
        stuck = next(producer[v] for v in graph.ops[stuck].inputs if v in producer and waiting[producer[v]] > 0)
    walked = list(seen)
    cycle = [graph.ops[index].name for index in reversed(walked[walked.index(stuck) :])]
    shown = " -> ".join(repr(name) for name in [*cycle[:6], *(["..."] if len(cycle) > 6 else []), cycle[0]])
    raise GraphError(f"the graph has a cycle: {shown}")


def _check_phases(graph: Graph) -> None:
    a = graph.arrays
    losses = [op.name for op in graph.ops if op.phase is Phase.LOSS]
    if len(losses) > 1:
        raise GraphError(f"operators {losses[0]!r} and {losses[1]!r} are both the loss; a graph has at most one")
    if graph.held and a.loss < 0:
        raise GraphError("held values need a loss operator, from which on they are held; without one make them targets")
    if graph.recompute_after_loss and a.loss < 0:
        raise GraphError("recompute_after_loss needs a loss operator, and this graph has none")
    if a.loss < 0:
        return
    loss_position = a.position[a.loss]
    for index, op in enumerate(graph.ops):
        if op.once and op.phase is Phase.FORWARD and a.position[index] > loss_position:
            raise GraphError(f"operator {op.name!r} is forward and runs once, but the order has it after the loss")
    for value in graph.held:
        producer = a.producer[value]
        if producer >= 0 and a.position[producer] >= loss_position:
            name, maker = graph.values[value].name, graph.ops[producer].name
            raise GraphError(f"held value {name!r} is produced by {maker!r}, which is not before the loss")


def _arrays(graph: Graph) -> GraphArrays:
    is_resident = [value.resident for value in graph.values]
    resident = np.array(is_resident, dtype=np.bool_)
    size = np.array([value.size_bytes for value in graph.values], dtype=np.int64)
    order = np.array(graph.order, dtype=np.int32)
    position = np.empty_like(order)
    position[order] = np.arange(len(order), dtype=np.int32)
    inputs_ptr, inputs = compressed_rows(
        [[value for value in dict.fromkeys(op.inputs) if not is_resident[value]] for op in graph.ops]
    )
    outputs_ptr, outputs = compressed_rows([op.outputs for op in graph.ops])
    producer = np.full(len(graph.values), -1, dtype=np.int32)
    producer[outputs] = _row_of_each_entry(outputs_ptr)
    readers = _row_of_each_entry(inputs_ptr)
    by_value_then_position = np.lexsort((position[readers], inputs))
    once = np.array([op.once or op.phase is Phase.LOSS for op in graph.ops], dtype=np.bool_)
    once_from, once_until, last_stage = _once_windows(graph, once, position)
    loss = next((index for index, op in enumerate(graph.ops) if op.phase is Phase.LOSS), -1)
    earliest = position[loss] if graph.recompute_after_loss and loss >= 0 else 0
    arrays = GraphArrays(
        seconds=np.array([op.seconds for op in graph.ops], dtype=np.float64),
        workspace=np.array([op.workspace_bytes for op in graph.ops], dtype=np.int64),
        size=size,
        producer=producer,
        inputs_ptr=inputs_ptr,
        inputs=inputs,
        outputs_ptr=outputs_ptr,
        outputs=outputs,
        users_ptr=_starts(np.bincount(inputs, minlength=len(graph.values))),
        users=readers[by_value_then_position],
        order=order,
        position=position,
        once=once,
        once_from=once_from,
        once_until=once_until,
        turn=_turns(graph, once),
        first_stage=np.maximum(position, earliest).astype(np.int32) + np.int32(1),
        last_stage=last_stage,
        target=_flags(graph.targets, len(graph.values)) & ~resident,
        held=_flags(graph.held, len(graph.values)) & ~resident,
        movable=np.array([value.movable for value in graph.values], dtype=np.bool_) & ~resident,
        loss=loss,
        recompute_after_loss=graph.recompute_after_loss,
        resident_bytes=int(size[resident].sum()),
    )
    for name in arrays.__slots__:
        array = getattr(arrays, name)
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return arrays


def _once_windows(graph: Graph, once: Bools, position: Ints) -> tuple[Ints, Ints, Ints]:
    """The window of the once count in which each operator may run, and the last stage that lies in it."""
    sequence = [index for index in graph.order if once[index]]
    mutations: dict[int, list[int]] = {}  # value -> ranks among the operators marked once
    for rank, index in enumerate(sequence):
        for value in graph.ops[index].mutates:
            mutations.setdefault(value, []).append(rank)
    first = np.zeros(len(graph.ops), dtype=np.int32)
    until = np.full(len(graph.ops), len(sequence), dtype=np.int32)
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            if value in mutations:
                ranks = mutations[value]
                before = bisect_left(ranks, position[index], key=lambda rank: position[sequence[rank]])
                if before > 0:
                    first[index] = max(first[index], ranks[before - 1] + 1)
                if before < len(ranks):
                    until[index] = min(until[index], ranks[before])
    for rank, index in enumerate(sequence):
        first[index] = until[index] = rank
    stage_of_rank = np.array([position[index] for index in sequence] + [len(graph.ops)], dtype=np.int32)
    return first, until, stage_of_rank[until]


def _turns(graph: Graph, once: Bools) -> Ints:
    """Per operator its rank among those whose first runs keep the default order, or -1."""
    turn = np.full(len(graph.ops), -1, dtype=np.int32)
    keeping = [op for op in graph.order if graph.recompute_after_loss or once[op] or graph.ops[op].random]
    turn[keeping] = np.arange(len(keeping), dtype=np.int32)
    return turn


def compressed_rows(rows: Sequence[Collection[int]]) -> tuple[Ints, Ints]:
    """`compressed_rows([[3, 5], [4]])` is `([0, 2, 3], [3, 5, 4])`: row starts, then all rows end to end."""
    starts = _starts(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
    return starts, np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(starts[-1]))


def _starts(lengths: NDArray[np.integer[Any]]) -> Ints:
    """Where each row starts when rows of these lengths are laid end to end, and where the last one ends."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _row_of_each_entry(starts: Ints) -> Ints:
    return np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))


def _flags(members: Iterable[int], count: int) -> Bools:
    flags = np.zeros(count, dtype=np.bool_)
    flags[list(members)] = True
    return flags


def row_sums(entries: Longs, pointer: Ints) -> Longs:
    """The sum of each row of entries in compressed rows."""
    total = np.concatenate(([0], np.cumsum(entries)))
    return total[pointer[1:]] - total[pointer[:-1]]
