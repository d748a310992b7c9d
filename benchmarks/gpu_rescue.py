"""The largest batch that trains on a card of 16 or 24 GB: plainly, with block checkpointing, and with rematch.

    python benchmarks/gpu_rescue.py [--only REGEX] [--limit 10] [--rounds 5]

U-Net, MobileNetV2, VGG19, ViT-L/16 and GPT-2 medium on a card capped at 16 GB, Llama 1B at 24 GB, where the allocator
of a larger card is capped (`torch.cuda.set_per_process_memory_fraction`). For plain training and block checkpointing
the largest batch is found by trying; for rematch `rematch.max_batch` says it, without training, for at most one more
forward pass. Then three steps train under the cap, and a tenth less of the batch is tried as long as they do not. Rows
are kept as they come, and a run that was stopped goes on where it was. `--tiny` has small models for any machine, where
a batch trains if its measured peak is below the cap.

Beside it, what Checkmate's figure 6 says (V100 with 16 GB; Jain et al. 2020): its schedules train batches up to 5.1
times as large as keeping everything does.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu import DEVICE, Setting, conditions, first_class, gpt2, images, llama, peer, tidy, vit, within
from gpu_more import denoiser
from torch import nn

import rematch
from rematch.files import write_text
from rematch.report.text import table
from rematch.trial import Trial

METHODS = ("plain", "block checkpoint", "rematch")
_CONTEXT_BYTES = 600 << 20  # what CUDA itself takes of a card, which the cap does not count


@dataclass(frozen=True)
class Case:
    """A model for any batch, and the size of the card."""

    name: str
    cap_bytes: int
    of_batch: Callable[[int], Setting]


@dataclass(frozen=True)
class Row:
    """The largest batch of one model by one method."""

    model: str
    cap_gb: float
    method: str
    batch: int = 0
    step_ms: float = 0.0
    samples_per_second: float = 0.0
    peak_mib: float = 0.0
    foreseen: int | None = None  # by rematch.max_batch, before anything was trained
    failure: str | None = None


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
        yield Case("GPT-2, tiny", 128 << 20, lambda batch: gpt2(2, 128, batch, 64))
        yield Case("U-Net, tiny", 24 << 20, lambda batch: denoiser((32, 64), batch, 16))
        return
    small, large = 16 * 10**9, 24 * 10**9
    yield Case("U-Net of diffusion, 64 x 64", small, lambda batch: denoiser(batch=batch))
    yield Case("MobileNetV2, 224 x 224", small, mobilenet)
    yield Case("VGG19, 224 x 224", small, vgg)
    yield Case("ViT-L/16, 224 x 224", small, vit)
    yield Case("GPT-2 medium, 1024 tokens", small, lambda batch: gpt2(24, 1024, batch, 1024))
    yield Case("Llama 1B, 2048 tokens", large, lambda batch: llama(batch=batch))


@contextmanager
def capped(cap_bytes: int) -> Iterator[None]:
    """The card as if it were so small; elsewhere as it is."""
    if DEVICE.type != "cuda":
        yield
        return
    tidy()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((cap_bytes - _CONTEXT_BYTES) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def usable_bytes(case: Case) -> int:
    return case.cap_bytes - (_CONTEXT_BYTES if DEVICE.type == "cuda" else 0)


def trains(trial: Trial, sample: Any, case: Case) -> bool:
    """Whether three steps fit under the cap."""
    try:
        for _ in range(3):
            trial.step(sample)
        return DEVICE.type == "cuda" or trial.peak_bytes(sample) <= case.cap_bytes
    except torch.cuda.OutOfMemoryError:
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
    seconds = statistics.median(trial.timed_step(sample)[1] for _ in range(rounds))
    peak = trial.peak_bytes(sample) / 2**20
    return Row(case.name, case.cap_bytes / 1e9, method, batch, seconds * 1e3, batch / seconds, peak, foreseen)


def of_peer(case: Case, model: nn.Module, method: str, rounds: int) -> Row:
    @contextmanager
    def trial_of(setting: Setting) -> Iterator[Trial]:
        if method == "plain":
            yield Trial(model, setting.loss, setting.context)
        else:
            with peer("block", setting, model) as trial:
                yield trial

    def fits(batch: int) -> bool:
        setting = case.of_batch(batch)
        with trial_of(setting) as trial:
            return trains(trial, setting.sample(), case)

    with capped(case.cap_bytes):
        batch = largest(fits)
        if not batch:
            return Row(case.name, case.cap_bytes / 1e9, method, failure="not even one sample trains")
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
        with capped(case.cap_bytes):
            inside, needed = within(setting, model, sample, budget, limit)
            trial = Trial(inside, setting.loss, setting.context)
            if needed <= budget and trains(trial, sample, case):
                return timed(case, "rematch", trial, batch, sample, rounds, answer.batch)
        batch = batch * 9 // 10
    return Row(case.name, case.cap_bytes / 1e9, "rematch", foreseen=answer.batch, failure="no batch trains")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, to try this script")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds to solve for each batch")
    parser.add_argument("--rounds", type=int, default=5, help="steps to time")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "gpu-rescue.json"
    rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] if path.exists() else []
    for case in cases(arguments.tiny):
        missing = [method for method in METHODS if (case.name, method) not in {(r.model, r.method) for r in rows}]
        if not missing or not re.search(arguments.only, case.name):
            continue
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = case.of_batch(1).build().to(DEVICE).train()
        for method in missing:
            try:
                if method == "rematch":
                    row = of_rematch(case, model, arguments.limit, arguments.rounds)
                else:
                    row = of_peer(case, model, method, arguments.rounds)
            except Exception as error:
                said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                row = Row(case.name, case.cap_bytes / 1e9, method, failure=said)
            rows.append(row)
            write_text(path, json.dumps({**conditions(arguments), "rows": [asdict(row) for row in rows]}, indent=1))
            print(row, flush=True)
            tidy()
        del model
        tidy()
    lines = [
        (row.model, row.method, row.failure or f"{row.batch:,}", f"{row.samples_per_second:.1f} samples/s")
        for row in rows
    ]
    print(table("the largest batch", lines))


if __name__ == "__main__":
    main()
