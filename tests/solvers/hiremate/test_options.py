"""Options: what a schedule of a piece costs its surroundings, and which ones are passed on."""

from __future__ import annotations

from hypothesis import given, strategies as st

from rematch.graph import Graph, Op, Phase, Schedule, Value, baseline
from rematch.solvers.common.blocks import Block, gap_graph
from rematch.solvers.common.options import Option, option_of, undominated
from rematch.solvers.hiremate.options import layer_option, limits, spread

# x -a-> u -b-> y | loss makes g | -c-> h (reads g, u) -d-> r (reads h, x)
SIZES = {"x": 7, "u": 100, "y": 10, "g": 10, "h": 50, "r": 7, "w": 3}
X, U, Y, G, H, R, W = range(7)


def graph() -> Graph:
    values = tuple(Value(name, size) for name, size in SIZES.items())
    ops = (
        Op("before", 1.0, (), (X,)),
        Op("a", 2.0, (X,), (U,), workspace_bytes=5),
        Op("b", 3.0, (U,), (Y,)),
        Op("loss", 0.5, (Y,), (G,), phase=Phase.LOSS, once=True),
        Op("c", 4.0, (G, U), (H,), phase=Phase.BACKWARD),
        Op("d", 5.0, (H, X), (R, W), phase=Phase.BACKWARD, workspace_bytes=1),
        Op("after", 1.0, (R,), (), phase=Phase.BACKWARD),
    )
    return Graph(ops, values, targets=frozenset({W}))


BLOCK = Block((1, 2), (), (4, 5), input=(X,), output=(Y,), gradients=(G,), returned=(R,), kept=(W,))
PART = gap_graph(graph(), BLOCK)
SAVING = option_of(PART, baseline(PART.graph))
AGAIN = option_of(PART, Schedule.from_ops(PART.graph, [0, 1, 2, 0, 3, 4]))  # a, b, gap, a, c, d
DATA = {X: 0, Y: 1, G: 2, R: 3, W: 4}


def test_figures_of_an_option() -> None:
    assert SAVING.ops_of(PART) == ((1, 2), (4, 5))
    assert AGAIN.ops_of(PART) == ((1, 2), (1, 4, 5))
    assert (SAVING.seconds, AGAIN.seconds) == (14.0, 16.0)
    assert (SAVING.saved_bytes, AGAIN.saved_bytes) == (100, 0)


def test_what_a_level_sees_of_an_option_that_saves() -> None:
    seen = layer_option(BLOCK, PART, SAVING, DATA)
    assert (seen.forward_seconds, seen.backward_seconds, seen.phantom_bytes) == (5.0, 9.0, 100)
    assert seen.backward_reads == {DATA[G], DATA[X]}
    forward = {(m.overhead_bytes, m.finished, m.unmade) for m in seen.forward_moments}
    assert forward == {(5, frozenset(), frozenset({DATA[Y]})), (0, frozenset({DATA[X]}), frozenset())}
    backward = {(m.overhead_bytes, m.finished) for m in seen.backward_moments}
    # c holds u and h beside g; then d holds h and its workspace, less than the phantom, and g is done with
    assert backward == {(50, frozenset()), (0, frozenset({DATA[G]}))}


def test_what_a_level_sees_of_an_option_that_computes_again() -> None:
    seen = layer_option(BLOCK, PART, AGAIN, DATA)
    assert seen.phantom_bytes == 0
    assert seen.forward_overhead_bytes == 105  # u and the workspace of a
    assert seen.backward_overhead_bytes == 150  # u and h, while c runs
    assert seen.backward_reads == {DATA[G], DATA[X]}


def test_limits_ask_for_any_share_of_what_is_saved() -> None:
    """From nothing, where the gap takes all that the budget leaves, to nearly everything."""
    found = list(limits(PART))
    assert all(budget >= PART.graph.largest_op_bytes for _, budget in found)
    left = [budget - graph.ops[PART.gap].workspace_bytes for graph, budget in found]
    assert min(left) == left[-1] < max(left)


options = st.builds(
    Option,
    saved_bytes=st.integers(0, 20),
    forward_seconds=st.integers(0, 10).map(float),
    forward_peak_bytes=st.integers(0, 20),
    backward_seconds=st.integers(0, 10).map(float),
    backward_peak_bytes=st.integers(0, 20),
)


@given(st.lists(options, min_size=1, max_size=12))
def test_undominated_options_are_all_that_anyone_would_choose(given_options: list[Option]) -> None:
    def beats(one: Option, other: Option) -> bool:
        return all(mine <= theirs for mine, theirs in zip(one.figures, other.figures, strict=True))

    kept = undominated(given_options, lambda option: option.figures)
    assert all(any(beats(one, option) for one in kept) for option in given_options)
    assert not any(beats(one, other) for one in kept for other in kept if one is not other)


@given(st.lists(options, min_size=1, max_size=12), st.integers(1, 12))
def test_spread_takes_the_fastest_then_the_lowest_peak_then_the_least_saved(
    given_options: list[Option], count: int
) -> None:
    chosen = spread(given_options, count)
    assert len(chosen) == min(count, len(given_options))
    assert [option.seconds for option in chosen] == sorted(option.seconds for option in chosen)
    assert chosen[0].seconds == min(option.seconds for option in given_options)
    if count > 1:
        assert min(option.peak_bytes for option in given_options) in [option.peak_bytes for option in chosen]
    if count > 2:
        assert min(option.saved_bytes for option in given_options) in [option.saved_bytes for option in chosen]
