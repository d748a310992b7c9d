"""The graph of a recorded training step: what eager runs, with eager's lifetimes, for an engine that leaves forward as
it is.

`recorded_graph(recording, name="GPT2").graph`

Operators are the calls that make or change storages, in eager's order; views cost nothing. The engine can bring values
back only after the loss, so the graph is marked `recompute_after_loss`, and what belongs to the loss or to backward
runs once. Values live as long as Python holds them: where that is longer than anyone reads them, a *release* operator
of no cost reads them last. In-place operators become part of the operator that made the storage, if nobody reads it in
between but copies, which then belong to it too (autograd clones what ReLU6 or SiLU write over, for their backward);
otherwise the storage is pinned: what makes, changes or reads it before the change is not run again.

A value is movable if autograd saves it in forward and nobody else has it when backward begins: the engine can then copy
it out as it is saved, and its memory is free once the copy has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from rematch.capture.aten import (
    BATCH_NORM_STATISTICS,
    can_be_noted,
    draws,
    is_constant,
    is_filling,
    is_uninitialised,
    may_repeat,
    without_running_statistics,
)
from rematch.capture.memory import allocated_bytes, random_state_bytes
from rematch.capture.recording import RecordedCall, Recording, SavedTensor, TensorRef
from rematch.graph import Graph, Op, Phase, Value
from rematch.graph.model import ALREADY_ALLOCATED, LOSS_VALUE

_OPERATORS_OF_A_NODE = 6  # of autograd, at most, for those that are looked after: a product's two, and their sums
_MOST_WAITING = 0.5  # of a storage: data that waits until all of it is written together


@dataclass(frozen=True)
class StepGraph:
    """The graph of a training step, with what planning it and running it ask of the recording."""

    graph: Graph
    device: torch.device
    root_bytes: int  # of what backward starts from: if the user's loss is not recorded, what that reads
    roots: int
    has_loss: bool
    unseen_bytes: int = 0  # of what torch allocates where no dispatcher sees it


@dataclass(frozen=True)
class RecordedGraph:
    """A graph, and the recorded calls and storages behind its operators and values."""

    graph: Graph
    recording: Recording
    calls: tuple[tuple[int, ...], ...]  # per operator; none for the loss, releases and random states
    storage_of: dict[int, int]  # value -> storage, for values that have one
    notes: tuple[str, ...] = ()
    splits_products: bool = False  # whether forward was recorded with a node of autograd for each factor

    @property
    def device(self) -> torch.device:
        """Where the step runs: CUDA, if any of its memory is there."""
        return _device_of(self.recording)

    @property
    def step(self) -> StepGraph:
        """The graph without the recording."""
        roots = [self.recording.storages[storage] for storage in self.recording.roots]
        root_bytes = sum(allocated_bytes(storage.size_bytes, storage.device) for storage in roots)
        recording = self.recording
        return StepGraph(self.graph, self.device, root_bytes, len(roots), recording.has_loss, recording.unseen_bytes)


@dataclass
class _Draft:
    """An operator while it is put together; storages instead of values."""

    calls: list[int]
    at: int  # its place in eager's order
    inputs: dict[int, None] = field(default_factory=dict)
    outputs: dict[int, None] = field(default_factory=dict)
    once: bool = False
    random: bool = False
    beside_bytes: int = 0  # of storages that are there as it first runs and belong to an operator that comes later


def recorded_graph(recording: Recording, *, name: str = "", notes: tuple[str, ...] = ()) -> RecordedGraph:
    """The graph of `recording`. What the user's loss takes, if it is not recorded, is added by `with_outside`."""
    return _Assembly(recording).finish(name, notes)


class _Assembly:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.calls = recording.calls
        self.storages = recording.storages
        self.device = _device_of(recording)
        self.kernels = [place for place, call in enumerate(self.calls) if call.makes or call.writes]
        self.maker: dict[int, int] = {s: place for place in self.kernels for s in self.calls[place].makes}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.writers: dict[int, list[int]] = defaultdict(list)
        for place in self.kernels:
            call = self.calls[place]
            for storage in call.reads:
                self.readers[storage].append(place)
            for storage in call.writes:
                self.writers[storage].append(place)
        self.head: dict[int, int] = {}  # call -> the call whose operator it is part of
        self.late: dict[int, int] = {}  # call that makes what is written later -> the last write, where its operator is
        self.pinned_calls: set[int] = set()
        self._resolve_writes()
        self.drafts = self._drafts()
        self._keep_alive()

    # In-place writes

    def _resolve_writes(self) -> None:
        for storage, writers in self.writers.items():
            if self.storages[storage].resident:
                continue
            maker = self.maker[storage]
            if not self._can_join(storage, maker, writers):
                self._pin(storage, maker, writers)
                continue
            if self._has_late_data(storage, maker, writers):
                self.late[maker] = writers[-1]
            for place in (*self._copies_between(storage, maker, writers[-1]), *writers):
                self.head[place] = maker

    def _can_join(self, storage: int, maker: int, writers: list[int]) -> bool:
        """Whether the writes and what makes the storage can be run one right after the other: where that is, or where
        the last write is."""
        last = writers[-1]
        if self.calls[maker].phase is not self.calls[last].phase:
            return False
        others = {reader for reader in self.readers[storage] if maker < reader < last}.difference(writers)
        if not others.issubset(self._copies_between(storage, maker, last)):
            return False
        if any(saved.at <= last for saved in self.storages[storage].saved):
            return False
        for writer in writers:
            call = self.calls[writer]
            if call.makes or call.writes != (storage,) or writer in self.head:
                return False
        return not self._has_late_data(storage, maker, writers) or self._can_join_late(storage, maker, writers)

    def _copies_between(self, storage: int, maker: int, last: int) -> list[int]:
        """Copies of a storage before its last write that nobody writes to: they can be made whenever it is."""
        between = (place for place in self.readers[storage] if maker < place < last)
        return [
            place
            for place in between
            if self.calls[place].target is torch.ops.aten.clone.default
            and self.calls[place].reads == (storage,)
            and not any(made in self.writers for made in self.calls[place].makes)
        ]

    def _has_late_data(self, storage: int, maker: int, writers: list[int]) -> bool:
        """Whether something is written that is made after the storage."""
        for writer in writers:
            for other in self._data_of(writer, storage):
                ready = max([self.maker[other], *(w for w in self.writers.get(other, ()) if w < writer)])
                if ready > maker:
                    return True
        return False

    def _can_join_late(self, storage: int, maker: int, writers: list[int]) -> bool:
        """Whether making the storage can wait until the last write, and with it all data that is written.

        Eager frees that data as it goes, and has the storage meanwhile. The graph counts both for longer, which is
        right for what is small beside the storage, as the corners of a spectrum are.
        """
        last = writers[-1]
        group = [self.calls[place] for place in (maker, *writers)]
        if self._copies_between(storage, maker, last):  # which others may read before the last write
            return False
        if last >= self.recording.forward_until or any(draws(call.target, call.args, call.kwargs) for call in group):
            return False
        data = {other for place in (maker, *writers) for other in self._data_of(place, storage)}
        for other in data:
            read_at = min(place for place in (maker, *writers) if other in self.calls[place].reads)
            if any(read_at < writer <= last for writer in self.writers.get(other, ())):
                return False
        waiting_bytes = sum(self.storages[other].size_bytes for other in data if self.maker[other] > maker)
        return waiting_bytes <= _MOST_WAITING * self.storages[storage].size_bytes

    def _data_of(self, place: int, storage: int) -> list[int]:
        """What a call reads beside a storage, as far as it is not always there."""
        return [s for s in self.calls[place].reads if s != storage and not self.storages[s].resident]

    def _pin(self, storage: int, maker: int, writers: list[int]) -> None:
        """Nothing that needs earlier contents of the storage runs again."""
        self.pinned_calls.add(maker)
        self.pinned_calls.update(writers)
        self.pinned_calls.update(reader for reader in self.readers[storage] if reader <= writers[-1])

    # Operators

    def _drafts(self) -> list[_Draft]:
        of_call: dict[int, _Draft] = {}
        for place in self.kernels:
            head = self.head.get(place, place)
            if head != place:
                of_call[head].calls.append(place)
            else:
                of_call[place] = _Draft([place], place)
        for place, last in self.late.items():
            of_call[place].at = last
        for place, last in self.late.items():
            made = [self.storages[storage] for storage in self.calls[place].makes]
            made_bytes = sum(allocated_bytes(storage.size_bytes, storage.device) for storage in made)
            for between in of_call.values():
                if place < between.at < last:
                    between.beside_bytes += made_bytes
        drafts = sorted(of_call.values(), key=lambda draft: draft.at)
        for draft in drafts:
            self._describe(draft)
        self.draft_of_call = {place: draft for draft in drafts for place in draft.calls}
        return drafts

    def _describe(self, draft: _Draft) -> None:
        for place in draft.calls:
            call = self.calls[place]
            draft.outputs.update(dict.fromkeys(call.makes))
            kept = self._read_again(call)
            draft.inputs.update((s, None) for s in kept if s not in draft.outputs)
            draft.random |= draws(call.target, call.args, call.kwargs)
            draft.once |= not self._may_repeat(place, call)
        first = self.calls[draft.calls[0]]
        draft.once |= is_constant(first.target) and len(draft.calls) == 1
        draft.once |= is_uninitialised(first.target) and not self._is_filled(draft)
        draft.once |= first.phase is not Phase.FORWARD

    def _may_repeat(self, place: int, call: RecordedCall) -> bool:
        on_cuda = any(ref.tensor.device.type == "cuda" for ref in (*call.inputs, *filter(None, call.outputs)))
        return (
            place not in self.pinned_calls
            and call.grad_enabled
            and call.profile is not None
            and may_repeat(call.target, on_cuda)
            and (can_be_noted(call.target) or is_uninitialised(call.target))
            and not any(self.storages[s].resident for s in call.writes)
        )

    def _is_filled(self, draft: _Draft) -> bool:
        """Whether what follows an allocation writes all of it."""
        if len(draft.calls) == 1:
            return False
        call = self.calls[draft.calls[1]]
        written = call.outputs[0]
        if not is_filling(call.target) or written is None:
            return False
        whole_bytes = self.storages[written.storage].size_bytes
        return written.tensor.numel() * written.tensor.element_size() == whole_bytes

    def _read_again(self, call: RecordedCall) -> list[int]:
        """Storages that running the call again reads: batch norm then leaves its running statistics alone."""
        again = without_running_statistics(call.target, call.args)
        if again is None:
            return list(call.reads)
        return list(dict.fromkeys(arg.storage for arg in again if isinstance(arg, TensorRef)))

    # Lifetimes

    def _keep_alive(self) -> None:
        """Have whatever runs last while a storage is held read it."""
        self.starts = [draft.at for draft in self.drafts]
        loss_at = self.recording.loss_at
        forward_until = self.recording.forward_until
        self.releases: dict[int, dict[int, None]] = defaultdict(dict)  # draft -> storages that are released after it
        self.held_at_end: set[int] = set()
        end = len(self.calls)
        for storage, info in enumerate(self.storages):
            if info.resident or storage not in self.maker:
                continue
            maker = self.draft_of_call[self.maker[storage]]
            for holding in info.held:
                since, until = holding.since, holding.until
                if holding.after_unpacking:
                    until = self._after_next_operator(until)
                if until >= end and since < loss_at <= until:
                    self.held_at_end.add(storage)
                if since < loss_at < until:
                    maker.once = True  # Python holds it while backward runs
                self._hold_until(storage, until)
                if since >= loss_at:
                    asked = self._after_next_operator(since)
                    self._hold_until(storage, asked)
                    if maker.at < loss_at and not maker.once:
                        self._hold_throughout(storage, asked, until)
            for saved in info.saved:
                kept = saved.phase is not Phase.FORWARD or maker.once or saved.at > forward_until
                kept |= any(time < loss_at for time, _ in saved.unpacked)  # by a derivative that forward takes
                if saved.released is not None and saved.released <= loss_at:  # with a graph that forward drops
                    self._hold_until(storage, saved.released)
                elif kept and saved.released is not None:
                    maker.once = True
                    self._hold_until(storage, saved.released)
                elif saved.released is not None and self._released_by_its_node(saved):
                    self._hold_until(storage, saved.released)

    def _released_by_its_node(self, saved: SavedTensor) -> bool:
        """Whether autograd lets go of it right after its last use: a node first sums its results to their shapes."""
        last_use = max((time for time, _ in saved.unpacked), default=0)
        assert saved.released is not None
        operators = bisect_left(self.starts, saved.released) - bisect_left(self.starts, last_use)
        return operators <= _OPERATORS_OF_A_NODE

    def _after_next_operator(self, time: int) -> int:
        """What backward asked for before `time` may be computed then, so what is held longer is there as well."""
        index = bisect_left(self.starts, time)
        return self.starts[index] + 1 if index < len(self.starts) else time

    def _hold_until(self, storage: int, until: int) -> None:
        """The storage is alive when the last operator before `until` runs."""
        index = bisect_left(self.starts, until) - 1
        if index < 0:
            return
        draft = self.drafts[index]
        if storage in draft.outputs or storage in draft.inputs:
            return
        if draft.at < self.draft_of_call[self.maker[storage]].at:
            return
        if draft.at >= self.recording.forward_until:
            draft.inputs[storage] = None
        else:
            self.releases[index][storage] = None

    def _hold_throughout(self, storage: int, first: int, until: int) -> None:
        """What backward has asked for and holds cannot be freed and brought back in between."""
        for index in range(bisect_left(self.starts, first), bisect_left(self.starts, until)):
            self._hold_until(storage, self.starts[index] + 1)

    # Host memory

    def _is_movable(self, storage: int) -> bool:
        info = self.storages[storage]
        maker = self.maker[storage]
        elsewhere = info.device != self.device and info.device.type != "meta"  # which stands for the device planned for
        if elsewhere or maker >= self.recording.forward_until:
            return False
        if storage in self.recording.outputs or storage in self.recording.roots:
            return False  # the user's own loss may save them
        if any(self.head.get(writer) != maker for writer in self.writers.get(storage, ())):
            return False
        if any(holding.since < self.recording.loss_at < holding.until for holding in info.held):
            return False
        return bool(info.saved) and all(map(self._comes_to_the_hooks, info.saved)) and self._is_read_while_held(storage)

    def _comes_to_the_hooks(self, saved: SavedTensor) -> bool:
        """Whether forward saves it, and only backward asks for it."""
        in_forward = saved.phase is Phase.FORWARD and saved.at <= self.recording.forward_until
        late = all(time >= self.recording.loss_at for time, _ in saved.unpacked)
        return in_forward and late and saved.released is not None

    def _is_read_while_held(self, storage: int) -> bool:
        """Whether all that runs while backward holds the storage reads it, so that no plan frees it in between."""
        for holding in self.storages[storage].held:
            if holding.since < self.recording.loss_at:
                continue
            until = self._after_next_operator(holding.until) if holding.after_unpacking else holding.until
            first = bisect_left(self.starts, self._after_next_operator(holding.since))
            while_held = self.drafts[first : bisect_left(self.starts, until)]
            if not all(storage in draft.inputs or storage in draft.outputs for draft in while_held):
                return False
        return True

    # The graph

    def finish(self, name: str, notes: tuple[str, ...]) -> RecordedGraph:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.op_calls: list[tuple[int, ...]] = []
        self.index: dict[int, int] = {}  # storage -> value
        for storage, info in enumerate(self.storages):
            if info.resident:
                self._add_value(storage, info.name, info.role)
        self.values.append(Value(ALREADY_ALLOCATED, 0, resident=True, role=ALREADY_ALLOCATED))
        gradients = set(self.recording.gradients.values())
        loss_added = False
        for number, draft in enumerate(self.drafts):
            if draft.at >= self.recording.loss_at and not loss_added:
                self._add_loss()
                loss_added = True
            self._add_op(draft, gradients)
            if number in self.releases:
                self._add_release(number)
        if not loss_added:
            self._add_loss()
        targets = {self.index[s] for s in gradients if not self.storages[s].resident}
        targets |= {self.index[s] for s in self.held_at_end}
        targets |= {index for index, value in enumerate(self.values) if value.role == LOSS_VALUE}
        graph = Graph(
            ops=tuple(self.ops),
            values=tuple(self.values),
            targets=frozenset(targets),
            name=name,
            recompute_after_loss=True,
        )
        storage_of = {value: storage for storage, value in self.index.items()}
        return RecordedGraph(graph, self.recording, tuple(self.op_calls), storage_of, notes)

    def _add_value(self, storage: int, name: str, role: str) -> int:
        info = self.storages[storage]
        size = allocated_bytes(info.size_bytes, info.device)
        self.index[storage] = len(self.values)
        movable = info.resident or self._is_movable(storage)  # nobody asks for those that are resident
        self.values.append(Value(name, size, resident=info.resident, role=role, movable=movable))
        return self.index[storage]

    def _add_op(self, draft: _Draft, gradients: set[int]) -> None:
        calls = [self.calls[place] for place in draft.calls]
        first = calls[0]
        label = "+".join(_name_of(call) for call in calls)
        name = f"{label}_{draft.at}"
        phase = Phase.FORWARD if draft.at < self.recording.loss_at else Phase.BACKWARD
        inputs = [self.index[s] for s in draft.inputs]
        if draft.random and not draft.once:
            inputs.append(self._add_random_state(name, draft, first.module_path))
        outputs = []
        for place, storage in enumerate(draft.outputs):
            role = "gradients" if storage in gradients else "outputs" if storage in self.recording.outputs else ""
            outputs.append(self._add_value(storage, name if place == 0 else f"{name}.{place}", role))
        costs = [call.profile.cost for call in calls if call.profile is not None]
        flops = [cost.flops for cost in costs]
        self._append(
            Op(
                name=name,
                seconds=sum(cost.seconds for cost in costs),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                workspace_bytes=draft.beside_bytes + max((cost.workspace_bytes for cost in costs), default=0),
                phase=phase,
                once=draft.once or bool(self._mutated(calls)),
                mutates=self._mutated(calls),
                module_path=first.module_path,
                class_key="+".join(call.class_key for call in calls),
                flops=None if None in flops else sum(f for f in flops if f is not None),
                random=draft.random,
            ),
            tuple(draft.calls),
        )
        self._add_statistics(calls, name, phase)

    def _mutated(self, calls: Iterable[RecordedCall]) -> tuple[int, ...]:
        storages = [s for call in calls for s in call.writes if self.storages[s].resident]
        return tuple(dict.fromkeys(self.index[s] for s in storages))

    def _add_statistics(self, calls: Iterable[RecordedCall], name: str, phase: Phase) -> None:
        """A batch norm updates its running statistics in its first run only: as an operator of its own."""
        for call in calls:
            if without_running_statistics(call.target, call.args) is None:
                continue
            places, _ = BATCH_NORM_STATISTICS[call.target]
            statistics = [call.args[place] for place in places]
            changed = tuple(self.index[ref.storage] for ref in statistics if isinstance(ref, TensorRef))
            changed = tuple(value for value in changed if self.values[value].resident)
            self._append(Op(f"{name}.statistics", 0.0, (), (), phase=phase, once=True, mutates=changed), ())

    def _append(self, op: Op, calls: tuple[int, ...]) -> None:
        self.ops.append(op)
        self.op_calls.append(calls)

    def _add_random_state(self, name: str, draft: _Draft, path: str) -> int:
        """The generator's state, noted before a random operator so that it can be run again."""
        device = self.storages[next(iter(draft.outputs))].device
        state_bytes = random_state_bytes(device)
        self.values.append(Value(f"{name}.state", state_bytes, role="random states", movable=False))
        state = len(self.values) - 1
        self._append(Op(f"{name}.state", 0.0, (), (state,), once=True, module_path=path), ())
        return state

    def _add_release(self, number: int) -> None:
        at = self.drafts[number].at
        inputs = tuple(self.index[storage] for storage in self.releases[number])
        self._append(Op(f"release_{at}", 0.0, inputs, (), once=True), ())

    def _add_loss(self) -> None:
        """The moment between forward and backward; where the loss is not recorded, `with_outside` gives it a cost."""
        self.values.append(Value(LOSS_VALUE, 0, role=LOSS_VALUE, movable=False))
        self._append(Op("loss", 0.0, (), (len(self.values) - 1,), phase=Phase.LOSS, once=True), ())


def _device_of(recording: Recording) -> torch.device:
    """Where the step runs: CUDA, if any of its memory is there."""
    devices = (storage.device for storage in recording.storages)
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _name_of(call: RecordedCall) -> str:
    packet = getattr(call.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(call.target)


def with_outside(graph: Graph, *, loss_workspace_bytes: int, loss_retained_bytes: int, allocated_bytes: int) -> Graph:
    """The graph with what lies outside of the recording: the user's own loss, and memory that is allocated already."""
    sizes = {ALREADY_ALLOCATED: allocated_bytes, LOSS_VALUE: loss_retained_bytes}
    values = tuple(
        replace(value, size_bytes=sizes[value.role]) if value.role in sizes else value for value in graph.values
    )
    ops = tuple(replace(op, workspace_bytes=loss_workspace_bytes) if op.phase is Phase.LOSS else op for op in graph.ops)
    return replace(graph, ops=ops, values=values)
