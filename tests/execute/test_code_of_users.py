"""Hooks, functions, checkpoints and copies of the user's own, set beside plain autograd, bit by bit."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rematch
from rematch.errors import CaptureError
from tests.modules import Net, batch, mean_square
from tests.training import assert_same_steps, noted, same_bits, step_of, train
from tests.uses import assert_alike, on_replay, on_tape, wrap

pytestmark = pytest.mark.usefixtures("engine")

# Hooks and code of the user's own


def test_hooks_on_the_module_on_tensors_and_on_parameters() -> None:
    def hooked(module: nn.Module) -> tuple[nn.Module, list[torch.Tensor]]:
        seen: list[torch.Tensor] = []
        module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        module.register_forward_hook(lambda _, args, output: output + args[0].mean())
        module.register_full_backward_hook(lambda _, inputs, outputs: seen.extend(map(noted, (*inputs, *outputs))))
        module.head.weight.register_hook(lambda gradient: gradient * 3)
        module.head.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(noted(parameter.grad)))
        return module, seen

    plain, plain_seen = hooked(Net())
    wrapped, seen = hooked(Net())
    wrapped.load_state_dict(plain.state_dict())
    wrapped = rematch.remat(wrapped, batch().requires_grad_(), budget="66%", time_limit=0.5)
    assert not seen  # planning runs no hooks

    def step(module: nn.Module) -> torch.Tensor:
        output = module(batch().requires_grad_())
        output.register_hook(lambda gradient: gradient / 2)
        value = mean_square(output)
        value.backward()
        return value

    assert_alike(wrapped, plain, step)
    assert len(seen) == len(plain_seen) == 9
    assert all(same_bits(*pair) for pair in zip(seen, plain_seen, strict=True))


def test_forward_hooks_inside() -> None:
    plain = Net()
    plain.blocks[1].register_forward_hook(_double)
    plain.blocks[2].register_forward_pre_hook(_one_more)
    assert_alike(wrap(plain, batch()), plain, step_of(batch(), mean_square))


def _double(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _one_more(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] + 1,)


@on_replay
def test_backward_hooks_inside_are_refused_in_words() -> None:
    plain = Net()
    plain.blocks[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"modules\.py:\d+, in forward.*backwards? hooks"):
        wrap(plain, batch())


@on_tape
def test_backward_hooks_inside() -> None:
    plain = Net()
    plain.blocks[1].register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] * 2,))
    assert_alike(wrap(plain, batch()), plain, step_of(batch(), mean_square))


class Cubed(torch.autograd.Function):
    """Its gradient is wrong on purpose, so that a derived one would be noticed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class WithFunction(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = Cubed.apply(block(x).tanh())
        return self.head(x)


def test_a_function_with_its_own_backward() -> None:
    plain = WithFunction()
    assert_alike(wrap(plain, batch()), plain, step_of(batch(), mean_square))


class Checkpointed(Net):
    """Without batch norm: eager updates running statistics twice when it computes a checkpoint again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(norm=False)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside(reentrant: bool) -> None:
    plain = Checkpointed(reentrant)
    wrapped = wrap(plain, batch().requires_grad_(), budget="200%")

    def step(module: nn.Module) -> Any:
        leaf = batch().requires_grad_()
        value = mean_square(module(leaf))
        value.backward()
        return value, leaf.grad

    assert_same_steps(train(wrapped, step), train(plain, step))


# Copies


def _copies(module: nn.Module) -> list[nn.Module]:
    return [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]


@pytest.mark.parametrize("used_before", [False, True])
def test_copies_have_parameters_and_plans_of_their_own(used_before: bool) -> None:
    plain = Net()
    wrapped = wrap(plain, batch())
    step = step_of(batch(), mean_square)
    if used_before:
        assert_alike(wrapped, plain, step)
    for twin in _copies(wrapped):
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in wrapped.parameters()}
        assert rematch.plans_of(twin) == rematch.plans_of(wrapped)
        assert_alike(twin, copy.deepcopy(plain), step)


def test_states_are_exchanged_with_plain_modules() -> None:
    plain, other = Net(), Net()
    wrapped = wrap(plain, batch())
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    wrapped.load_state_dict(other.state_dict())
    assert_alike(wrapped, other, step_of(batch(), mean_square))
    plain.load_state_dict(wrapped.state_dict())
    assert all(same_bits(*pair) for pair in zip(plain.parameters(), other.parameters(), strict=True))


def test_still_the_same_kind_of_module() -> None:
    plain = Net()
    wrapped = rematch.remat(plain, batch(), budget="66%", time_limit=0.5)
    assert type(wrapped) is Net
    assert wrapped.family == "tests"
    assert inspect.signature(wrapped.forward) == inspect.signature(plain.forward)
    assert all(ours is theirs for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True))
    assert [name for name, _ in wrapped.named_modules()] == [name for name, _ in plain.named_modules()]
    assert "forward" not in plain.__dict__
