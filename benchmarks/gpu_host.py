"""On a CUDA card: host memory as a third choice, beside recomputation alone and what trainers offload.

    python benchmarks/gpu_host.py [--only REGEX] [--points 50,35,25,least] [--chunks 32] [--limit 60] [--jobs 8]

Llama 1B, GPT-2 medium and ViT-L as in `gpu_settings.py`. Peers: block checkpointing; PyTorch's `save_on_cpu` with
pinned memory; saved tensors offloaded on streams, as trainers do it (`gpu_streams.py`); and block checkpointing with
the blocks' inputs offloaded on streams. rematch at percentages of eager's peak, at each peer's own peak ("block",
"save_on_cpu", "streams", "inputs") and at the least budget that its refusal names: by recomputation alone, and with
host memory (`offload=True`); for language models both again with the head and the loss in slices. Every row is a
process of its own, and measures alone (`crew.py`), as in `gpu.py`. `--tiny` has small models for any machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import crew
import torch
from crew import Benchmark, Task
from gpu import Row, budgeted, by_peer, chart, eagerly, line, ours
from gpu_settings import (
    DEVICE,
    EAGER,
    PEERS,
    Setting,
    by_name,
    checkpointed,
    gpt2,
    llama,
    tiny_gpt2,
    tiny_llama,
    vit,
    wrapped,
)
from gpu_streams import StreamedSaves
from torch import nn

from rematch.trial import Trial

# Joins those of `gpu_settings.py`, so that points may name them.
PEERS |= {
    "save_on_cpu": "save_on_cpu, pinned",
    "streams": "saved tensors offloaded on streams",
    "inputs": "block checkpoint, inputs offloaded on streams",
}
HOST_PEERS = ("block", "save_on_cpu", "streams", "inputs")


def host_settings(tiny: bool) -> Iterator[Setting]:
    if tiny:
        yield from (tiny_llama(), tiny_gpt2(3))
    else:
        yield from (llama(), gpt2(24, 1024, 8, 1024), vit())


@contextmanager
def host_peer(name: str, setting: Setting, model: nn.Module) -> Iterator[Trial]:
    """A way to train with less device memory that is not ours."""
    trial = setting.trial(model)
    blocks = setting.blocks(model)
    if name == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu(pin_memory=DEVICE.type == "cuda"):
            yield trial
        return
    if name == "block":
        with wrapped(blocks, checkpointed):
            yield trial
        return
    saves = StreamedSaves(model, smallest_bytes=2**20 if DEVICE.type == "cuda" else 2**12)
    inner: Callable[..., Any] = checkpointed if name == "inputs" else lambda forward: forward
    with wrapped(blocks, lambda forward: saves.around(inner(forward))):
        yield trial


def ways(setting: Setting, chunks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of what rematch is asked for, with what `remat` takes."""
    yield "rematch, recomputation alone", {}
    yield "rematch, host memory", {"offload": True}
    if "ViT" not in setting.name:  # a classifier's logits weigh nothing
        yield f"rematch, recomputation alone, {chunks} slices", {"chunk_loss": chunks}
        yield f"rematch, host memory, {chunks} slices", {"offload": True, "chunk_loss": chunks}


def work(task: Task, arguments: argparse.Namespace) -> Row:
    setting = by_name(host_settings(arguments.tiny), task.model)
    if task.method == EAGER:
        return eagerly(task, setting, arguments.rounds)
    if task.method in PEERS.values():
        return by_peer(task, setting, arguments.rounds, host_peer)
    options = dict(ways(setting, arguments.chunks))[task.method]
    return ours(task, setting, arguments.limit, arguments.rounds, **options)


def tasks_of(found: list[Setting], points: str, chunks: int) -> Iterator[Task]:
    """Eager and the peers, then point by point."""
    for method in (EAGER, *(PEERS[name] for name in HOST_PEERS)):
        yield from (Task(setting.name, method) for setting in found)
    for point in filter(None, points.split(",")):
        for setting in found:
            yield from (Task(setting.name, method, point) for method, _ in ways(setting, chunks))


def main() -> None:
    parser = crew.options(__doc__, limit=60.0, rounds=10)
    parser.add_argument("--points", default=",".join(("50", "35", "25", "least", *HOST_PEERS)))
    parser.add_argument("--chunks", type=int, default=32, help="slices of the tokens for the head and the loss")
    arguments = parser.parse_args()
    tasks = [*tasks_of([*host_settings(arguments.tiny)], arguments.points, arguments.chunks)]
    rows = crew.run(Benchmark("gpu-host", Row, tasks, work, line, budgeted), arguments)
    chart(rows, arguments.results / "gpu-host.png", logarithmic=True)  # some peers take seven times as long
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
