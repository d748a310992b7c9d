"""The dynamic programme for chains: exact against a search over sequences of forward and backward steps."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

import numpy as np
from hypothesis import given, strategies as st

from rematch.solvers import Deadline
from rematch.solvers.common.options import Option
from rematch.solvers.rotor.chain import Action, Alone, ChainBlock, ChainTable, in_slots
from tests.examples import examples

SIZES = st.integers(0, 4)
SECONDS = st.integers(0, 5).map(float)


@st.composite
def options(draw: st.DrawFn, output: int, gradient: int) -> Option:
    saved = draw(SIZES)
    return Option(
        saved_bytes=saved,
        forward_seconds=draw(SECONDS),
        forward_peak_bytes=saved + output + draw(SIZES),
        backward_seconds=draw(SECONDS),
        backward_peak_bytes=saved + gradient + draw(SIZES),
    )


def one_after_the_other(option: Option, gradient_bytes: int) -> Alone:
    """An option's forward and backward in one go."""
    peak = max(option.forward_peak_bytes + gradient_bytes, option.backward_peak_bytes)
    return Alone(option.seconds, peak)


@st.composite
def chains(draw: st.DrawFn, max_blocks: int = 4) -> list[ChainBlock]:
    blocks = []
    for _ in range(draw(st.integers(1, max_blocks))):
        output, gradient = draw(SIZES), draw(SIZES)
        given = tuple(draw(options(output, gradient)) for _ in range(draw(st.integers(1, 2))))
        alone = [one_after_the_other(option, gradient) for option in given]
        if draw(st.booleans()):
            alone.append(Alone(draw(SECONDS), gradient + draw(SIZES)))
        plain, passing = output + draw(SIZES), output + draw(SIZES)
        beside = tuple(Alone(draw(SECONDS), gradient + draw(SIZES)) for _ in range(draw(st.integers(0, 2))))
        kept, seconds = draw(st.integers(0, 2)), draw(SECONDS)
        blocks.append(ChainBlock(output, gradient, kept, seconds, plain, passing, given, tuple(alone), beside))
    loss = ChainBlock(0, 0, draw(st.integers(0, 2)), 0.0, 0, 0, (), (Alone(draw(SECONDS), draw(SIZES)),))
    return [*blocks, loss]


State = tuple[int, int | None, frozenset[int], frozenset[tuple[int, int]]]


def fewest_seconds(blocks: list[ChainBlock], memory: int) -> float | None:
    """Dijkstra over what is in memory: memory-persistent schedules, without any recursion over segments.

    A state is the next block to run back, the block whose input was made last (None once it is used), the blocks whose
    inputs are kept, and the options saved. What is kept stays until its block has been run back; only the input of that
    block may stay longer, for the block before it, of which it is the output.
    """
    tie = count()
    start: State = (len(blocks) - 1, 0, frozenset({0}), frozenset())
    queue = [(0.0, next(tie), start)]
    settled: set[State] = set()
    while queue:
        spent, _, state = heappop(queue)
        if state[0] < 0:
            return spent
        if state not in settled:
            settled.add(state)
            for seconds, following in moves(blocks, memory, state):
                heappush(queue, (spent + seconds, next(tie), following))
    return None


def moves(blocks: list[ChainBlock], memory: int, state: State) -> Iterator[tuple[float, State]]:
    """Run back the block whose turn it is, restart from a kept input, or run the block at the front forward."""
    back, front, inputs, saved = state

    def input_bytes(number: int) -> int:
        return blocks[number - 1].output_bytes if number else 0

    options = {number: blocks[number].options[index] for number, index in saved}
    there = inputs if front is None else inputs | {front}
    held = (
        sum(block.kept_bytes for block in blocks[back + 1 :])
        + sum(map(input_bytes, there))
        + sum(option.saved_bytes for option in options.values())
    )

    def run_back(seconds: float, peak: int) -> Iterator[tuple[float, State]]:
        if peak <= memory:
            others = frozenset(entry for entry in saved if entry[0] != back)
            for left in {inputs - {back, back + 1}, (inputs | {back}) - {back + 1}}:
                yield seconds, (back - 1, None, left, others)

    if back in options:
        option = options[back]
        without = held - option.saved_bytes - (0 if back + 1 not in there else input_bytes(back + 1))
        yield from run_back(option.backward_seconds, without + option.backward_peak_bytes)
    elif front is None:
        yield 0.0, (back, max(number for number in inputs if number <= back and number not in options), inputs, saved)
    elif front == back:
        ways = blocks[back].beside if back + 1 in inputs else blocks[back].alone
        for alone in ways:
            yield from run_back(alone.seconds, held + alone.peak_bytes)
    else:
        block, arriving = blocks[front], blocks[back].gradient_bytes
        if held + arriving + block.plain_peak_bytes <= memory:
            yield block.plain_seconds, (back, front + 1, inputs | {front}, saved)
        if front not in inputs and held - input_bytes(front) + arriving + block.passing_peak_bytes <= memory:
            yield block.plain_seconds, (back, front + 1, inputs, saved)
        for index, option in enumerate(block.options):
            if held + arriving + option.forward_peak_bytes <= memory:
                kept = inputs | {front, front + 1}
                yield option.forward_seconds, (back, front + 1, kept, saved | {(front, index)})


@given(chains(max_blocks=3))
@examples(60)
def test_equals_a_search_over_all_persistent_sequences(blocks: list[ChainBlock]) -> None:
    """On both sides of each amount of memory at which the time changes."""
    seconds = ChainTable.of(blocks, 60, 1).seconds
    changes = np.flatnonzero(seconds[1:] != seconds[:-1]).tolist()
    for memory in {0, 60, *changes, *(change + 1 for change in changes)}:
        truth = fewest_seconds(blocks, memory)
        assert seconds[memory] == (float("inf") if truth is None else truth)


@given(chains(max_blocks=6), st.integers(0, 60))
def test_steps_take_the_seconds_the_table_says(blocks: list[ChainBlock], memory: int) -> None:
    table = ChainTable.of(blocks, memory, 1)
    if table.seconds[memory] == float("inf"):
        return
    steps = table.steps(memory)
    spent = 0.0
    for step in steps:
        block = blocks[step.block]
        if step.action in (Action.CHECKPOINT, Action.FORWARD):
            spent += block.plain_seconds
        elif step.action is Action.SAVE:
            spent += block.options[step.option].forward_seconds
        elif step.action is Action.BACKWARD:
            spent += block.options[step.option].backward_seconds
        else:
            ways = block.alone if step.action is Action.ALONE else block.beside
            spent += ways[step.option].seconds
    assert spent == table.seconds[memory]
    back = [step.block for step in steps if step.action in (Action.BACKWARD, Action.ALONE, Action.BESIDE)]
    assert back == list(reversed(range(len(blocks))))


@given(chains(), st.integers(1, 7), st.integers(0, 12))
def test_coarse_slots_never_promise_more_than_there_is(blocks: list[ChainBlock], slot_bytes: int, slots: int) -> None:
    exact = ChainTable.of(blocks, slots * slot_bytes, 1).seconds[slots * slot_bytes]
    assert ChainTable.of(blocks, slots, slot_bytes).seconds[slots] >= exact


def test_dithered_slots_add_up_over_equal_blocks() -> None:
    """A block keeps half a slot: rounded up, a hundred keep a hundred slots; dithered, fifty."""
    block = ChainBlock(5, 0, 0, 0.0, 0, 0, (Option(0, 1.0, 5, 1.0, 0),), ())
    assert in_slots([block] * 100, 10).stays.sum() == 100
    assert abs(int(in_slots([block] * 100, 10, dithered=True).stays.sum()) - 50) <= 1
    assert in_slots([block] * 100, 1, dithered=True).stays.tolist() == [5] * 100


@given(chains())
@examples(20)
def test_a_table_without_time_promises_nothing(blocks: list[ChainBlock]) -> None:
    assert np.isinf(ChainTable.of(blocks, 20, 1, deadline=Deadline(0.0)).seconds).all()
