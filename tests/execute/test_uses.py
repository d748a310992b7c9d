"""The ways people use a module, each trained inside a budget and set beside plain autograd, bit by bit."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import rematch
from rematch.errors import CaptureError
from rematch.planning.settings import AUTO, REPLAY, TAPE
from tests.modules import BATCH, WIDTH, Block, Net, batch, mean_square
from tests.training import Loss, TrainingStep, assert_same_steps, noted, same_bits, step_of, train

pytestmark = pytest.mark.usefixtures("engine")
on_tape = pytest.mark.parametrize("engine", [TAPE], indirect=True)
on_replay = pytest.mark.parametrize("engine", [REPLAY], indirect=True)
# Where replay traces something else than eager runs it refuses, and the choice falls on the tape.
chosen = pytest.mark.parametrize("engine", [TAPE, AUTO], indirect=True)


def wrap(plain: nn.Module, sample: Any = None, **options: Any) -> nn.Module:
    """A copy of `plain` made to train in two thirds of its memory; `plain` stays as it is."""
    settings: dict[str, Any] = {"budget": "75%", "time_limit": 1.0, **options}
    return rematch.remat(copy.deepcopy(plain), sample, **settings)


def recomputes(module: nn.Module) -> bool:
    return any(plan.recomputed for plan in rematch.plans_of(module))


def assert_alike(wrapped: nn.Module, plain: nn.Module, step: TrainingStep) -> None:
    """Three steps of both, and at least one operator computed again, so that there was something to get wrong."""
    assert_same_steps(train(wrapped, step), train(plain, step))
    assert recomputes(wrapped)


@pytest.fixture(autouse=True)
def fixed_parameters() -> None:
    torch.manual_seed(0)


# Losses


@pytest.mark.parametrize(("loss", "given"), [(mean_square, True), (mean_square, False), (torch.sum, False)])
def test_a_loss_given_or_unknown(loss: Loss, given: bool) -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), loss=loss if given else None)
    assert_alike(wrapped, plain, step_of(batch(), loss))


@on_tape
def test_a_loss_whose_gradient_is_one_number_everywhere() -> None:
    plain = Net()
    assert_alike(wrap(plain, batch(), loss=torch.sum), plain, step_of(batch(), torch.sum))


@on_replay
def test_a_loss_that_is_known_is_traced_as_eager_runs_it_or_refused() -> None:
    plain = nn.Sequential(Net(), nn.BatchNorm1d(4))
    with pytest.raises(CaptureError, match="not what eager runs"):
        wrap(plain, batch(), loss=torch.sum)
    with pytest.raises(CaptureError, match="not what eager runs"):
        wrap(Several(), batch(), loss=lambda outputs: outputs[3].sum())


@chosen
def test_the_sum_of_what_a_batch_norm_returns() -> None:
    plain = nn.Sequential(Net(), nn.BatchNorm1d(4))
    assert_alike(wrap(plain, batch()), plain, step_of(batch(), torch.sum))


# Types and layouts


def under_autocast(inputs: torch.Tensor) -> TrainingStep:
    def step(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = module(inputs)
        value = mean_square(output)
        value.backward()
        return value

    return step


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "at_first_call"])
def test_autocast(ahead: bool) -> None:
    plain = Net()
    with torch.autocast("cpu", torch.bfloat16):
        wrapped = wrap(plain, batch() if ahead else None)
    assert_alike(wrapped, plain, under_autocast(batch()))
    assert len(rematch.plans_of(wrapped)) == 1


@chosen
def test_autocast_with_a_shared_parameter() -> None:
    plain = Net(norm=False)
    plain.blocks[1].up.weight = plain.blocks[0].up.weight
    assert_alike(wrap(plain), plain, under_autocast(batch()))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(F.silu(norm(x), inplace=True))
        return self.head(x.mean((2, 3)))


def test_channels_last() -> None:
    plain = Images().to(memory_format=torch.channels_last)
    images = torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last)
    assert_alike(wrap(plain, images, budget="90%"), plain, step_of(images, mean_square))


def test_another_dtype_is_planned_anew() -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), budget=900_000)
    assert not recomputes(wrapped)
    assert wrapped.to(torch.float64) is wrapped
    assert_alike(wrapped, plain.to(torch.float64), step_of(batch().double(), mean_square))


# Parameters


def test_frozen_parameters_get_no_gradient() -> None:
    plain = Net()
    plain.blocks[0].requires_grad_(False)
    plain.head.bias.requires_grad_(False)
    assert_alike(wrap(plain, batch(), budget="80%"), plain, step_of(batch(), mean_square))


def test_shared_parameters() -> None:
    plain = Net()
    plain.blocks[1].up.weight = plain.blocks[0].up.weight
    plain.blocks[2].down = plain.blocks[0].down
    wrapped = wrap(plain, batch())
    assert wrapped.blocks[1].up.weight is wrapped.blocks[0].up.weight
    assert_alike(wrapped, plain, step_of(batch(), mean_square))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), budget="95%")

    def trained(module: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        steps = optimizer(module.parameters(), lr=0.01)
        for _ in range(3):
            steps.zero_grad()
            mean_square(module(batch())).backward()
            steps.step()
        return list(module.state_dict().values())

    assert all(same_bits(*pair) for pair in zip(trained(wrapped), trained(plain), strict=True))


# Inputs and outputs


@dataclass
class Inputs:
    x: torch.Tensor
    scale: float = 2.0


@dataclass
class Outputs:
    logits: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)


class Structured(Net):
    def forward(self, given: Inputs, parts: list[Any], *, shift: float = 0.0, options: Any = None) -> Outputs:
        x = given.x * given.scale + parts[0] - parts[1]["y"] + shift
        logits = super().forward(x + options["z"][0])
        return Outputs(logits, {"more": [logits.exp(), 3], "none": None, "apart": (logits.detach(), "name")})


def test_structures_go_in_and_come_out() -> None:
    x = batch()
    sample = ((Inputs(x), [x, {"y": x.sin()}]), {"shift": 0.5, "options": {"z": (x.cos(),)}})

    def loss(output: Outputs) -> torch.Tensor:
        return mean_square(output.logits) + output.extra["more"][0].mean()

    plain = Structured()
    wrapped = wrap(plain, sample)
    assert_alike(wrapped, plain, step_of(sample, loss))
    output = wrapped(*sample[0], **sample[1])
    assert type(output) is Outputs
    assert list(output.extra) == ["more", "none", "apart"]
    assert (output.extra["more"][1], output.extra["none"], output.extra["apart"][1]) == (3, None, "name")
    assert output.logits.requires_grad and not output.extra["apart"][0].requires_grad


@pytest.mark.parametrize("sample", [((batch(),), {"scale": 0.5}), {"x": batch(), "scale": 0.5}, (batch(), 0.5)])
def test_keywords_and_numbers(sample: Any) -> None:
    plain = Net()
    assert_alike(wrap(plain, sample), plain, step_of(sample, mean_square))


def test_a_sequential() -> None:
    plain = nn.Sequential(Block(), nn.ReLU(inplace=True), Block(), Block(), nn.Linear(WIDTH, 4))
    assert_alike(wrap(plain, batch()), plain, step_of(batch(), mean_square))


class Attention(nn.Module):
    def __init__(self, fill: bool) -> None:
        super().__init__()
        self.fill = fill
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.queries(x) @ self.keys(x).transpose(-1, -2)
        scores = scores.masked_fill(mask < 0, float("-inf")) if self.fill else scores + mask
        return x + F.softmax(scores, -1) @ self.values(x)


@pytest.mark.parametrize("fill", [True, False], ids=["filled", "added"])
def test_masks_of_minus_infinity(fill: bool) -> None:
    plain = Stack(nn.ModuleList(Attention(fill) for _ in range(3)))
    x = torch.randn(4, 64, WIDTH)
    sample = (x, torch.full((64, 64), float("-inf")).triu(1))
    assert_alike(wrap(plain, sample), plain, step_of(sample, mean_square))


class Stack(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


class Several(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
        logits = super().forward(x, scale)
        return logits, logits.exp(), (x * 2).sin(), self.head.weight.square()


@chosen
@pytest.mark.parametrize("used", [0, 1, 3])
def test_outputs_that_nobody_uses(used: int) -> None:
    plain = Several()
    assert_alike(wrap(plain, batch()), plain, step_of(batch(), lambda outputs: outputs[used].sum()))


def test_outputs_stay_what_they_were_after_backward() -> None:
    plain = Several()
    wrapped = wrap(plain, batch())

    def step(module: nn.Module) -> Any:
        outputs = module(batch())
        mean_square(outputs[0]).backward()
        return outputs

    assert_alike(wrapped, plain, step)


def test_gradients_of_inputs() -> None:
    plain = Net()
    wrapped = wrap(plain, batch().requires_grad_())

    def step(module: nn.Module) -> Any:
        leaf = batch().requires_grad_()
        inner = leaf * 2
        inner.retain_grad()
        mean_square(module(leaf) + module(inner)).backward()
        return leaf.grad, inner.grad

    assert_alike(wrapped, plain, step)


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


# Other shapes and modes


def test_batches_of_all_sizes() -> None:
    plain = Net()
    wrapped = wrap(plain, batch(), budget="85%")

    def step(module: nn.Module) -> torch.Tensor:
        values = []
        for size in (BATCH, 32, BATCH + 8, 32, 7):
            values.append(mean_square(module(batch(size))))
            values[-1].backward()
        return torch.stack(values)

    assert_alike(wrapped, plain, step)
    plans = rematch.plans_of(wrapped)
    assert len({plan.graph_fingerprint for plan in plans}) == len(plans) >= 4


def test_between_training_and_evaluation() -> None:
    plain = Net()
    wrapped = wrap(plain, batch())

    def step(module: nn.Module) -> Any:
        assert module.train() is module
        value = mean_square(module(batch()))
        value.backward()
        module.eval()
        with torch.no_grad():
            scored = module(batch())
        with torch.inference_mode():
            inferred = module(batch(32))
        assert not scored.requires_grad and inferred.is_inference()
        differentiable = module(batch())
        module.train()
        with torch.no_grad():
            updating = module(batch())  # running statistics and random numbers too
        return value, scored, inferred.clone(), differentiable, updating

    assert_alike(wrapped, plain, step)


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
    wrapped = rematch.remat(wrapped, batch().requires_grad_(), budget="66%", time_limit=1.0)
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
    wrapped = rematch.remat(plain, batch(), budget="66%", time_limit=1.0)
    assert type(wrapped) is Net
    assert wrapped.family == "tests"
    assert inspect.signature(wrapped.forward) == inspect.signature(plain.forward)
    assert all(ours is theirs for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True))
    assert [name for name, _ in wrapped.named_modules()] == [name for name, _ in plain.named_modules()]
    assert "forward" not in plain.__dict__
