"""Losses, gradients, buffers and random states are eager's, bit by bit, whatever the tape drops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from rematch.execute.tape import Budget, observe
from tests.modules import Net, batch
from tests.taped import Calls, drop_some, taped, taped_copy
from tests.training import TrainingStep, assert_same_steps, deterministic, step_of, train


class Residual(nn.Module):
    """Convolutions, batch norm, ReLU in place, and a sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 3, 3, padding=1, bias=False),
            nn.BatchNorm2d(3),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 3, 3, padding=1, bias=False),
            nn.BatchNorm2d(3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y += x
        return F.relu_(y).mean((2, 3))


class Mobile(nn.Module):
    """An inverted residual with squeeze and excitation, in place wherever it can be."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12), nn.ReLU6(inplace=True))
        self.depth = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.BatchNorm2d(12), nn.Hardswish(True))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 12, 1), nn.Hardsigmoid(inplace=True))
        self.project = nn.Sequential(nn.Conv2d(12, 3, 1), nn.BatchNorm2d(3))
        self.drop = nn.Dropout(0.2, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depth(self.expand(x))
        y = y * self.gate(y)
        return self.drop(self.project(F.silu(y, inplace=True))).add_(x)


class Assigning(nn.Module):
    """Writes parts of tensors: by slices, by indices, through views, and out of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        out = torch.zeros(len(x), 16, device=x.device)
        out[:, :8] = y.sin()
        out[:, 8:] = self.second(y).exp()
        out[:, ::2] *= 0.5
        view = out.view(-1, 4, 4).transpose(1, 2)
        view[:, 1].add_(1.0)
        z = torch.zeros_like(y).index_add_(0, torch.arange(len(x), device=x.device) // 2, y.cos())
        z = z.clone().index_fill(1, torch.tensor([3], device=x.device), 2.0)
        noise = torch.empty_like(y).uniform_()
        z = z.masked_fill(noise > 0.7, 0.0) * noise
        pieces = torch.cat([z, out], dim=1).mul_(2.0).split(8, dim=1)
        blank = torch.zeros_like(y)
        shifted = (y + blank).exp()  # reads what is written over next
        blank[1:] = 3.0
        return torch.stack([*(piece.tanh() for piece in pieces), shifted.sin() * blank]).exp()


class Experts(nn.Module):
    """Experts chosen in Python; the path depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


class _Scaled(torch.autograd.Function):
    """Changes memory where no dispatcher sees it, and draws in forward for backward only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out.numpy()[...] *= weight.detach().numpy()
        noise = torch.rand_like(x)
        ctx.save_for_backward(x, weight, noise, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight, noise, out = ctx.saved_tensors
        return grad * weight * noise + ctx.saved_tensors[3], (grad * x * noise * out).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _Scaled.apply(self.linear(x).exp(), self.weight)
        mask = torch.zeros(8)
        mask.numpy()[::2] = 1.5  # seen by nobody
        scale = torch.empty(8)
        scale.numpy()[...] = 0.5
        return (y.sin() * mask).exp() * scale


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.net = Net(depth=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.net.blocks:
            x = checkpoint(block, F.gelu(x), use_reentrant=self.reentrant)
        return self.net.head(x.tanh())


class Spectral(nn.Module):
    """Complex numbers, lazily conjugated and negated ones among them, and a view as another type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.fft(self.linear(x).sin())
        z = torch.view_as_real(y * torch.exp(y).conj())
        return z.square().sum(-1) + (y.conj().imag * y.real).exp() + y.abs().view(torch.int32).view(torch.float32)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return GPT2LMHeadModel(config).train()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).train()


IDS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "mlp": (Net, (batch(8),)),
    "residual": (Residual, (IMAGES,)),
    "mobile": (Mobile, (IMAGES,)),
    "gpt2": (_gpt2, (IDS,)),
    "llama": (_llama, (IDS,)),
    "lstm": (lambda: nn.LSTM(8, 8, 2, dropout=0.2, bidirectional=True), (ROWS[:, None],)),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (ROWS[None], ROWS[None, :4])),
    "assigning": (Assigning, (ROWS,)),
    "experts": (Experts, (ROWS,)),
    "custom": (Custom, (ROWS,)),
    "checkpoint": (lambda: Checkpointed(False), (batch(8),)),
    "checkpoint, reentrant": (lambda: Checkpointed(True), (batch(8).requires_grad_(),)),
    "complex": (Spectral, (ROWS,)),
}


def loss_of(output: Any) -> torch.Tensor:
    output = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    return output.float().square().mean()


def made(name: str, device: torch.device) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    make, sample = MODELS[name]
    if name == "custom" and device.type != "cpu":
        pytest.skip("writes to memory through numpy, so it needs the CPU")
    torch.manual_seed(0)
    return make().to(device), tuple(
        tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in sample
    )


def assert_alike(wrapped: nn.Module, plain: nn.Module, step: TrainingStep) -> None:
    with deterministic():
        assert_same_steps(train(wrapped, step, steps=2), train(copy.deepcopy(plain), step, steps=2))


@pytest.mark.parametrize("name", MODELS)
def test_everything_dropped(name: str, device: torch.device) -> None:
    plain, sample = made(name, device)
    assert_alike(taped_copy(plain, *sample), plain, step_of(sample, loss_of))


@pytest.mark.parametrize("name", ["residual", "mobile", "assigning", "experts", "gpt2"])
def test_bits_do_not_depend_on_what_is_dropped(name: str, device: torch.device) -> None:
    plain, sample = made(name, device)
    for seed in range(5):
        assert_alike(taped_copy(plain, *sample, policy=drop_some(seed)), plain, step_of(sample, loss_of))


@pytest.mark.parametrize("name", MODELS)
def test_no_plan_but_a_budget(name: str, device: torch.device) -> None:
    plain, sample = made(name, device)
    for size in (0, 2000):
        wrapped = taped(copy.deepcopy(plain), None, budget=Budget(size))
        assert_alike(wrapped, plain, step_of(sample, loss_of))


def test_autocast_with_dropout(device: torch.device) -> None:
    plain, sample = made("gpt2", device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        wrapped = taped_copy(plain, *sample)

    def step(module: nn.Module) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            value = loss_of(module(*sample))
            value.backward()  # inside: what is recomputed must not be cast again
        return value

    assert_alike(wrapped, plain, step)


@pytest.mark.parametrize("name", MODELS)
def test_something_is_recomputed(name: str, device: torch.device) -> None:
    plain, sample = made(name, device)
    counts = []
    for module in (plain, taped_copy(plain, *sample)):
        value = loss_of(module(*sample))
        with Calls() as calls:
            value.backward()
        counts.append(len(calls.seen))
    assert counts[1] > counts[0]


@pytest.mark.parametrize("deterministically", [False, True])
def test_kernels_that_add_with_atomics_do_not_run_twice(deterministically: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA card and a torch built for it")
    experts, sample = made("experts", torch.device("cuda"))
    with deterministic() if deterministically else nullcontext():
        observed = observe(experts, sample, {})
    writes = {place for place, call in enumerate(observed.calls) if call is torch.ops.aten.index_add_.default}
    assert writes
    assert bool(writes & {call for call, _ in observed.droppable}) == deterministically
