"""H-ILP: the judge of a level, the heuristic and the program, against a search that drops data step by step."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations, count

import pytest
from hypothesis import given, strategies as st

from rematch.errors import ScheduleError, SolverError
from rematch.solvers.base import Deadline
from rematch.solvers.common.highs import minimise
from rematch.solvers.hiremate.hilp import heuristic, price, solve_level
from rematch.solvers.hiremate.hilp_model import HilpModel
from rematch.solvers.hiremate.level import Layer, LayerOption, Level, LevelSolution, Moment, Pass, Run
from rematch.solvers.hiremate.pricing import Judge
from tests.examples import examples

LOSS = Run(Pass.LOSS)


def forward(layer: int, option: int = 0) -> Run:
    return Run(Pass.FORWARD, layer, option)


def backward(layer: int, option: int = 0) -> Run:
    return Run(Pass.BACKWARD, layer, option)


def data(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


# --- ground truth -----------------------------------------------------------------------------------------------------

Contributions = frozenset[tuple[int, int]]  # pairs of datum and maker
Phantoms = frozenset[tuple[int, int]]  # pairs of layer and option


@dataclass(frozen=True)
class State:
    """What is in memory between two runs of a phase. `after` is the last node run in it."""

    phase: int = 0
    after: int = -1
    contributions: Contributions = frozenset()
    phantoms: Phantoms = frozenset()


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
        waits = (layer, option) in state.phantoms
        if math.isinf(seconds) or (kind is Pass.BACKWARD and not waits):
            return
        if not all(self.complete(datum, state.contributions) for datum in reads):
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

    def following(self, node: int, phase: int, kept: Contributions, phantoms: Phantoms) -> State:
        at_the_end = node == len(self.order) - 1
        done = not at_the_end or all(self.complete(datum, kept) for datum in self.level.final)
        return State(phase + 1, -1, kept, phantoms) if node == phase and done else State(phase, node, kept, phantoms)

    def complete(self, datum: int, contributions: Contributions) -> bool:
        return all((datum, maker) in contributions for maker in self.makers[datum])

    def phantoms_after(self, state: State, node: int, option: int) -> Iterator[Phantoms]:
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

    def phantom_bytes(self, phantoms: Phantoms) -> int:
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


def chain_of(count: int, *options: LayerOption) -> Level:
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
    return Level(
        layers=tuple(layers),
        data_bytes=(1,) * (2 * count),
        backward_order=tuple(reversed(range(count))),
        loss_reads=data(count - 1),
        loss_makes=data(2 * count - 1),
    )


SAVES = LayerOption(forward_seconds=1.0, backward_seconds=2.0, phantom_bytes=10)
SAVES_NOTHING = LayerOption(forward_seconds=1.0, backward_seconds=3.0, phantom_bytes=0, backward_moments=(Moment(10),))


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


@examples(120)
@given(levels(), st.integers(0, 8), st.booleans(), st.booleans())
def test_equals_the_search(level: Level, less: int, corrections: bool, repeat_backward: bool) -> None:
    check_against_search(level, less, corrections=corrections, repeat_backward=repeat_backward)


@examples(40)
@given(levels(most_layers=3, most_data=3), st.integers(1, 8))
def test_equals_the_search_with_three_layers(level: Level, less: int) -> None:
    check_against_search(level, less, corrections=True, repeat_backward=False)


def check_against_search(level: Level, less: int, *, corrections: bool, repeat_backward: bool) -> None:
    """With `less` bytes than running everything once, each layer with its fastest option, would take."""
    budget_bytes = max(0, price(level, fastest(level)).peak_bytes - less)
    options = {"corrections": corrections, "repeat_backward": repeat_backward}
    least = Search(level, budget_bytes, **options).least_seconds()
    assert least_by_program(level, budget_bytes, **options) == pytest.approx(least)
    found = solved(level, budget_bytes, **options)
    if found is None:
        assert math.isinf(least)
        return
    assert found == replace(price(level, found.runs), proved=True)
    assert found.peak_bytes <= budget_bytes
    if corrections:
        assert found.seconds == pytest.approx(least)
    else:  # the heuristic knows of them in any case
        assert found.seconds <= least + 1e-9


def least_by_program(level: Level, budget_bytes: int, **options: bool) -> float:
    """Without the help of the heuristic; inf if the program has no solution."""
    model = HilpModel(Judge(level), budget_bytes, **options)
    found = minimise(model.program, deadline=Deadline(20.0))
    assert found.finished
    if found.point is None:
        return math.inf
    runs = price(level, model.runs_at(found.point))
    assert runs.peak_bytes <= budget_bytes
    assert runs.seconds == pytest.approx(found.objective / model.percent)
    return runs.seconds


@pytest.mark.parametrize(("budget_bytes", "seconds"), [(11, None), (12, 11.0), (21, 11.0), (22, 10.0), (32, 9.0)])
def test_options_are_chosen_by_budget(budget_bytes: int, seconds: float | None) -> None:
    found = solved(chain_of(3, SAVES, SAVES_NOTHING), budget_bytes)
    assert (found and found.seconds) == seconds
    assert found is None or (found.proved and found.peak_bytes <= budget_bytes)


def test_a_forward_runs_again_and_replaces_its_phantom() -> None:
    found = solved(chain_of(2, SAVES), 12)
    assert found == LevelSolution((forward(0), forward(1), LOSS, backward(1), forward(0), backward(0)), 7.0, 12, True)
    assert solved(chain_of(2, SAVES), 11) is None


def test_a_phantom_does_not_outlive_another_forward_of_its_layer() -> None:
    """Datum 0 must go during the loss and be made again for the backward of layer 1.

    Only before and after all others is there room for the forward of layer 0 with its own option, so the fastest way
    would be to keep its phantom of two bytes from the beginning. But the forward in between, with the other option,
    takes its place.
    """
    saving = LayerOption(1.0, 2.0, 2, forward_moments=(Moment(9),))
    passing = LayerOption(forward_seconds=0.5, backward_seconds=math.inf, phantom_bytes=0)
    first, second = chain_of(2, LayerOption(1.0, 2.0, 0)).layers
    layers = (replace(first, options=(saving, passing)), replace(second, backward_reads=data(0, 3)))
    level = replace(chain_of(2, saving), layers=layers, data_bytes=(12, 0, 0, 8), loss_overhead_bytes=13)
    assert least_by_program(level, 23) == 0.5 + 1.0 + 0.5 + 2.0 + 1.0 + 2.0
    assert Search(level, 23, corrections=True, repeat_backward=False).least_seconds() == 7.0


def test_corrections_allow_what_the_plain_limit_refuses() -> None:
    """Two bytes are taken once the gradient of three has been read; (10) has both at the same time."""
    option = LayerOption(1.0, 1.0, 5, backward_moments=(Moment(2, finished=data(1)),))
    level = replace(chain_of(1, option), data_bytes=(1, 3))
    assert least_by_program(level, 9, corrections=False) == math.inf
    assert least_by_program(level, 9) == 2.0
    assert solved(level, 9) == LevelSolution((forward(0), LOSS, backward(0)), 2.0, 9, True)
    assert solved(level, 8) is None  # the loss: 5 + 1 + 3


@pytest.mark.parametrize("moment", [Moment(0), Moment(0, finished=data(2)), Moment(0, unmade=data(2))])
def test_a_correction_of_one_option_does_not_bind_another(moment: Moment) -> None:
    """Option 1 never has its gradients in and out in memory at once. The rows of option 0 must not say it has."""
    apart = (Moment(0, finished=data(3)), Moment(0, unmade=data(2)))
    large = LayerOption(1.0, 1.0, 7, backward_moments=(moment,))
    level = chain_of(2, large, LayerOption(1.0, 2.0, 0, backward_moments=apart))
    layers = (replace(level.layers[0], options=(LayerOption(1.0, 1.0, 0),)), level.layers[1])
    level = replace(level, layers=layers, data_bytes=(0, 0, 4, 4))
    assert least_by_program(level, 6) == 1.0 + 1.0 + 2.0 + 1.0


def test_an_option_may_need_data_that_others_do_not() -> None:
    reads_output = LayerOption(1.0, 1.0, 0, backward_reads=data(0))
    level = chain_of(2, LayerOption(1.0, 2.0, 0))
    options = (reads_output, LayerOption(1.0, 2.0, 0))
    level = replace(level, layers=(replace(level.layers[0], options=options), level.layers[1]), data_bytes=(5, 1, 1, 1))
    roomy, tight = solved(level, 7), solved(level, 6)
    assert roomy is not None and roomy.runs[-1] == backward(0, 0) and roomy.peak_bytes == 7
    assert tight is not None and tight.runs[-1] == backward(0, 1) and tight.peak_bytes == 6


def test_all_contributions_are_made_again() -> None:
    """Both forwards add to datum 0, which must go while the backward of layer 1 takes its ten bytes."""
    plain, large = LayerOption(1.0, 1.0, 0), LayerOption(1.0, 1.0, 0, backward_moments=(Moment(10),))
    adds = Layer((plain,), forward_makes=data(0), backward_reads=data(0))
    level = Level((adds, replace(adds, options=(large,), backward_reads=data())), (5,), (1, 0), loss_reads=data(0))
    assert least_by_program(level, 15) == 4.0
    assert least_by_program(level, 14) == 6.0
    found = solved(level, 14)
    assert found is not None
    assert found.runs == (forward(0), forward(1), LOSS, backward(1), forward(0), forward(1), backward(0))


def test_a_first_contribution_waits_for_the_second() -> None:
    """Layers 0 and 2 add to datum 0, and the forward of layer 1 between them has no room for it.

    At first layer 0 can run again behind it. After the backward of layer 2, which has no room for data at all, all
    three would have to run again in one phase.
    """
    plain, large = LayerOption(1.0, 1.0, 0), LayerOption(1.0, 1.0, 0, backward_moments=(Moment(12),))
    layers = (
        Layer((plain,), forward_makes=data(0), backward_reads=data()),
        Layer((replace(plain, forward_moments=(Moment(6),)),), forward_makes=data(1), backward_reads=data(0, 1)),
        Layer((large,), forward_makes=data(0)),
    )
    level = Level(layers, (5, 5), (2, 1, 0))
    assert least_by_program(level, 12) == math.inf
    assert least_by_program(level, 16) == 6.0 + 3.0
    assert least_by_program(level, 22) == 6.0


def test_a_layer_without_backward_leaves_nothing() -> None:
    level = chain_of(2, SAVES)
    level = replace(level, layers=(replace(level.layers[0], has_backward=False), level.layers[1]), backward_order=(1,))
    assert solved(level, 12) == LevelSolution((forward(0), forward(1), LOSS, backward(1)), 4.0, 12, True)


def test_an_option_for_the_forward_alone() -> None:
    """Cheaper to pass through with, but the backward needs the forward with another option."""
    passing = LayerOption(forward_seconds=0.5, backward_seconds=math.inf, phantom_bytes=0)
    found = solved(chain_of(2, SAVES, passing), 12)
    assert found is not None and found.seconds == 6.5
    assert found.runs == (forward(0, 1), forward(1), LOSS, backward(1), forward(0), backward(0))
    with pytest.raises(ScheduleError, match="cannot be run"):
        price(chain_of(1, SAVES, passing), [forward(0, 1), LOSS, backward(0, 1)])


def test_given_data_are_there_all_along() -> None:
    level = replace(chain_of(1, SAVES), data_bytes=(1, 1, 7))
    assert price(level, once_through(level)).peak_bytes == 10 + 1 + 1 + 7
    assert solved(level, 18) is None
    assert solved(level, 6) is None  # less than what is given


# --- start, deadline, gap ---------------------------------------------------------------------------------------------


def test_a_start_is_improved_on() -> None:
    level = chain_of(3, SAVES, SAVES_NOTHING)
    slow = once_through(level, 1)
    found = solve_level(level, 22, deadline=Deadline(20.0), start=slow)
    assert found is not None and found.seconds == 10.0 and price(level, slow).seconds == 12.0


def test_an_expired_deadline_leaves_the_start() -> None:
    level = chain_of(3, SAVES, SAVES_NOTHING)
    slow = once_through(level, 1)
    assert solve_level(level, 22, deadline=Deadline(0.0), start=slow) == price(level, slow)


def test_an_expired_deadline_without_a_start() -> None:
    level = chain_of(40, SAVES, SAVES_NOTHING)
    found = solve_level(level, 20, deadline=Deadline(0.0))
    assert found is not None and found.peak_bytes <= 20 and not found.proved


def test_a_start_over_budget_does_not_count_and_a_broken_one_is_refused() -> None:
    level = chain_of(2, SAVES)
    found = solve_level(level, 12, deadline=Deadline(20.0), start=once_through(level))
    assert found is not None and found.seconds == 7.0
    with pytest.raises(ScheduleError):
        solve_level(level, 12, deadline=Deadline(20.0), start=[LOSS])


def test_within_the_gap_the_start_will_do() -> None:
    level = chain_of(3, SAVES, SAVES_NOTHING)
    slow = once_through(level, 1)
    for gap_target in (0.25, 0.5):  # 12 seconds, where 10 can be had, and 9 with any budget
        found = solve_level(level, 22, deadline=Deadline(20.0), start=slow, gap_target=gap_target)
        assert found == replace(price(level, slow), proved=True)


@given(levels(), st.integers(0, 8))
def test_a_point_holds_the_runs_it_was_made_of(level: Level, less: int) -> None:
    budget_bytes = max(0, price(level, fastest(level)).peak_bytes - less)
    runs = heuristic(level, budget_bytes)
    if runs is None:
        return
    model = HilpModel(Judge(level), budget_bytes)
    point = model.point_of(runs)
    if point is not None:
        assert model.runs_at([point.get(column, 0.0) for column in range(model.program.column_count)]) == list(runs)


# --- heuristic --------------------------------------------------------------------------------------------------------


@given(levels(most_layers=4, most_data=6), st.integers(0, 30))
def test_the_heuristic_keeps_the_budget(level: Level, budget_bytes: int) -> None:
    runs = heuristic(level, budget_bytes)
    assert runs is None or price(level, runs).peak_bytes <= budget_bytes


@pytest.mark.parametrize(("budget_bytes", "seconds"), [(162, 48), (161, 50), (60, 60), (25, 70), (14, 112), (13, 168)])
def test_the_heuristic_runs_forwards_again_where_options_do_not_help(budget_bytes: int, seconds: float) -> None:
    """16 layers of 10 bytes: 48 seconds without and 64 with one recomputation of everything."""
    level = chain_of(16, SAVES)
    runs = heuristic(level, budget_bytes)
    assert runs is not None and price(level, runs).seconds <= seconds


def test_the_heuristic_mixes_options() -> None:
    level = chain_of(8, SAVES, SAVES_NOTHING)
    runs = heuristic(level, 62)
    assert runs is not None and price(level, runs).seconds == 24.0 + 2.0
    assert sorted(run.option for run in runs if run.of is Pass.BACKWARD) == [0, 0, 0, 0, 0, 0, 1, 1]


# --- the judge --------------------------------------------------------------------------------------------------------


def test_price_by_hand() -> None:
    """Phantoms of 10 and data of 1 byte. At the worst both phantoms, what is read and what is made."""
    level = chain_of(2, SAVES)
    assert price(level, once_through(level)) == LevelSolution(tuple(once_through(level)), 6.0, 22)
    assert Judge(level).memory(once_through(level)).tolist() == [11, 22, 22, 22, 11]
    again = [forward(0), forward(1), LOSS, backward(1), forward(0), backward(0)]
    assert Judge(level).memory(again).tolist() == [11, 12, 12, 12, 12, 11]


def test_contributions_add_up_in_one_datum() -> None:
    """Layers 1 and 2 both add to datum 0, which the backward of layer 0 reads."""
    plain = LayerOption(1.0, 1.0, 0)
    adds = Layer((plain,), backward_makes=data(0))
    level = Level((Layer((plain,), backward_reads=data(0)), adds, adds), (3,), (2, 1, 0))
    runs = once_through(level)
    assert Judge(level).memory(runs).tolist() == [0, 0, 0, 0, 3, 3, 3]
    repeated = [*runs[:-1], forward(2), backward(2), backward(0)]  # the other contribution is kept meanwhile
    assert Judge(level).memory(repeated).tolist() == [0, 0, 0, 0, 3, 3, 3, 3, 3]
    both = [*runs[:-1], backward(2), backward(1), backward(0)]  # nobody reads what the first two made
    assert Judge(level).memory(both).tolist() == [0, 0, 0, 0, 3, 3, 3, 3, 3]
    apart = [*runs[:-1], forward(2), backward(2), backward(1), backward(0)]
    assert Judge(level).memory(apart).tolist() == [0, 0, 0, 0, 3, 3, 0, 3, 3, 3]


def test_what_a_run_leaves_counts_even_if_no_moment_of_it_has_it() -> None:
    level = chain_of(1, LayerOption(1.0, 1.0, 2, forward_moments=(Moment(1, unmade=data(0)),)))
    level = replace(level, data_bytes=(5, 0))
    assert Judge(level).memory(once_through(level)).tolist() == [2 + 5, 2 + 5, 2]


def test_final_data_stay_and_unread_ones_do_not() -> None:
    level = replace(chain_of(2, LayerOption(1.0, 1.0, 0)), data_bytes=(4, 1, 1, 1))
    assert Judge(level).memory(once_through(level)).tolist() == [4, 5, 2, 2, 1]
    kept = replace(level, final=data(0))
    assert Judge(kept).memory(once_through(level)).tolist() == [4, 5, 6, 6, 5]


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([forward(0), LOSS, backward(0, 1)], "finds the phantom of option 0"),
        ([forward(0), forward(0, 1), LOSS, backward(0)], "finds the phantom of option 1"),
        ([LOSS, forward(0), backward(0)], "topological order"),
        ([forward(0), backward(0), LOSS], "topological order"),
        ([forward(0), LOSS, LOSS, backward(0)], "exactly once"),
        ([forward(0), LOSS], "never runs"),
        ([forward(1), LOSS, backward(0)], "no forward of layer 1"),
        ([forward(0, 2), LOSS, backward(0, 2)], "2 options"),
        ([forward(0, -1), LOSS, backward(0, -1)], "2 options"),
    ],
)
def test_runs_that_are_no_schedule_are_refused(runs: list[Run], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        price(chain_of(1, SAVES, SAVES_NOTHING), runs)


def test_a_level_must_be_in_topological_order() -> None:
    level = chain_of(2, SAVES)
    with pytest.raises(SolverError, match="reads datum 1 before"):
        Judge(replace(level, layers=(replace(level.layers[0], forward_reads=data(1)), level.layers[1])))
    with pytest.raises(SolverError, match="backward_order"):
        Judge(replace(level, backward_order=(1,)))
