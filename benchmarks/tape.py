"""What a tape costs the host for each operator of forward, beside eager and an empty dispatch mode.

`make bench-tape ARGS="--device cuda --large"`

Two models: one of many tiny operators, where the host is all there is to wait for, and one of few large ones, where
kernels hide it. For each, the time of forward and of a whole step as ratios to eager's: under an empty mode with hooks
that do nothing but what a hook must (the floor), under tapes that follow a plan and note nothing, note everything and
drop nothing, or drop everything, and under the rule for paths without a plan. Rounds of all variants alternate, and the
median counts. On the CPU we take one thread and its own time, which a busy machine disturbs least. `--large` adds Llama
with a billion parameters and ViT-L, as people train them; it needs a large card, transformers and torchvision.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from rematch.execute.tape import Budget, TapePlan, drop, drop_all, observe, run


class Block(nn.Module):
    """A pre-norm block with attention, of the size of a transformer's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Floor(TorchDispatchMode):
    """Looks at a position and runs the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.position += 1
        return func._op(*args, **kwargs) if kwargs else func._op(*args)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


class Logits(nn.Module):
    """A language model of transformers that returns a tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids).logits


def llama() -> tuple[nn.Module, torch.Tensor]:
    """Llama 3.2's sizes, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("cuda"):
        return Logits(LlamaForCausalLM(config).to(torch.bfloat16)), torch.randint(0, 128256, (8, 2048))


def vit() -> tuple[nn.Module, torch.Tensor]:
    """ViT-L/16 under bf16 autocast."""
    from torchvision.models import vit_l_16

    with torch.device("cuda"):
        module, images = vit_l_16(), torch.randn(64, 3, 224, 224)
    module.forward = torch.autocast("cuda", dtype=torch.bfloat16)(module.forward)
    return module, images


def blocks(width: int, rows: int, length: int, depth: int, device: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(width, 4) for _ in range(depth))).to(device)
    return module, torch.randn(rows, length, width, device=device)


Forward = Callable[[], torch.Tensor]


def variants(module: nn.Module, x: torch.Tensor) -> tuple[dict[str, Forward], int]:
    """Forwards by name, and how many operators each runs."""
    observed = observe(module, (x,), {})
    calls, droppable = observed.calls, observed.droppable
    observed = replace(observed, returned=None)

    def floor() -> torch.Tensor:
        with Floor(), saved_tensors_hooks(_detached, lambda tensor: tensor):
            return module(x)

    def under(plan: TapePlan | None, budget: Budget | None = None) -> Forward:
        return lambda: run(module, (x,), {}, plan=plan, budget=budget)

    return {
        "eager": lambda: module(x),
        "empty mode": floor,
        "notes nothing": under(TapePlan(calls, frozenset(), frozenset())),
        "notes all, keeps all": under(drop(observed, frozenset())),
        "drops every second": under(drop(observed, frozenset(droppable[::2]))),
        "drops everything": under(drop_all(observed)),
        "no plan, large budget": under(None, Budget(2**60)),
    }, len(calls)


def measure(forwards: dict[str, Forward], rounds: int, device: str) -> dict[str, tuple[float, float]]:
    """Median seconds of forward and of the step, by name."""
    synchronize = torch.cuda.synchronize if device == "cuda" else nullcontext
    clock = time.perf_counter if device == "cuda" else time.thread_time
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forwards}
    for number in range(rounds + 2):
        for name, forward in forwards.items():
            synchronize()
            start = clock()
            output = forward()
            middle = clock()  # on CUDA, of the host alone
            output.sum().backward()
            synchronize()
            end = clock()
            if number >= 2:
                times[name].append((middle - start, end - start))
    return {name: tuple(map(statistics.median, zip(*each, strict=True))) for name, each in times.items()}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (768, 8, 1024) if options.device == "cuda" else (256, 2, 256)
    report("host-bound", *blocks(32, 2, 16, 12, options.device), options)
    report("compute-bound", *blocks(*sizes, 4, options.device), options)
    if options.large:
        report("Llama 1B", *llama(), options)
        report("ViT-L", *vit(), options)


def report(name: str, module: nn.Module, x: torch.Tensor, options: argparse.Namespace) -> None:
    """Measure one model and print its table."""
    forwards, calls = variants(module, x)
    found = measure(forwards, options.rounds, options.device)
    eager_forward, eager_step = found["eager"]
    print(f"{name}: {calls} operators in forward, {eager_step * 1e3:.2f} ms a step in eager on {options.device}")
    print(f"  {'':24}{'us an operator':>16}{'forward':>10}{'step':>8}")
    for variant, (forward, step) in found.items():
        more = (forward - eager_forward) / calls * 1e6
        print(f"  {variant:24}{more:>+16.1f}{forward / eager_forward:>10.2f}{step / eager_step:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
