"""A tape does what its plan says while forward follows it, and is right where forward does not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rematch.capture.memory import PeakMemory
from rematch.execute.tape import Budget, Parting, TapePlan, UnpackEvent, observe
from rematch.execute.tape.recompute import Backward
from tests.taped import Calls, plan_for, taped
from tests.training import same_bits

aten = torch.ops.aten
WIDTH = 64
ROWS = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


class Forked(nn.Module):
    """Takes another path if it is told to, or when the data say so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.path = "long"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).exp()
        for _ in range(3):
            x = x.sin() * x
        if self.path == "short":
            return x
        if self.path == "other":
            x = x.mul_(0.5).tanh()
        return self.second(x).exp().sin()


def gradients_of(module: nn.Module, x: torch.Tensor = ROWS) -> list[torch.Tensor]:
    return list(torch.autograd.grad(module(x).square().mean(), list(module.parameters()), materialize_grads=True))


def assert_same_gradients(one: nn.Module, other: nn.Module, x: torch.Tensor = ROWS) -> None:
    assert all(same_bits(a, b) for a, b in zip(gradients_of(one, x), gradients_of(other, x), strict=True))


@pytest.mark.parametrize("budget", [None, Budget(0), Budget(20_000)])
@pytest.mark.parametrize("path", ["short", "other"])
def test_another_path_than_the_planned_one(path: str, budget: Budget | None) -> None:
    plain = Forked()
    parted: list[Parting] = []
    module = taped(copy.deepcopy(plain), plan_for(plain, ROWS), budget=budget, parted=parted.append)
    assert_same_gradients(module, plain)
    assert not parted
    plain.path = module.path = path
    assert_same_gradients(module, plain)
    (parting,) = parted
    assert parting.calls == observe(plain, (ROWS,), {}).calls
    assert parting.position == 8


def test_other_shapes_are_another_path() -> None:
    plain = Forked()
    parted: list[Parting] = []
    plan = plan_for(plain, ROWS)
    exp = plan.calls.index(aten.exp.default)
    module = taped(copy.deepcopy(plain), replace(plan, shapes={exp: (32, WIDTH)}), parted=parted.append)
    assert_same_gradients(module, plain)
    assert not parted
    assert_same_gradients(module, plain, ROWS[:16])
    assert [parting.position for parting in parted] == [exp + 1]


@contextmanager
def measured() -> Iterator[PeakMemory]:
    """Memory is measured while no garbage of earlier tests goes."""
    gc.collect()
    gc.disable()
    try:
        with PeakMemory(torch.device("cpu")) as used:
            yield used
    finally:
        gc.enable()


def kept_bytes(module: nn.Module) -> int:
    with measured() as used:
        output = module(ROWS)
    assert output.requires_grad
    return used.end_bytes - output.nbytes


def test_memory_after_forward() -> None:
    plain = Forked()
    activation = ROWS.nbytes
    assert kept_bytes(plain) >= 8 * activation
    assert kept_bytes(taped(copy.deepcopy(plain), plan_for(plain, ROWS))) < activation
    for budget in (0, 2, 4):
        module = taped(copy.deepcopy(plain), None, budget=Budget(budget * activation))
        assert max(budget - 1, 0) * activation <= kept_bytes(module) < (max(budget, 1) + 0.5) * activation
    path = taped(copy.deepcopy(plain), plan_for(plain, ROWS), budget=Budget(activation))
    path.path = "other"
    assert kept_bytes(path) < 1.5 * activation


def test_costs_decide_what_goes() -> None:
    """What takes long to compute stays."""

    def seconds(call: Any, args: Any, kwargs: Any) -> float:
        return 1.0 if call is slow else 1e-6

    runs = {}
    for slow in (aten.exp.default, aten.sin.default):
        module = taped(Forked(), None, budget=Budget(5 * ROWS.nbytes, seconds))
        value = module(ROWS).square().mean()
        with Calls() as calls:
            value.backward()
        runs[slow] = (calls.seen.count(aten.exp.default), calls.seen.count(aten.sin.default))
    assert runs[aten.exp.default][0] < runs[aten.sin.default][0]


class Logged(Backward):
    """Writes down in which order backward asks for contents."""

    order: list[tuple[int, int]]

    def unpack(self, handle: Any) -> torch.Tensor:
        content = handle.saved.content
        Logged.order.append((content.note.position, content.index))
        return super().unpack(handle)


def accesses(plan: TapePlan, module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    Logged.order = []
    with monkeypatch.context() as patch:
        patch.setattr("rematch.execute.tape.tape.Backward", Logged)
        gradients_of(taped(copy.deepcopy(module), plan))
    return Logged.order


def least_memory(plan: TapePlan, order: list[tuple[int, int]]) -> TapePlan:
    """For each access, everything from the start, and nothing of it kept: this plan's calls read the two before."""
    events = []
    for content in order:
        steps: list[Any] = []
        for call in sorted(call for call in plan.noted if call <= content[0]):
            steps += [call, (call - 3, 0)]
        steps += [(content[0] - behind, 0) for behind in (2, 1)]
        events.append(UnpackEvent(content, tuple(steps), last=True))
    return replace(plan, events=tuple(events))


def recomputed(module: nn.Module) -> tuple[int, int]:
    """Runs of `exp` in backward, and the peak of backward."""
    value = module(ROWS).square().mean()
    with Calls() as calls:
        value.backward()
    value = module(ROWS).square().mean()
    with measured() as used:
        value.backward()
    return calls.seen.count(aten.exp.default), used.peak_bytes


def test_events_decide_what_is_computed_when(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Forked()
    plan = plan_for(plain, ROWS)
    order = accesses(plan, plain, monkeypatch)
    planned = least_memory(plan, order)
    module = taped(copy.deepcopy(plain), planned)
    assert_same_gradients(module, plain)
    on_demand, with_events = (recomputed(taped(copy.deepcopy(plain), each)) for each in (plan, planned))
    assert on_demand[0] == 2
    assert with_events[0] > 4  # each access starts again
    assert with_events[1] < on_demand[1]


def test_what_no_step_lets_go_of_stays_for_later_events(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Forked()
    full = plan_for(plain, ROWS)
    exp = full.calls.index(aten.exp.default)
    runs = []
    for held in (False, True):
        events = list(least_memory(full, accesses(full, plain, monkeypatch)).events)
        if held:
            for number, event in enumerate(events):
                left_out = ((exp, 0), exp, exp - 1) if number else ((exp, 0),)
                steps = tuple(step for step in event.steps if step not in left_out)
                events[number] = replace(event, steps=steps, last=event.content != (exp, 0))
        planned = replace(full, events=tuple(events))
        assert_same_gradients(taped(copy.deepcopy(plain), planned), plain)
        runs.append(recomputed(taped(copy.deepcopy(plain), planned))[0])
    assert runs[0] > 10
    assert runs[1] == 3  # once for call 2, twice for call 11, which two nodes of autograd saved


def test_a_backward_in_another_order_goes_on_by_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Forked()
    plan = plan_for(plain, ROWS)
    order = accesses(plan, plain, monkeypatch)
    module = taped(copy.deepcopy(plain), least_memory(plan, order[::-1]))
    assert_same_gradients(module, plain)
    module = taped(copy.deepcopy(plain), least_memory(plan, order[: len(order) // 2]))
    assert_same_gradients(module, plain)


def test_results_in_the_memory_of_an_argument_are_no_contents() -> None:
    """The schema of `_unsafe_view` does not say that it is a view."""
    observed = observe(nn.Linear(8, 8, bias=False), (torch.randn(2, 3, 8),), {})
    assert aten._unsafe_view.default in observed.calls
    assert [observed.calls[call] for call, _ in observed.droppable] == [aten.mm.default]
