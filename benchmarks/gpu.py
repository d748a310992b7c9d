"""On a CUDA card: keep-everything against eager in kernels, time and memory, then 80, 50 and 30 % of the memory.

    python benchmarks/gpu.py [--only REGEX] [--budgets 80,50,30] [--limit 15] [--rounds 20] [--results DIR]

GPT-2 small (16 x 1024 tokens, bf16 autocast, dropout) and ResNet-50 (128 images, tf32). Steps of both kinds are taken
in turns and medians compared. `--tiny` has small models, which also run without a card. Rows are kept as JSON as they
come; the table comes last.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import TINY, Case
from models.cases import cross_entropy, labelled_sample, own_loss, residual_network, token_sample
from models.images import bottleneck_body
from models.tokens import GPT, FusedCausalAttention, hugging_face_gpt2
from torch.utils import _pytree as pytree

import rematch
from rematch.files import write_text
from rematch.trial import Trial, alternate, same_outcome
from rematch.units import extra_pct, format_bytes

KEEP = "keep"  # everything: no recomputation, so that what differs from eager is our doing
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


_GPT2_SMALL = {"vocabulary": 50257, "context": 1024, "width": 768, "heads": 12, "depth": 12, "dropout": 0.1}


def gpt2_small() -> Case:
    build = partial(GPT, **_GPT2_SMALL, attention=FusedCausalAttention, attention_dropout=0.1)
    return Case("GPT-2 small, 16 x 1024, bf16", build, partial(token_sample, 50257, 16, 1024), cross_entropy)


def hugging_face_small() -> Case:
    """The same from transformers, which returns loss and logits, and masks attention otherwise when it is traced."""
    sample = partial(labelled_sample, 50257, 16, 1024)
    return Case("HF GPT-2 small, same, labels", partial(hugging_face_gpt2, **_GPT2_SMALL), sample, own_loss)


def resnet50() -> Case:
    name = "ResNet-50, 128, tf32"
    return residual_network(name, bottleneck_body, (3, 4, 6, 3), 64, batch=128, resolution=224, classes=1000)


def bf16() -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, torch.bfloat16)


Setting = tuple[Case, Callable[[], AbstractContextManager[Any]]]


def settings(tiny: bool) -> list[Setting]:
    if tiny:
        return [(TINY["hf_gpt2"], bf16), (TINY["resnet_bottleneck"], nullcontext)]
    return [(gpt2_small(), bf16), (hugging_face_small(), bf16), (resnet50(), nullcontext)]


@dataclass(frozen=True)
class Kernels:
    """What one step runs on the card; copies and fills are no kernels."""

    count: int
    seconds: float


@dataclass(frozen=True)
class Row:
    model: str
    budget: str  # KEEP or per cent of the peak without recomputation
    failure: str | None = None
    eager_seconds: float = 0.0
    seconds: float = 0.0
    eager_kernels: Kernels | None = None
    kernels: Kernels | None = None
    eager_peak_bytes: int = 0
    peak_bytes: int = 0
    budget_bytes: int = 0
    predicted_peak_bytes: int = 0
    predicted_percent: float | None = None
    measured_percent: float | None = None
    plan_seconds: float = 0.0
    equal: bool = False  # loss and gradients of one step, to the bit
    eager_repeats: bool = False  # whether eager equals itself, without which equality is luck


def kernels_of(trial: Trial, sample: Any) -> Kernels | None:
    from torch.profiler import ProfilerActivity, profile

    if DEVICE.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        trial.step(sample)
        torch.cuda.synchronize()
    found = [
        event
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return Kernels(len(found), sum(event.self_device_time_total for event in found) * 1e-6)


def run(setting: Setting, budget: str, limit: float, rounds: int) -> Row:
    case, context = setting
    torch.manual_seed(0)
    model = case.build().to(DEVICE)
    sample = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), case.sample())
    eager = Trial(model, case.loss, context)
    how = {"solver": "noremat"} if budget == KEEP else {"time_limit": limit}
    started = time.perf_counter()
    with context():
        wanted = "102%" if budget == KEEP else budget if budget.endswith("B") else f"{budget}%"
        inside = rematch.remat(model, sample, budget=wanted, loss=case.loss, progress=False, **how)
    plan_seconds = time.perf_counter() - started
    ours = Trial(inside, case.loss, context)
    eager_repeats, equal = same_outcome(eager, eager, sample), same_outcome(ours, eager, sample)
    alternate([eager, ours], sample, rounds=3)
    eager_seconds, seconds = map(statistics.median, alternate([eager, ours], sample, rounds))
    figures = rematch.plans_of(inside)[-1].figures
    return Row(
        model=case.name,
        budget=budget,
        eager_seconds=eager_seconds,
        seconds=seconds,
        eager_kernels=kernels_of(eager, sample),
        kernels=kernels_of(ours, sample),
        eager_peak_bytes=eager.peak_bytes(sample),
        peak_bytes=ours.peak_bytes(sample),
        budget_bytes=figures.budget_bytes,
        predicted_peak_bytes=figures.peak_bytes or 0,
        predicted_percent=figures.overhead_pct,
        measured_percent=extra_pct(seconds, eager_seconds),
        plan_seconds=plan_seconds,
        equal=equal,
        eager_repeats=eager_repeats,
    )


def run_or_say_why(setting: Setting, budget: str, limit: float, rounds: int) -> Row:
    """A row at this budget, at the smallest that its refusal names, or why there is none."""
    row, possible_bytes = _attempt(setting, budget, limit, rounds)
    if possible_bytes is None:
        return row
    return _attempt(setting, f"{int(1.01 * possible_bytes)}B", limit, rounds)[0]


def _attempt(setting: Setting, budget: str, limit: float, rounds: int) -> tuple[Row, int | None]:
    """A row, and a budget that would be feasible where this one is not. Afterwards nothing of it is in memory."""
    try:
        return run(setting, budget, limit, rounds), None
    except rematch.BudgetInfeasible as error:
        return Row(setting[0].name, budget, failure=str(error).splitlines()[0]), error.feasible_from_bytes
    except Exception as error:
        return Row(setting[0].name, budget, failure=f"{type(error).__name__}: {str(error).splitlines()[0]}"), None
    finally:
        torch._dynamo.reset()  # lets go of the models whose code it caches
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


HEADER = (
    f"{'model':28} {'budget':>6} {'limit':>9} {'predicted':>9} {'peak':>9} {'eager':>9} {'predicted':>9} {'extra':>8} "
    f"{'step':>9} {'eager':>9} {'kernels':>13} {'kernel time':>17} {'plan':>6} {'equal':>5}"
)


def line(row: Row) -> str:
    if row.failure is not None:
        return f"{row.model:28} {row.budget:>6} {row.failure}"

    def percent(value: float | None, width: int) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:>+{width - 1}.2f}%"

    sizes = (row.budget_bytes, row.predicted_peak_bytes, row.peak_bytes, row.eager_peak_bytes)
    counts, times = "-", "-"
    if row.kernels is not None and row.eager_kernels is not None:
        counts = f"{row.kernels.count} / {row.eager_kernels.count}"
        times = f"{row.kernels.seconds * 1e3:.1f} / {row.eager_kernels.seconds * 1e3:.1f} ms"
    equal = "yes" if row.equal else "no" if row.eager_repeats else "n/a"
    budget = "least" if row.budget.endswith("B") else row.budget
    return (
        f"{row.model:28} {budget:>6} {' '.join(f'{format_bytes(size):>9}' for size in sizes)} "
        f"{percent(row.predicted_percent, 9)} {percent(row.measured_percent, 8)} {row.seconds * 1e3:>6.1f} ms "
        f"{row.eager_seconds * 1e3:>6.1f} ms {counts:>13} {times:>17} {row.plan_seconds:>5.1f}s {equal:>5}"
    )


def keep(rows: list[Row], arguments: argparse.Namespace) -> None:
    """All rows so far as JSON, so that a run that is stopped loses nothing."""
    kept = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine(),
        "versions": {
            "rematch": rematch.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "limit_seconds": arguments.limit,
        "rounds": arguments.rounds,
        "rows": [asdict(row) for row in rows],
    }
    write_text(arguments.results / "gpu.json", json.dumps(kept, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, to try this script")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--budgets", default="80,50,30", help="per cent of the peak without recomputation")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds to solve for each budget")
    parser.add_argument("--rounds", type=int, default=20, help="steps to time of each kind")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")  # tf32 where nothing is cast
    rows: list[Row] = []
    for setting in settings(arguments.tiny):
        for budget in (KEEP, *arguments.budgets.split(",")):
            if re.search(arguments.only, setting[0].name):
                rows.append(run_or_say_why(setting, budget, arguments.limit, arguments.rounds))
                print(f"{rows[-1].model} at {budget}: planned in {rows[-1].plan_seconds:.1f} s", flush=True)
                keep(rows, arguments)
    print("\n".join([HEADER, *map(line, rows)]))


if __name__ == "__main__":
    main()
