"""One case of test_cuda.py, in a process of its own: `python -m tests.execute.compiled.on_a_card CASE`.

Prints as JSON how far gradients are from those of eager mode (of their norm), and peaks and the budget in bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rematch.execute.compiled.backend import backends, rematch_backend
from rematch.trial import Trial
from tests.modules import mean_square

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, SHARE = 256, 0.8
TOKENS = (16, 512) if DEVICE.type == "cuda" else (8, 256)
STEPS = 10  # in which rematch compiles at most three times, and CUDA graphs are recorded


class Block(nn.Module):
    """A layer of a transformer whose products are all of one shape, so that little has to be tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        heads = [part(y).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).to(DEVICE)


Options = dict[str, Any]


def alone(module: nn.Sequential, **options: Any) -> nn.Module:
    return torch.compile(module, dynamic=False, **options)  # type: ignore[return-value]


def in_ddp(module: nn.Sequential, **options: Any) -> nn.Module:
    return torch.compile(DistributedDataParallel(module, bucket_cap_mb=1), dynamic=False, **options)  # type: ignore[return-value]


def in_fsdp(module: nn.Sequential, **options: Any) -> nn.Module:
    for block in module:
        block.compile(dynamic=False, **options)
        fully_shard(block)
    return fully_shard(module)


FEW: Options = {"test_configs.max_mm_configs": 4}  # else each product is tuned for a minute on a busy card
CASES: dict[str, tuple[Callable[..., nn.Module], Options]] = {
    "tuned": (alone, {"mode": "max-autotune-no-cudagraphs", **FEW}),
    "tuned with CUDA graphs": (alone, {"mode": "max-autotune", **FEW}),
    "CUDA graphs": (alone, {"triton.cudagraphs": True}),
    "DDP": (in_ddp, {}),
    "FSDP2": (in_fsdp, {}),
}


def trained(model: nn.Module, sample: torch.Tensor, steps: int) -> Trial:
    trial = Trial(model, mean_square)
    for _ in range(steps):
        trial.step(sample)
    return trial


def gradients(module: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
    return [gradient.clone() for gradient in whole if gradient is not None]


def outcome(case: str) -> dict[str, Any]:
    make, options = CASES[case]
    sample = torch.randn(*TOKENS, WIDTH, device=DEVICE)
    plain = stack()
    trained(plain, sample, 1)
    eager = gradients(plain)
    del plain
    kept = trained(make(stack()), sample, 3)  # without options: CUDA graphs would hide what a step takes
    kept_bytes = kept.peak_bytes(sample)
    del kept
    torch._dynamo.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    budget = int(SHARE * kept_bytes)
    model = make(stack(), backend=rematch_backend, options={"budget": budget, "time_limit": 2.0, **options})
    trial = trained(model, sample, STEPS)
    ours = gradients(model)
    # Together: those of the biases of keys are zero but for rounding.
    far = sum(float((one - other).square().sum()) for one, other in zip(ours, eager, strict=True))
    norm = sum(float(other.square().sum()) for other in eager)
    plans = [plan for backend in backends.values() for plan in backend.planner.plans]
    return {
        "distance": (far / norm) ** 0.5,
        "budget": budget,
        "kept": kept_bytes,
        "peak": trial.peak_bytes(sample),
        "recomputed": sum(len(plan.recomputed) for plan in plans),
        "history": [graph.history for backend in backends.values() for graph in backend.alive()],
    }


def main() -> None:
    case = sys.argv[1]
    torch.set_float32_matmul_precision("highest")
    group = CASES[case][0] is not alone
    if group:
        kind = "nccl" if DEVICE.type == "cuda" else "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    try:
        print(json.dumps(outcome(case)))
    finally:
        if group:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
