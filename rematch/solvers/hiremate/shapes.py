"""Shapes of schedules for a level, and a greedy choice of options for each.

`Fitter(judge, shape).fit(budget_bytes, deadline)`

A shape says which nodes run one after the other (`shape_model`). `shapes` has a few kinds: everything once; and forward
passes that are repeated in groups before their backward passes, as Chen et al. (2016) and Griewank (1992) do. `Fitter`
begins with the fastest options and, as long as the budget is broken, takes the option that costs the least time for
each byte it spares at the worst moment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from rematch.solvers.base import Deadline
from rematch.solvers.hiremate.level import Pass, Run
from rematch.solvers.hiremate.pricing import Judge
from rematch.solvers.hiremate.shape_model import ShapeStep

# A slot is that of a layer, for the forward and backward that belong together, or a second one of the layer for
# forwards whose phantom nobody wants. The loss has the slot -1.


def shapes(judge: Judge) -> Iterator[tuple[ShapeStep, ...]]:
    """All layers once; then the last ones once and the others, in groups, again before their backward passes."""
    order = judge.level.backward_order
    again = _Again(judge)
    yield again.shape(order, ())
    for size in _group_sizes(len(order)):
        for kept in {size, *(len(order) * eighths // 8 for eighths in range(1, 8))}:
            yield again.shape(order[:kept], chain.from_iterable(map(again.group, _cut(order[kept:], size))))
        for leaf in (1, 2, 4):
            halved = (again.halved(group, leaf) for group in _cut(order[leaf:], size))
            yield again.shape(order[:leaf], chain.from_iterable(halved))
        yield again.shape(order[:1], chain.from_iterable(map(again.from_the_start, _cut(order[1:], size))))


def _group_sizes(count: int) -> set[int]:
    return {-(-count // groups) for groups in range(1, count + 1)}


def _cut(layers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [layers[at : at + size] for at in range(0, len(layers), size)]


class _Again:
    """Ways to run forwards again for the backwards of some layers, given in backward order."""

    def __init__(self, judge: Judge) -> None:
        self._number = judge.number
        self._layers = len(judge.level.layers)
        self._lone = [j for j, layer in enumerate(judge.level.layers) if not layer.has_backward]

    def shape(self, kept: Sequence[int], rest: Iterable[ShapeStep]) -> tuple[ShapeStep, ...]:
        """Forward, loss, backward of the `kept` layers, and the `rest`."""
        once = set(kept)
        forward = (self._save(j) if j in once else self._pass(j) for j in range(self._layers))
        return (*forward, (self._number[Pass.LOSS, -1], -1), *map(self._back, kept), *rest)

    def group(self, layers: Sequence[int]) -> Iterator[ShapeStep]:
        """All forwards, then all backwards."""
        saving = set(layers)
        yield from (self._save(j) if j in saving else self._pass(j) for j in self._with_lone(layers))
        yield from map(self._back, layers)

    def halved(self, layers: Sequence[int], size: int) -> Iterator[ShapeStep]:
        """Run up to the later half, do that half, then the other: few data wait, log n forwards each."""
        if len(layers) <= size:
            yield from self.group(layers)
            return
        later, earlier = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        yield from map(self._pass, self._with_lone(earlier))
        yield from self.halved(later, size)
        yield from self.halved(earlier, size)

    def from_the_start(self, layers: Sequence[int]) -> Iterator[ShapeStep]:
        """Before each backward everything up to it: nothing waits, n forwards each."""
        for at in range(len(layers)):
            yield from map(self._pass, self._with_lone(layers[at + 1 :]))
            yield from self.group(layers[at : at + 1])

    def _with_lone(self, layers: Sequence[int]) -> list[int]:
        """In forward order, and with layers between them that have no backward."""
        between = (j for j in self._lone if layers and min(layers) < j < max(layers))
        return sorted((*layers, *between))

    def _save(self, layer: int) -> ShapeStep:
        return self._number[Pass.FORWARD, layer], layer

    def _pass(self, layer: int) -> ShapeStep:
        return self._number[Pass.FORWARD, layer], self._layers + layer

    def _back(self, layer: int) -> ShapeStep:
        return self._number[Pass.BACKWARD, layer], layer


class Fitter:
    """A shape with an option in every slot, to begin with the fastest."""

    def __init__(self, judge: Judge, shape: Sequence[ShapeStep]) -> None:
        self._judge, self.shape = judge, shape
        self._places: dict[int, list[int]] = defaultdict(list)
        for place, (_, slot) in enumerate(shape):
            self._places[slot].append(place)
        self._seconds = {slot: self._slot_seconds(places) for slot, places in self._places.items()}
        self.choice = {slot: seconds.index(min(seconds)) for slot, seconds in self._seconds.items()}

    @property
    def seconds(self) -> float:
        return math.fsum(self._seconds[slot][option] for slot, option in self.choice.items())

    def runs(self) -> tuple[Run, ...]:
        return self._runs(self.choice)

    def _runs(self, choice: dict[int, int]) -> tuple[Run, ...]:
        nodes = self._judge.nodes
        return tuple(
            Run(nodes[number].of, nodes[number].layer, choice[slot] if slot >= 0 else -1) for number, slot in self.shape
        )

    def fit(self, budget_bytes: int, deadline: Deadline) -> bool:
        """Choose options that keep the budget, if that looks possible, and then faster ones that still do."""
        frugal = next((choice for choice in self._frugal_choices() if self._peak_bytes(choice) <= budget_bytes), None)
        if frugal is None:
            return False
        if not self._spare(budget_bytes, deadline):
            self.choice = frugal
        self._speed_up(budget_bytes, deadline)
        return True

    def _frugal_choices(self) -> Iterator[dict[int, int]]:
        """The options that leave the least; those that need the least with what their runs hold."""
        yield {slot: self._least_held(slot, with_overhead=False) for slot in self._places}
        yield {slot: self._least_held(slot, with_overhead=True) for slot in self._places}

    def _least_held(self, slot: int, *, with_overhead: bool) -> int:
        ways = [self._judge.nodes[self.shape[place][0]].ways for place in self._places[slot]]

        def held_bytes(option: int) -> int:
            overheads = (of_node[option].overhead_bytes for of_node in ways) if with_overhead else ()
            return self._left_bytes(slot)[option] + max(overheads, default=0)

        possible = (option for option, seconds in enumerate(self._seconds[slot]) if math.isfinite(seconds))
        return min(possible, key=lambda option: (held_bytes(option), self._seconds[slot][option]))

    def _peak_bytes(self, choice: dict[int, int]) -> int:
        return int(self._judge.memory(self._runs(choice)).max(initial=0))

    def _spare(self, budget_bytes: int, deadline: Deadline) -> bool:
        """Change options, none twice, until the budget is kept; whether it is."""
        tried = set(self.choice.items())
        while True:
            memory = self._judge.memory(self.runs())
            worst = int(memory.argmax())
            excess = int(memory[worst]) - budget_bytes
            if excess <= 0:
                return True
            moves = [move for move in self._moves(worst, excess) if move[1:] not in tried]
            if not moves or deadline.expired:
                return False
            _, slot, option = min(moves)
            self.choice[slot] = option
            tried.add((slot, option))

    def _moves(self, place: int, excess: int) -> Iterator[tuple[float, int, int]]:
        """Options that hold less at a place: the time each costs for a byte that is needed, slot and option."""
        for slot, now in self.choice.items():
            held = self._held_bytes(slot, place)
            for option, seconds in enumerate(self._seconds[slot]):
                if held[option] < held[now] and math.isfinite(seconds):
                    spared = min(held[now] - held[option], excess)
                    yield (seconds - self._seconds[slot][now]) / spared, slot, option

    def _held_bytes(self, slot: int, place: int) -> list[int]:
        """Per option of a slot, what it holds at a place of the shape, as far as that depends on the option."""
        number, running = self.shape[place]
        places = self._places[slot]
        if running == slot:
            ways = self._judge.nodes[number].ways
            return [left + way.overhead_bytes for left, way in zip(self._left_bytes(slot), ways, strict=True)]
        return self._left_bytes(slot) if places[0] < place < places[-1] else [0] * len(self._seconds[slot])

    def _left_bytes(self, slot: int) -> list[int]:
        """Per option of a slot, what waits for the backward: the phantom, and data that this option reads."""
        if slot < 0:
            return [0]
        layers = self._judge.level.layers
        if slot >= len(layers):
            return [option.phantom_bytes for option in layers[slot - len(layers)].options]
        return [option.phantom_bytes + self._bytes(option.backward_reads) for option in layers[slot].options]

    def _bytes(self, data: frozenset[int]) -> int:
        return sum(self._judge.level.data_bytes[datum] for datum in data)

    def _speed_up(self, budget_bytes: int, deadline: Deadline) -> None:
        """Whatever faster option fits, those first that save the most time."""
        gains = sorted(
            (seconds - self._seconds[slot][now], slot, option)
            for slot, now in self.choice.items()
            for option, seconds in enumerate(self._seconds[slot])
            if seconds < self._seconds[slot][now]
        )
        for _, slot, option in gains:
            now = self.choice[slot]
            if deadline.expired or self._seconds[slot][option] >= self._seconds[slot][now]:
                continue
            if self._peak_bytes(self.choice | {slot: option}) <= budget_bytes:
                self.choice[slot] = option

    def _slot_seconds(self, places: Sequence[int]) -> list[float]:
        """Per option of a slot, what all its runs take."""
        ways = zip(*(self._judge.nodes[self.shape[place][0]].ways for place in places), strict=True)
        return [math.fsum(way.seconds for way in of_option) for of_option in ways]
