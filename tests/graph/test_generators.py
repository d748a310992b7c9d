"""Generated graphs: sizes as documented, deterministic, valid, and with the structure they claim."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rematch.errors import GraphError
from rematch.graph import Graph, Op, Phase, Value, baseline, simulate
from rematch.graph.builder import TrainingGraphBuilder
from rematch.graph.generators import (
    FAMILIES,
    chain,
    encoder_decoder,
    feed_forward,
    gpt,
    jittered,
    random_layered,
    training_graph,
    unet,
)
from tests.strategies import plain_graphs, renumbered


@pytest.mark.parametrize(
    ("graph", "operators"),
    [
        (gpt(1), 35),
        (gpt(12), 365),
        (gpt(96), 2885),
        (encoder_decoder(1, 2), 137),
        (encoder_decoder(36, 36), 2887),
        (unet(5, 8), 563),
        (unet(1, 1), 29),
        (chain(200), 401),
        (feed_forward(16), 65),
        (random_layered(100, 27), 100),
    ],
)
def test_numbers_of_operators(graph: Graph, operators: int) -> None:
    assert len(graph.ops) == operators


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_families_are_deterministic_simulate_and_document_their_whole_numbers(family: Callable[..., Graph]) -> None:
    graph = family()
    assert graph == family()
    simulate(graph, baseline(graph)).checked()
    assert len({op.name for op in graph.ops}) == len(graph.ops)
    documented = inspect.getdoc(family) or ""
    for parameter in inspect.signature(family).parameters.values():
        assert type(parameter.default) is int
        assert f"\n{parameter.name}: " in documented


@pytest.mark.parametrize("family", ["chain", "random_layered"])
def test_seeds_differ(family: str) -> None:
    assert FAMILIES[family](seed=1) != FAMILIES[family](seed=2)


@pytest.mark.parametrize("family", ["feed_forward", "gpt", "encoder_decoder", "unet"])
def test_jitter_changes_times_only(family: str) -> None:
    graph, spread = FAMILIES[family](), FAMILIES[family](jitter_percent=10, seed=3)
    assert spread.fingerprint == graph.fingerprint
    assert spread != FAMILIES[family](jitter_percent=10, seed=4)
    for op, other in zip(graph.ops, spread.ops, strict=True):
        assert 0.9 * op.seconds <= other.seconds <= 1.1 * op.seconds


@pytest.mark.parametrize(
    ("make", "parameters", "words"),
    [
        (chain, {"layers": 0}, "layers=0 is too small; at least 1"),
        (chain, {"vary_percent": -1}, "vary_percent=-1"),
        (gpt, {"heads": 0}, "heads=0"),
        (encoder_decoder, {"decoder_layers": 0}, "decoder_layers=0"),
        (unet, {"size": 100}, "size=100 cannot be halved 5 times; take a multiple of 32"),
        (feed_forward, {"width": -2}, "width=-2"),
        (feed_forward, {"jitter_percent": 101}, "jitter_percent=101"),
        (random_layered, {"nodes": 2}, "nodes=2"),
        (random_layered, {"width_percent": 100}, "width_percent=100"),
    ],
)
def test_impossible_parameters_are_named(make: Callable[..., Graph], parameters: dict[str, int], words: str) -> None:
    with pytest.raises(GraphError) as caught:
        make(**parameters)
    assert words in str(caught.value)


@given(st.data(), plain_graphs())
def test_training_graph_has_checkmates_edges(data: st.DataObject, forward: Graph) -> None:
    forward = renumbered(forward, data.draw(st.permutations(range(len(forward.ops)))))
    graph = training_graph(forward, backward_ratio=3.0)
    layers, edges = len(forward.ops), _edges(forward)
    loss = layers
    backward = {op: loss + 1 + rank for rank, op in enumerate(reversed(forward.order))}
    expected = edges | {(backward[v], backward[u]) for u, v in edges} | {(v, backward[u]) for u, v in edges}
    expected |= {(op, backward[op]) for op in range(layers)}
    expected |= {(forward.order[-1], loss), (loss, backward[forward.order[-1]])}
    assert _edges(graph) == expected
    assert len(graph.ops) == 2 * layers + 1
    assert len(expected) == 3 * len(edges) + layers + 2
    assert graph.loss == loss
    for op, number in backward.items():
        assert graph.ops[number].seconds == 3.0 * forward.ops[op].seconds
        assert graph.ops[number].phase is Phase.BACKWARD
        assert _made_bytes(graph, number) == _made_bytes(forward, op)


def _edges(graph: Graph) -> set[tuple[int, int]]:
    producer = graph.arrays.producer
    return {(int(producer[v]), op) for op in range(len(graph.ops)) for v in graph.ops[op].inputs if producer[v] >= 0}


def _made_bytes(graph: Graph, op: int) -> int:
    return sum(graph.values[value].size_bytes for value in graph.ops[op].outputs)


def test_training_graph_takes_several_outputs_residents_and_mutations() -> None:
    ops = (
        Op("f", 1.0, (0,), (1, 2), workspace_bytes=9, flops=4.0, class_key="f"),
        Op("update", 1.0, (0, 1), (), once=True, mutates=(0,)),
        Op("g", 1.0, (2,), (3,)),
    )
    values = (Value("w", 5, resident=True), Value("a", 1), Value("b", 2), Value("c", 4))
    graph = training_graph(Graph(ops, values, name="net"))
    simulate(graph, baseline(graph)).checked()
    backward_of_f = graph.ops[-1]
    assert [graph.values[value].name for value in backward_of_f.inputs] == [
        "a",
        "b",
        "c",
        "update.backward",
        "g.backward",
    ]
    assert (backward_of_f.workspace_bytes, backward_of_f.flops, backward_of_f.class_key) == (9, 8.0, "f.backward")
    assert _made_bytes(graph, len(graph.ops) - 1) == 3
    assert not any(op.once for op in graph.ops if op.phase is Phase.BACKWARD)


def test_training_graph_needs_a_forward_graph() -> None:
    with pytest.raises(GraphError, match="'loss' is loss"):
        training_graph(chain(2))
    with pytest.raises(GraphError, match="'empty' has no operators"):
        training_graph(Graph((), (), name="empty"))


def test_random_layered_follows_its_construction() -> None:
    graph = random_layered(300, 36, seed=5)
    edges = _edges(graph)
    assert (graph.order[0], graph.order[-1]) == (0, 1)
    assert all(source != 1 for source, _ in edges)
    reached = {sink for _, sink in edges}
    assert reached == set(range(1, 300))  # all but the source read something
    assert {source for source, _ in edges} == set(range(300)) - {1}  # all but the sink are read
    assert [graph.ops[0].seconds, graph.ops[1].seconds] == [0.0, 0.0]
    assert all(1 <= op.seconds <= 1000 for op in graph.ops[2:])
    assert all(value.size_bytes % 10 == 0 for value in graph.values)


def test_decoder_layers_all_read_the_encoders_last_output() -> None:
    graph = encoder_decoder(2, 5)
    encoded = next(v for v, value in enumerate(graph.values) if value.name == "encoder.1.mlp.add")
    readers = {op.name for op in graph.ops if encoded in op.inputs and op.phase is Phase.FORWARD}
    assert readers == {f"decoder.{i}.cross.kv" for i in range(5)}


def test_unet_has_a_skip_at_every_level() -> None:
    graph = unet(depth=3)
    for level in range(3):
        joined = next(op for op in graph.ops if op.name == f"up.{level}.concatenate")
        names = [graph.values[value].name for value in joined.inputs]
        assert names == [f"up.{level}.upsample", f"down.{level}.1.relu"]


@pytest.mark.parametrize("family", ["feed_forward", "gpt", "encoder_decoder", "unet"])
def test_training_steps_have_all_weight_gradients_as_targets_and_hold_the_logits(family: str) -> None:
    graph = FAMILIES[family]()
    names = [value.name for value in graph.values]
    weights = {name for name in names if name.endswith(".weight")}
    assert {names[value] for value in graph.targets} == {f"{name}.gradient" for name in weights}
    (logits,) = graph.held
    assert graph.loss is not None
    assert graph.ops[graph.loss].inputs == (logits,)
    shares = [sum(op.seconds for op in graph.ops if op.phase is phase) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    assert 1.5 < shares[1] / shares[0] < 2.5  # a backward pass takes about twice its forward pass


def _backward_reads(build: Callable[[TrainingGraphBuilder, int], int]) -> tuple[str, list[str]]:
    """The last operator of the backward pass and what it reads, residents left out."""
    builder = TrainingGraphBuilder()
    x = builder.linear("x", builder.resident("input", 64), rows=4, fan_in=8, fan_out=8)
    graph = builder.build(build(builder, x), "built")
    op = next(op for op in graph.ops if op.name.startswith("f."))
    return op.name, [graph.values[v].name for v in op.inputs if not graph.values[v].resident]


@pytest.mark.parametrize(
    ("build", "reads"),
    [
        (lambda t, x: t.linear("f", x, rows=4, fan_in=8, fan_out=8), ["loss.gradient", "x"]),
        (lambda t, x: t.product("f", x, x, elements=16, inner=8), ["loss.gradient", "x", "x"]),
        (lambda t, x: t.convolution("f", x, pixels=4, channels_in=8, channels_out=8, window=9), ["loss.gradient", "x"]),
        (lambda t, x: t.norm("f", x, groups=4), ["loss.gradient", "x", "f.statistics"]),
        (lambda t, x: t.softmax("f", x), ["loss.gradient", "f"]),
        (lambda t, x: t.relu("f", x), ["loss.gradient", "f"]),
        (lambda t, x: t.gelu("f", x), ["loss.gradient", "x"]),
        (lambda t, x: t.dropout("f", x), ["loss.gradient", "f.mask"]),
        (lambda t, x: t.max_pool("f", x), ["loss.gradient", "f.indices"]),
    ],
)
def test_a_backward_reads_what_its_formula_needs(
    build: Callable[[TrainingGraphBuilder, int], int], reads: list[str]
) -> None:
    assert _backward_reads(build) == ("f.backward", reads)


def test_gradients_of_a_value_read_twice_are_accumulated() -> None:
    builder = TrainingGraphBuilder()
    x = builder.linear("x", builder.resident("input", 64), rows=4, fan_in=8, fan_out=8)
    y = builder.add("sum", x, builder.gelu("gelu", x))
    graph = builder.build(y, "built")
    assert [op.name for op in graph.ops if op.phase is Phase.BACKWARD] == [
        "gelu.backward",
        "x.accumulate",
        "x.backward",
    ]
    total = graph.ops[-2]
    assert [graph.values[value].name for value in total.inputs] == ["loss.gradient", "x.gradient"]


def test_a_product_with_a_weight_adds_to_the_gradient_itself() -> None:
    builder = TrainingGraphBuilder()
    x = builder.linear("x", builder.resident("input", 64), rows=4, fan_in=8, fan_out=8)
    branches = [builder.linear(name, x, rows=4, fan_in=8, fan_out=8) for name in ("left", "right")]
    graph = builder.build(builder.add("sum", *branches), "built")
    left = next(op for op in graph.ops if op.name == "left.backward")
    assert [op.name for op in graph.ops if "accumulate" in op.name] == []
    assert [graph.values[v].name for v in left.inputs] == ["loss.gradient", "x.gradient", "x", "left.weight"]


def test_times_follow_the_roofline() -> None:
    graph = gpt(1)
    by_name: dict[str, Any] = {op.name: op for op in graph.ops}
    matmul, cheap = by_name["h.0.mlp.up"], by_name["h.0.mlp.gelu"]
    assert matmul.flops == 2 * 32 * 1024 * 768 * 4 * 768
    assert matmul.seconds == pytest.approx(5e-6 + matmul.flops / 150e12)
    assert cheap.seconds == pytest.approx(5e-6 + 2 * (32 * 1024 * 4 * 768 * 2) / 1.5e12)


def test_equal_operators_of_different_layers_share_their_class_and_know_their_module() -> None:
    by_name = {op.name: op for op in gpt(2).ops}
    first, second = by_name["h.0.attention.scores"], by_name["h.1.attention.scores"]
    assert first.class_key == second.class_key != by_name["h.0.attention.context"].class_key
    assert (first.module_path, by_name["h.1.mlp.gelu.backward"].module_path) == ("h.0.attention", "h.1.mlp")


def test_no_jitter_is_the_same_graph() -> None:
    graph = replace(chain(3), name="three")
    assert jittered(graph, 0, seed=9) is graph
