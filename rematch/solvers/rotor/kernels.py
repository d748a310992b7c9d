"""The dynamic programme over segments of a chain and slots of memory, compiled; `chain` says what it means.

`fill(table, chain, length, choices, seconds)` for each length

A table has a row for each segment of blocks, at `row_of`, and a column for each number of free slots; then as many rows
for segments whose last output is there from the beginning; then one for the empty segment, which takes no time. What
can be done first with a segment is a *choice*: its seconds, the slots without which it is impossible, and up to two
shorter segments that remain, each with the slots that it must do without.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# Columns of a choice.
WHAT, NEEDED, THEN, THEN_LACKS, LAST, LAST_LACKS = range(6)
CHOICE_COLUMNS = 6


class Chain(NamedTuple):
    """Blocks in slots of memory and seconds; lists of options are in compressed rows."""

    output: np.ndarray
    gradient: np.ndarray  # what comes back into a block from those behind it
    kept_from: np.ndarray  # what the backward of this block and of all behind it leaves for good; then 0
    plain: np.ndarray  # peak of running forward only, input kept by others
    passing: np.ndarray  # the same with the input, which is dropped as soon as it can be
    plain_seconds: np.ndarray
    option_ptr: np.ndarray
    stays: np.ndarray  # output and what else stays between forward and backward
    forward: np.ndarray  # peak
    backward: np.ndarray  # peak
    option_seconds: np.ndarray  # both ways
    alone_ptr: np.ndarray
    alone: np.ndarray  # peak of forward and backward in one go
    alone_seconds: np.ndarray
    beside_ptr: np.ndarray
    beside: np.ndarray  # the same if the output is there, which is not in the peak
    beside_seconds: np.ndarray


@njit(cache=True)
def row_of(first, last, has_output, count):
    """Where segment first..last of `count` blocks is in the table."""
    kind = count * (count + 1) // 2 if has_output else 0
    return kind + first * count - first * (first - 1) // 2 + last - first


@njit(cache=True)
def empty_row(count):
    return count * (count + 1)


@njit(cache=True)
def list_choices(chain, first, last, has_output, choices, seconds):
    """What can be done first with a segment; returns how many choices were written.

    WHAT is an option's number in its block, or ~b for the block b that the segment is continued from with its input
    kept. Slots never count the input of the segment's first block, nor the last output if that is there: both are paid
    for by whoever opened the segment. The last output is given back when the last block has been run back.
    """
    if first == last:
        return _list_alone(chain, first, has_output, choices, seconds)
    count = len(chain.output)
    given_back = chain.output[last] if has_output else 0
    written = 0
    begin = chain.option_ptr[first]
    kept = chain.kept_from[first + 1] - chain.kept_from[last + 1] - given_back
    rest = row_of(first + 1, last, has_output, count)
    for index in range(begin, chain.option_ptr[first + 1]):
        peak = max(chain.gradient[last] + chain.forward[index], kept + chain.backward[index])
        stays = chain.stays[index]
        choices[written] = (index - begin, max(peak, stays), rest, stays, empty_row(count), 0)
        seconds[written] = chain.option_seconds[index]
        written += 1
    passed_seconds, passed_peak = chain.plain_seconds[first], chain.plain[first]
    for block in range(first + 1, last + 1):
        read = chain.output[block - 1]
        kept = chain.kept_from[block] - chain.kept_from[last + 1] - given_back
        rest = row_of(block, last, has_output, count)
        for stays in range(2 if chain.beside_ptr[block - 1] < chain.beside_ptr[block] else 1):
            before = row_of(first, block - 1, stays == 1, count)
            lacks = kept + (read if stays else 0)
            needed = max(chain.gradient[last] + passed_peak, read, lacks)
            choices[written] = (~block, needed, rest, read, before, lacks)
            seconds[written] = passed_seconds
            written += 1
        passed_seconds += chain.plain_seconds[block]
        passed_peak = max(passed_peak, chain.passing[block])
    return written


@njit(cache=True)
def _list_alone(chain, block, has_output, choices, seconds):
    pointer = chain.beside_ptr if has_output else chain.alone_ptr
    peaks = chain.beside if has_output else chain.alone
    times = chain.beside_seconds if has_output else chain.alone_seconds
    nothing = empty_row(len(chain.output))
    for written, index in enumerate(range(pointer[block], pointer[block + 1])):
        choices[written] = (written, peaks[index], nothing, 0, nothing, 0)
        seconds[written] = times[index]
    return pointer[block + 1] - pointer[block]


@njit(cache=True)
def fill(table, chain, length, choices, seconds):
    """The fewest seconds of every segment of `length` blocks with every number of free slots.

    Rows of shorter segments are filled already; those of this length are infinite, which is what stays where a segment
    is impossible.
    """
    count = len(chain.output)
    for first in range(count - length + 1):
        last = first + length - 1
        for kind in range(2 if chain.beside_ptr[last] < chain.beside_ptr[last + 1] else 1):
            best = table[row_of(first, last, kind == 1, count)]
            for choice in range(list_choices(chain, first, last, kind == 1, choices, seconds)):
                _, needed, then, then_lacks, end, end_lacks = choices[choice]
                _improve(best, needed, seconds[choice], table[then], then_lacks, table[end], end_lacks)


@njit(cache=True)
def _improve(best, needed, seconds, then, then_lacks, end, end_lacks):
    # Where more is given back than was lacking, the last columns would need some that the table does not have. They
    # are of segments whose last output is there, and nobody who pays for that output has so many slots left.
    for free in range(needed, min(len(best), len(best) + end_lacks)):
        total = seconds + then[free - then_lacks] + end[free - end_lacks]
        if total < best[free]:
            best[free] = total


@njit(cache=True)
def choose(table, chain, first, last, has_output, free, choices, seconds):
    """The best choice for one segment with so many slots free, as its row of `choices`; -1 if it is impossible."""
    best, fewest = -1, np.inf
    for choice in range(list_choices(chain, first, last, has_output, choices, seconds)):
        _, needed, then, then_lacks, end, end_lacks = choices[choice]
        if needed <= free:
            total = seconds[choice] + table[then, free - then_lacks] + table[end, free - end_lacks]
            if total < fewest:
                best, fewest = choice, total
    return best
