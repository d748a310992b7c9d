"""Parts that are equal up to renaming: solve one, translate its schedule to the others.

`classes = equal_blocks(graph, blocks)`; `translate(graph, schedule, classes[0].representative, classes[0].members[1])`

Gusak et al., HiRemate, ICML 2025, appendix C.1.1: a *block* is the operators of a part, forward and backward, in the
order in which they are to be compared (the default order). It is written down as the classes of its operators and
its own numbers of the values they touch; blocks whose text is the same are equal, and a hash table finds them in time
linear in the graph. Classes of operators tell code, times, workspace and sizes apart.

Beyond the paper, the text says what a block's surroundings do with its values (`rematch.graph.blocks`): whether they
are targets or held, made or used outside before or after the loss, and which mutation ends the time in which an
operator may run again. A schedule of the representative alone, with these values kept for its surroundings, is then
valid for every member after renaming.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rematch.errors import ScheduleError
from rematch.graph import Graph, Schedule
from rematch.graph.blocks import BlockWriter, Form

BlockOps = tuple[int, ...]


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks equal up to renaming, in the order given. `members[i][j]` does in block i what `members[0][j]` does.

    Equal blocks have the same `key` in any graph and process, so that it can name what was solved before.
    """

    key: str
    members: tuple[BlockOps, ...]

    @property
    def representative(self) -> BlockOps:
        """The one to solve."""
        return self.members[0]


def equal_blocks(graph: Graph, blocks: Iterable[Sequence[int]]) -> tuple[EqualBlocks, ...]:
    """The classes of equal blocks, by first member."""
    writer = BlockWriter(graph, by_phase=True)
    by_form: dict[Form, list[BlockOps]] = {}
    for block in blocks:
        by_form.setdefault(writer.form(block), []).append(tuple(block))
    return tuple(EqualBlocks(writer.key(form), tuple(members)) for form, members in by_form.items())


def translate(graph: Graph, schedule: Schedule, source: Sequence[int], member: Sequence[int]) -> Schedule:
    """A schedule of the block `source` in the words of `member`, which is equal to it."""
    if len(source) != len(member):
        raise ScheduleError(f"a schedule of {len(source)} operators cannot be one of {len(member)}; blocks differ")
    step_of = dict(_renamed_steps(graph, source, member))
    try:
        steps = [step_of[step] for step in schedule.steps.tolist()]
    except KeyError as error:
        raise ScheduleError(f"cannot translate {_in_words(graph, error.args[0])}, not part of the block") from None
    return Schedule(np.array(steps, dtype=np.int32))


def _renamed_steps(graph: Graph, source: Sequence[int], member: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each step that computes or frees something of `source`, and what it is for `member`."""
    for here, there in zip(source, member, strict=True):
        yield here, there
        one, other = graph.ops[here], graph.ops[there]
        for mine, theirs in ((one.inputs, other.inputs), (one.outputs, other.outputs)):
            yield from ((~value, ~renamed) for value, renamed in zip(mine, theirs, strict=True))


def _in_words(graph: Graph, step: int) -> str:
    if step >= 0:
        return f"operator {graph.ops[step].name!r}" if step < len(graph.ops) else f"operator {step}"
    return f"value {graph.values[~step].name!r}" if ~step < len(graph.values) else f"value {~step}"
