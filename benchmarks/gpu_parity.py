"""On a CUDA card: what rematch costs where everything is kept, beside eager, model by model.

    python benchmarks/gpu_parity.py [--only REGEX] [--rounds 30] [--jobs 6]

The models of `gpu_settings.py`, Llama also with an attention mask, and a GPT-2 without transformers whose loss is the
user's own. The budget is 102 % of eager's peak, so that nothing is recomputed. Steps of both are taken in turns and
waited for; the median of the ratios of pairs counts. Kernels are those that a profiler lists for one step: their names
and numbers must be the same, and their time is added up. Without a card they are operators, which a tape lists twice.
Every row is a process of its own, and measures alone (`crew.py`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import crew
from crew import Benchmark, Task, alone
from gpu_settings import (
    DEVICE,
    Setting,
    bf16,
    by_name,
    gpt2,
    kernels_of,
    llama,
    resnet,
    tiny_gpt2,
    tiny_llama,
    vit,
    within,
)
from models.cases import gpt

from rematch.trial import Trial, alternate


@dataclass(frozen=True)
class Row(crew.Row):
    """One model; ratios are rematch's over eager's."""

    method: str = "rematch"
    step_ratio: float = 0.0
    kernel_ratio: float = 0.0
    same_kernels: bool = False
    kernels: int = 0
    more_mib: float = 0.0  # of peak memory


def own_gpt2(
    depth: int = 12, width: int = 768, batch: int = 16, length: int = 1024, vocabulary: int = 50257
) -> Setting:
    """GPT-2 of `models`, in forty lines, with its loss outside of the model."""
    case = gpt("GPT-2", depth, width, width // 64, batch, length, vocabulary, fused=True)
    return Setting(
        f"own GPT-2 {depth} x {width}, {batch} x {length}, bf16 autocast",
        case.build,
        lambda: case.sample()[0][0].to(DEVICE),
        case.loss,
        lambda model: list(model.blocks),
        bf16,
    )


def parity_settings(tiny: bool) -> Iterator[Setting]:
    if tiny:
        yield from (tiny_llama(), tiny_llama(masked=True), tiny_gpt2(), own_gpt2(2, 128, 2, 64, vocabulary=1024))
    else:
        yield from (llama(), llama(masked=True), gpt2(), own_gpt2(), vit(), resnet())


def compare(task: Task, eager: Trial, ours: Trial, sample: Any, pairs: int) -> Row:
    alternate([eager, ours], sample, rounds=3)
    taken = alternate([eager, ours], sample, rounds=pairs)
    peaks = [trial.peak_bytes(sample) for trial in (eager, ours)]
    plain, inside = (kernels_of(trial, sample) for trial in (eager, ours))
    times = [sum(spent for _, spent in found.values()) for found in (plain, inside)]
    counts = [{kernel: count for kernel, (count, _) in found.items()} for found in (plain, inside)]
    return Row(
        model=task.model,
        step_ratio=statistics.median(ours / eager for eager, ours in zip(*taken, strict=True)),
        kernel_ratio=times[1] / times[0],
        same_kernels=counts[0] == counts[1],
        kernels=sum(counts[0].values()),
        more_mib=(peaks[1] - peaks[0]) / 2**20,
    )


def work(task: Task, arguments: argparse.Namespace) -> Row:
    setting = by_name(parity_settings(arguments.tiny), task.model)
    model, sample = setting.made()
    eager = setting.trial(model)
    with alone():
        eager.step(sample)
        peak_bytes = eager.peak_bytes(sample)
    inside, _ = within(setting, model, sample, int(1.02 * peak_bytes), arguments.limit)
    with alone():
        return compare(task, eager, setting.trial(inside), sample, arguments.rounds)


def line(row: Row) -> str:
    if row.failure is not None:
        return f"{row.model:40} {row.failure}"
    same = "the same" if row.same_kernels else "OTHER"
    return (
        f"{row.model:40} step x {row.step_ratio:.4f}, {same} {row.kernels} kernels x {row.kernel_ratio:.4f}, "
        f"peak {row.more_mib:+.1f} MiB"
    )


def main() -> None:
    arguments = crew.options(__doc__, limit=15.0, rounds=30).parse_args()
    tasks = [Task(setting.name, Row.method) for setting in parity_settings(arguments.tiny)]
    rows = crew.run(Benchmark("gpu-parity", Row, tasks, work, line), arguments)
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
