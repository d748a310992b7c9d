"""Blocks that run as captured: the same bits, the same memory, and eager wherever a pattern would be a guess."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from rematch.execute.tape import Blocks, Budget, Observation, Parting, TapePlan, drop, drop_all, run
from tests.taped import Policy, drop_some, plan_for
from tests.training import measured_peak


class Layer(nn.Module):
    """What a transformer's block is made of, with numbers in it that autograd does not know."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.shift = 1.0

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.up(self.norm(x))
        inner = 0.5 * inner * (self.shift + torch.tanh(inner))
        out = x + self.down(inner)
        return out if scale is None else out * scale


class Stack(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.sigmoid(x.mean())
        for layer in self.layers:
            x = layer(x) if isinstance(layer, Other) else layer(x, scale)
        return x


class Casting(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Other(nn.Module):
    """A layer of the user's own, for what is not to be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)


class Gradients:
    """Gradients of one module, plainly and under a tape with its blocks captured."""

    def __init__(self, module: nn.Module, policy: Policy = drop_all, *shape: int) -> None:
        self.module = module
        self.sample = torch.randn(shape or (4, 6, 16))
        self.plan: TapePlan = plan_for(module, self.sample, policy=policy)
        self.blocks = Blocks.of(module)
        self.partings: list[Parting] = []
        self.budget: Budget | None = None  # where the plan is left

    def plain(self) -> list[torch.Tensor]:
        return self._of(self.module)

    def captured(self) -> list[torch.Tensor]:
        return self._of(self.forward)

    def forward(self, sample: torch.Tensor) -> Any:
        return run(
            self.module.forward,
            (sample,),
            {},
            plan=self.plan,
            budget=self.budget,
            parted=self.partings.append,
            blocks=self.blocks,
        )

    def _of(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        self.module.zero_grad()
        sample = self.sample.clone().requires_grad_()
        returned = forward(sample)
        returned.square().sum().backward()
        assert sample.grad is not None
        return [
            returned.detach(),
            sample.grad,
            *(p.grad.clone() for p in self.module.parameters() if p.grad is not None),
        ]

    def assert_equal(self, steps: int = 3) -> None:
        for _ in range(steps):
            expected, got = self.plain(), self.captured()
            assert len(got) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class Summing(nn.Module):
    """Its sums are dead when the linear layer makes copies of its parameters, which get their addresses."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        first, second, third = x + 1, x + 2, x + 3
        total = first + second + third
        del first, second, third
        return F.gelu(self.linear(total)) + x * scale


def _drop_products(observation: Observation) -> TapePlan:
    """Drop what matrix products make; the copies of parameters that they read stay."""
    products = {call for call, made in enumerate(observation.calls) if made is torch.ops.aten.addmm.default}
    plan = drop(observation, frozenset(key for key in observation.droppable if key[0] in products))
    return TapePlan(plan.calls, frozenset(products), plan.dropped)


def test_storages_are_not_taken_for_dead_ones_at_their_addresses() -> None:
    gradients = Gradients(
        Casting(Summing, depth=8), _drop_products, 64, 32, 16
    )  # too large to be noted for convenience
    gradients.assert_equal(4)
    assert gradients.blocks.unseen == 3 * 8
    assert len(gradients.plan.dropped) == 8


@pytest.mark.parametrize("policy", [drop_all, drop_some(0), drop_some(1), drop_some(2)])
def test_blocks_run_unseen_with_the_same_bits(policy: Policy) -> None:
    gradients = Gradients(Stack(), policy)
    gradients.assert_equal(4)
    assert gradients.blocks.unseen == 3 * 3  # the first step is followed
    assert not gradients.partings
    assert all("forward" not in module.__dict__ for module in gradients.module.modules())


def test_blocks_of_many_sizes_run_unseen() -> None:
    """More than Dynamo compiles of one piece of code."""

    class Bottleneck(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(16, width), nn.Linear(width, 16)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return x + scale * self.up(torch.tanh(self.down(x)))

    sizes = torch._dynamo.config.recompile_limit + 2
    widths = iter(range(1, sizes + 1))
    gradients = Gradients(Stack(lambda: Bottleneck(next(widths)), depth=sizes))
    gradients.assert_equal(2)
    assert gradients.blocks.unseen == sizes


@pytest.mark.parametrize("policy", [drop_all, drop_some(4), drop_some(5)])
def test_casts_inside_operators_are_made_again(policy: Policy) -> None:
    gradients = Gradients(Casting(), policy)
    gradients.assert_equal(3)
    assert gradients.blocks.unseen == 2 * 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, when it captures again
def test_a_number_that_changes_is_seen() -> None:
    gradients = Gradients(Stack())
    gradients.assert_equal(2)
    for layer in gradients.module.layers:  # type: ignore[union-attr]
        layer.shift = 3.0
    unseen = gradients.blocks.unseen
    gradients.assert_equal(2)
    assert gradients.blocks.unseen == unseen + 3  # the step after the change is followed, the next one is not
    gradients.module.layers[1].eval()  # type: ignore[index]
    gradients.assert_equal(2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_parameters_that_change_are_read_anew() -> None:
    gradients = Gradients(Stack())
    for _ in range(3):
        gradients.assert_equal(1)
        with torch.no_grad():
            for parameter in gradients.module.parameters():
                parameter.mul_(1.1)
    gradients.module.layers[0].up = nn.Linear(16, 32)  # type: ignore[index, union-attr]
    gradients.assert_equal(2)
    gradients.module.layers[0].up.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    gradients.assert_equal(2)
    assert gradients.blocks.unseen > 0


class Writing(Other):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(self.linear(x)) * 2.0


class Printing(Other):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gc.get_count()  # something that Dynamo does not know
        return torch.tanh(self.linear(x)) + 1.0


class Drawing(Other):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(self.linear(x)), 0.0 if not self.training else 0.5)


class Checkpointing(Other):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=False)
        assert isinstance(inner, torch.Tensor)
        return inner * 2.0


class Mapping(Other):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: torch.tanh(row) * 2.0)(self.linear(x))


@pytest.mark.parametrize("layer", [Writing, Printing, Checkpointing, Mapping])
def test_what_has_no_pattern_is_followed(layer: Callable[[], nn.Module]) -> None:
    gradients = Gradients(Stack(layer))
    gradients.assert_equal()
    assert gradients.blocks.unseen == 0
    assert not gradients.partings


class Checkpointed(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
        return x


class Hooked(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(lambda tensor: tensor.double(), lambda packed: packed.float()):
            return super().forward(x)


@pytest.mark.parametrize("stack", [Checkpointed, Hooked])
def test_blocks_whose_saved_tensors_go_to_others_are_followed(stack: type[Stack]) -> None:
    gradients = Gradients(stack())
    gradients.assert_equal()
    assert gradients.blocks.unseen == 0


def test_random_numbers_are_drawn_again() -> None:
    gradients = Gradients(Stack(Drawing))
    for step in range(3):
        torch.manual_seed(step)
        expected = gradients.plain()
        torch.manual_seed(step)
        assert all(torch.equal(a, b) for a, b in zip(gradients.captured(), expected, strict=True))


class Asking(Other):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        return x.exp() if torch.compiler.is_compiling() else x.sin()


def test_a_block_that_runs_otherwise_when_captured_says_so() -> None:
    gradients = Gradients(Stack(Asking))
    gradients.captured()
    assert gradients.blocks.misled
    assert gradients.partings


class Exponential(Other):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).exp()


def test_backward_of_a_block_that_runs_otherwise_is_right_where_memory_runs_short() -> None:
    """From where it leaves the plan, all that was noted may be dropped, and runs again from its notes."""
    module = Stack(Asking)
    gradients = Gradients(module, drop_some(3))
    gradients.budget = Budget(0)
    got = gradients.captured()
    assert gradients.blocks.misled
    as_run = Stack(Asking)
    as_run.layers[0] = Exponential()
    as_run.load_state_dict(module.state_dict())
    gradients.module = as_run
    assert all(torch.equal(a, b) for a, b in zip(got, gradients.plain(), strict=True))


def test_hooks_inside_keep_a_block_from_being_captured() -> None:
    module = Stack()
    seen: list[Any] = []
    module.layers[1].up.register_forward_hook(lambda *args: seen.append(1))  # type: ignore[union-attr]
    gradients = Gradients(module)
    seen.clear()
    gradients.captured()
    gradients.captured()
    assert len(seen) == 2
    assert gradients.blocks.unseen == 2  # the two others, in the second step


def test_dynamo_that_was_told_to_stay_out_stays_out() -> None:
    gradients = Gradients(Stack())
    with torch.compiler.set_stance("force_eager"):
        gradients.assert_equal(2)
    assert gradients.blocks.unseen == 0
    with torch._dynamo.config.patch(disable=True):
        gradients.assert_equal(2)
    assert gradients.blocks.unseen == 0
    gradients.assert_equal(2)
    assert gradients.blocks.unseen == 3


class Attending(Other):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x + F.scaled_dot_product_attention(x, x, x)


def test_attention_by_other_kernels_is_followed() -> None:
    gradients = Gradients(Stack(Attending))
    gradients.assert_equal(2)
    assert gradients.blocks.unseen == 3
    with sdpa_kernel(SDPBackend.MATH):
        gradients.assert_equal(1)
    assert gradients.blocks.unseen == 3
    gradients.assert_equal(1)
    assert gradients.blocks.unseen == 6


def test_a_write_to_what_autograd_saved_is_found_out() -> None:
    gradients = Gradients(Stack())
    gradients.captured()
    sample = gradients.sample.clone().requires_grad_()
    returned = gradients.forward(sample)
    with torch.no_grad():
        sample.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        returned.sum().backward()


def test_backward_can_go_twice_and_a_graph_can_be_dropped() -> None:
    gradients = Gradients(Stack())
    gradients.captured()
    returned = gradients.forward(gradients.sample)
    first = torch.autograd.grad(returned.sum(), list(gradients.module.parameters()), retain_graph=True)
    second = torch.autograd.grad(returned.sum(), list(gradients.module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    returned = gradients.forward(gradients.sample)
    alive = weakref.ref(returned.untyped_storage())
    gc.disable()
    try:
        del returned
        assert alive() is None  # without a collector
    finally:
        gc.enable()


def test_memory_is_the_same_as_when_followed() -> None:
    gradients = Gradients(Stack(lambda: Layer(64), 4), drop_some(3), 64, 16, 64)
    followed = copy.copy(gradients)
    followed.blocks = Blocks([])
    peaks = [measured_peak(torch.device("cpu"), one.captured)[0] for one in (followed, gradients, gradients)]
    assert gradients.blocks.unseen == 4  # in the second step; the first one learns
    assert max(peaks[1:]) <= peaks[0] + 4096


def test_nothing_is_left_when_forward_fails() -> None:
    module = Stack()
    gradients = Gradients(module)
    gradients.assert_equal(2)
    with pytest.raises(RuntimeError, match="shape"), warnings.catch_warnings():
        gradients.forward(torch.randn(4, 6, 15))
    assert all("forward" not in inner.__dict__ for inner in module.modules())
    gradients.assert_equal(2)
