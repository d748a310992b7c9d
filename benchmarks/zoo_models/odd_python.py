"""Modules of our own whose forward does in Python what tracers stumble over."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .base import Example, Family, mean_square

family = Family("odd Python")
WIDTH, BATCH = 64, 256


def features(batch: int = BATCH, width: int = WIDTH) -> torch.Tensor:
    """What most modules here take."""
    return torch.randn(batch, width)


class Block(nn.Module):
    """A residual multilayer perceptron."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return out


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


@family.model("counter")
def counter() -> Example:
    class Counting(Stack):
        calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return super().forward(x)

    return Example(Counting(), features(), mean_square, observe=lambda module: module.calls)


@family.model("counter-that-decides")
def deciding_counter() -> Example:
    """A warm-up: what forward computes depends on how often it was called."""

    class WarmUp(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("step", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> Any:
            self.step += 1  # type: ignore[assignment, operator]
            scale = min(1.0, self.step.item() / 10)  # type: ignore[operator]
            return super().forward(x) * scale

    return Example(WarmUp(), features(), mean_square)


@family.model("print-and-attribute")
def print_and_attribute() -> Example:
    class Chatty(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            self.last_shape = tuple(x.shape)
            print("forward of", self.last_shape)
            out = super().forward(x)
            self.last_output = out.detach()
            return out

    return Example(Chatty(), features(), mean_square, observe=lambda module: module.last_shape)


@family.model("layerdrop-torch")
def layerdrop_torch() -> Example:
    class LayerDrop(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            for index, block in enumerate(self.blocks):
                if torch.rand(()).item() > 0.4 or index == 0:
                    x = block(x)
            return x

    return Example(LayerDrop(6, dropout=0.1), features(), mean_square)


@family.model("layerdrop-python")
def layerdrop_python() -> Example:
    class LayerDrop(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            for index, block in enumerate(self.blocks):
                if random.random() > 0.4 or index == 0:
                    x = block(x)
            return x

    return Example(LayerDrop(6, dropout=0.1), features(), mean_square)


@family.model("experts-in-python")
def experts() -> Example:
    """Each token goes to the expert with the highest score; unused experts get no gradient."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 4)
            self.experts = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.router(x).softmax(-1)
            weight, chosen = scores.max(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero().squeeze(-1)
                if rows.numel():
                    out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            return out

    return Example(nn.Sequential(Experts(), Experts()), features(256), mean_square)


@family.model("experts-by-argmax")
def one_expert() -> Example:
    """The whole batch goes to one expert, chosen in Python; each step may take another."""

    class OneOf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(Stack(depth + 1) for depth in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            return self.experts[int(self.router(x).mean(0).argmax())](x)

    return Example(OneOf(), features(), mean_square)


@family.model("nonzero")
def data_dependent() -> Example:
    """Only rows with a positive mean go on."""

    class Selecting(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            rows = (x.mean(-1) > 0).nonzero().flatten()
            return super().forward(x[rows])

    return Example(Selecting(), features(256), mean_square)


@family.model("boolean-mask")
def boolean_mask() -> Example:
    class Masked(Stack):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
            out = super().forward(x)
            return out[mask]

    return Example(Masked(), (features(), torch.rand(BATCH) < 0.5), mean_square)


@family.model("numpy-in-forward")
def numpy_in_forward() -> Example:
    """Numbers leave torch and come back as constants."""

    class WithNumpy(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            middle = x.detach().numpy().mean(axis=0)
            return super().forward(x - torch.from_numpy(middle))

    return Example(WithNumpy(), features(), mean_square)


@family.model("dict-output")
def dict_output() -> Example:
    class Named(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return {"out": out, "norm": out.norm(), "name": "named", "parts": [out.sum(0), None]}

    return Example(Named(), features(), lambda output: mean_square(output["out"]) + output["norm"] * 0.1)


@dataclass
class Result:
    """What a module of ours returns."""

    hidden: torch.Tensor
    penalty: torch.Tensor
    label: str = "result"


@family.model("dataclass-output")
def dataclass_output() -> Example:
    class Structured(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return Result(out, out.abs().mean())

    return Example(Structured(), features(), lambda output: mean_square(output.hidden) + output.penalty)


@family.model("keywords-only")
def keywords_only() -> Example:
    class Keywords(Stack):
        def forward(self, *, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
            out = super().forward(x)
            return out if scale is None else out * scale

    return Example(Keywords(), {"x": features(), "scale": torch.rand(WIDTH)}, mean_square)


@family.model("non-tensor-arguments")
def non_tensor_arguments() -> Example:
    class Configured(Stack):
        def forward(self, x: torch.Tensor, depth: int, mode: str, factors: list[float]) -> Any:
            for block in list(self.blocks)[:depth]:
                x = block(x)
            return (x * factors[0]).tanh() if mode == "tanh" else x

    return Example(Configured(), (features(), 3, "tanh", [0.5, 2.0]), mean_square)


@family.model("pre-hook-that-doubles")
def pre_hook() -> Example:
    module = Stack()
    module.blocks[1].register_forward_pre_hook(lambda block, args: (args[0] * 2,))
    return Example(module, features(), mean_square)


@family.model("forward-hook")
def forward_hook() -> Example:
    """A hook that replaces an output, and one that only looks."""
    module = Stack()
    seen: list[float] = []
    module.blocks[1].register_forward_hook(lambda block, args, output: output * 0.5)
    module.blocks[2].register_forward_hook(lambda block, args, output: seen.append(float(output.detach().mean())))
    return Example(module, features(), mean_square)


@family.model("tensor-hook")
def tensor_hook() -> Example:
    """The gradient of an activation is clipped on its way."""

    class Clipped(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            for index, block in enumerate(self.blocks):
                x = block(x)
                if index == 1:
                    x.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
            return x

    return Example(Clipped(), features(), mean_square)


@family.model("backward-hook")
def backward_hook() -> Example:
    """Hooks on a module's gradients and on a parameter's."""
    module = Stack()
    module.blocks[1].register_full_backward_hook(lambda block, inputs, outputs: tuple(g * 2 for g in inputs))
    module.blocks[2].up.weight.register_hook(lambda gradient: gradient * 0.5)
    return Example(module, features(), mean_square)


@family.model("hook-added-later")
def hook_added_later() -> Example:
    """The second step meets a hook that was not there when the plan was made."""
    module = Stack()
    sample = features()

    def step(trained: nn.Module, number: int) -> torch.Tensor:
        if number == 1 and not trained.blocks[1]._forward_pre_hooks:
            trained.blocks[1].register_forward_pre_hook(lambda block, args: (args[0] * 2,))
        value = mean_square(trained(sample))
        value.backward()
        return value

    return Example(module, sample, mean_square, step=step)


@family.model("two-inputs-one-unused")
def unused_input() -> Example:
    class Ignoring(Stack):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
            return super().forward(x), other

    sample = (features(), torch.randn(3, requires_grad=True))
    return Example(Ignoring(), sample, lambda output: mean_square(output[0]))


@family.model("try-and-except")
def try_and_except() -> Example:
    """A first way fails on the shapes and a second one is taken."""

    class Trying(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            try:
                x = x @ x
            except RuntimeError:
                x = x @ x.T @ x / len(x)
            return super().forward(x)

    return Example(Trying(), features(96), mean_square)


@family.model("while-loop")
def while_loop() -> Example:
    """As many blocks as the values need."""

    class UntilLarge(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            times = 0
            while times < 8 and x.detach().abs().mean() < 1.2:
                x = self.blocks[times % 4](x) * 1.1
                times += 1
            return x

    return Example(UntilLarge(), features() * 0.7, mean_square)


@family.model("global-cache")
def cached_table() -> Example:
    """A table computed in the first call and kept, as rotary embeddings do."""

    class Cached(Stack):
        table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> Any:
            if self.table is None or self.table.shape[0] < x.shape[0]:
                self.table = torch.arange(x.shape[0]).float()[:, None].cos()
            return super().forward(x * self.table[: x.shape[0]])

    return Example(Cached(), features(), mean_square)


@family.model("lazy-layers")
def lazy_layers() -> Example:
    """Layers that get their shapes in the first call, which was made."""
    module = nn.Sequential(nn.LazyLinear(WIDTH), nn.GELU(), nn.LazyLinear(WIDTH), nn.GELU(), Stack(2))
    module(features())
    return Example(module, features(), mean_square)
