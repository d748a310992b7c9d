"""DOT text: every operator and edge, sizes, recomputation, and names that need quoting."""

from __future__ import annotations

import re

from hypothesis import given

from rematch.graph import Graph, Op, Phase, Schedule, Value
from rematch.graph.dot import to_dot
from rematch.graph.generators import chain
from tests.strategies import graphs


@given(graphs())
def test_draws_each_operator_once_and_each_use_of_a_value(graph: Graph) -> None:
    text = to_dot(graph)
    assert sorted(re.findall(r"^ +o(\d+) \[label", text, re.M)) == sorted(map(str, range(len(graph.ops))))
    drawn = sorted((int(a), int(b)) for a, b in re.findall(r"o(\d+) -> o(\d+) \[(?!dir)", text))
    drawn += [(int(b), int(a)) for a, b in re.findall(r"o(\d+) -> o(\d+) \[dir=back", text)]
    producer = graph.arrays.producer
    uses = [(int(producer[v]), op) for op in range(len(graph.ops)) for v in graph.ops[op].inputs if producer[v] >= 0]
    assert sorted(drawn) == sorted(uses)
    assert text.count("{") == text.count("}")


def test_tells_passes_sizes_and_kinds_apart() -> None:
    values = (Value("w", 2**20, resident=True), Value("x", 2048), Value("t", 8), Value("g", 100))
    ops = (
        Op("f", 1.0, (0,), (1,)),
        Op("loss", 1.0, (1,), (2,), phase=Phase.LOSS),
        Op("back", 1.0, (1, 2), (3,), phase=Phase.BACKWARD),
    )
    lines = to_dot(Graph(ops, values, frozenset({3}), name="net")).splitlines()
    text = "\n".join(lines)
    assert 'label="net, 3 operators, 1.00 MiB resident"' in text
    assert '  o0 -> o1 [label="2.00 KiB"];' in lines
    assert '  o0 -> o2 [label="2.00 KiB", constraint=false];' in lines
    assert '  o2 -> o1 [dir=back, label="8 B"];' in lines
    forward, backward = text.index("cluster_forward"), text.index("cluster_backward")
    assert forward < text.index("o0 [") < backward < text.index("o2 [")
    assert 'style="filled,dashed"' in next(line for line in lines if "o1 [label" in line)
    assert "peripheries=2" in next(line for line in lines if "o2 [label" in line)


def test_marks_what_a_schedule_recomputes() -> None:
    graph = chain(2)
    plain, marked = to_dot(graph), to_dot(graph, Schedule.from_ops(graph, [0, 1, 2, 3, 0, 4]))
    assert "penwidth" not in plain
    (line,) = [line for line in marked.splitlines() if "penwidth" in line]
    assert r'label="layer0\n× 2"' in line  # noqa: RUF001
    assert "1 recomputed" in marked


def test_names_are_quoted() -> None:
    graph = Graph((Op('say "hi"\\', 1.0, (), ()),), (), name='a"b')
    text = to_dot(graph)
    assert r'digraph "a\"b" {' in text
    assert r'label="say \"hi\"\\"' in text
