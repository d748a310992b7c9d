"""The largest batch that trains on a card of 16 or 24 GB: plainly, with block checkpointing, and with rematch.

    python benchmarks/gpu_rescue.py [--only REGEX] [--limit 10] [--rounds 5] [--jobs 6]

U-Net, MobileNetV2, VGG19, ViT-L/16 and GPT-2 medium on a card capped at 16 GB, Llama 1B at 24 GB, where the allocator
of a larger card is capped (`torch.cuda.set_per_process_memory_fraction`). For plain training and block checkpointing
the largest batch is found by trying; for rematch `rematch.max_batch` says it, without training, for at most one more
forward pass. Then three steps train under the cap, and a tenth less of the batch is tried as long as they do not. Every
row is a process of its own; several try batches at once, and steps are timed alone (`crew.py`). `--tiny` has small
models for any machine, where a batch trains if its measured peak is below the cap.

Beside it, what Checkmate's figure 6 says (V100 with 16 GB; Jain et al. 2020): its schedules train batches up to 5.1
times as large as keeping everything does.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import crew
import torch
from crew import Benchmark, Task, alone
from gpu_more import denoiser
from gpu_settings import (
    DEVICE,
    Setting,
    capped,
    first_class,
    gpt2,
    images,
    llama,
    peer,
    require_room,
    tidy,
    tiny_gpt2,
    vit,
    within,
)
from torch import nn

import rematch
from rematch.trial import Trial

PLAIN, BLOCKS, OURS = METHODS = ("plain", "block checkpoint", "rematch")
_CONTEXT_BYTES = 600 << 20  # what CUDA itself takes of a card, which the cap does not count


@dataclass(frozen=True)
class Case:
    """A model for any batch, and the size of the card."""

    name: str
    cap_bytes: int
    of_batch: Callable[[int], Setting]


@dataclass(frozen=True)
class Row(crew.Row):
    """The largest batch of one model by one method."""

    cap_gb: float = 0.0
    batch: int = 0
    step_ms: float = 0.0
    samples_per_second: float = 0.0
    peak_mib: float = 0.0
    foreseen: int | None = None  # by rematch.max_batch, before anything was trained


def vgg(batch: int) -> Setting:
    from torchvision.models import vgg19

    def build() -> nn.Module:
        """With its layers up to each pooling as one block, for block checkpointing."""
        model: Any = vgg19()
        ends = [place + 1 for place, layer in enumerate(model.features) if isinstance(layer, nn.MaxPool2d)]
        model.features = nn.Sequential(*(model.features[since:until] for since, until in pairwise([0, *ends])))
        return model  # type: ignore[no-any-return]

    return Setting("VGG19", build, lambda: images(batch, 224), first_class, lambda model: [*model.features])


def mobilenet(batch: int) -> Setting:
    from torchvision.models import mobilenet_v2

    blocks: Callable[[Any], list[nn.Module]] = lambda model: [*model.features]  # noqa: E731
    return Setting("MobileNetV2", mobilenet_v2, lambda: images(batch, 224), first_class, blocks)


def cases(tiny: bool) -> Iterator[Case]:
    if tiny:
        yield Case("GPT-2, tiny", 16 << 20, lambda batch: tiny_gpt2(batch=batch))
        yield Case("U-Net, tiny", 24 << 20, lambda batch: denoiser((32, 64), batch, 16))
        return
    small, large = 16 * 10**9, 24 * 10**9
    yield Case("U-Net of diffusion, 64 x 64", small, lambda batch: denoiser(batch=batch))
    yield Case("MobileNetV2, 224 x 224", small, mobilenet)
    yield Case("VGG19, 224 x 224", small, vgg)
    yield Case("ViT-L/16, 224 x 224", small, vit)
    yield Case("GPT-2 medium, 1024 tokens", small, lambda batch: gpt2(24, 1024, batch, 1024))
    yield Case("Llama 1B, 2048 tokens", large, lambda batch: llama(batch=batch))


def usable_bytes(case: Case) -> int:
    return case.cap_bytes - (_CONTEXT_BYTES if DEVICE.type == "cuda" else 0)


def trains(trial: Trial, sample: Any, case: Case) -> bool:
    """Whether three steps fit under the cap."""
    try:
        for _ in range(3):
            trial.step(sample)
        return DEVICE.type == "cuda" or trial.peak_bytes(sample) <= case.cap_bytes
    except torch.cuda.OutOfMemoryError:
        require_room()
        return False
    finally:
        trial.model.zero_grad(set_to_none=True)
        tidy()


def largest(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, up to a fiftieth, by doubling and halving; 0 if none does."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def timed(case: Case, method: str, trial: Trial, batch: int, sample: Any, rounds: int, foreseen: int | None) -> Row:
    with alone():
        trial.timed_step(sample)
        seconds = statistics.median(trial.timed_step(sample)[1] for _ in range(rounds))
        peak_mib = trial.peak_bytes(sample) / 2**20
    return Row(
        model=case.name,
        method=method,
        cap_gb=case.cap_bytes / 1e9,
        batch=batch,
        step_ms=seconds * 1e3,
        samples_per_second=batch / seconds,
        peak_mib=peak_mib,
        foreseen=foreseen,
    )


def of_peer(case: Case, model: nn.Module, method: str, rounds: int) -> Row:
    @contextmanager
    def trial_of(setting: Setting) -> Iterator[Trial]:
        if method == PLAIN:
            yield setting.trial(model)
        else:
            with peer("block", setting, model) as trial:
                yield trial

    def fits(batch: int) -> bool:
        setting = case.of_batch(batch)
        with trial_of(setting) as trial:
            return trains(trial, setting.sample(), case)

    with capped(usable_bytes(case)):
        batch = largest(fits)
        if not batch:
            raise RuntimeError("not even one sample trains")
        setting = case.of_batch(batch)
        with trial_of(setting) as trial:
            return timed(case, method, trial, batch, setting.sample(), rounds, None)


def of_rematch(case: Case, model: nn.Module, limit: float, rounds: int) -> Row:
    budget = usable_bytes(case)

    def sample_of(batch: int) -> Any:
        return case.of_batch(batch).sample()

    setting = case.of_batch(1)
    with setting.context():
        answer = rematch.max_batch(model, sample_of, budget=budget, loss=setting.loss, time_limit=limit)
    batch = answer.batch
    while batch:
        setting = case.of_batch(batch)
        sample = setting.sample()
        with capped(budget):
            inside, needed = within(setting, model, sample, budget, limit)
            trial = setting.trial(inside)
            if needed <= budget and trains(trial, sample, case):
                return timed(case, OURS, trial, batch, sample, rounds, answer.batch)
        batch = batch * 9 // 10
    raise RuntimeError(f"no batch trains; rematch.max_batch said {answer.batch}")


def work(task: Task, arguments: argparse.Namespace) -> Row:
    case = next(case for case in cases(arguments.tiny) if case.name == task.model)
    model, _ = case.of_batch(1).made()
    if task.method == OURS:
        return of_rematch(case, model, arguments.limit, arguments.rounds)
    return of_peer(case, model, task.method, arguments.rounds)


def line(row: Row) -> str:
    if row.failure is not None:
        return f"{row.model:30} {row.method:20} {row.failure}"
    foreseen = "" if row.foreseen is None else f", {row.foreseen:,} foreseen"
    return (
        f"{row.model:30} {row.method:20} {row.batch:6,} samples on {row.cap_gb:g} GB{foreseen}, {row.step_ms:.1f} ms, "
        f"{row.samples_per_second:.1f} samples/s @ {row.peak_mib:.0f} MiB"
    )


def main() -> None:
    arguments = crew.options(__doc__, limit=10.0, rounds=5).parse_args()
    tasks = [Task(case.name, method) for case in cases(arguments.tiny) for method in METHODS]
    rows = crew.run(Benchmark("gpu-rescue", Row, tasks, work, line), arguments)
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
