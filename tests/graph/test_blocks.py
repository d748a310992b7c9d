"""Repeated blocks: found under any name, told apart by anything that matters, aligned operator by operator."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, strategies as st

from rematch.graph import Graph, Op, Phase, Value
from rematch.graph.blocks import repeated_blocks
from tests.strategies import graphs, renumbered, side_by_side


def stack(layers: int, nested: bool = True) -> Graph:
    """Layers of attention and MLP in a row, forward then backward, one parameter and its gradient each."""
    values = [Value("x", 8, resident=True), *(Value(f"w{i}", 4, resident=True) for i in range(layers))]
    ops: list[Op] = []
    targets: list[int] = []

    def run(key: str, path: str, phase: Phase, inputs: tuple[int, ...], size_bytes: int) -> int:
        values.append(Value(f"v{len(values)}", size_bytes))
        output = len(values) - 1
        ops.append(Op(f"{path}.{key}", 1.0, inputs, (output,), phase=phase, module_path=path, class_key=key))
        return output

    hidden = run("embed", "embed", Phase.FORWARD, (0,), 8)
    saved: list[int] = []
    for i in range(layers):
        attention, mlp = (f"h.{i}.attn", f"h.{i}.mlp") if nested else (f"h.{i}", f"h.{i}")
        saved.append(run("attend", attention, Phase.FORWARD, (hidden, i + 1), 8))
        hidden = run("widen", mlp, Phase.FORWARD, (saved[-1],), 8)
    gradient = run("head", "head", Phase.FORWARD, (hidden,), 8)
    for i in reversed(range(layers)):
        attention, mlp = (f"h.{i}.attn", f"h.{i}.mlp") if nested else (f"h.{i}", f"h.{i}")
        gradient = run("widen_backward", mlp, Phase.BACKWARD, (gradient, saved[i]), 8)
        targets.append(run("weight_gradient", attention, Phase.BACKWARD, (gradient,), 4))
    targets.append(run("embed_backward", "embed", Phase.BACKWARD, (gradient,), 8))
    return Graph(tuple(ops), tuple(values), targets=frozenset(targets))


def edited(graph: Graph, index: int, **changes: object) -> Graph:
    ops = list(graph.ops)
    ops[index] = replace(ops[index], **changes)  # type: ignore[arg-type]
    return replace(graph, ops=tuple(ops))


def test_layers_are_one_class_and_what_is_inside_them_is_not_reported() -> None:
    graph = stack(3)
    (layers,) = repeated_blocks(graph)
    assert layers.paths == ("h.0", "h.1", "h.2")
    for ops in layers.ops:
        assert [graph.ops[op].class_key for op in ops] == ["attend", "widen", "widen_backward", "weight_gradient"]


def test_members_are_aligned_operator_by_operator() -> None:
    graph = stack(4)
    (layers,) = repeated_blocks(graph)
    for column in zip(*layers.ops, strict=True):
        assert len({(graph.ops[index].class_key, graph.ops[index].phase) for index in column}) == 1
    assert len({index for ops in layers.ops for index in ops}) == 4 * 4


def test_an_odd_layer_is_left_out() -> None:
    graph = edited(stack(3), 3, class_key="attend_longer")  # h.1.attn's forward
    by_paths = {block.paths for block in repeated_blocks(graph)}
    assert ("h.0", "h.2") in by_paths
    assert not any("h.1" in paths for paths in by_paths)


def test_a_part_that_repeats_in_layers_that_do_not() -> None:
    graph = edited(stack(2), 1, class_key="attend_longer")  # h.0.attn differs from h.1.attn, h.0.mlp equals h.1.mlp
    assert [block.paths for block in repeated_blocks(graph)] == [("h.0.mlp", "h.1.mlp")]


def test_any_difference_that_matters_tells_blocks_apart() -> None:
    graph = stack(2, nested=False)
    assert len(repeated_blocks(graph)) == 1
    output = graph.ops[1].outputs[0]
    larger = list(graph.values)
    larger[output] = replace(larger[output], size_bytes=9)
    parameter = list(graph.values)
    parameter[1] = replace(parameter[1], size_bytes=5)
    for changed in (
        edited(graph, 1, seconds=2.0),
        edited(graph, 1, workspace_bytes=1),
        edited(graph, 1, once=True),
        edited(graph, 1, phase=Phase.BACKWARD),
        edited(graph, 1, inputs=graph.ops[1].inputs[::-1]),
        edited(graph, 1, inputs=graph.ops[1].inputs[:1] * 2),
        edited(graph, 2, inputs=graph.ops[1].inputs[:1]),
        replace(graph, values=tuple(larger)),
        replace(graph, values=tuple(parameter)),
        replace(graph, targets=graph.targets | {output}),
    ):
        assert repeated_blocks(changed) == ()


def test_wiring_counts_not_only_sizes() -> None:
    """Two modules add three values of one size; one adds the sum to its first input, the other to its second."""
    values = (Value("a", 4, resident=True), Value("b", 4, resident=True), *(Value(f"v{i}", 4) for i in range(4)))
    ops = (
        Op("p.add", 1.0, (0, 1), (2,), module_path="p", class_key="add"),
        Op("p.again", 1.0, (2, 0), (3,), module_path="p", class_key="add"),
        Op("q.add", 1.0, (0, 1), (4,), module_path="q", class_key="add"),
        Op("q.again", 1.0, (4, 1), (5,), module_path="q", class_key="add"),
    )
    assert repeated_blocks(Graph(ops, values)) == ()
    alike = edited(Graph(ops, values), 3, inputs=(4, 0))
    assert [block.paths for block in repeated_blocks(alike)] == [("p", "q")]


def test_a_value_used_outside_one_block_only_tells_them_apart() -> None:
    values = (Value("x", 4, resident=True), *(Value(f"v{i}", 4) for i in range(5)))
    ops = [
        Op("p.one", 1.0, (0,), (1,), module_path="p", class_key="one"),
        Op("p.two", 1.0, (1,), (2,), module_path="p", class_key="two"),
        Op("q.one", 1.0, (0,), (3,), module_path="q", class_key="one"),
        Op("q.two", 1.0, (3,), (4,), module_path="q", class_key="two"),
        Op("join", 1.0, (2, 4), (5,)),
    ]
    assert [block.paths for block in repeated_blocks(Graph(tuple(ops), values))] == [("p", "q")]
    ops[4] = replace(ops[4], inputs=(1, 2, 4))
    assert repeated_blocks(Graph(tuple(ops), values)) == ()


def test_a_module_that_only_wraps_another_is_not_a_second_member() -> None:
    graph = stack(2, nested=False)
    wrapped = [replace(op, module_path=op.module_path.replace("h.", "net.h.") + ".inner") for op in graph.ops]
    (layers,) = repeated_blocks(replace(graph, ops=tuple(wrapped)))
    assert layers.paths == ("net.h.0", "net.h.1")


def test_no_modules_no_blocks() -> None:
    ops = tuple(replace(op, module_path="") for op in stack(3).ops)
    assert repeated_blocks(replace(stack(3), ops=ops)) == ()


@given(graphs(), st.integers(2, 4), st.data())
def test_copies_of_any_graph_are_one_class(graph: Graph, copies: int, data: st.DataObject) -> None:
    """Copies side by side, operators numbered at random: one class, aligned with the original's default order."""
    forward = tuple(replace(op, phase=Phase.FORWARD) for op in graph.ops)
    graph = replace(graph, ops=forward, held=frozenset(), recompute_after_loss=False)
    many = renumbered(side_by_side(graph, copies), data.draw(st.permutations(range(copies * len(graph.ops)))))
    (block,) = repeated_blocks(many)
    assert block.paths == tuple(f"copy.{i}" for i in range(copies))
    for i, ops in enumerate(block.ops):
        assert [many.ops[index].name for index in ops] == [f"copy.{i}.{graph.ops[index].name}" for index in graph.order]
