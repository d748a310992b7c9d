"""On a CUDA card: host memory as a third choice, beside recomputation alone and what trainers offload.

    python benchmarks/gpu_host.py [--only REGEX] [--points 50,35,25,least] [--chunks 32] [--limit 60] [--rounds 10]

Llama 1B, GPT-2 medium and ViT-L as in `gpu.py` and `gpu_more.py`. Peers: block checkpointing; PyTorch's `save_on_cpu`
with pinned memory; saved tensors offloaded on streams, as trainers do it (`gpu_streams.py`); and block checkpointing
with the blocks' inputs offloaded on streams. rematch at percentages of eager's peak, at each peer's own peak ("block",
"save_on_cpu", "streams", "inputs") and at the least budget that its refusal names: by recomputation alone, and with
host memory (`offload=True`); for language models both again with the head and the loss in slices. Rows are kept as JSON
as they come, and a run that was stopped goes on where it was; the chart and the table come last. `--tiny` has small
models for any machine.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu import (
    DEVICE,
    PEERS,
    Row,
    Setting,
    attempted,
    chart,
    checkpointed,
    conditions,
    gpt2,
    line,
    llama,
    measured,
    ours,
    tidy,
    vit,
    wrapped,
)
from gpu_streams import StreamedSaves
from torch import nn

from rematch.files import write_text
from rematch.trial import Trial

# Joins those of `gpu.py`, so that points may name them.
PEERS |= {
    "save_on_cpu": "save_on_cpu, pinned",
    "streams": "saved tensors offloaded on streams",
    "inputs": "block checkpoint, inputs offloaded on streams",
}
OURS = ("block", "save_on_cpu", "streams", "inputs")


def host_settings(tiny: bool) -> Iterator[Setting]:
    if tiny:
        yield from (llama(2, 256, 2, 64), gpt2(3, 128, 2, 64))
    else:
        yield from (llama(), gpt2(24, 1024, 8, 1024), vit())


@contextmanager
def host_peer(name: str, setting: Setting, model: nn.Module) -> Iterator[Trial]:
    """A way to train with less device memory that is not ours."""
    trial = Trial(model, setting.loss, setting.context)
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


def run(setting: Setting, arguments: argparse.Namespace, rows: list[Row], keep: Callable[[], None]) -> None:
    """Fill in the rows that this model has not yet."""

    def known() -> list[Row]:
        return [row for row in rows if row.model == setting.name]

    def work() -> Iterator[tuple[str, str, Callable[[], Row]]]:
        """Every row: method, point and what measures it."""
        eager = Trial(model, setting.loss, setting.context)
        yield "eager", "", lambda: measured(setting, "eager", eager, eager, sample, arguments.rounds)
        for name in OURS:

            def by_peer(name: str = name) -> Row:
                plain = measured(setting, "eager", eager, eager, sample, 2)
                with host_peer(name, setting, model) as trial:
                    # Hooks and wrapped blocks would change eager's steps too, so it was timed before.
                    row = measured(setting, PEERS[name], trial, trial, sample, arguments.rounds)
                extra = (row.step_ms / plain.step_ms - 1.0) * 100.0
                return Row(**{**asdict(row), "eager_ms": plain.step_ms, "measured_pct": extra})

            yield PEERS[name], "", by_peer
        for method, options in ways(setting, arguments.chunks):
            for point in arguments.points.split(","):

                def by_us(method: str = method, options: dict[str, Any] = options, point: str = point) -> Row:
                    limits = arguments.limit, arguments.rounds
                    return ours(setting, model, sample, point, known(), *limits, method=method, **options)

                yield method, point, by_us

    done = {(row.method, row.point) for row in known()}
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = setting.build().to(DEVICE).train()
    sample = setting.sample()
    for method, point, measure in work():
        if (method, point) not in done:
            rows.append(attempted(setting.name, method, point, measure))
            keep()
            print(line(rows[-1]), flush=True)
            tidy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, to try this script")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--points", default=",".join(("50", "35", "25", "least", *OURS)))
    parser.add_argument("--chunks", type=int, default=32, help="slices of the tokens for the head and the loss")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to solve for each budget")
    parser.add_argument("--rounds", type=int, default=10, help="steps to time of each kind")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "gpu-host.json"
    torch.set_float32_matmul_precision("high")
    rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] if path.exists() else []

    def keep() -> None:
        write_text(path, json.dumps({**conditions(arguments), "rows": [asdict(row) for row in rows]}, indent=1))

    for setting in host_settings(arguments.tiny):
        if re.search(arguments.only, setting.name):
            run(setting, arguments, rows, keep)
            tidy()
    chart(rows, arguments.results / "gpu-host.png", logarithmic=True)  # some peers take seven times as long
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
