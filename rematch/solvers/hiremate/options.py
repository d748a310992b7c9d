"""Which limits a piece is solved under, which of its options are passed on, and what a level sees of an option.

`spread(options, 6)` and `layer_option(block, block_graph, option, data_of)`

`common.options` says what an option is. The gap's workspace limits what a schedule may hold meanwhile, so that the same
solvers that keep a budget find options that save little: `limits` names pairs of both (Gusak et al., HiRemate, ICML
2025, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rematch.graph import Graph, baseline
from rematch.solvers.common.blocks import Block, BlockGraph
from rematch.solvers.common.options import Option, option_of, with_saving_limit
from rematch.solvers.hiremate.level import LayerOption, Moment

# Shares of the way from the least to the highest peak, and of what is saved without recomputation. Most options that a
# level takes differ in what they save; low peaks matter only to the pieces at which the budget is tightest. Those that
# save nothing come last: they take longest, and one of them is known without a search.
_SHARES = (
    *((1.0, of_saved) for of_saved in (0.5, 0.75, 0.25, 0.62, 0.38, 0.88, 0.12)),
    (0.5, 0.5),
    *((of_peak, 0.0) for of_peak in (1.0, 0.5, 0.0)),
)


def limits(part: BlockGraph) -> Iterator[tuple[Graph, int]]:
    """The small graph with less and less memory in all and over the gap, each with its budget."""
    plain = option_of(part, baseline(part.graph))
    highest, least = plain.peak_bytes, part.graph.largest_op_bytes
    for of_peak, of_phantom in _SHARES:
        peak = least + int(of_peak * (highest - least))
        yield with_saving_limit(part, peak, int(of_phantom * plain.saved_bytes)), peak


def spread(options: Sequence[Option], count: int) -> list[Option]:
    """At most `count` options, fastest first: the fastest, the ones with the lowest peak and with the least saved, then
    the one furthest from all chosen.

    The paper begins with the highest peak. That is often, but not always, the fastest option, and a level without it
    could not do without recomputation even where it has the memory. Of equal options the faster one comes first.
    """
    waiting = sorted(options, key=lambda o: (o.seconds, o.saved_bytes, o.peak_bytes))
    chosen: list[Option] = []
    firsts = [
        lambda o: (o.seconds, o.saved_bytes, o.peak_bytes),
        lambda o: (o.peak_bytes, o.seconds),
        lambda o: (o.saved_bytes, o.seconds),
    ]
    while waiting and len(chosen) < count:
        best = min(waiting, key=firsts.pop(0)) if firsts else max(waiting, key=lambda o: _distance(o, chosen))
        chosen.append(best)
        waiting.remove(best)
    return sorted(chosen, key=lambda o: o.seconds)


def _distance(option: Option, chosen: Sequence[Option]) -> int:
    """How far peak and phantom are from those of the nearest chosen one."""
    return min(abs(option.peak_bytes - o.peak_bytes) + abs(option.saved_bytes - o.saved_bytes) for o in chosen)


def layer_option(block: Block, part: BlockGraph, option: Option, data_of: dict[int, int]) -> LayerOption:
    """The option as a level sees it: `data_of` numbers the values that pass between the level's layers."""
    return _Walk(block, part, data_of).option(option)


class _Walk:
    """Runs an option step by step, apart into what the surroundings see and what only the run itself holds."""

    def __init__(self, block: Block, part: BlockGraph, data_of: dict[int, int]) -> None:
        self._part = part
        self._data_of = data_of
        self._size = [value.size_bytes for value in part.graph.values]
        passing = {*block.output, *block.gradients, *block.returned, *block.kept}
        self._own_forward = frozenset(v for v, name in enumerate(part.values) if name not in passing)
        # A backward that makes an output again keeps it to itself.
        again = frozenset(v for v, name in enumerate(part.values) if name in block.output)
        self._own_backward = self._own_forward | again

    def option(self, option: Option) -> LayerOption:
        forward, phantom = self._moments(option.forward, frozenset(), self._own_forward, option.backward)
        backward, _ = self._moments(option.backward, phantom, self._own_backward, ())
        seconds = self._part.graph.arrays.seconds
        return LayerOption(
            forward_seconds=float(seconds[list(option.forward)].sum()),
            backward_seconds=float(seconds[list(option.backward)].sum()),
            phantom_bytes=option.saved_bytes,
            forward_moments=_merged(forward, option.saved_bytes),
            backward_moments=_merged(backward, option.saved_bytes),
            backward_reads=self._data(self._read_from_outside(option.backward, phantom)),
        )

    def _moments(
        self, ops: Sequence[int], alive: frozenset[int], own: frozenset[int], then: Sequence[int]
    ) -> tuple[list[Moment], frozenset[int]]:
        """What each run holds of its `own`, from what is `alive` at first; and what stays for `then`."""
        graph = self._part.graph
        last, reads = self._last_uses(ops, then), self._last_reads_of_others(ops)
        unmade = {value for op in ops for value in graph.ops[op].outputs} - own
        held, moments = set(alive), []
        for at, op in enumerate(ops):
            unmade.difference_update(graph.ops[op].outputs)
            held.update(own.intersection(graph.ops[op].outputs))
            held_bytes = sum(self._size[value] for value in held) + graph.ops[op].workspace_bytes
            finished = self._data(value for value, end in reads.items() if end < at)
            moments.append(Moment(held_bytes, finished, self._data(unmade)))
            held = {value for value in held if last.get(value, -1) > at}
        return moments, frozenset(held)

    def _last_uses(self, ops: Sequence[int], then: Sequence[int]) -> dict[int, int]:
        """Per value the number of its last use; beyond the end if `then` reads it without making it first."""
        graph = self._part.graph
        last: dict[int, int] = {}
        for at, op in enumerate(ops):
            last.update(dict.fromkeys((*graph.ops[op].inputs, *graph.ops[op].outputs), at))
        made: set[int] = set()
        for op in then:
            last.update(dict.fromkeys((v for v in graph.ops[op].inputs if v not in made), len(ops)))
            made.update(graph.ops[op].outputs)
        return last

    def _last_reads_of_others(self, ops: Sequence[int]) -> dict[int, int]:
        """Per value of the surroundings that the run reads, the number of the last reader."""
        graph = self._part.graph
        made: set[int] = set()
        last: dict[int, int] = {}
        for at, op in enumerate(ops):
            for value in graph.ops[op].inputs:
                if value not in made and self._part.values[value] in self._data_of:
                    last[value] = at
            made.update(graph.ops[op].outputs)
        return last

    def _read_from_outside(self, ops: Sequence[int], phantom: frozenset[int]) -> Iterator[int]:
        graph = self._part.graph
        made = set(phantom)
        for op in ops:
            yield from (value for value in graph.ops[op].inputs if value not in made)
            made.update(graph.ops[op].outputs)

    def _data(self, values: Iterable[int]) -> frozenset[int]:
        names = (self._part.values[value] for value in values)
        return frozenset(self._data_of[name] for name in names if name in self._data_of)


def _merged(moments: Iterable[Moment], phantom_bytes: int) -> tuple[Moment, ...]:
    """One moment for each set of data that need not be there, with the most that is held beside the phantom."""
    most: dict[tuple[frozenset[int], frozenset[int]], int] = {}
    for moment in moments:
        key = (moment.finished, moment.unmade)
        most[key] = max(most.get(key, 0), moment.overhead_bytes - phantom_bytes)
    return tuple(Moment(held, *key) for key, held in most.items())
