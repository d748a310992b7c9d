"""Modules of our own that use autograd in uncommon ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .base import Example, Family, mean_square
from .odd_python import BATCH, WIDTH, Block, Stack, features

family = Family("odd autograd")


class Between(Stack):
    """Blocks with something between them."""

    def between(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = self.between(block(x))
        return x


@family.model("own-function")
def own_function() -> Example:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = x.clamp(max=2).exp()
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x, out = ctx.saved_tensors
            return gradient * out * (x < 2)

    class Module(Between):
        def between(self, x: torch.Tensor) -> Any:
            return Exp.apply(x) * 0.1

    return Example(Module(), features(), mean_square)


@family.model("own-function-that-draws")
def drawing_function() -> Example:
    """Random numbers are drawn in the Function's forward, for its backward alone."""

    class NoisyGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.rand_like(x))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            (noise,) = ctx.saved_tensors
            return gradient * (0.5 + noise)

    class Module(Between):
        def between(self, x: torch.Tensor) -> Any:
            return NoisyGradient.apply(x)

    return Example(Module(dropout=0.1), features(), mean_square)


@family.model("own-function-with-numpy")
def numpy_function() -> Example:
    """A kernel outside torch writes into a tensor that torch only allocated."""
    import numpy

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            numpy.square(x.detach().numpy(), out=out.numpy())
            ctx.save_for_backward(x)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            return gradient * 2 * x

    class Module(Between):
        def between(self, x: torch.Tensor) -> Any:
            return Square.apply(x.tanh())

    return Example(Module(), features(), mean_square)


@family.model("own-function-attributes")
def function_attributes() -> Example:
    """Tensors kept as attributes of the context, not by save_for_backward."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
            ctx.sign, ctx.factor = x.sign(), factor
            return x.abs() * factor

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            return gradient * ctx.sign * ctx.factor, None

    class Module(Between):
        def between(self, x: torch.Tensor) -> Any:
            return Scale.apply(x, 0.5)

    return Example(Module(), features(), mean_square)


@family.model("straight-through")
def straight_through() -> Example:
    """Rounded forward, as it is backward, as in quantization-aware training."""

    class Module(Between):
        def between(self, x: torch.Tensor) -> Any:
            return x + (torch.round(x * 8) / 8 - x).detach()

    return Example(Module(), features(), mean_square)


@family.model("sparse-embedding")
def sparse_embedding() -> Example:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, WIDTH, sparse=True)
            self.stack = Stack()

        def forward(self, ids: torch.Tensor) -> Any:
            return self.stack(self.table(ids))

    return Example(Module(), torch.randint(0, 100, (BATCH,)), mean_square)


@family.model("embedding-bag")
def embedding_bag() -> Example:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(100, WIDTH, mode="mean")
            self.stack = Stack()

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> Any:
            return self.stack(self.table(ids, offsets))

    sample = (torch.randint(0, 100, (4 * BATCH,)), torch.arange(0, 4 * BATCH, 4))
    return Example(Module(), sample, mean_square)


@family.model("torch-func")
def torch_func() -> Example:
    """Derivatives of a submodule by torch.func."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
            self.stack = Stack(2)

        def forward(self, x: torch.Tensor) -> Any:
            slopes = torch.func.vmap(torch.func.grad(lambda row: self.inner(row).sum()))(x)
            return self.stack(x + slopes)

    return Example(Module(), features(), mean_square)


@family.model("functional-call")
def functional_call() -> Example:
    """A submodule called with weights that forward made, as hypernetworks do."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stack(3)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            weights = {name: value * self.scale for name, value in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, weights, (x,))

    return Example(Module(), features(), mean_square)


@family.model("gradient-penalty")
def gradient_penalty() -> Example:
    """`torch.autograd.grad` with `create_graph` inside forward."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
            )

        def forward(self, x: torch.Tensor) -> Any:
            x = x.detach().requires_grad_()
            score = self.critic(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            return score.mean() + (slope.norm(dim=-1) - 1).square().mean()

    return Example(Module(), features(), lambda output: output)


@family.model("energy-model")
def energy_model() -> Example:
    """Forces as derivatives of an energy, as in models of molecules; they get their own loss."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(
                nn.Linear(3, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)
            )

        def forward(self, places: torch.Tensor) -> Any:
            with torch.enable_grad():
                places = places.clone().requires_grad_()
                energy = self.energy(places).sum()
                (slope,) = torch.autograd.grad(energy, places, create_graph=self.training)
            return energy, -slope

    return Example(Module(), torch.randn(256, 3), lambda output: output[0] * 0.01 + output[1].square().mean())


@family.model("inner-loop")
def inner_loop() -> Example:
    """One step of gradient descent inside forward, as in meta-learning."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
            self.head = Stack(2)

        def forward(self, x: torch.Tensor) -> Any:
            error = (x @ self.weight - x).square().mean()
            (slope,) = torch.autograd.grad(error, self.weight, create_graph=True)
            return self.head(x @ (self.weight - 0.1 * slope))

    return Example(Module(), features(), mean_square)


def checkpointed(reentrant: bool) -> Example:
    """Each block under torch.utils.checkpoint, with dropout."""

    class Module(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    sample = features()
    return Example(Module(dropout=0.1), sample.requires_grad_(reentrant), mean_square)


family.add("checkpoint-reentrant", checkpointed, True)
family.add("checkpoint", checkpointed, False)


@family.model("saved-tensor-hooks")
def saved_tensor_hooks() -> Example:
    """Forward packs what it saves by hooks of its own."""

    class Module(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.float64), lambda t: t.to(torch.float32)):
                x = self.blocks[0](x)
            return self.blocks[3](self.blocks[2](self.blocks[1](x)))

    return Example(Module(), features(), mean_square)


@family.model("fft")
def fft() -> Example:
    """Complex weights in the frequency domain, as in Fourier neural operators."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(17, 17, dtype=torch.cfloat) * 0.2 for _ in range(3))
            self.mix = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            for weight, mix in zip(self.weights, self.mix, strict=True):
                spectrum = torch.fft.rfft(x)
                x = torch.nn.functional.gelu(torch.fft.irfft(spectrum @ weight, n=x.shape[-1]) + mix(x))
            return x

    return Example(Module(), torch.randn(16, 8, 32), mean_square)


@family.model("complex")
def complex_numbers() -> Example:
    """Complex activations, their magnitude and their phase."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32, dtype=torch.cfloat) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            z = torch.view_as_complex(x)
            for layer in self.layers:
                z = layer(z)
                z = torch.polar(z.abs().tanh(), z.angle())
            return torch.view_as_real(z)

    return Example(Module(), torch.randn(128, 32, 2), mean_square)


@family.model("tied-weights")
def tied_weights() -> Example:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, WIDTH)
            self.stack = Stack(3)
            self.head = nn.Linear(WIDTH, 100, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.stack(self.table(ids)))

    return Example(Module(), torch.randint(0, 100, (BATCH,)), mean_square)


@family.model("frozen-layers")
def frozen_layers() -> Example:
    module = Stack(6)
    for block in list(module.blocks)[:3]:
        block.requires_grad_(False)
    return Example(module, features(), mean_square)


@family.model("no-grad-inside")
def no_grad_inside() -> Example:
    """A teacher without gradients beside a student."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = Stack(3), Stack(3)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                wanted = self.teacher(x)
            return self.student(x) - wanted

    return Example(Module(), features(), mean_square)


@family.model("momentum-teacher")
def momentum_teacher() -> Example:
    """Forward moves the teacher's weights towards the student's, then uses them."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = Stack(3), Stack(3)
            self.teacher.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.no_grad():
                for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
                wanted = self.teacher(x)
            return self.student(x) - wanted

    return Example(Module(), features(), mean_square)


@family.model("weight-norms")
def weight_norms() -> Example:
    """Parametrized weights: spectral norm, which iterates in forward, and weight norm."""
    from torch.nn.utils import parametrizations

    def layer(parametrize: Any) -> nn.Module:
        return nn.Sequential(parametrize(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

    module = nn.Sequential(*(layer(p) for p in (parametrizations.spectral_norm, parametrizations.weight_norm) * 2))
    return Example(module, features(), mean_square)


@family.model("lora-by-hand")
def lora() -> Example:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Linear(base.in_features, 4, bias=False)
            self.up = nn.Linear(4, base.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.base(x) + self.up(self.down(x)) * 2

    module = Stack(5).requires_grad_(False)
    for block in module.blocks:
        assert isinstance(block, Block)
        block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[assignment]
    return Example(module, features(), mean_square)


@family.model("inputs-with-gradients")
def inputs_with_gradients() -> Example:
    """The inputs are differentiated too, as for adversarial examples."""
    sample = features().requires_grad_()

    def step(module: nn.Module, number: int) -> Any:
        sample.grad = None
        value = mean_square(module(sample))
        value.backward()
        assert sample.grad is not None
        return value, sample.grad.clone()

    return Example(Stack(), sample, mean_square, step=step)
