"""Compiled inner loop of `policy`. Import this module only where it is called: it loads numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def fill_recomputations(
    kept, order, last_stage, inputs_ptr, inputs, producer, target, held, loss,
):  # fmt: skip
    """R[stage, operator]: the fewest computations with which each stage finds what it reads and leaves what is kept.

    Walks backwards over stages, and in each over operators, so that whatever asks for a value comes before it. Where
    the producer may not run any more, the value is kept instead: `kept` is completed in place.
    """
    stage_count, op_count = len(kept), len(order)
    runs = np.zeros((stage_count, op_count), dtype=np.bool_)
    for stage in range(stage_count - 1, -1, -1):
        for value in range(len(producer)):
            last = stage + 1 == stage_count
            if (last and (target[value] or held[value])) or (not last and kept[stage + 1, value]):
                _provide(stage, value, runs, kept, producer, last_stage)
        if stage < op_count:
            runs[stage, order[stage]] = True
        for index in range(min(stage, op_count - 1), -1, -1):
            op = order[index]
            if not runs[stage, op]:
                continue
            for i in range(inputs_ptr[op], inputs_ptr[op + 1]):
                _provide(stage, inputs[i], runs, kept, producer, last_stage)
            if op == loss:
                for value in range(len(producer)):
                    if held[value]:
                        _provide(stage, value, runs, kept, producer, last_stage)
    return runs


@njit(cache=True)
def _provide(stage, value, runs, kept, producer, last_stage):
    op = producer[value]
    if op < 0 or kept[stage, value]:
        return
    if stage <= last_stage[op]:
        runs[stage, op] = True
    else:
        kept[stage, value] = True
