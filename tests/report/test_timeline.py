"""What holds the memory, by module: the sums are the oracle's, whatever the schedule."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from rematch.graph import Graph, Op, Schedule, Value, baseline, simulate
from rematch.graph.generators import gpt
from rematch.report.timeline import OTHER_MODULES, modules_shown, timeline


@given(st.integers(0, 10**6))
def test_the_sums_are_those_of_the_oracle(seed: int) -> None:
    graph = gpt(layers=2)
    drawn = np.random.default_rng(seed)
    after_loss = [op for op in graph.order if graph.ops[op].phase.value == "forward"]
    again = sorted(drawn.choice(after_loss, size=5, replace=False).tolist(), key=list(graph.order).index)
    loss_at = list(graph.order).index(graph.loss) + 1
    schedule = Schedule.from_ops(graph, [*graph.order[:loss_at], *again, *graph.order[loss_at:]])
    seen = simulate(graph, schedule)
    if not seen.valid:  # an input of what runs again is gone
        return
    found = timeline(graph, schedule)
    assert [sample.total_bytes for sample in found.samples] == seen.timeline_bytes[schedule.steps >= 0].tolist()
    assert all(sum(sample.held_bytes) == sample.total_bytes for sample in found.samples)
    assert [sample.op for sample in found.samples] == schedule.ops.tolist()
    assert sum(sample.again for sample in found.samples) == 5
    assert abs(found.seconds - seen.seconds) < 1e-9


def test_many_computations_are_shown_by_the_highest_of_their_stretch() -> None:
    graph = gpt(layers=20)
    found = timeline(graph, baseline(graph), most_samples=50)
    assert len(found.samples) <= 50
    assert max(sample.total_bytes for sample in found.samples) == simulate(graph, baseline(graph)).peak_bytes
    ends = [sample.end_seconds for sample in found.samples]
    assert ends == sorted(ends)
    assert [sample.start_seconds for sample in found.samples[1:]] == ends[:-1]


def test_an_output_that_is_alive_counts_twice_while_it_is_computed_again() -> None:
    values = (Value("weights", 10, resident=True, role="parameters"), Value("a", 3), Value("b", 5))
    ops = (
        Op("a", 1.0, (0,), (1,), module_path="net.0", workspace_bytes=7),
        Op("b", 1.0, (1,), (2,), module_path="net.1"),
    )
    graph = Graph(ops, values, targets=frozenset({2}))
    found = timeline(graph, Schedule([0, 0, 1, ~1]))
    assert found.groups == ("parameters", "net.*", "workspace")
    assert [sample.held_bytes for sample in found.samples] == [(10, 3, 7), (10, 6, 7), (10, 8, 0)]
    assert [sample.again for sample in found.samples] == [False, True, False]


def test_heavy_modules_are_shown_by_their_parts_and_light_ones_together() -> None:
    weights = {f"h.*.part{number}": 100 - number for number in range(12)} | {"head": 50, "": 1}
    shown = modules_shown(weights, most=4)
    assert set(shown) == set(weights)
    assert len(set(shown.values())) == 4
    assert shown["h.*.part0"] == "h.*.part0"
    assert shown["h.*.part11"] == shown[""] == OTHER_MODULES
