"""Compiled inner loop of the greedy solver."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit


class Stages(NamedTuple):
    """The arrays of a graph that say what an operator makes, takes and costs, and when it may run again."""

    size: np.ndarray
    seconds: np.ndarray
    producer: np.ndarray
    position: np.ndarray
    first_stage: np.ndarray
    last_stage: np.ndarray


class Notes(NamedTuple):
    """What is found out on the way. Made outside: compiling that takes long."""

    next_use: np.ndarray  # per value, the entry that needs it next
    stage: np.ndarray  # per entry and for the end, the first computation that it belongs to
    first_seen: np.ndarray  # per operator
    computed_in: np.ndarray  # per operator, the stage in which it last ran
    touched: np.ndarray  # per value, whether the running operator reads or makes it

    @staticmethod
    def new(entries: int, operators: int, values: int) -> Notes:
        next_use = np.full(values, entries + 1, dtype=np.int64)  # not needed again before it is recomputed
        stage, first_seen = np.empty(entries + 1, dtype=np.int64), np.zeros(operators, dtype=np.bool_)
        computed_in, touched = np.full(operators, -1, dtype=np.int64), np.zeros(values, dtype=np.bool_)
        return Notes(next_use, stage, first_seen, computed_in, touched)


@njit(cache=True, no_cfunc_wrapper=True)
def largest_saving(sequence, at, graph, stages, notes):
    """The operator to compute again so that least memory is held while `sequence[at]` runs, and where to insert it.

    Returns (-1, -1) where no recomputation saves anything. `notes` are new ones.
    """
    inputs_ptr, inputs, outputs_ptr, outputs = graph.inputs_ptr, graph.inputs, graph.outputs_ptr, graph.outputs
    target, held, loss = graph.target, graph.held, graph.loss
    size, seconds, producer, position = stages.size, stages.seconds, stages.producer, stages.position
    first_stage, last_stage = stages.first_stage, stages.last_stage
    next_use, stage, first_seen = notes.next_use, notes.stage, notes.first_seen
    computed_in, touched = notes.computed_in, notes.touched
    end = len(sequence)
    for value in range(len(size)):
        if target[value] or held[value]:
            next_use[value] = end
    front = 0
    for index in range(end):
        op = sequence[index]
        stage[index] = front
        if not first_seen[op]:
            first_seen[op] = True
            front = position[op] + 1
    stage[end] = front
    after_loss = loss >= 0
    for index in range(end - 1, at, -1):
        op = sequence[index]
        if op == loss:
            after_loss = False
            for value in range(len(size)):
                if held[value]:
                    next_use[value] = index
        for i in range(outputs_ptr[op], outputs_ptr[op + 1]):
            next_use[outputs[i]] = index if after_loss and held[outputs[i]] else end + 1
        for i in range(inputs_ptr[op], inputs_ptr[op + 1]):
            next_use[inputs[i]] = index
    loss_done = False
    for index in range(at):
        computed_in[sequence[index]] = stage[index]
        loss_done |= sequence[index] == loss
    running = sequence[at]
    for i in range(inputs_ptr[running], inputs_ptr[running + 1]):
        touched[inputs[i]] = True
    for i in range(outputs_ptr[running], outputs_ptr[running + 1]):
        touched[outputs[i]] = True

    # An operator is a candidate where it may run again, and once a stage at most, so that the walk ends.
    best_op, best_before, best_saving, best_seconds = -1, -1, 0, 0.0
    for value in range(len(size)):
        before = next_use[value]
        op = producer[value]
        if op < 0 or touched[value] or before > end or (held[value] and (loss_done or running == loss)):
            continue
        if not 0 <= computed_in[op] < stage[before] <= last_stage[op] or stage[before] < first_stage[op]:
            continue
        saving = 0
        for i in range(outputs_ptr[op], outputs_ptr[op + 1]):
            other = outputs[i]
            if not touched[other] and before <= next_use[other] <= end and not held[other]:
                saving += size[other]
        for i in range(inputs_ptr[op], inputs_ptr[op + 1]):
            other = inputs[i]
            if next_use[other] > end and not touched[other]:  # dead by now: it would be held for this recomputation
                saving -= size[other]
        if saving > best_saving or (saving == best_saving > 0 and seconds[op] < best_seconds):
            best_op, best_before, best_saving, best_seconds = op, before, saving, seconds[op]
    return best_op, best_before
