"""Compiled inner loop of `policy`. Import this module only where it is called: it loads numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit


class Reads(NamedTuple):
    """The arrays of a graph that say who reads what; `GraphArrays` explains each."""

    order: np.ndarray
    first_stage: np.ndarray
    last_stage: np.ndarray
    inputs_ptr: np.ndarray
    inputs: np.ndarray
    producer: np.ndarray
    target: np.ndarray
    held: np.ndarray
    loss: int


@njit(cache=True)
def fill_recomputations(kept, graph):
    """R[stage, operator]: the fewest computations with which each stage finds what it reads and leaves what is kept.

    Walks backwards over stages, and in each over operators, so that whatever asks for a value comes before it. Where
    the producer may not run, the value is kept instead: `kept` is completed in place.
    """
    order, producer, held, target = graph.order, graph.producer, graph.held, graph.target
    stage_count, op_count = len(kept), len(order)
    runs = np.zeros((stage_count, op_count), dtype=np.bool_)
    for stage in range(stage_count - 1, -1, -1):
        if stage < op_count:
            runs[stage, order[stage]] = True
        for value in range(len(producer)):
            last = stage + 1 == stage_count
            if (last and (target[value] or held[value])) or (not last and kept[stage + 1, value]):
                _provide(stage, value, runs, kept, graph)
        for index in range(min(stage, op_count - 1), -1, -1):
            op = order[index]
            if not runs[stage, op]:
                continue
            for i in range(graph.inputs_ptr[op], graph.inputs_ptr[op + 1]):
                _provide(stage, graph.inputs[i], runs, kept, graph)
            if op == graph.loss:
                for value in range(len(producer)):
                    if held[value]:
                        _provide(stage, value, runs, kept, graph)
    return runs


@njit(cache=True)
def _provide(stage, value, runs, kept, graph):
    op = graph.producer[value]
    if op < 0 or kept[stage, value] or runs[stage, op]:
        return
    if graph.first_stage[op] <= stage <= graph.last_stage[op]:
        runs[stage, op] = True
    else:
        kept[stage, value] = True
