"""H-ILP: the judge of a level, the heuristic and the program, against a search that drops data step by step."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations, count

import pytest
from hypothesis import given, settings, strategies as st

from rematch.errors import ScheduleError, SolverError
from rematch.solvers.base import Deadline
from rematch.solvers.hierarchy.hilp import heuristic, price, solve_level
from rematch.solvers.hierarchy.hilp_model import HilpModel
from rematch.solvers.hierarchy.level import Layer, LayerOption, Level, LevelSolution, Moment, Pass, Run
from rematch.solvers.hierarchy.pricing import Judge

LOSS = Run(Pass.LOSS)


def forward(layer: int, option: int = 0) -> Run:
    return Run(Pass.FORWARD, layer, option)


def backward(layer: int, option: int = 0) -> Run:
    return Run(Pass.BACKWARD, layer, option)


def data(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


# --- ground truth -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What is in memory between two runs of a phase. `after` is the last node run in it."""

    phase: int = 0
    after: int = -1
    contributions: frozenset[tuple[int, int]] = frozenset()  # (datum, maker)
    phantoms: frozenset[tuple[int, int]] = frozenset()  # (layer, option)


class Search:
    """The least seconds within a budget, by Dijkstra's algorithm over everything that can be in memory."""

    def __init__(self, level: Level, budget_bytes: int, *, corrections: bool, repeat_backward: bool) -> None:
        self.level, self.budget_bytes = level, budget_bytes
        self.corrections, self.repeat_backward = corrections, repeat_backward
        self.order = [
            *((Pass.FORWARD, layer) for layer in range(len(level.layers))),
            (Pass.LOSS, -1),
            *((Pass.BACKWARD, layer) for layer in level.backward_order),
        ]
        self.makers = {
            datum: {node for node in range(len(self.order)) if datum in self.makes(node)}
            for datum in range(len(level.data_bytes))
        }
        self.given = {datum for datum, makers in self.makers.items() if not makers}

    def least_seconds(self) -> float:
        """inf if nothing fits."""
        ticket = count()
        waiting = [(0.0, next(ticket), State())]
        best = {State(): 0.0}
        while waiting:
            seconds, _, state = heapq.heappop(waiting)
            if seconds > best[state]:
                continue
            if state.phase == len(self.order):
                return seconds
            for more, following in self.steps(state):
                if seconds + more < best.get(following, math.inf):
                    best[following] = seconds + more
                    heapq.heappush(waiting, (seconds + more, next(ticket), following))
        return math.inf

    def steps(self, state: State) -> Iterator[tuple[float, State]]:
        for node in range(state.after + 1, state.phase + 1):
            kind, layer = self.order[node]
            if node < state.phase and (kind is Pass.LOSS or (kind is Pass.BACKWARD and not self.repeat_backward)):
                continue
            for option in range(1 if kind is Pass.LOSS else len(self.level.layers[layer].options)):
                yield from self.runs(state, node, option)

    def runs(self, state: State, node: int, option: int) -> Iterator[tuple[float, State]]:
        kind, layer = self.order[node]
        reads, makes = self.reads(node, option), self.makes(node)
        seconds, moments, left = self.costs(node, option)
        complete = {d for d, makers in self.makers.items() if all((d, maker) in state.contributions for maker in makers)}
        waits = (layer, option) in state.phantoms
        if math.isinf(seconds) or not reads <= complete or (kind is Pass.BACKWARD and not waits):
            return
        if kind is Pass.FORWARD and any(of == layer for of, _ in state.phantoms):
            return  # whoever runs it again has dropped its phantom before
        before = {datum for datum, _ in state.contributions} | self.given
        made = state.contributions | {(datum, node) for datum in makes}
        for dropped in subsets((reads | makes) - self.given):
            kept = frozenset((datum, maker) for datum, maker in made if datum not in dropped)
            after = {datum for datum, _ in kept} | self.given
            if self.fits(state, moments, left, before, before | makes, after):
                for phantoms in self.phantoms_after(state, node, option):
                    if self.bytes(after) + self.phantom_bytes(phantoms) <= self.budget_bytes:
                        yield seconds, self.following(node, state.phase, kept, phantoms)

    def following(self, node: int, phase: int, kept: frozenset, phantoms: frozenset) -> State:
        if node == phase == len(self.order) - 1 and not self.level.final <= {d for d in self.makers if self.whole(d, kept)}:
            return State(phase, node, kept, phantoms)  # the end, but not a good one
        return State(phase + 1, -1, kept, phantoms) if node == phase else State(phase, node, kept, phantoms)

    def whole(self, datum: int, kept: frozenset) -> bool:
        return all((datum, maker) in kept for maker in self.makers[datum])

    def phantoms_after(self, state: State, node: int, option: int) -> Iterator[frozenset[tuple[int, int]]]:
        kind, layer = self.order[node]
        yield state.phantoms - {(layer, option)}
        if kind is not Pass.LOSS:
            yield state.phantoms | {(layer, option)}

    def fits(self, state: State, moments: tuple, left: int, before: set, meanwhile: set, after: set) -> bool:
        """Whether a run keeps the budget all along."""
        held = self.phantom_bytes(state.phantoms) + left
        for moment in moments or (Moment(0),):
            finished, unmade = (moment.finished, moment.unmade) if self.corrections else (data(), data())
            there = meanwhile - (unmade - before) - (finished - unmade - after)
            if self.bytes(there) + held + moment.overhead_bytes > self.budget_bytes:
                return False
        return True

    def phantom_bytes(self, phantoms: frozenset[tuple[int, int]]) -> int:
        return sum(self.level.layers[layer].options[option].phantom_bytes for layer, option in phantoms)

    def bytes(self, of: set[int] | frozenset[int]) -> int:
        return sum(self.level.data_bytes[datum] for datum in of)

    def costs(self, node: int, option: int) -> tuple[float, tuple[Moment, ...], int]:
        kind, layer = self.order[node]
        if kind is Pass.LOSS:
            return self.level.loss_seconds, (Moment(self.level.loss_overhead_bytes),), 0
        way = self.level.layers[layer].options[option]
        if kind is Pass.FORWARD:
            return way.forward_seconds, way.forward_moments, way.phantom_bytes
        return way.backward_seconds, way.backward_moments, 0

    def makes(self, node: int) -> frozenset[int]:
        kind, layer = self.order[node]
        if kind is Pass.LOSS:
            return self.level.loss_makes
        of = self.level.layers[layer]
        return of.forward_makes if kind is Pass.FORWARD else of.backward_makes

    def reads(self, node: int, option: int) -> frozenset[int]:
        kind, layer = self.order[node]
        if kind is Pass.LOSS:
            return self.level.loss_reads
        of = self.level.layers[layer]
        return of.forward_reads if kind is Pass.FORWARD else of.backward_reads | of.options[option].backward_reads


def subsets(of: frozenset[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(sorted(of), size) for size in range(len(of) + 1))


# --- levels -----------------------------------------------------------------------------------------------------------


@st.composite
def levels(draw: st.DrawFn, most_layers: int = 2, most_data: int = 4) -> Level:
    """Few layers; data with no, one or two makers anywhere, read anywhere after them, by some options only at times."""
    layer_count = draw(st.integers(1, most_layers))
    with_backward = [draw(st.integers(0, 4)) > 0 for _ in range(layer_count)]
    backward_order = draw(st.permutations([layer for layer, has in enumerate(with_backward) if has]))
    node_count = layer_count + 1 + len(backward_order)
    option_counts = [draw(st.integers(1, 2)) for _ in range(layer_count)]
    datum_count = draw(st.integers(1, most_data))
    makes: list[set[int]] = [set() for _ in range(node_count)]
    reads: list[set[int]] = [set() for _ in range(node_count)]
    for datum in range(datum_count):
        makers = draw(st.sets(st.integers(0, node_count - 1), max_size=2))
        readers = draw(st.sets(st.integers(max(makers, default=-1) + 1, node_count), max_size=3)) - {node_count}
        for maker in makers:
            makes[maker].add(datum)
        for reader in readers:
            reads[reader].add(datum)
    backward_node = {layer: layer_count + 1 + place for place, layer in enumerate(backward_order)}

    def moments(read: set[int], made: set[int]) -> tuple[Moment, ...]:
        some = st.sets(st.sampled_from(sorted(read | made))) if read | made else st.just(set())
        return tuple(
            Moment(draw(st.integers(0, 3)), frozenset(draw(some)), frozenset(draw(some) & made))
            for _ in range(draw(st.integers(0, 2)))
        )

    layers = []
    for layer in range(layer_count):
        node = backward_node.get(layer)
        read, made = (reads[node], makes[node]) if node is not None else (set(), set())
        special = draw(st.sets(st.sampled_from(sorted(read)))) if read else set()
        options = []
        for option in range(option_counts[layer]):
            own = draw(st.sets(st.sampled_from(sorted(special)))) if special else set()
            forward_only = option == 1 and draw(st.integers(0, 3)) == 0
            options.append(
                LayerOption(
                    forward_seconds=draw(st.integers(1, 4)),
                    backward_seconds=math.inf if forward_only else draw(st.integers(1, 4)),
                    phantom_bytes=draw(st.integers(0, 4)),
                    forward_moments=moments(reads[layer], makes[layer]),
                    backward_moments=moments((read - special) | own, made),
                    backward_reads=frozenset(own),
                )
            )
        layers.append(
            Layer(
                options=tuple(options),
                forward_reads=frozenset(reads[layer]),
                forward_makes=frozenset(makes[layer]),
                backward_reads=frozenset(read - special),
                backward_makes=frozenset(made),
                has_backward=node is not None,
            )
        )
    return Level(
        layers=tuple(layers),
        data_bytes=tuple(draw(st.integers(0, 4)) for _ in range(datum_count)),
        backward_order=tuple(backward_order),
        loss_reads=frozenset(reads[layer_count]),
        loss_makes=frozenset(makes[layer_count]),
        loss_seconds=1.0,
        loss_overhead_bytes=draw(st.integers(0, 2)),
        final=frozenset(draw(st.sets(st.integers(0, datum_count - 1), max_size=2))),
    )


def chain_of(count: int, *options: LayerOption, **others: object) -> Level:
    """Layers in a row: datum j is what layer j makes, datum count + j its gradient; layer 0 reads nothing."""
    layers = [
        Layer(
            options=options,
            forward_reads=data(j - 1) if j else data(),
            forward_makes=data(j),
            backward_reads=data(count + j),
            backward_makes=data(count + j - 1) if j else data(),
        )
        for j in range(count)
    ]
    level = Level(
        layers=tuple(layers),
        data_bytes=(1,) * (2 * count),
        backward_order=tuple(reversed(range(count))),
        loss_reads=data(count - 1),
        loss_makes=data(2 * count - 1),
    )
    return replace(level, **others)


SAVES = LayerOption(forward_seconds=1.0, backward_seconds=2.0, phantom_bytes=10)
SAVES_NOTHING = LayerOption(
    forward_seconds=1.0, backward_seconds=3.0, phantom_bytes=0, backward_moments=(Moment(10),)
)


def once_through(level: Level, option: int = 0) -> list[Run]:
    layers = range(len(level.layers))
    return [*(forward(j, option) for j in layers), LOSS, *(backward(j, option) for j in level.backward_order)]


def fastest(level: Level) -> tuple[Run, ...]:
    runs = heuristic(level, 10**9)
    assert runs is not None
    return runs


def solved(level: Level, budget_bytes: int, **options: bool) -> LevelSolution | None:
    return solve_level(level, budget_bytes, deadline=Deadline(20.0), **options)


# --- the program ------------------------------------------------------------------------------------------------------


@settings(max_examples=1000)
@given(levels(), st.integers(0, 8), st.booleans(), st.booleans())
def test_equals_the_search(level: Level, less: int, corrections: bool, repeat_backward: bool) -> None:
    check_against_search(level, less, corrections=corrections, repeat_backward=repeat_backward)


@settings(max_examples=200)
@given(levels(most_layers=3, most_data=3), st.integers(1, 8))
def test_equals_the_search_with_three_layers(level: Level, less: int) -> None:
    check_against_search(level, less, corrections=True, repeat_backward=False)


def check_against_search(level: Level, less: int, **options: bool) -> None:
    """With `less` bytes than running everything once, each layer with its fastest option, would take."""
    budget_bytes = max(0, price(level, fastest(level)).peak_bytes - less)
    least = Search(level, budget_bytes, **options).least_seconds()
    found = solved(level, budget_bytes, **options)
    if found is None:
        assert math.isinf(least)
        return
    assert found == replace(price(level, found.runs), proved=True)
    assert found.peak_bytes <= budget_bytes
    # The heuristic knows of corrections in any case, and of forwards in another order than the phases have them.
    assert found.seconds == pytest.approx(least) or found.seconds < least
    if options["corrections"]:
        assert found.seconds == pytest.approx(least)
