"""What operators are to a scheduler, judged by what their kernels do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.fx import Graph, Node

from rematch.capture.aten import (
    IN_PLACE,
    InPlaceOnCopy,
    aten,
    fill_of_empty,
    forget_unread_statistics,
    in_place_twin,
    in_rows_apart,
    is_random,
    may_repeat,
    updated_statistics,
    without_running_statistics,
)
from tests.training import deterministic, same_bits


def _call(target: Any, *args: Any, **kwargs: Any) -> Node:
    """A node that calls `target`; strings among the arguments become inputs of its graph."""
    graph = Graph()
    nodes = [graph.placeholder(arg) if isinstance(arg, str) else arg for arg in args]
    return graph.call_function(target, tuple(nodes), kwargs)


@pytest.mark.parametrize(
    ("node", "random"),
    [
        (_call(aten.bernoulli.p, "x", 0.5), True),
        (_call(aten.native_dropout.default, "x", 0.1, True), True),
        (_call(aten.relu.default, "x"), False),
        (_call(torch.sin, "x"), False),
        (_call(aten._scaled_dot_product_flash_attention_for_cpu.default, "q", "k", "v"), False),
        (_call(aten._scaled_dot_product_flash_attention_for_cpu.default, "q", "k", "v", 0.1), True),
        (_call(aten._scaled_dot_product_flash_attention_for_cpu.default, "q", "k", "v", dropout_p=0.1), True),
    ],
)
def test_only_calls_that_draw_are_random(node: Node, random: bool) -> None:
    assert is_random(node) is random


def test_what_nobody_vouches_for_is_not_repeated() -> None:
    with torch.library._scoped_library("rematch_tests", "FRAGMENT") as library:
        library.define("mystery(Tensor x) -> Tensor")
        assert not may_repeat(torch.ops.rematch_tests.mystery.default, on_cuda=False)
    assert not may_repeat(torch.sin, on_cuda=False)
    assert may_repeat(aten.mm.default, on_cuda=True)


def test_kernels_with_atomics_are_repeated_only_where_torch_runs_their_deterministic_variant() -> None:
    assert may_repeat(aten.index_add.default, on_cuda=False)
    assert not may_repeat(aten.index_add.default, on_cuda=True)
    with deterministic():
        assert may_repeat(aten.index_add.default, on_cuda=True)


def _batch_norm_arguments(training: bool) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, generator=generator)
    return x, torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), training, 0.1, 1e-5


def test_batch_norm_computes_the_same_without_its_running_statistics() -> None:
    args = _batch_norm_arguments(training=True)
    harmless = without_running_statistics(aten.native_batch_norm.default, args)
    assert harmless is not None
    again = aten.native_batch_norm.default(*harmless)
    assert torch.equal(args[3], torch.zeros(3)), "the running mean was touched"
    first = aten.native_batch_norm.default(*args)
    assert not torch.equal(args[3], torch.zeros(3)), "with statistics the kernel updates them"
    assert all(same_bits(one, other) for one, other in zip(first, again, strict=True))


def test_batch_norm_that_updates_nothing_is_left_as_it_is() -> None:
    evaluating = _batch_norm_arguments(training=False)
    assert without_running_statistics(aten.native_batch_norm.default, evaluating) is None
    x, weight, bias, _, _, *rest = _batch_norm_arguments(training=True)
    assert without_running_statistics(aten.native_batch_norm.default, (x, weight, bias, None, None, *rest)) is None
    assert without_running_statistics(aten.relu.default, (x,)) is None


def test_the_statistics_that_a_call_updates() -> None:
    node = _call(aten.native_batch_norm.default, "x", "weight", "bias", "mean", "var", True, 0.1, 1e-5)
    assert [buffer.name for buffer in updated_statistics(node)] == ["mean", "var"]
    assert updated_statistics(_call(aten.relu.default, "x")) == ()


@pytest.mark.parametrize("training", [True, False])
def test_backward_of_a_training_batch_norm_forgets_the_running_statistics(training: bool) -> None:
    names = ("grad", "x", "weight", "running_mean", "running_var", "mean", "invstd")
    node = _call(aten.native_batch_norm_backward.default, *names, training, 1e-5, [True, True, True])
    forget_unread_statistics(node.graph)
    read = {arg.name for arg in node.all_input_nodes}
    assert read == set(names) - ({"running_mean", "running_var"} if training else set())


def test_numbers_written_to_fresh_memory_are_filled_in_place() -> None:
    graph = Graph()
    empty = graph.call_function(aten.empty_like.default, (graph.placeholder("x"),))
    filled = graph.call_function(aten.bernoulli.p, (empty, 0.5))
    assert fill_of_empty(filled) is aten.bernoulli_.float
    graph.call_function(aten.relu.default, (empty,))
    assert fill_of_empty(filled) is None, "someone else reads the memory"
    assert fill_of_empty(_call(aten.bernoulli.p, "x", 0.5)) is None, "the memory holds something"


@pytest.mark.parametrize(
    ("target", "twin"),
    [
        (aten.relu.default, aten.relu_.default),
        (aten.add.Tensor, aten.add_.Tensor),
        (aten.gelu.default, aten.gelu_.default),
        (aten.mm.default, None),
        (aten.native_dropout.default, None),
        (torch.relu, None),
    ],
)
def test_pointwise_operators_have_twins_that_work_in_place(target: Any, twin: Any) -> None:
    assert in_place_twin(target) is twin


def _marked(target: Any) -> Node:
    """A call that eager makes in place."""
    node = _call(target, "x")
    node.meta["custom"] = {IN_PLACE: True}
    return node


@st.composite
def parts_of_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A slice of a contiguous tensor, its axes in any order."""
    shape = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    whole = torch.linspace(-3, 3, math.prod(shape)).reshape(shape)
    slices = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        slices.append(slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 3))))
    return whole[tuple(slices)].permute(draw(st.permutations(range(len(shape)))))


@given(part=parts_of_tensors())
def test_part_of_a_tensor_is_computed_as_if_it_were_still_part_of_it(part: torch.Tensor) -> None:
    apart = in_rows_apart(_marked(aten.gelu.default), part)
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    assert (apart is None) == (spanned == part.numel())
    if apart is not None:
        computed = apart(part)
        assert same_bits(computed, aten.gelu_.default(part))


def test_only_what_eager_runs_in_place_is_computed_in_rows_apart() -> None:
    part = torch.rand(6, 5)[::2]
    assert in_rows_apart(_marked(aten.gelu.default), part) == InPlaceOnCopy(aten.gelu_.default, (6, 1))
    assert in_rows_apart(_call(aten.gelu.default, "x"), part) is None
    assert in_rows_apart(_marked(aten.mm.default), part) is None
    assert in_rows_apart(_marked(aten.gelu.default), torch.rand(3, 1).expand(3, 4)) is None, "it overlaps itself"
    assert in_rows_apart(_marked(aten.gelu.default), 2.0) is None
