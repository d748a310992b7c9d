"""H-ILP: the fastest way to run a level within a budget, by integer programming.

`solve_level(level, budget_bytes, deadline=Deadline(10.0))`

J. Gusak et al., "HiRemate: hierarchical approach for efficient re-materialization of neural networks", ICML 2025, section
3.2.2 and appendix B. `hilp_model` has the program and what we changed in it, `pricing` judges what comes out.

`heuristic` needs no program: it starts the search, and stands in for it where time is short. For a few shapes of
schedules, from one run of everything to forward passes that are repeated before every backward pass (Chen et al., 2016;
Griewank, 1992), it starts from the fastest options and, as long as the budget is broken, takes the option that costs the
least time for each byte it spares at the worst moment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from rematch.solvers.base import Deadline
from rematch.solvers.hierarchy.hilp_model import HilpModel
from rematch.solvers.hierarchy.level import Level, LevelSolution, Pass, Run
from rematch.solvers.hierarchy.pricing import Judge, price
from rematch.solvers.highs import minimise

__all__ = ["heuristic", "price", "solve_level"]

_TOLERANCE = 1e-6  # percent of the least seconds


def solve_level(
    level: Level,
    budget_bytes: int,
    *,
    deadline: Deadline,
    start: Sequence[Run] | None = None,
    corrections: bool = True,
    repeat_backward: bool = False,
    gap_target: float = 1e-6,
) -> LevelSolution | None:
    """The fastest runs found, or None. `proved` if none of the program's kind is faster by more than `gap_target` of it.

    `start` are runs to improve on, by default those of `heuristic`.
    """
    judge = Judge(level)
    known = _within(judge, budget_bytes, start) or _within(judge, budget_bytes, _quick_runs(judge, budget_bytes, deadline))
    if known is not None and known.seconds <= judge.least_seconds * (1.0 + gap_target):
        return replace(known, proved=True)
    if deadline.expired or budget_bytes < judge.given_bytes:
        return known
    model = HilpModel(judge, budget_bytes, corrections=corrections, repeat_backward=repeat_backward)
    allowed = max(_TOLERANCE, 100.0 * gap_target)
    found = minimise(
        model.program,
        deadline=deadline,
        cutoff=math.inf if known is None else known.seconds * model.percent - allowed,
        absolute_gap=allowed,
        start=None if known is None else model.point_of(known.runs),
    )
    better = None if found.point is None else _within(judge, budget_bytes, model.runs_at(found.point))
    best = min((s for s in (known, better) if s is not None), key=lambda s: s.seconds, default=None)
    return None if best is None else replace(best, proved=found.finished and (found.point is None) == (better is None))


def _within(judge: Judge, budget_bytes: int, runs: Sequence[Run] | None) -> LevelSolution | None:
    """What the runs cost, unless they break the budget."""
    if runs is None:
        return None
    solution = judge.price(runs)
    return solution if solution.peak_bytes <= budget_bytes else None


# --- heuristic --------------------------------------------------------------------------------------------------------


def heuristic(level: Level, budget_bytes: int, *, deadline: Deadline | None = None) -> tuple[Run, ...] | None:
    """Runs within the budget found quickly, or None."""
    return _quick_runs(Judge(level), budget_bytes, deadline or Deadline())


# A step of a shape is a node and the slot whose option it takes: that of its layer, for the forward and backward that
# belong together, or a second one for forwards whose phantom nobody wants.
Step = tuple[int, int]


def _quick_runs(judge: Judge, budget_bytes: int, deadline: Deadline) -> tuple[Run, ...] | None:
    fitters = sorted((_Fitter(judge, shape) for shape in set(_shapes(judge))), key=lambda f: f.seconds)
    best: tuple[Run, ...] | None = None
    best_seconds = math.inf
    for fitter in fitters:
        if fitter.seconds >= best_seconds or (deadline.expired and fitter is not fitters[0]):
            break
        if fitter.fit(budget_bytes, deadline) and fitter.seconds < best_seconds:
            best, best_seconds = fitter.runs(), fitter.seconds
    return best


def _shapes(judge: Judge) -> Iterator[tuple[Step, ...]]:
    """Once through; then the last `kept` layers once and the others again before their backward passes."""
    order = judge.level.backward_order
    again = _Again(judge)
    for size in _group_sizes(len(order)):
        for kept in {size, *(len(order) * quarter // 4 for quarter in range(1, 5))}:
            rest = order[kept:]
            groups = [rest[at : at + size] for at in range(0, len(rest), size)]
            yield again.shape(order[:kept], chain.from_iterable(map(again.group, groups)))
    for size in (1, 2):
        yield again.shape(order[:size], again.halved(order[size:], size))
    yield again.shape(order[:1], again.from_the_start(order[1:]))


def _group_sizes(count: int) -> set[int]:
    return {-(-count // groups) for groups in range(1, count + 1)}


class _Again:
    """Ways to run forwards again for the backwards of some layers, given in backward order."""

    def __init__(self, judge: Judge) -> None:
        self._number = judge.number
        self._layers = len(judge.level.layers)
        self._lone = [j for j, layer in enumerate(judge.level.layers) if not layer.has_backward]

    def shape(self, kept: Sequence[int], rest: Iterator[Step] | tuple[Step, ...]) -> tuple[Step, ...]:
        """Forward, loss, backward of the `kept` layers, and the `rest`."""
        once = set(kept)
        forward = (self._save(j) if j in once else self._pass(j) for j in range(self._layers))
        return (*forward, (self._number[Pass.LOSS, -1], -1), *map(self._back, kept), *rest)

    def group(self, layers: Sequence[int]) -> Iterator[Step]:
        """All forwards, then all backwards."""
        saving = set(layers)
        yield from (self._save(j) if j in saving else self._pass(j) for j in self._with_lone(layers))
        yield from map(self._back, layers)

    def halved(self, layers: Sequence[int], size: int) -> Iterator[Step]:
        """Run up to the later half, do that half, then the other: few data wait, log n forwards each."""
        if len(layers) <= size:
            yield from self.group(layers)
            return
        later, earlier = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        yield from map(self._pass, self._with_lone(earlier))
        yield from self.halved(later, size)
        yield from self.halved(earlier, size)

    def from_the_start(self, layers: Sequence[int]) -> Iterator[Step]:
        """Before each backward everything up to it: nothing waits, n forwards each."""
        for at in range(len(layers)):
            yield from map(self._pass, self._with_lone(layers[at + 1 :]))
            yield from self.group(layers[at : at + 1])

    def _with_lone(self, layers: Sequence[int]) -> list[int]:
        """In forward order, and with layers between them that have no backward."""
        between = (j for j in self._lone if layers and min(layers) < j < max(layers))
        return sorted((*layers, *between))

    def _save(self, layer: int) -> Step:
        return self._number[Pass.FORWARD, layer], layer

    def _pass(self, layer: int) -> Step:
        return self._number[Pass.FORWARD, layer], self._layers + layer

    def _back(self, layer: int) -> Step:
        return self._number[Pass.BACKWARD, layer], layer


class _Fitter:
    """A shape with an option in every slot, to begin with the fastest."""

    def __init__(self, judge: Judge, shape: Sequence[Step]) -> None:
        self._judge, self._shape = judge, shape
        self._places: dict[int, list[int]] = defaultdict(list)
        for place, (_, slot) in enumerate(shape):
            self._places[slot].append(place)
        self._seconds = {slot: self._slot_seconds(places) for slot, places in self._places.items()}
        self._choice = {slot: seconds.index(min(seconds)) for slot, seconds in self._seconds.items()}

    @property
    def seconds(self) -> float:
        return math.fsum(self._seconds[slot][option] for slot, option in self._choice.items())

    def runs(self) -> tuple[Run, ...]:
        nodes = self._judge.nodes
        return tuple(
            Run(nodes[number].of, nodes[number].layer, self._choice[slot] if slot >= 0 else -1)
            for number, slot in self._shape
        )

    def fit(self, budget_bytes: int, deadline: Deadline) -> bool:
        """Change options until the budget is kept, then back to faster ones where it allows; whether it is kept."""
        tried = {(slot, option) for slot, option in self._choice.items()}
        while True:
            memory = self._judge.memory(self.runs())
            worst = int(memory.argmax())
            excess = int(memory[worst]) - budget_bytes
            if excess <= 0:
                break
            moves = [move for move in self._moves(worst, excess) if move[1:] not in tried]
            if not moves or deadline.expired:
                return False
            _, slot, option = min(moves)
            self._choice[slot] = option
            tried.add((slot, option))
        self._speed_up(budget_bytes, deadline)
        return True

    def _moves(self, place: int, excess: int) -> Iterator[tuple[float, int, int]]:
        """Options that hold less at a place: the time each costs for a byte that is needed, slot and option."""
        for slot, now in self._choice.items():
            held = self._held_bytes(slot, place)
            for option, seconds in enumerate(self._seconds[slot]):
                if held[option] < held[now] and math.isfinite(seconds):
                    spared = min(held[now] - held[option], excess)
                    yield (seconds - self._seconds[slot][now]) / spared, slot, option

    def _held_bytes(self, slot: int, place: int) -> list[int]:
        """Per option of a slot, what it holds at a place of the shape, as far as that depends on the option."""
        number, running = self._shape[place]
        places = self._places[slot]
        layer = self._judge.nodes[self._shape[places[0]][0]].layer
        if running != slot and not places[0] < place < places[-1] or layer < 0:
            return [0] * len(self._seconds[slot])
        waiting = len(places) > 1 and slot < len(self._judge.level.layers)
        held = [
            option.phantom_bytes + (self._bytes(option.backward_reads) if waiting else 0)
            for option in self._judge.level.layers[layer].options
        ]
        if running == slot:
            held = [size + way.overhead_bytes for size, way in zip(held, self._judge.nodes[number].ways, strict=True)]
        return held

    def _bytes(self, data: frozenset[int]) -> int:
        return sum(self._judge.level.data_bytes[datum] for datum in data)

    def _speed_up(self, budget_bytes: int, deadline: Deadline) -> None:
        """Whatever faster option fits, those first that save the most time."""
        gains = sorted(
            (seconds - self._seconds[slot][now], slot, option)
            for slot, now in self._choice.items()
            for option, seconds in enumerate(self._seconds[slot])
            if seconds < self._seconds[slot][now]
        )
        for _, slot, option in gains:
            now = self._choice[slot]
            if deadline.expired or self._seconds[slot][option] >= self._seconds[slot][now]:
                continue
            self._choice[slot] = option
            if self._judge.memory(self.runs()).max(initial=0) > budget_bytes:
                self._choice[slot] = now

    def _slot_seconds(self, places: Sequence[int]) -> list[float]:
        """Per option of a slot, what all its runs take."""
        ways = zip(*(self._judge.nodes[self._shape[place][0]].ways for place in places), strict=True)
        return [math.fsum(way.seconds for way in of_option) for of_option in ways]
