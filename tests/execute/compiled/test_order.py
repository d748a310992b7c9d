"""Kernels that several operators are fused into run where the last of these was."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from rematch.execute.compiled.order import PlannedOrder, in_order_of_last


@dataclass
class Kernel:
    """What is read of a node of inductor's scheduler: one kernel of operators with these places."""

    operators: list[int]
    waits_for: set[int] = field(default_factory=set)

    @property
    def max_order(self) -> int:
        return max(self.operators)

    @property
    def unmet_dependencies(self) -> list[Any]:
        return [SimpleNamespace(name=f"made by {operator}") for operator in self.waits_for] + [
            SimpleNamespace(name="an input")
        ]

    def get_buffer_names(self) -> set[str]:
        return {f"made by {operator}" for operator in self.operators}


def test_a_fused_kernel_runs_where_its_last_operator_was() -> None:
    sums, product, last = Kernel([0, 3]), Kernel([1, 2]), Kernel([4], {0, 3})
    assert in_order_of_last([sums, product, last]) == [product, sums, last]


def test_what_waits_for_a_kernel_stays_behind_it() -> None:
    sums, needs_the_first = Kernel([0, 3]), Kernel([1], {0})
    assert in_order_of_last([sums, needs_the_first]) == [sums, needs_the_first]


@st.composite
def kernels(draw: st.DrawFn) -> list[Kernel]:
    """Kernels in an order in which they can run, which read what earlier ones make."""
    owners = draw(st.lists(st.integers(0, 6), min_size=1, max_size=20))
    found = [Kernel([at for at, each in enumerate(owners) if each == owner]) for owner in sorted(set(owners))]
    for number, kernel in enumerate(found):
        earlier = [operator for other in found[:number] for operator in other.operators]
        if earlier:
            kernel.waits_for = set(draw(st.lists(st.sampled_from(earlier), max_size=4)))
    return found


def none_could_come_sooner(ordered: list[Any]) -> bool:
    """Each runs after those it waits for, and of those that could run in its place none was before it."""
    made_here = {buffer for node in ordered for buffer in node.get_buffer_names()}
    there: set[str] = set()
    for place, node in enumerate(ordered):
        ready = [
            later
            for later in ordered[place:]
            if {read.name for read in later.unmet_dependencies} & made_here <= there | later.get_buffer_names()
        ]
        if node not in ready or node.max_order > min(each.max_order for each in ready):
            return False
        there |= node.get_buffer_names()
    return True


@given(kernels())
def test_each_kernel_runs_once_after_those_it_waits_for_and_none_could_come_sooner(given_kernels: list[Kernel]) -> None:
    ordered = in_order_of_last(given_kernels)
    assert sorted(map(id, ordered)) == sorted(map(id, given_kernels))
    assert none_could_come_sooner(ordered)


def test_only_graphs_with_gradients_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Kernel([0, 3]), Kernel([1, 2])]
    for is_inference, expected in ((True, both), (False, both[::-1])):
        with torch._inductor.virtualized.V.set_graph_handler(SimpleNamespace(is_inference=is_inference)):
            assert PlannedOrder()(list(both)) == expected


def test_inductors_caches_can_hold_it() -> None:
    assert pickle.loads(pickle.dumps(PlannedOrder())).uuid() == PlannedOrder().uuid()
    assert "_post_fusion_custom_pass" in torch._inductor.list_options()


def test_inductor_runs_kernels_in_that_order() -> None:
    seen: list[bool] = []

    class Noting(PlannedOrder):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            ordered = super().__call__(nodes)
            seen.append(none_could_come_sooner(ordered))
            return ordered

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + torch.tanh(x @ w)
        return x.square().sum()

    x, w = (torch.randn(16, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(step(x, w), (x, w))
    torch._dynamo.reset()
    options = {"_post_fusion_custom_pass": Noting(), "fx_graph_cache": False}
    compiled: Any = torch.compile(step, options=options)  # type: ignore[call-overload]
    for mine, theirs in zip(torch.autograd.grad(compiled(x, w), (x, w)), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert seen == [True, True]
