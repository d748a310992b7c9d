"""Files: our own form keeps everything, the benchmark form is read as it is meant, and bad files are explained."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from rematch.errors import FormatError, GraphError, RematchError
from rematch.graph import Graph, Op, Phase, Value, baseline, simulate
from rematch.graph.formats import graph_from_data, graph_to_data, load_graph, save_graph
from rematch.graph.generators import gpt
from tests.strategies import graphs

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(graphs())
@in_one_folder
def test_own_form_round_trip(tmp_path: Path, graph: Graph) -> None:
    save_graph(graph, tmp_path / "graph.json")
    loaded = load_graph(tmp_path / "graph.json")
    assert loaded.graph == graph
    assert loaded.notes == ()


def test_own_form_keeps_names_paths_keys_flops_and_odd_numbers(tmp_path: Path) -> None:
    op = Op('q"\n\u00e9', 1 / 3, (0,), (1,), 5, Phase.LOSS, True, (0,), "a.b", "matmul [2, 3]", 1e300)
    graph = Graph((op,), (Value("w", 2**56, resident=True), Value("", 0)), frozenset({1}), frozenset({0}), name="n")
    save_graph(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json").graph == graph


def test_numpy_numbers_are_written_as_numbers(tmp_path: Path) -> None:
    op = Op("f", np.float32(0.5), (), (np.int64(0),))  # type: ignore[arg-type]
    graph = Graph((op,), (Value("x", np.int64(7)),), frozenset({np.int64(0)}))  # type: ignore[arg-type]
    save_graph(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json").graph == graph


def test_defaults_are_left_out() -> None:
    data = graph_to_data(Graph((Op("f", 1.0, (), (0,)),), (Value("x", 1),)))
    assert data["ops"] == [{"name": "f", "seconds": 1.0, "inputs": [], "outputs": [0]}]
    assert data["values"] == [{"name": "x", "size_bytes": 1}]
    assert "recompute_after_loss" not in data


def test_loading_leaves_the_garbage_collector_as_it_was(tmp_path: Path) -> None:
    save_graph(gpt(1), tmp_path / "graph.json")
    load_graph(tmp_path / "graph.json")
    assert gc.isenabled()
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(FormatError):
        load_graph(tmp_path / "bad.json")
    assert gc.isenabled()


BENCHMARK: dict[str, Any] = {
    "name": "three",
    "time_unit": "ms",
    "nodes": [
        {"id": 10, "name": "a", "time": 1, "memory": 8, "backward": False, "workspace": 4, "layer": 1},
        {"id": 11, "name": "b", "time": 2.5, "memory": 16, "backward": False, "workspace": -4},
        {"id": 12, "name": "c", "time": 3, "memory": 1, "backward": True},
    ],
    "edges": [[10, 11], [11, 12], [10, 12], [10, 12]],
    "order": [10, 11, 12],
    "outputs": [12],
    "fixed_memory": 100,
    "peak_no_remat": 25,
}


def benchmark_file(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "benchmark.json"
    path.write_text(json.dumps({key: entry for key, entry in (BENCHMARK | changes).items() if entry is not None}))
    return path


def test_benchmark_form(tmp_path: Path) -> None:
    loaded = load_graph(benchmark_file(tmp_path))
    assert loaded.graph == Graph(
        ops=(
            Op("a", 1e-3, (), (0,), workspace_bytes=4),
            Op("b", 2.5e-3, (0,), (1,)),
            Op("c", 3e-3, (1, 0), (2,), phase=Phase.BACKWARD),
        ),
        values=(Value("a", 8), Value("b", 16), Value("c", 1), Value("fixed_memory", 100, resident=True)),
        targets=frozenset({2}),
        name="three",
    )
    (note,) = loaded.notes
    assert '1 of 3 operators have a negative workspace, taken as 0 (the first is "b" with -4 bytes)' in note


def test_benchmark_form_plain_has_the_peak_of_the_papers(tmp_path: Path) -> None:
    loaded = load_graph(benchmark_file(tmp_path), plain=True)
    graph = loaded.graph
    assert simulate(graph, baseline(graph)).checked().peak_bytes == BENCHMARK["peak_no_remat"]
    assert (graph.targets, graph.held, graph.resident_bytes) == (frozenset(), frozenset(), 0)
    assert not graph.arrays.workspace.any()
    assert loaded.notes == ()


def test_own_form_plain(tmp_path: Path) -> None:
    save_graph(gpt(1), tmp_path / "graph.json")
    graph = load_graph(tmp_path / "graph.json", plain=True).graph
    assert (graph.targets, graph.held, graph.resident_bytes) == (frozenset(), frozenset(), 0)
    assert not graph.arrays.workspace.any()
    assert [op.inputs for op in graph.ops] == [op.inputs for op in gpt(1).ops]


@pytest.mark.parametrize(("unit", "seconds"), [("s", 3.0), ("ms", 3e-3), ("us", 3e-6), ("ns", 3e-9)])
def test_benchmark_time_units(tmp_path: Path, unit: str, seconds: float) -> None:
    assert load_graph(benchmark_file(tmp_path, time_unit=unit)).graph.ops[2].seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("unit", "words"), [("flop", 'times are in "flop"'), (None, "no unit of time is given")])
def test_benchmark_unknown_time_units_are_told(tmp_path: Path, unit: str | None, words: str) -> None:
    loaded = load_graph(benchmark_file(tmp_path, time_unit=unit), plain=True)
    assert loaded.graph.ops[2].seconds == 3.0
    assert loaded.notes == (f"{words}; the numbers are taken as seconds",)


@pytest.mark.parametrize("key", ["constant_memory", "fixed_memory", "param_memory"])
def test_benchmark_fixed_memory_is_one_resident_value(tmp_path: Path, key: str) -> None:
    graph = load_graph(benchmark_file(tmp_path, **{"fixed_memory": None, key: 7})).graph
    assert [value for value in graph.values if value.resident] == [Value(key, 7, resident=True)]


def test_benchmark_without_order_outputs_and_name_takes_the_order_of_nodes(tmp_path: Path) -> None:
    graph = load_graph(benchmark_file(tmp_path, order=None, outputs=None, name=None)).graph
    assert (graph.order, graph.targets, graph.name) == ((0, 1, 2), frozenset(), "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON: Expecting value at line 1, column 1"),
        ('{"nodes": [}', "at line 1, column 12"),
        ("[1]\n]", "Extra data at line 2, column 1"),
        ('{"nodes": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", 'neither "format": "rematch-graph" nor "nodes" and "edges"'),
        ('{"nodes": []}', 'neither "format"'),
        ('{"format": "rematch-plan"}', '"rematch-plan"'),
        ('{"format": "rematch-graph"}', "its version is null"),
        ('{"format": "rematch-graph", "version": 2}', "reads version 1; it was written by a newer rematch"),
        ('{"format": "rematch-graph", "version": 1}', 'has no "held"'),
    ],
)
def test_files_that_are_no_graphs(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(FormatError) as caught:
        load_graph(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_folder_and_binary(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in (("absent", "no such file"), ("", "is a directory"), ("binary", "byte 0 is not UTF-8")):
        with pytest.raises(FormatError) as caught:
            load_graph(tmp_path / name)
        assert words in str(caught.value)
        assert str(tmp_path / name) in str(caught.value)


OWN = graph_to_data(Graph((Op("f", 1.0, (), (0,)),), (Value("x", 1),), name="g"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ops": {}}, "ops should be a list, not {}"),
        ({"ops": [3]}, "ops[0] should be an object, not 3"),
        ({"ops": [{"name": "f", "inputs": [], "outputs": [0]}]}, 'ops[0] ("f") has no "seconds"'),
        ({"ops": [{"name": "f", "seconds": "1", "inputs": [], "outputs": [0]}]}, 'seconds should be a number, not "1"'),
        (
            {"ops": [{"name": "f", "seconds": 1, "inputs": [True], "outputs": [0]}]},
            "inputs[0] should be a whole number, not true",
        ),
        ({"ops": [{"name": "f", "seconds": 1, "inputs": [], "outputs": [0], "x": 1}]}, 'has an unknown field "x"'),
        (
            {"ops": [{"name": "f", "seconds": 1, "inputs": [], "outputs": [0], "phase": "side"}]},
            'phase should be one of "forward", "loss", "backward", not "side"',
        ),
        ({"ops": [{"name": "f", "seconds": 1, "inputs": [], "outputs": [0], "once": 1}]}, "should be true or false"),
        ({"values": [{"name": 1, "size_bytes": 1}]}, "values[0].name should be text, not 1"),
        ({"values": [{"name": "x", "size_bytes": 1.5}]}, 'values[0] ("x").size_bytes should be a whole number'),
        (
            {"ops": [{"name": "f", "seconds": 10**400, "inputs": [], "outputs": [0]}]},
            "seconds should be a finite number below 1e308",
        ),
        ({"targets": [None]}, "targets[0] should be a whole number, not null"),
        ({"order": "f" * 99}, f'order should be a list, not "{"f" * 36}...'),
    ],
)
def test_wrong_entries_of_our_own_form_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError) as caught:
        graph_from_data(OWN | changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 3}, "nodes should be a list, not 3"),
        ({"nodes": [{"id": 10, "name": "a", "time": 1}]}, 'nodes[0] ("a") has no "memory"'),
        ({"nodes": [BENCHMARK["nodes"][0]] * 2}, '2 entries of "nodes" have only 1 different ids'),
        ({"edges": [[10]]}, "edges[0] should be a list of 2, not [10]"),
        ({"edges": [[10, "x"]]}, 'edges[0] should be a whole number, not "x"'),
        ({"edges": [[10, 99]]}, '"edges" names node 99'),
        ({"outputs": [5]}, '"outputs" names node 5'),
        ({"order": [5]}, '"order" names node 5'),
        ({"edges": [[10, 11], [11, 10]]}, "cycle: "),
        ({"order": [11, 10, 12]}, "runs 'b' before 'a'"),
        ({"fixed_memory": -1}, "'fixed_memory'"),
    ],
)
def test_wrong_entries_of_the_benchmark_form_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = benchmark_file(tmp_path, **changes)
    with pytest.raises(RematchError) as caught:
        load_graph(path)
    assert isinstance(caught.value, (FormatError, GraphError))
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
