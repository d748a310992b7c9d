"""Compiled inner loops of `pruning`. Import this module only where it is called: it loads numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

_GONE = 1 << 61  # subtracted from the memory during a run that was removed, which then never is the peak
_NONE = -1
_APART = -2  # instead of the event before: a copy of a held value that was made after the loss, which nobody reads


class Rules(NamedTuple):
    """The arrays of a graph that say when an operator may run; `GraphArrays` explains each."""

    order: np.ndarray
    position: np.ndarray
    inputs_ptr: np.ndarray
    inputs: np.ndarray
    producer: np.ndarray
    once: np.ndarray
    once_from: np.ndarray
    once_until: np.ndarray
    turn: np.ndarray
    recompute_after_loss: bool
    held: np.ndarray
    loss: int


class Costs(NamedTuple):
    """The arrays of a graph that say what a sequence of operators costs; `GraphArrays` explains each."""

    inputs_ptr: np.ndarray
    inputs: np.ndarray
    outputs_ptr: np.ndarray
    outputs: np.ndarray
    size: np.ndarray
    workspace: np.ndarray
    seconds: np.ndarray
    once: np.ndarray
    turn: np.ndarray
    target: np.ndarray
    held: np.ndarray
    loss: int
    resident_bytes: int


class _Ordered(NamedTuple):
    """A sequence as it is written: what has run, what must run next, and the operators so far."""

    done: np.ndarray
    required: np.ndarray
    ops: np.ndarray


@njit(cache=True)
def in_turn(sequence, graph):
    """The sequence as far as the graph's rules let it run.

    What may not run (again) at its place is left out; what must have run before it is put in, in default order.
    """
    count = len(graph.order)
    result = _Ordered(
        np.zeros(count, dtype=np.bool_),
        np.zeros(count, dtype=np.bool_),
        np.empty(len(sequence) + count, dtype=np.int32),
    )
    turns = graph.order[graph.turn[graph.order] >= 0]
    once_count = turn_count = all_done_until = filled = 0
    for index in range(len(sequence)):
        op = sequence[index]
        repeated, too_early = result.done[op], graph.recompute_after_loss and not result.done[graph.loss]
        if repeated and (graph.once[op] or once_count > graph.once_until[op] or too_early):
            continue
        taking_turn = not repeated and graph.turn[op] >= 0
        while once_count < graph.once_from[op] or (taking_turn and turn_count <= graph.turn[op]):
            while result.done[graph.order[all_done_until]]:
                all_done_until += 1
            filled, once_count = _run_next_in_turn(turns[turn_count], once_count, all_done_until, graph, result, filled)
            turn_count += 1
        if not taking_turn:
            result.ops[filled] = op
            filled += 1
            result.done[op] = True
    return result.ops[:filled].copy()


@njit(cache=True)
def _run_next_in_turn(op, once_count, all_done_until, graph, result, filled):
    """Run the operator whose turn it is, and before it whatever has not run yet and could not run, or be read, without.

    All operators at positions before `all_done_until` have run.
    """
    done, required = result.done, result.required
    required[op] = True
    if op == graph.loss:
        for value in range(len(graph.held)):
            if graph.held[value]:
                required[graph.producer[value]] = True
    for at in range(graph.position[op], all_done_until - 1, -1):
        other = graph.order[at]
        if done[other]:
            continue
        required[other] |= graph.once[op] and graph.once_until[other] <= once_count
        if required[other]:
            for i in range(graph.inputs_ptr[other], graph.inputs_ptr[other + 1]):
                required[graph.producer[graph.inputs[i]]] = True
    for at in range(all_done_until, graph.position[op] + 1):
        other = graph.order[at]
        if required[other] and not done[other]:
            result.ops[filled] = other
            filled += 1
            done[other] = True
            once_count += graph.once[other]
    return filled, once_count


class _Events(NamedTuple):
    """What happens to each value, in order: a run makes it, runs read it, and so on until it is made again.

    The events of run r are `first[r]` to `first[r + 1]`, reads before writes. A value is in memory from one event to
    the next (`behind`) if that one reads it, or if there is none and it is `final`.
    """

    first: np.ndarray
    run: np.ndarray
    value: np.ndarray
    writes: np.ndarray
    before: np.ndarray
    behind: np.ndarray
    final: np.ndarray  # per value
    size: np.ndarray  # per value


class _Memory(NamedTuple):
    """A tree of maxima over the bytes during each run; `pending` is what all runs below a node have in addition."""

    largest: np.ndarray
    pending: np.ndarray


@njit(cache=True)
def pruned(sequence, limit_bytes, keep_first, passes, graph):
    """The sequence without runs that are useless, or whose values can stay from the run before within the limit.

    The limit is raised to the peak without useless runs. The slowest for the bytes that must stay instead go first.
    """
    events = _events(sequence, graph)
    memory = _memory(sequence, events, graph)
    spare = np.full(len(graph.workspace), -1, dtype=np.int64)  # runs beyond the one that every operator needs
    for op in sequence:
        spare[op] += 1
    spare[graph.once] = 0
    staying = np.zeros(len(sequence), dtype=np.bool_)
    seen = np.zeros(len(graph.workspace), dtype=np.bool_)
    for run in range(len(sequence)):
        staying[run] = (keep_first or graph.turn[sequence[run]] >= 0) and not seen[sequence[run]]
        seen[sequence[run]] = True
    gone = staying.copy()  # what is to stay counts as settled, like what is gone
    for run in range(len(sequence) - 1, -1, -1):
        _remove_useless(run, sequence, spare, gone, events, memory)
    limit = max(limit_bytes, memory.largest[1])
    for _ in range(passes):
        removed = False
        worth = _worth(sequence, graph.seconds, gone, events)
        for run in np.argsort(-worth, kind="mergesort"):
            if worth[run] < 0.0:
                break
            if gone[run] or spare[sequence[run]] == 0 or not _remove(run, limit, events, memory):
                continue
            gone[run] = removed = True
            spare[sequence[run]] -= 1
            _remove_useless_makers(run, sequence, spare, gone, events, memory)
        if not removed:
            break
    return sequence[staying | ~gone]


@njit(cache=True)
def _events(sequence, graph):
    held_count = np.sum(graph.held)
    first = np.zeros(len(sequence) + 1, dtype=np.int64)
    for run in range(len(sequence)):
        op = sequence[run]
        reads = graph.inputs_ptr[op + 1] - graph.inputs_ptr[op] + (held_count if op == graph.loss else 0)
        first[run + 1] = first[run] + reads + graph.outputs_ptr[op + 1] - graph.outputs_ptr[op]
    count = first[-1]
    events = _Events(
        first, np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32), np.zeros(count, dtype=np.bool_),
        np.full(count, _NONE, dtype=np.int32), np.full(count, _NONE, dtype=np.int32), graph.target | graph.held,
        graph.size,
    )  # fmt: skip
    latest = np.full(len(graph.size), _NONE, dtype=np.int32)
    loss_done = False
    event = 0
    for run in range(len(sequence)):
        op = sequence[run]
        for i in range(graph.inputs_ptr[op], graph.inputs_ptr[op + 1]):
            event = _append(events, event, run, graph.inputs[i], False, latest)
        if op == graph.loss:
            loss_done = True
            for value in range(len(graph.size)):
                if graph.held[value]:
                    event = _append(events, event, run, value, False, latest)
        for i in range(graph.outputs_ptr[op], graph.outputs_ptr[op + 1]):
            event = _append(events, event, run, graph.outputs[i], True, latest)
            if loss_done and graph.held[graph.outputs[i]]:
                # The copy that the loss saw stays: it serves all who read it later.
                earlier = events.before[event - 1]
                events.behind[earlier] = _NONE
                latest[graph.outputs[i]] = earlier
                events.before[event - 1] = _APART
    return events


@njit(cache=True)
def _append(events, event, run, value, writes, latest):
    events.run[event] = run
    events.value[event] = value
    events.writes[event] = writes
    events.before[event] = latest[value]
    if latest[value] >= 0:
        events.behind[latest[value]] = event
    latest[value] = event
    return event + 1


@njit(cache=True)
def _in_memory_behind(event, events):
    """Whether the event's value stays in memory after it."""
    following = events.behind[event]
    if events.before[event] == _APART:
        return False
    return events.final[events.value[event]] if following < 0 else not events.writes[following]


@njit(cache=True)
def _memory(sequence, events, graph):
    count = len(sequence)
    change = np.zeros(count + 1, dtype=np.int64)
    for event in range(len(events.run)):
        size, run, following = events.size[events.value[event]], events.run[event], events.behind[event]
        if events.writes[event]:
            change[run] += size
            change[run + 1] -= size
        if _in_memory_behind(event, events):
            change[run + 1] += size
            change[events.run[following] + 1 if following >= 0 else count] -= size
    leaves = 1
    while leaves < count:
        leaves *= 2
    largest = np.full(2 * leaves, -_GONE, dtype=np.int64)
    held_bytes = graph.resident_bytes
    for run in range(count):
        held_bytes += change[run]
        largest[leaves + run] = held_bytes + graph.workspace[sequence[run]]
    for node in range(leaves - 1, 0, -1):
        largest[node] = max(largest[2 * node], largest[2 * node + 1])
    return _Memory(largest, np.zeros(leaves, dtype=np.int64))


@njit(cache=True)
def _add(memory, start, end, size):
    """Add `size` to the memory during the runs from `start` up to, not including, `end`."""
    if start >= end:
        return
    leaves = len(memory.pending)
    low, high = start + leaves, end + leaves
    while low < high:
        if low & 1:
            _add_below(memory, low, size)
            low += 1
        if high & 1:
            high -= 1
            _add_below(memory, high, size)
        low //= 2
        high //= 2
    _update_above(memory, start + leaves)
    _update_above(memory, end - 1 + leaves)


@njit(cache=True)
def _add_below(memory, node, size):
    memory.largest[node] += size
    if node < len(memory.pending):
        memory.pending[node] += size


@njit(cache=True)
def _update_above(memory, node):
    largest = memory.largest
    while node > 1:
        node //= 2
        largest[node] = max(largest[2 * node], largest[2 * node + 1]) + memory.pending[node]


@njit(cache=True)
def _remove(run, limit, events, memory):
    """Take the run out and let its readers have the values of the run before; False, and as before, if over the limit.

    The caller knows that there is a run before, or that nothing reads what this one makes.
    """
    first, end = events.first[run], events.first[run + 1]
    for event in range(first, end):
        _change_by_removal(event, 1, events, memory)
        before, behind = events.before[event], events.behind[event]
        if before >= 0:
            events.behind[before] = behind
        if behind >= 0:
            events.before[behind] = before
    _add(memory, run, run + 1, -_GONE)
    if memory.largest[1] <= limit:
        return True
    _add(memory, run, run + 1, _GONE)
    for event in range(end - 1, first - 1, -1):
        before, behind = events.before[event], events.behind[event]
        if before >= 0:
            events.behind[before] = event
        if behind >= 0:
            events.before[behind] = event
        _change_by_removal(event, -1, events, memory)
    return False


@njit(cache=True)
def _change_by_removal(event, sign, events, memory):
    """What other runs have more or less in memory without the event; `sign` -1 takes that back."""
    size, stays = events.size[events.value[event]], _in_memory_behind(event, events)
    before, run = events.before[event], events.run[event]
    if events.writes[event]:
        if stays:
            _add(memory, events.run[before] + 1, run, sign * size)
    elif not stays:
        _add(memory, events.run[before] + 1, run + 1, -sign * size)


@njit(cache=True)
def _useless(run, events):
    """Whether nothing reads what the run makes before it is made again."""
    for event in range(events.first[run], events.first[run + 1]):
        if events.writes[event] and _in_memory_behind(event, events):
            return False
    return True


@njit(cache=True)
def _remove_useless(start, sequence, spare, gone, events, memory):
    """Take the run out if it is useless, and then what only it needed."""
    waiting = [start]
    while len(waiting) > 0:
        run = waiting.pop()
        if gone[run] or spare[sequence[run]] == 0 or not _useless(run, events):
            continue
        _remove(run, _GONE, events, memory)
        gone[run] = True
        spare[sequence[run]] -= 1
        for event in range(events.first[run], events.first[run + 1]):
            if not events.writes[event] and events.writes[events.before[event]]:
                waiting.append(events.run[events.before[event]])


@njit(cache=True)
def _remove_useless_makers(run, sequence, spare, gone, events, memory):
    for event in range(events.first[run], events.first[run + 1]):
        if not events.writes[event] and events.writes[events.before[event]]:
            _remove_useless(events.run[events.before[event]], sequence, spare, gone, events, memory)


@njit(cache=True)
def _worth(sequence, seconds, gone, events):
    """Per run, its seconds for each byte that must stay in its place; -1 where nothing can stand in for it."""
    worth = np.empty(len(sequence))
    for run in range(len(sequence)):
        staying_bytes = 0
        possible = not gone[run]
        for event in range(events.first[run], events.first[run + 1]):
            if events.writes[event] and _in_memory_behind(event, events):
                possible &= events.before[event] >= 0
                staying_bytes += events.size[events.value[event]]
        if not possible:
            worth[run] = -1.0
        else:
            worth[run] = seconds[sequence[run]] / staying_bytes if staying_bytes else np.inf
    return worth
