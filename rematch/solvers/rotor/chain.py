"""The fastest way to run a chain of blocks forward and back in limited memory, each block with several options.

`ChainTable.of(blocks, slots=500, slot_bytes=budget_bytes // 500).steps(500)`

O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal Checkpointing for Heterogeneous Chains: How to
Train Deep Neural Networks with Limited Memory" (2019; ACM TOMS 2024), with several options a block as RK-rotor has
them: X. Zhao, T. Le Hellard, L. Eyraud-Dubois, J. Gusak, O. Beaumont, "Rockmate" (ICML 2023).

C(s, t, m) is the fewest seconds to run blocks s..t forward and back when the input of s is there and paid for, the
gradient of t's output is there, and m bytes are free for that gradient and all else. Either s runs with an option o
whose saved values stay until its backward, or only forward up to a block b whose input is kept, and s..b-1 come again:

    C(s, t, m) = min over o of  f(s,o) + C(s+1, t, m - saved(s,o) - output(s)) + b(s,o)
                 min over b of  f(s) + ... + f(b-1) + C(b, t, m - output(b-1)) + C(s, b-1, m)

each where its own peaks fit. So it is optimal among *memory-persistent* schedules: what is kept is kept until its
backward has used it. Memory comes in slots and everything is rounded up to them; with slots of one byte it is exact.

Deviations. The last block is the loss: no gradient comes into it, and it is run alone. What a backward leaves for good
(gradients of weights) is taken from the memory of all that comes after it. A block that is run forward only to be run
back at once (s = t) has options of its own, which need not compute its output. And where a block's backward reads its
output, the output, being the input of the block behind it, may stay after that block has been run back; the published
recursion would compute it again. C has a twin for segments whose last output is there and paid for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rematch.graph.model import Floats, Longs, compressed_rows
from rematch.solvers.base import Deadline
from rematch.solvers.common.options import Option

if TYPE_CHECKING:
    from rematch.solvers.rotor.kernels import Chain

_GOLDEN = 0.6180339887498949  # its multiples are spread most evenly over the fractions


@dataclass(frozen=True)
class Alone:
    """Forward and backward in one go, from the input and the gradient of the output, which the peak has."""

    seconds: float
    peak_bytes: int
    ops: tuple[int, ...] = ()  # of the whole graph

    @property
    def figures(self) -> tuple[float, ...]:
        """What these are compared by, less being better."""
        return self.seconds, self.peak_bytes


@dataclass(frozen=True)
class ChainBlock:
    """What the dynamic programme knows of a block. `plain` runs it forward only.

    Its peak has the output and not the input; `passing_peak_bytes` has the input too, dropped as soon as it can be.
    """

    output_bytes: int
    gradient_bytes: int  # what comes back from the blocks behind
    kept_bytes: int  # what its backward leaves until the end
    plain_seconds: float
    plain_peak_bytes: int
    passing_peak_bytes: int
    options: tuple[Option, ...]
    alone: tuple[Alone, ...]
    beside: tuple[Alone, ...] = ()  # if the output is there, which its peak does not have; empty if that is of no use


class Action(Enum):
    """What a step does with its block."""

    CHECKPOINT = "forward, input kept"  # F_ck
    FORWARD = "forward, input dropped"  # F_none
    SAVE = "forward with an option"  # F_all
    BACKWARD = "backward with an option"  # B
    ALONE = "forward and backward in one go"  # F_all and B
    BESIDE = "forward and backward in one go, the output being there"


@dataclass(frozen=True)
class ChainStep:
    """An action on a block; `option` is an index into what there is for it, -1 where there is nothing to choose."""

    action: Action
    block: int
    option: int = -1


@dataclass(frozen=True)
class ChainTable:
    """The fewest seconds of every segment of a chain in every number of slots; `seconds[slots]` is of all of it."""

    chain: Chain
    rows: Floats

    @staticmethod
    def of(
        blocks: Sequence[ChainBlock],
        slots: int,
        slot_bytes: int,
        *,
        dithered: bool = False,
        deadline: Deadline | None = None,
    ) -> ChainTable:
        """Solve a chain whose last block is the loss, for up to `slots` of `slot_bytes` of memory.

        Everything is rounded up to slots, or what blocks keep is `dithered`: see `in_slots`. After `deadline` longer
        segments count as impossible.
        """
        from rematch.solvers.rotor import kernels as rotor_kernels

        chain = in_slots(blocks, slot_bytes, dithered=dithered)
        count = len(blocks)
        rows = np.full((rotor_kernels.empty_row(count) + 1, slots + 1), np.inf)
        rows[-1] = 0.0  # the empty segment
        room = _room_for_choices(chain)
        for length in range(1, count + 1):
            if deadline is not None and deadline.expired:
                break
            rotor_kernels.fill(rows, chain, length, *room)
        return ChainTable(chain, rows)

    @property
    def seconds(self) -> Floats:
        whole: Floats = self.rows[len(self.chain.output) - 1]
        return whole

    def steps(self, slots: int) -> list[ChainStep]:
        """The fastest steps in so many slots; there must be some."""
        from rematch.solvers.rotor import kernels as rotor_kernels

        count = len(self.chain.output)
        choices, seconds = _room_for_choices(self.chain)
        steps: list[ChainStep] = []
        tasks: list[ChainStep | _Segment] = [_Segment(0, count - 1, False, slots)]
        while tasks:
            task = tasks.pop()
            if isinstance(task, ChainStep):
                steps.append(task)
                continue
            first, last, has_output, free = task
            chosen = rotor_kernels.choose(self.rows, self.chain, *task, choices, seconds)
            what, _, _, then_lacks, end, end_lacks = choices[chosen].tolist()
            if first == last:
                steps.append(ChainStep(Action.BESIDE if has_output else Action.ALONE, first, what))
            elif what >= 0:
                steps.append(ChainStep(Action.SAVE, first, what))
                tasks += [
                    ChainStep(Action.BACKWARD, first, what),
                    _Segment(first + 1, last, has_output, free - then_lacks),
                ]
            else:
                steps += [
                    ChainStep(Action.CHECKPOINT, first),
                    *(ChainStep(Action.FORWARD, b) for b in range(first + 1, ~what)),
                ]
                output_stays = end == rotor_kernels.row_of(first, ~what - 1, True, count)
                tasks += [
                    _Segment(first, ~what - 1, output_stays, free - end_lacks),
                    _Segment(~what, last, has_output, free - then_lacks),
                ]
        return steps


class _Segment(NamedTuple):
    """Blocks first..last that are still to be run forward and back."""

    first: int
    last: int
    has_output: bool
    free: int


def _room_for_choices(chain: Chain) -> tuple[Longs, Floats]:
    from rematch.solvers.rotor.kernels import CHOICE_COLUMNS

    pointers = (chain.option_ptr, chain.alone_ptr, chain.beside_ptr)
    most = 2 * len(chain.output) + max(int(np.diff(pointer).max(initial=0)) for pointer in pointers)
    return np.zeros((most, CHOICE_COLUMNS), dtype=np.int64), np.zeros(most)


def in_slots(blocks: Sequence[ChainBlock], slot_bytes: int, *, dithered: bool = False) -> Chain:
    """The chain with bytes rounded up to slots; what is kept for good as a sum, so that rounding does not add up.

    What a block's options keep adds up along the chain, and rounding it up would cost each of a hundred blocks half a
    slot, and hide that one option keeps a little less than another. Dithered, it is rounded up or down, each block at
    another threshold, so that the sum over equal blocks is right whatever their options; peaks may be over by a little.
    """
    from rematch.solvers.rotor.kernels import Chain

    def slots(sizes_bytes: Iterable[int]) -> Longs:
        return np.array([-(-size // slot_bytes) for size in sizes_bytes], dtype=np.int64)

    def times(seconds: Iterable[float]) -> Floats:
        return np.array(list(seconds), dtype=np.float64)

    kept = np.cumsum([0, *(block.kept_bytes for block in reversed(blocks))])[::-1]
    options = [(block, option) for block in blocks for option in block.options]
    alone = [one for block in blocks for one in block.alone]
    beside = [one for block in blocks for one in block.beside]
    return Chain(
        output=slots(block.output_bytes for block in blocks),
        gradient=slots(block.gradient_bytes for block in blocks),
        kept_from=slots(kept.tolist()),
        plain=slots(block.plain_peak_bytes for block in blocks),
        passing=slots(block.passing_peak_bytes for block in blocks),
        plain_seconds=times(block.plain_seconds for block in blocks),
        option_ptr=compressed_rows([range(len(block.options)) for block in blocks])[0],
        stays=_dithered(blocks, slot_bytes) if dithered else slots(b.output_bytes + o.saved_bytes for b, o in options),
        forward=slots(option.forward_peak_bytes for _, option in options),
        backward=slots(option.backward_peak_bytes for _, option in options),
        option_seconds=times(option.forward_seconds + option.backward_seconds for _, option in options),
        alone_ptr=compressed_rows([range(len(block.alone)) for block in blocks])[0],
        alone=slots(one.peak_bytes for one in alone),
        alone_seconds=times(one.seconds for one in alone),
        beside_ptr=compressed_rows([range(len(block.beside)) for block in blocks])[0],
        beside=slots(one.peak_bytes for one in beside),
        beside_seconds=times(one.seconds for one in beside),
    )


def _dithered(blocks: Sequence[ChainBlock], slot_bytes: int) -> Longs:
    """Slots that stay with each option, rounded up above a fraction that is spread evenly over the blocks."""
    return np.array(
        [
            int((block.output_bytes + option.saved_bytes) / slot_bytes + index * _GOLDEN % 1.0)
            for index, block in enumerate(blocks)
            for option in block.options
        ],
        dtype=np.int64,
    )
