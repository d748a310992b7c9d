"""What people do with the graph under a tape: errors, repeated and partial backwards, threads, graphs let go."""

from __future__ import annotations

import copy
import gc
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from rematch.execute.tape import Budget
from rematch.execute.tape.contents import Content
from tests.modules import Net, batch, mean_square
from tests.taped import plan_for, taped, taped_copy
from tests.training import same_bits


class Chain(nn.Module):
    """A product and pointwise operators; returns what lies between as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        between = self.linear(x).exp()
        return (between.sin() * between).tanh(), between


ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Chain()
    return plain, taped_copy(plain, ROWS)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) > 0
    assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def _without_names(message: str) -> str:
    """Eager's error up to its hint, without the name of the autograd node, which hooks cannot know."""
    return re.sub(r",? (which is output 0 of \w+, )?is at", " is at", message).partition(" Hint")[0]


def test_a_write_to_a_saved_tensor_raises_what_eager_raises() -> None:
    messages = []
    for module in pair():
        output, between = module(ROWS)
        with torch.no_grad():
            between.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            output.sum().backward()
        messages.append(_without_names(str(error.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("drop_nothing", [False, True])
def test_a_write_to_a_weight_before_backward_raises_what_eager_raises(drop_nothing: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plan = plan_for(model, ROWS)
    wrapped = taped(copy.deepcopy(model), None if drop_nothing else plan)
    messages = []
    for module in (copy.deepcopy(model), wrapped):
        output = module(ROWS)
        with torch.no_grad():
            module[2].weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            output.sum().backward()
        messages.append(_without_names(str(error.value)))
    assert messages[0] == messages[1]


def test_a_write_to_what_recomputation_reads_raises() -> None:
    class Shifted(nn.Module):
        """Saves nothing of its input."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.scale + x).exp().sin()

    x = ROWS.clone()
    output = taped_copy(Shifted(), x)(x)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_memory_taken_from_a_weight_raises() -> None:
    module = taped_copy(pair()[0], ROWS)
    output, _ = module(ROWS)
    module.linear.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="given other memory"):
        output.sum().backward()


def test_other_memory_given_to_a_weight_raises() -> None:
    module = taped_copy(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()), ROWS)
    output = module(ROWS)
    module[1].weight.data = torch.zeros(8)
    with pytest.raises(RuntimeError, match="given other memory"):
        output.sum().backward()


def _twice(module: nn.Module) -> None:
    output, _ = module(ROWS)
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()


def _in_parts(module: nn.Module) -> None:
    output, between = module(ROWS)
    (first,) = torch.autograd.grad(output.sum(), between, retain_graph=True)
    between.backward(first, retain_graph=True)
    (second,) = torch.autograd.grad(output[:2].sum(), module.linear.weight)
    module.linear.weight.grad.add_(second)


def _one_of_two(module: nn.Module) -> None:
    outputs = [module(ROWS)[0], module(ROWS * 2)[0]]
    outputs[0].sum().backward()
    module(ROWS * 3)
    outputs[1].square().sum().backward()


def _doubly(module: nn.Module) -> None:
    x = ROWS.clone().requires_grad_()
    output, _ = module(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (gradient.square().sum() + output.mean()).backward()


def _elsewhere(module: nn.Module) -> None:
    output, _ = module(ROWS)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(output.sum().backward).result()


def _under_autocast(module: nn.Module) -> None:
    output, _ = module(ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output.sum().backward()


@pytest.mark.parametrize("budgeted", [False, True])
@pytest.mark.parametrize("use", [_twice, _in_parts, _one_of_two, _doubly, _elsewhere, _under_autocast])
def test_uses_of_the_graph(use: Callable[[nn.Module], None], budgeted: bool) -> None:
    plain, wrapped = pair()
    if budgeted:
        wrapped = taped(copy.deepcopy(plain), None, budget=Budget(0))
    for module in (plain, wrapped):
        use(module)
    assert_same(gradients(wrapped), gradients(plain))


def test_forwards_in_threads() -> None:
    torch.manual_seed(0)
    plain = Net(depth=2, norm=False).eval()
    plan = plan_for(plain, batch(8))
    wrapped = taped(copy.deepcopy(plain), plan)
    inputs = [batch(8) + number for number in range(8)]
    barrier = threading.Barrier(4)

    def results(module: nn.Module, x: torch.Tensor, wait: bool) -> list[torch.Tensor]:
        if wait:
            barrier.wait()
        return list(torch.autograd.grad(mean_square(module(x)), list(module.parameters())))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: results(wrapped, x, True), inputs))
    for x, result in zip(inputs, found, strict=True):
        assert_same(result, results(plain, x, False))


class _Scaled(torch.autograd.Function):
    """Its backward writes to what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x.mul_(2.0).mul_(grad)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(self.linear(x) + 1.0).sin()


def test_a_backward_that_writes_to_what_it_saved() -> None:
    plain = Overwriting()
    wrapped = taped_copy(plain, ROWS)
    for module in (plain, wrapped):
        output = module(ROWS)
        output.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    assert_same(gradients(wrapped), gradients(plain))


class Mark:
    """Lives as long as the autograd node that it is put on."""


def _living() -> int:
    return sum(type(found) is Content for found in gc.get_objects())


@pytest.mark.parametrize("budget", [None, Budget(0), Budget(2**40)])
def test_graphs_dropped_without_a_backward_leave_nothing(budget: Budget | None) -> None:
    module: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.5))
    module = taped(module, plan_for(module, ROWS) if budget is None else None, budget=budget)
    gc.collect()
    gc.disable()
    try:
        before = _living()
        for _ in range(2000 if budget is None else 50):
            output = module(ROWS)
            mark = output.grad_fn.metadata["mark"] = Mark()
            graph = weakref.ref(mark)
            del mark
        assert graph() is not None
        del output
        assert graph() is None
        assert _living() == before
    finally:
        gc.enable()


def test_dropped_memory_is_gone_after_forward_and_again_after_backward() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    class Noting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x * 2.0).exp()
            seen.append(StorageWeakRef(y.untyped_storage()))
            return y.sin().sum()

    seen: list[StorageWeakRef] = []
    x = ROWS.clone().requires_grad_()
    plan = plan_for(Noting(), x)
    for module, gone in ((Noting(), False), (taped(Noting(), plan), True)):
        output = module(x)
        assert seen[-1].expired() == gone
        output.backward()
        assert seen[-1].expired()


def test_what_is_brought_back_lives_until_its_last_use() -> None:
    """Each content is computed once although several operators saved it, and goes with the last of them."""
    runs = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.exp.default:
                runs.append(func)
            return func(*args, **(kwargs or {}))

    _, module = pair()
    output, _ = module(ROWS)
    with Counting():
        output.sum().backward(retain_graph=True)
        assert len(runs) == 1
        output.sum().backward()
    assert len(runs) == 1


def test_thousands_of_operators_in_a_row() -> None:
    class Long(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(1500)
            for number in range(1500):
                x = x.sin()
                out[number] = x
            return out.cos()

    x = torch.ones(()).requires_grad_()
    plan = plan_for(Long(), x)
    results = []
    for module in (Long(), taped(Long(), plan)):
        results.append(torch.autograd.grad(module(x).sum(), x)[0])
    assert same_bits(*results)
