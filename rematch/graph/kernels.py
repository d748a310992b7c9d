"""Compiled inner loops of `rematch.graph`. Import this module only where it is called: it loads numba.

A schedule is one array of steps: `op >= 0` computes an operator, `~value < 0` frees a value; `Schedule` has the steps
that move one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from rematch.graph.schedule import FETCHES, OFFLOADS

# What broke, as `simulate_steps` reports it; `simulate` puts it into words.
OK = 0
UNKNOWN_STEP = 1
INPUT_NOT_ALIVE = 2
FREED_NOT_ALIVE = 3
FREED_HELD = 4
HELD_MISSING_AT_LOSS = 5
OUT_OF_WINDOW = 6
NEVER_RUN = 7
TARGET_MISSING = 8
OUT_OF_TURN = 9
REPEATED_BEFORE_LOSS = 10
NO_LINK = 11
OFFLOADED_NOT_ALIVE = 12
OFFLOADED_AGAIN = 13
HOST_FULL = 14
FETCHED_NOT_THERE = 15
FETCHED_ALIVE = 16
FETCHED_BEFORE_LOSS = 17
OFFLOADED_NOT_MOVABLE = 18


class Values(NamedTuple):
    """The arrays of a graph that say which values are read, made and kept; `GraphArrays` explains each."""

    inputs_ptr: np.ndarray
    inputs: np.ndarray
    outputs_ptr: np.ndarray
    outputs: np.ndarray
    target: np.ndarray
    held: np.ndarray
    loss: int


class Rules(NamedTuple):
    """The arrays of a graph that say when an operator may run."""

    once: np.ndarray
    once_from: np.ndarray
    once_until: np.ndarray
    turn: np.ndarray
    movable: np.ndarray
    recompute_after_loss: bool


class Bytes(NamedTuple):
    """The arrays of a graph that say what is needed while an operator runs."""

    size: np.ndarray
    workspace: np.ndarray
    resident_bytes: int


@njit(cache=True, no_cfunc_wrapper=True)
def simulate_steps(steps, graph, rules, needs, host_room, timeline, counts, alive, hosted):
    """Run the steps; fill `timeline` (bytes during each step), `counts`, `alive` and `hosted`.

    `host_room` has the bytes of host memory, -1 for a graph without a link. Returns (code, step, culprit, peak, peak
    step): `culprit` is the value or operator the code speaks of.
    """
    inputs_ptr, inputs, outputs_ptr, outputs = graph.inputs_ptr, graph.inputs, graph.outputs_ptr, graph.outputs
    target, held, loss = graph.target, graph.held, graph.loss
    size, workspace = needs.size, needs.workspace
    memory = needs.resident_bytes
    peak = memory
    peak_step = -1
    once_count = 0
    turn_count = 0
    loss_done = False
    for index in range(len(steps)):
        step = steps[index]
        if step < 0:
            value = ~step
            if value >= OFFLOADS:
                waits = rules.recompute_after_loss and not loss_done
                code, host_room = _move(step, size, rules.movable, waits, host_room, alive, hosted)
                value -= FETCHES if value >= FETCHES else OFFLOADS
                if code != OK:
                    return code, index, value, peak, peak_step
                if step <= ~FETCHES:
                    memory += size[value]
                    if memory > peak:
                        peak = memory
                        peak_step = index
                timeline[index] = memory
                continue
            if value >= len(size):
                return UNKNOWN_STEP, index, step, peak, peak_step
            if not alive[value]:
                return FREED_NOT_ALIVE, index, value, peak, peak_step
            if loss_done and held[value]:
                return FREED_HELD, index, value, peak, peak_step
            alive[value] = False
            memory -= size[value]
            timeline[index] = memory
            continue
        if step >= len(workspace):
            return UNKNOWN_STEP, index, step, peak, peak_step
        for i in range(inputs_ptr[step], inputs_ptr[step + 1]):
            if not alive[inputs[i]]:
                return INPUT_NOT_ALIVE, index, inputs[i], peak, peak_step
        if once_count < rules.once_from[step] or once_count > rules.once_until[step]:
            return OUT_OF_WINDOW, index, once_count, peak, peak_step
        if counts[step] > 0:
            if rules.recompute_after_loss and not loss_done:
                return REPEATED_BEFORE_LOSS, index, step, peak, peak_step
        elif rules.turn[step] >= 0:
            if rules.turn[step] != turn_count:
                return OUT_OF_TURN, index, turn_count, peak, peak_step
            turn_count += 1
        if step == loss:
            for value in range(len(held)):
                if held[value] and not alive[value]:
                    return HELD_MISSING_AT_LOSS, index, value, peak, peak_step
            loss_done = True
        if rules.once[step]:
            once_count += 1
        replaced = 0
        for i in range(outputs_ptr[step], outputs_ptr[step + 1]):
            value = outputs[i]
            memory += size[value]
            if alive[value]:
                replaced += size[value]
            alive[value] = True
        running = memory + workspace[step]
        timeline[index] = running
        if running > peak or peak_step < 0:
            peak = running
            peak_step = index
        memory -= replaced
        counts[step] += 1
    for op in range(len(workspace)):
        if counts[op] == 0:
            return NEVER_RUN, len(steps), op, peak, peak_step
    for value in range(len(size)):
        if (target[value] or held[value]) and not alive[value]:
            return TARGET_MISSING, len(steps), value, peak, peak_step
    return OK, -1, -1, peak, peak_step


@njit(cache=True, no_cfunc_wrapper=True)
def _move(step, size, movable, waits, host_room, alive, hosted):
    """Offload or fetch a value. `waits` says that nothing may be fetched yet. Returns (code, host memory left)."""
    fetches = step <= ~FETCHES
    value = ~step - (FETCHES if fetches else OFFLOADS)
    if value >= len(size):
        return UNKNOWN_STEP, host_room
    if host_room < 0:
        return NO_LINK, host_room
    if fetches:
        if not hosted[value]:
            return FETCHED_NOT_THERE, host_room
        if alive[value]:
            return FETCHED_ALIVE, host_room
        if waits:
            return FETCHED_BEFORE_LOSS, host_room
        alive[value] = True
        return OK, host_room
    if not alive[value]:
        return OFFLOADED_NOT_ALIVE, host_room
    if not movable[value]:
        return OFFLOADED_NOT_MOVABLE, host_room
    if hosted[value]:
        return OFFLOADED_AGAIN, host_room
    if size[value] > host_room:
        return HOST_FULL, host_room
    hosted[value] = True
    return OK, host_room - size[value]


@njit(cache=True, no_cfunc_wrapper=True)
def run_clock(steps, graph, seconds, out_seconds, in_seconds, begins, ends):
    """Fill `begins` and `ends` of each step of a valid schedule; returns when all has ended.

    `seconds` has the time of each operator, `out_seconds` and `in_seconds` those of moving each value. `clock` has the
    rules.
    """
    departed = np.zeros(len(out_seconds))  # when a value's copy out has ended
    arrived = np.zeros(len(in_seconds))  # and its copy in
    now, out_until, in_until = 0.0, 0.0, 0.0
    for index in range(len(steps)):
        step = steps[index]
        if step >= 0:
            begin = now
            for i in range(graph.inputs_ptr[step], graph.inputs_ptr[step + 1]):
                begin = max(begin, arrived[graph.inputs[i]])
            for i in range(graph.outputs_ptr[step], graph.outputs_ptr[step + 1]):
                begin = max(begin, max(arrived[graph.outputs[i]], departed[graph.outputs[i]]))
            if step == graph.loss:
                for value in range(len(arrived)):
                    if graph.held[value]:
                        begin = max(begin, arrived[value])
            now = begin + seconds[step]
            end = now
        elif step <= ~FETCHES:
            value = ~step - FETCHES
            begin = max(max(now, in_until), departed[value])
            end = begin + in_seconds[value]
            in_until = arrived[value] = end
        elif step <= ~OFFLOADS:
            value = ~step - OFFLOADS
            begin = max(now, out_until)
            end = begin + out_seconds[value]
            out_until = departed[value] = end
        else:
            now = max(now, max(departed[~step], arrived[~step]))
            begin = end = now
        begins[index] = begin
        ends[index] = end
    return max(now, max(out_until, in_until))


@njit(cache=True, no_cfunc_wrapper=True)
def sort_first(numbers, count):
    """Sort the first `count` numbers in place, by Shell's method. numpy's sort takes seconds to compile."""
    gap = count // 2
    while gap > 0:
        for start in range(gap, count):
            moved = numbers[start]
            place = start
            while place >= gap and numbers[place - gap] > moved:
                numbers[place] = numbers[place - gap]
                place -= gap
            numbers[place] = moved
        gap = 1 if gap == 2 else gap * 5 // 11
    return


@njit(cache=True, no_cfunc_wrapper=True)
def steps_with_frees(sequence, graph, needed, dying):
    """The sequence of operators with each value freed right after its last use before it is computed again.

    Walks backwards: a value is needed if a later step reads it before its producer runs again. `needed` says which
    values are when all steps are done; `dying` has room for all values. Returns the steps from the last to the first,
    and how many they are.
    """
    inputs_ptr, inputs, outputs_ptr, outputs = graph.inputs_ptr, graph.inputs, graph.outputs_ptr, graph.outputs
    held, loss = graph.held, graph.loss
    after_loss = loss >= 0
    steps = np.empty(4 * len(sequence) + 16, dtype=np.int32)
    filled = 0
    for index in range(len(sequence) - 1, -1, -1):
        op = sequence[index]
        if op == loss:
            after_loss = False
        count = np.int64(0)  # a literal would have `sort_first` compiled twice
        for i in range(outputs_ptr[op], outputs_ptr[op + 1]):
            value = outputs[i]
            if not needed[value]:
                dying[count] = value
                count += 1
            needed[value] = after_loss and held[value]  # the user keeps a held copy whatever is computed anew
        for i in range(inputs_ptr[op], inputs_ptr[op + 1]):
            value = inputs[i]
            if not needed[value]:
                dying[count] = value
                count += 1
                needed[value] = True
        if filled + count + 1 > len(steps):
            grown = np.empty(2 * len(steps) + count, dtype=np.int32)
            for i in range(filled):  # an assignment of slices takes seconds to compile
                grown[i] = steps[i]
            steps = grown
        sort_first(dying, count)
        for i in range(count - 1, -1, -1):
            steps[filled] = ~dying[i]
            filled += 1
        steps[filled] = op
        filled += 1
    return steps, filled
