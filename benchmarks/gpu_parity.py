"""On a CUDA card: what rematch costs where everything is kept, beside eager, model by model.

    python benchmarks/gpu_parity.py [--only REGEX] [--pairs 30]

The models of `benchmarks/gpu.py`, with a budget of 102 % of eager's peak, so that nothing is recomputed. Steps of both
are taken in turns and waited for; the median of the ratios of pairs counts. Kernels are those that a profiler lists for
one step: their names and numbers must be the same, and their time is added up. Without a card they are operators, which
a tape lists twice. Rows are kept as JSON as they come.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu import DEVICE, conditions, settings, tidy, within
from torch.profiler import ProfilerActivity, profile

from rematch.files import write_text
from rematch.trial import Trial, alternate


@dataclass(frozen=True)
class Row:
    """One model; ratios are rematch's over eager's."""

    model: str
    step_ratio: float
    kernel_ratio: float
    same_kernels: bool
    kernels: int
    more_mib: float  # of peak memory


def kernels_of(trial: Trial, sample: Any) -> dict[str, tuple[int, int]]:
    """How often each kernel of a step runs, and its microseconds; on a machine without a card, each operator."""
    cuda = DEVICE.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    trial.timed_step(sample)
    with profile(activities=activities, acc_events=True) as profiler:
        trial.timed_step(sample)
    found: dict[str, tuple[int, int]] = {}
    for event in profiler.events():
        on_card = event.device_type == torch.autograd.DeviceType.CUDA
        if on_card if cuda else event.name.startswith("aten::"):
            count, spent = found.get(event.name, (0, 0))
            found[event.name] = count + 1, spent + int(event.time_range.elapsed_us())
    return found


def compare(name: str, eager: Trial, ours: Trial, sample: Any, pairs: int) -> Row:
    alternate([eager, ours], sample, rounds=3)
    taken = alternate([eager, ours], sample, rounds=pairs)
    peaks = [trial.peak_bytes(sample) for trial in (eager, ours)]
    plain, inside = (kernels_of(trial, sample) for trial in (eager, ours))
    times = [sum(spent for _, spent in found.values()) for found in (plain, inside)]
    return Row(
        name,
        statistics.median(ours / eager for eager, ours in zip(*taken, strict=True)),
        times[1] / times[0],
        {kernel: count for kernel, (count, _) in plain.items()} == {k: count for k, (count, _) in inside.items()},
        sum(count for count, _ in plain.values()),
        (peaks[1] - peaks[0]) / 2**20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, to try this script")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--limit", type=float, default=15.0)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.rounds = arguments.pairs
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    rows: list[Row] = []
    for setting in settings(arguments.tiny):
        if not re.search(arguments.only, setting.name):
            continue
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = setting.build().to(DEVICE).train()
        sample = setting.sample()
        eager = Trial(model, setting.loss, setting.context)
        eager.step(sample)
        inside, _ = within(setting, model, sample, int(1.02 * eager.peak_bytes(sample)), arguments.limit)
        row = compare(setting.name, eager, Trial(inside, setting.loss, setting.context), sample, arguments.pairs)
        rows.append(row)
        write_text(
            arguments.results / "gpu-parity.json",
            json.dumps({**conditions(arguments), "rows": [asdict(row) for row in rows]}, indent=1),
        )
        same = "the same" if row.same_kernels else "OTHER"
        print(
            f"{row.model:40} step x {row.step_ratio:.4f}, {same} {row.kernels} kernels x {row.kernel_ratio:.4f}, "
            f"peak {row.more_mib:+.1f} MiB",
            flush=True,
        )
        del model, sample, eager, inside
        tidy()


if __name__ == "__main__":
    main()
