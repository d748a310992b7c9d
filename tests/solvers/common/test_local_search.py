"""The local search: its incremental memory against the oracle, its results against the ground truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rematch.errors import ScheduleError
from rematch.graph import Graph, Op, Phase, Schedule, Value, baseline, simulate
from rematch.graph.generators import chain, gpt, random_layered
from rematch.solvers import Deadline, Problem
from rematch.solvers.common import local_search
from rematch.solvers.common.local_search import LocalSearch, make_model, make_state, recomputations_of, schedule_of
from rematch.solvers.common.pauses import PausedGraph
from tests.examples import examples
from tests.problems import changed_resident, held_for_the_loss
from tests.strategies import graphs, sequences, staged_sequences


def peak(graph: Graph, schedule: Schedule | None = None) -> int:
    return simulate(graph, schedule or baseline(graph)).checked().peak_bytes


def less_than_baseline(graph: Graph, percent: int) -> Problem:
    return Problem(graph, peak(graph) * percent // 100)


class Replay:
    """A problem's model and state, compared with the oracle stage by stage."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        from rematch.solvers.common import local_search_kernels

        self.kernels = local_search_kernels
        self.graph = problem.graph
        self.model = make_model(problem)
        self.state = make_state(self.model, seed, 16 * (len(problem.graph.ops) + 4))

    def load(self, schedule: Schedule) -> None:
        self.kernels.load(self.model, self.state, recomputations_of(self.graph, schedule))

    def anneal(self, moves: int, temperature: float) -> None:
        self.state.levels[self.kernels.TEMPERATURE] = temperature * self.model.cost.mean() + 1.0
        self.state.levels[self.kernels.WEIGHT] = self.model.cost.mean() / 4
        self.kernels.anneal(self.model, self.state, moves)

    @property
    def schedule(self) -> Schedule:
        k = self.kernels
        in_use = self.state.pool[: self.state.counters[k.RECOMPUTED]]
        return schedule_of(self.graph, self.state.nodes[in_use][:, [k.STAGE, k.OP]])

    def check(self) -> None:
        k, schedule = self.kernels, self.schedule
        seen = simulate(self.graph, schedule).checked()
        stage = 0
        expected = np.zeros(len(self.graph.ops) + 1, dtype=np.int64)  # in the last stage nothing may run
        for step, memory in zip(schedule.steps.tolist(), seen.timeline_bytes.tolist(), strict=True):
            if step >= 0:
                expected[stage] = max(expected[stage], memory - self.graph.resident_bytes)
                stage += self.graph.order[stage : stage + 1] == (step,)
        ran = len(self.graph.ops) + bool(len(schedule.ops) and schedule.ops[-1] != self.graph.order[-1])
        assert self.state.peak[:ran].tolist() == expected[:ran].tolist()
        excess = np.maximum(self.state.peak - self.model.budget[0], 0).sum()
        assert self.state.counters[k.EXCESS] == excess
        counts = seen.counts[list(self.graph.order)]
        assert self.state.counters[k.COST] == np.dot(counts - 1, self.model.cost[:-1])


@given(graphs(), st.data())
@examples(300)
def test_memory_of_any_set_equals_the_oracles(graph: Graph, data: st.DataObject) -> None:
    replay = Replay(less_than_baseline(graph, 80))
    replay.check()
    for _ in range(2):
        schedule = Schedule.from_ops(graph, data.draw(staged_sequences(graph)))
        replay.load(schedule)
        replay.check()
        assert replay.schedule == schedule


@given(graphs(max_ops=10), st.integers(30, 100), st.integers(0, 2**32), st.sampled_from((0.0, 0.3, 10.0)))
@examples(150)
def test_memory_equals_the_oracles_along_accepted_and_undone_moves(
    graph: Graph, percent: int, seed: int, temperature: float
) -> None:
    replay = Replay(less_than_baseline(graph, percent), seed)
    if not replay.model.outputs.size:
        return
    for _ in range(12):
        replay.anneal(3, temperature)
        replay.check()


@pytest.mark.parametrize("graph", [gpt(layers=2), random_layered(80), chain(40)], ids=lambda graph: graph.name)
def test_memory_equals_the_oracles_on_longer_walks(graph: Graph) -> None:
    replay = Replay(less_than_baseline(graph, 60), seed=5)
    for temperature in (3.0, 0.3, 0.01):
        for _ in range(10):
            replay.anneal(200, temperature)
            replay.check()


def test_a_refused_move_leaves_the_state_as_it_was() -> None:
    graph = random_layered(60)
    replay = Replay(less_than_baseline(graph, 80), seed=2)
    replay.anneal(2000, 0.01)
    k = replay.kernels
    stuck = 0
    for _ in range(300):
        before, peaks, cost = replay.schedule, replay.state.peak.copy(), replay.state.counters[k.COST]
        draws = replay.state.random.copy()
        replay.anneal(1, 0.0)
        if replay.state.counters[k.COST] == cost and replay.schedule == before:
            stuck += 1
            assert replay.state.peak.tolist() == peaks.tolist()
        assert replay.state.random != draws
    assert 0 < stuck < 300


def test_a_held_value_made_again_after_the_loss_counts_twice() -> None:
    graph = Graph(
        ops=(
            Op("forward", 1.0, (), (0, 1)),
            Op("loss", 1.0, (0,), (2,), phase=Phase.LOSS),
            Op("wide", 1.0, (2,), (3,), phase=Phase.BACKWARD),
            Op("backward", 1.0, (1, 3), (4,), phase=Phase.BACKWARD),
        ),
        values=(Value("out", 10), Value("saved", 20), Value("tangent", 1), Value("g", 5), Value("grad", 5)),
        held=frozenset({0}),
        targets=frozenset({4}),
    )
    replay = Replay(Problem(graph, 100))
    replay.load(Schedule.from_ops(graph, [0, 1, 2, 0, 3]))
    assert replay.state.peak.tolist() == [30, 11, 16, 10 + 10 + 20 + 5, 15]  # stage 3: out twice, saved, g
    replay.check()


def test_the_same_seed_and_moves_give_the_same_schedule_however_they_are_cut() -> None:
    problem = less_than_baseline(random_layered(100), 80)
    in_one, in_many, other = (LocalSearch(problem, seed=seed) for seed in (7, 7, 8))
    in_one.run(6000)
    other.run(6000)
    for moves in (1, 999, 1700, 3300):
        in_many.run(moves)
    assert in_one.best is not None
    assert in_one.best == in_many.best
    assert in_one.best != other.best


def test_no_moves_are_made_after_the_deadline() -> None:
    search = LocalSearch(less_than_baseline(random_layered(100), 80))
    assert not search.run(6000, Deadline(0.0))
    assert search.moves == 0
    search.run(6000, Deadline())
    assert search.moves == 6000


def test_the_best_never_gets_worse_from_cycle_to_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_search, "_FIRST_CYCLE", 2000)
    problem = less_than_baseline(random_layered(120), 80)
    search = LocalSearch(problem, seed=3)
    best = []
    for _ in range(40):
        search.run(1000)
        best.append(search.best_seconds or float("inf"))
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0]
    assert search.best is not None
    assert peak(problem.graph, search.best) <= problem.budget_bytes


def test_ends_when_nothing_can_be_recomputed() -> None:
    ops = (Op("a", 1.0, (), (0,), once=True), Op("b", 1.0, (), (1,), once=True), Op("c", 1.0, (0, 1), (), once=True))
    graph = Graph(ops, (Value("x", 4), Value("y", 4)))
    search = LocalSearch(Problem(graph, 7))
    assert search.finished
    assert not search.run(1000)
    assert (search.best, search.best_seconds) == (None, None)


@given(graphs(), st.data())
@examples(100)
def test_adopts_any_schedule_in_default_order_and_is_never_worse(graph: Graph, data: st.DataObject) -> None:
    schedule = Schedule.from_ops(graph, data.draw(sequences(graph)))
    seen = simulate(graph, schedule).checked()
    search = LocalSearch(Problem(graph, seen.peak_bytes))
    in_default_order = tuple(dict.fromkeys(schedule.ops.tolist())) == graph.order
    if not in_default_order:
        with pytest.raises(ScheduleError, match="default order"):
            search.adopt(schedule)
        return
    search.adopt(schedule)
    assert search.best is not None
    assert search.best_seconds is not None
    assert search.best_seconds <= seen.seconds
    assert peak(graph, search.best) <= seen.peak_bytes


def test_adopting_leaves_out_what_is_not_needed() -> None:
    graph = chain(10)
    wasteful = Schedule.from_ops(graph, [*graph.order[:6], *graph.order[:4], *graph.order[6:]])
    search = LocalSearch(Problem(graph, peak(graph) * 2), start=wasteful)
    assert search.best == baseline(graph)


def test_repairs_a_schedule_slightly_over_the_budget() -> None:
    graph = gpt(layers=4)
    loose = LocalSearch(less_than_baseline(graph, 50), seed=1)
    loose.run(30_000)
    assert loose.best is not None
    assert loose.best_seconds is not None
    problem = Problem(graph, peak(graph, loose.best) * 98 // 100)
    repaired = LocalSearch(problem, seed=1, start=loose.best)
    repaired.run(10_000)
    assert repaired.best is not None
    assert repaired.best_seconds is not None
    assert peak(graph, repaired.best) <= problem.budget_bytes
    assert repaired.best_seconds - loose.best_seconds < 0.05 * graph.baseline_seconds


def test_makes_room_for_a_schedule_with_very_many_recomputations() -> None:
    graph = chain(30)
    loss = graph.loss
    sequence = [op for stage in range(len(graph.ops)) for op in graph.order[: stage + 1] if stage == op or op != loss]
    search = LocalSearch(less_than_baseline(graph, 40), start=Schedule.from_ops(graph, sequence))
    search.run(3000)
    assert search.best is not None


@pytest.mark.parametrize("problem", [held_for_the_loss(), changed_resident()])
def test_evicts_what_must_be_made_again_long_before_it_is_read(problem: Problem) -> None:
    """The loss holds it, or what it is made from changes."""
    search = LocalSearch(problem)
    search.run(2000)
    assert search.best is not None


def reverse_at_the_end() -> Problem:
    """Targets a (1) and b (3), made beside waste (7), do not fit beside c (10); then b must be made again before a."""
    ops = (Op("a", 1.0, (), (0,)), Op("b", 1.0, (), (1, 2)), Op("c", 1.0, (), (3,)))
    values = (Value("a", 1), Value("b", 3), Value("waste", 7), Value("c", 10))
    return Problem(Graph(ops, values, targets=frozenset({0, 1})), 10)


def test_two_passes_find_what_one_cannot_say() -> None:
    found = []
    for passes in (1, 2):
        search = LocalSearch(reverse_at_the_end(), passes=passes)
        search.run(3000)
        found.append(search.best)
    assert found[0] is None
    assert found[1] is not None
    assert found[1].ops.tolist() == [0, 1, 2, 1, 0]


@given(graphs(), st.data())
def test_a_schedule_goes_into_pauses_and_comes_back_as_it_was(graph: Graph, data: st.DataObject) -> None:
    """With as many pauses as it has computations, any schedule in default order is one of stages."""
    sequence = data.draw(sequences(graph, max_extra=4))
    firsts = list(dict.fromkeys(sequence))
    if tuple(firsts) != graph.order:
        return
    schedule = Schedule.from_ops(graph, sequence)
    pauses = PausedGraph.of(graph, len(sequence))
    paused = pauses.paused_schedule(schedule)
    assert pauses.schedule(paused) == schedule
    assert peak(pauses.paused, paused) == peak(graph, schedule)
    staged = schedule_of(pauses.paused, recomputations_of(pauses.paused, paused))
    assert pauses.schedule(staged) == schedule


@pytest.mark.parametrize("passes", [1, 2])
def test_adopts_with_any_number_of_passes(passes: int) -> None:
    problem = less_than_baseline(gpt(layers=2), 70)
    known = LocalSearch(problem)
    known.run(20_000)
    search = LocalSearch(problem, start=known.best, passes=passes)
    assert search.best_seconds is not None
    assert known.best_seconds is not None
    assert search.best_seconds <= known.best_seconds
