"""Training steps of all kinds, with one module or several, set beside plain autograd, bit by bit."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rematch
from rematch.errors import CaptureError
from tests.modules import Block, Net, batch, mean_square
from tests.training import assert_same_steps, step_of, train
from tests.uses import Stack, assert_alike, on_replay, on_tape, recomputes, wrap

pytestmark = pytest.mark.usefixtures("engine")

# Steps


def test_several_forwards_before_one_backward() -> None:
    plain = Net()
    wrapped = wrap(plain, batch())

    def step(module: nn.Module) -> torch.Tensor:
        first, second, third = (module(batch() * factor) for factor in (1.0, 2.0, -1.0))
        value = mean_square(first * second) + third.sum()
        value.backward()
        return value

    assert_alike(wrapped, plain, step)


@pytest.mark.parametrize("accumulate", [False, True], ids=["unexpected", "expected"])
def test_gradient_accumulation(accumulate: bool) -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), budget="80%", accumulate=accumulate)

    def step(module: nn.Module) -> torch.Tensor:
        values = []
        for factor in (1.0, 0.5, 2.0):
            values.append(mean_square(module(batch() * factor)) / 3)
            values[-1].backward()
        return torch.stack(values)

    assert_alike(wrapped, plain, step)


def _single_step(module: nn.Module) -> torch.Tensor:
    module.zero_grad()
    value = mean_square(module(batch()))
    value.backward()
    return value


class _RunsOut(TorchDispatchMode):
    """A device that has no more memory for the n-th operator."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if not self.left:
            raise torch.OutOfMemoryError("no more memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("after", [3, 11])
def test_a_device_that_runs_out_in_forward_leaves_the_module_usable(after: int) -> None:
    plain = Net(norm=False)
    wrapped = wrap(plain, batch())

    assert_alike(wrapped, plain, _single_step)
    with pytest.raises(torch.OutOfMemoryError), _RunsOut(after):
        wrapped(batch())
    assert all("forward" not in module.__dict__ for module in list(wrapped.modules())[1:])
    assert_alike(wrapped, plain, _single_step)


def test_modes_of_others_see_every_operator() -> None:
    plain = Net(norm=False).eval()
    wrapped = wrap(plain, batch())
    with FlopCounterMode(display=False) as expected:
        plain(batch())
    with FlopCounterMode(display=False) as counted:
        returned = wrapped(batch())
    assert counted.get_total_flops() == expected.get_total_flops()
    assert torch.equal(returned, plain(batch()))


def test_a_device_that_runs_out_in_backward_leaves_the_module_usable() -> None:
    plain = Net(norm=False)
    wrapped = wrap(plain, batch())

    def run_out(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no more memory")

    assert_alike(wrapped, plain, _single_step)
    sample = batch().requires_grad_()
    sample.register_hook(run_out)  # once all of the module's own backward has run
    with pytest.raises(torch.OutOfMemoryError):
        mean_square(wrapped(sample)).backward()
    with pytest.raises(torch.OutOfMemoryError):
        returned = wrapped(batch())
        returned.register_hook(run_out)
        mean_square(returned).backward()
    assert_alike(wrapped, plain, _single_step)


def test_the_graph_can_be_retained() -> None:
    plain = Net()
    wrapped = wrap(plain, batch())

    def step(module: nn.Module) -> Any:
        value = mean_square(module(batch()))
        first = torch.autograd.grad(value, list(module.parameters()), retain_graph=True)
        return first, torch.autograd.grad(value, list(module.parameters()))

    assert_alike(wrapped, plain, step)


@on_replay
def test_gradients_of_gradients_are_refused_in_words() -> None:
    wrapped = wrap(Net(), batch())
    value = mean_square(wrapped(batch()))
    gradients = torch.autograd.grad(value, list(wrapped.parameters()), create_graph=True)
    with pytest.raises(CaptureError, match=r"gradients of gradients.*cannot be computed.*Use the plain module"):
        sum(gradient.square().sum() for gradient in gradients).backward()


@on_tape
def test_gradients_of_gradients() -> None:
    plain = Net()

    def step(module: nn.Module) -> torch.Tensor:
        gradients = torch.autograd.grad(mean_square(module(batch())), list(module.parameters()), create_graph=True)
        value = sum(gradient.square().sum() for gradient in gradients)
        assert isinstance(value, torch.Tensor)
        value.backward()
        return value

    assert_alike(wrap(plain, batch()), plain, step)


def test_create_graph_alone_is_no_error() -> None:
    plain = Net()
    wrapped = wrap(plain, batch())

    def step(module: nn.Module) -> Any:
        return torch.autograd.grad(mean_square(module(batch())), list(module.parameters()), create_graph=True)

    assert_alike(wrapped, plain, step)


@pytest.mark.parametrize("backward", [True, False])
def test_a_step_leaves_nothing_to_the_garbage_collector(backward: bool) -> None:
    """What it kept, and autograd's nodes of parameters, would otherwise stay until some later collection."""
    wrapped = wrap(Net(), batch())
    mean_square(wrapped(batch())).backward()
    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in wrapped.parameters()]
    gc.collect()
    gc.disable()
    try:
        value = mean_square(wrapped(batch()))
        for node in nodes:
            node.metadata["of this step"] = True
        if backward:
            value.backward()
        del node, nodes, value
        edges = [torch.autograd.graph.get_gradient_edge(parameter) for parameter in wrapped.parameters()]
        assert not any(edge.node.metadata for edge in edges)
    finally:
        gc.enable()


def test_a_forward_without_backward_disturbs_nothing() -> None:
    plain = Net()
    wrapped, other = wrap(plain), wrap(plain)

    def step(module: nn.Module) -> torch.Tensor:
        module(batch())
        value = mean_square(module(batch(64)))
        value.backward()
        return value

    wrapped(batch())  # its loss is being waited for while the other one is planned
    plain(batch())  # updates the running statistics too
    wrapped.load_state_dict(plain.state_dict())
    other.load_state_dict(plain.state_dict())
    reference = train(copy.deepcopy(plain), step)
    assert_same_steps(train(other, step), reference)
    assert_same_steps(train(wrapped, step), reference)


# Several modules


def test_two_of_a_kind_side_by_side() -> None:
    plain = nn.ModuleList([Net(), Net()])
    wrapped = nn.ModuleList(wrap(module, batch()) for module in plain)

    def step(modules: nn.Module) -> torch.Tensor:
        first, second = modules
        value = mean_square(first(batch()) - second(batch() * 2))
        value.backward()
        return value

    assert_same_steps(train(wrapped, step), train(plain, step))
    assert all(recomputes(module) for module in wrapped)


def test_one_after_the_other() -> None:
    plain = nn.Sequential(Stack(nn.ModuleList(Block() for _ in range(2))), Net())
    wrapped = nn.Sequential(wrap(plain[0], batch(), budget="80%"), wrap(plain[1]))
    assert_same_steps(*(train(module, step_of(batch(), mean_square)) for module in (wrapped, plain)))
    assert recomputes(wrapped[1])


def test_nested() -> None:
    plain = Net()
    inside = copy.deepcopy(plain)
    inside.blocks[1] = wrap(plain.blocks[1], batch(), budget="1GiB")
    assert_same_steps(*(train(copy.deepcopy(module), step_of(batch(), mean_square)) for module in (inside, plain)))
    assert_alike(wrap(inside, batch()), plain, step_of(batch(), mean_square))


def test_wrapped_again() -> None:
    plain = Net()
    tighter = wrap(wrap(plain, batch(), budget="90%"), batch())
    assert_alike(tighter, plain, step_of(batch(), mean_square))
    assert len(rematch.plans_of(tighter)) == 1
