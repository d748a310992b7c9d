"""Generated functions: they compute what their graph says and let go of each tensor after its last use."""

from __future__ import annotations

import math
import operator
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.fx import Graph, GraphModule, Node

from rematch.capture.aten import aten
from rematch.execute.replay.source import compile_module
from tests.training import same_bits


def _module(write: Callable[[Graph], Any], **attributes: torch.Tensor) -> GraphModule:
    """The graph that `write` writes, with the nodes it returns as outputs."""
    graph = Graph()
    graph.output(tuple(write(graph)))
    holder = torch.nn.Module()
    for name, tensor in attributes.items():
        holder.register_buffer(name, tensor)
    return GraphModule(holder, graph)


def test_the_list_of_arguments_is_emptied() -> None:
    run = compile_module(_module(lambda graph: [graph.call_function(aten.sin.default, (graph.placeholder("x"),))]))
    arguments = [torch.rand(3)]
    expected = arguments[0].sin()
    assert same_bits(run(arguments)[0], expected)
    assert arguments == []


def test_each_tensor_is_freed_after_its_last_use() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    def watch(x: torch.Tensor) -> torch.Tensor:
        made = x + 1
        alive.append([reference() is not None for reference in seen])
        seen.append(weakref.ref(made))
        return made

    def write(graph: Graph) -> list[Node]:
        x = graph.placeholder("x")
        first = graph.call_function(watch, (x,))
        second = graph.call_function(watch, (first,))
        third = graph.call_function(watch, (second,))
        return [graph.call_function(watch, (third,)), second]

    outputs = compile_module(_module(write))([torch.zeros(2)])
    assert alive == [[], [True], [False, True], [False, True, True]]
    assert [tensor.tolist() for tensor in outputs] == [[4.0, 4.0], [2.0, 2.0]]


def test_an_argument_that_nobody_reads_is_dropped_at_once() -> None:
    unread = torch.rand(3)
    reference = weakref.ref(unread)

    def look(x: torch.Tensor) -> torch.Tensor:
        assert reference() is None
        return x

    def write(graph: Graph) -> list[Node]:
        x, _ = graph.placeholder("x"), graph.placeholder("unread")
        return [graph.call_function(look, (x,))]

    arguments = [torch.rand(1), unread]
    del unread
    compile_module(_module(write))(arguments)


def test_entries_of_a_tuple_are_freed_one_by_one() -> None:
    """The tuple itself is never bound, for it would keep all of them."""
    entries: list[weakref.ref[torch.Tensor]] = []

    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = x + 1, x + 2, x + 3
        entries.extend(map(weakref.ref, made))
        return made

    def look(x: torch.Tensor) -> torch.Tensor:
        assert [entry() is not None for entry in entries] == [False, True, False]
        return x * 2

    def write(graph: Graph) -> list[Node]:
        x = graph.placeholder("x")
        both = graph.call_function(two, (x,))
        both.meta["val"] = (torch.zeros(1), torch.zeros(1), torch.zeros(1))
        first, second = (graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
        shown = graph.call_function(aten.neg.default, (first,))
        return [graph.call_function(look, (shown,)), graph.call_function(aten.neg.default, (second,))]

    outputs = compile_module(_module(write))([torch.zeros(1)])
    assert [tensor.item() for tensor in outputs] == [-2.0, -2.0]


@pytest.mark.parametrize(
    "value", [1, -2.5, math.inf, -math.inf, math.nan, True, None, "mean", torch.float64, torch.device("cpu"), 1j]
)
def test_constants_of_every_kind_arrive_as_they_are(value: Any) -> None:
    given: list[Any] = []

    def take(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        given.append((rest, named))
        return x

    def write(graph: Graph) -> list[Node]:
        return [graph.call_function(take, (graph.placeholder("x"), value, [value, [value]]), {"named": value})]

    compile_module(_module(write))([torch.zeros(1)])
    expected = ((value, [value, [value]]), {"named": value})
    assert repr(given) == repr([expected])


def test_views_take_their_numbers_one_by_one_or_as_a_list() -> None:
    def write(graph: Graph) -> list[Node]:
        x = graph.placeholder("x")
        y = graph.call_function(aten.reshape.default, (x, [3, 4]))
        z = graph.call_function(aten.permute.default, (y, [1, 0]))
        number = graph.call_function(aten.select.int, (graph.call_function(aten.select.int, (z, 0, 1)), 0, 2))
        scalar = graph.call_function(aten.reshape.default, (number, []))
        return [z, graph.call_function(aten.expand.default, (scalar, [2, 2]))]

    x = torch.arange(12.0)
    expected = x.reshape(3, 4).t()
    transposed, expanded = compile_module(_module(write))([x])
    assert same_bits(transposed, expected)
    assert same_bits(expanded, expected[1, 2].expand(2, 2))


def test_constant_tensors_of_the_graph_are_found() -> None:
    def write(graph: Graph) -> list[Node]:
        return [graph.call_function(aten.add.Tensor, (graph.placeholder("x"), graph.get_attr("table")))]

    module = _module(write, table=torch.arange(3.0))
    assert compile_module(module)([torch.ones(3)])[0].tolist() == [1.0, 2.0, 3.0]


def test_autograd_sees_nothing() -> None:
    run = compile_module(_module(lambda graph: [graph.call_function(aten.exp.default, (graph.placeholder("x"),))]))
    (made,) = run([torch.rand(3, requires_grad=True)])
    assert not made.requires_grad


def test_a_traceback_shows_the_line_that_failed() -> None:
    def write(graph: Graph) -> list[Node]:
        return [graph.call_function(aten.mm.default, (graph.placeholder("x"), graph.placeholder("y")))]

    run = compile_module(_module(write), "forward")
    with pytest.raises(RuntimeError) as caught:
        run([torch.rand(2, 3), torch.rand(2, 3)])
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename.startswith("<rematch forward")
    assert last.line is not None and "aten_mm_default(" in last.line


_UNARY = (aten.sin.default, aten.neg.default, aten.relu.default, aten.t.default)
_BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.mm.default)


@given(data=st.data())
def test_any_graph_gives_what_its_interpreter_gives(data: st.DataObject) -> None:
    def write(graph: Graph) -> list[Node]:
        nodes = [graph.placeholder(f"x{index}") for index in range(3)]
        for _ in range(data.draw(st.integers(0, 12))):
            one, other = (data.draw(st.sampled_from(nodes)) for _ in range(2))
            target = data.draw(st.sampled_from(_UNARY + _BINARY))
            nodes.append(graph.call_function(target, (one,) if target in _UNARY else (one, other)))
        return data.draw(st.lists(st.sampled_from(nodes), max_size=4))

    module = _module(write)
    inputs = list(torch.linspace(-1, 1, 27).reshape(3, 3, 3).unbind())
    expected = module(*inputs)
    got = compile_module(module)(list(inputs))
    assert len(got) == len(expected)
    assert all(same_bits(one, other) for one, other in zip(got, expected, strict=True))
