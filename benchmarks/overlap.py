"""When DDP's buckets of gradients leave: plain training beside a budget, in two processes with gloo between them.

    python benchmarks/overlap.py [--budget 60%] [--steps 9] [--layers 6]

A bucket leaves when the last of its gradients is there, and travels while backward goes on. For each bucket, prints
the share of backward's time after which it left, as the median of steps taken in turns by both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import rematch


def loss_of(output: Any) -> torch.Tensor:
    return output.loss


def model(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": 256, "n_head": 4, "vocab_size": 1000, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


class Watched:
    """A module under DDP that notes when its buckets leave."""

    def __init__(self, module: nn.Module) -> None:
        self.module = DistributedDataParallel(module, bucket_cap_mb=2)
        self.left: list[float] = []
        self.shares: list[list[float]] = []  # by step and bucket
        left = self.left

        def leave(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
            left.append(time.perf_counter())
            return allreduce_hook(None, bucket)

        self.module.register_comm_hook(None, leave)

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        self.module.zero_grad()
        loss = self.module(**batch).loss
        self.left.clear()
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        whole = time.perf_counter() - start
        self.shares.append([(each - start) / whole for each in self.left])

    def medians(self) -> list[float]:
        """Without the first steps, which make the buckets and measure."""
        return [statistics.median(bucket) for bucket in zip(*self.shares[3:], strict=True)]


def run(rank: int, asked: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(asked.port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    tokens = torch.randint(1000, (8, 128))
    batch = {"input_ids": tokens, "labels": tokens}
    planned = rematch.remat(model(asked.layers), batch, budget=asked.budget, loss=loss_of, time_limit=20)
    ours, plain = Watched(planned), Watched(model(asked.layers))
    for _ in range(asked.steps + 3):
        plain.step(batch)
        ours.step(batch)
    if rank == 0:
        plan = rematch.plans_of(planned)[0]
        print(f"{asked.layers} layers, budget {asked.budget}, {len(plan.recomputed)} operators recomputed")
        print("bucket  plain  ours  of backward")
        pairs = list(zip(plain.medians(), ours.medians(), strict=True))
        for number, (theirs, mine) in enumerate(pairs):
            print(f"{number:6d}  {theirs:5.0%}  {mine:4.0%}")
        print(f"largest difference {max(abs(theirs - mine) for theirs, mine in pairs):.0%}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="When DDP's buckets leave, with and without a budget.")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--port", type=int, default=29_571)
    processes.spawn(run, (parser.parse_args(),), nprocs=2)


if __name__ == "__main__":
    main()
