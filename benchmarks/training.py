"""Training inside a budget: HiRemate's twelve models, measured beside plain training.

    python benchmarks/training.py [--budget 50%|table4] [--solver auto] [--device cpu] [--only REGEX] [--limit 60]
                                  [--rounds 5] [--threads N] [--results DIR]

Models come from `benchmarks/models`, by default at sizes that a laptop can train (`--models paper` needs a large card,
`--models tiny` runs in minutes). Prints a line a model and keeps all as JSON. Time is the median of steps taken in
turns, in per cent more than plain training; with one thread it is CPU time, which other programs disturb less. "equal"
means loss and gradients to the bit.

`--budget table4` gives each model the relative peak of HiRemate's table 4 (c), of what it needs beside parameters and
inputs. `--models paper --budget table4 --solver hiremate --device cuda` fills the observed columns of that table, which
`benchmarks/hiremate.py` prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from models import TINY, Case, twelve
from torch.utils import _pytree as pytree

import rematch
from rematch.files import write_text
from rematch.trial import Trial, alternate, same_outcome
from rematch.units import extra_pct, format_bytes

TABLE_4 = "table4"  # as a budget
PEAKS_OF_TABLE_4 = {  # of HiRemate's table 4 (c), in percent
    "gpt24": 36.6, "gpt96": 47.2, "unet": 51.3, "mlp_mixer": 53.3, "regnet32": 41.1, "resnet101": 42.6,
    "transformer6_6": 46.9, "transformer36_36": 44.6, "fno1d": 53.1, "fno3d": 47.2, "ufno": 56.7, "uno": 58.5,
}  # fmt: skip
MODELS: dict[str, Callable[[], dict[str, Case]]] = {
    "machine": lambda: twelve("machine"),
    "paper": lambda: twelve("paper"),
    "tiny": lambda: TINY,
}


@dataclass(frozen=True)
class Row:
    """What was found for one model; `failure` says why nothing was."""

    name: str
    failure: str | None = None
    operators: int = 0
    budget_bytes: int = 0
    predicted_peak_bytes: int = 0
    peak_bytes: int = 0
    plain_peak_bytes: int = 0
    predicted_percent: float | None = None
    bound_percent: float | None = None
    measured_percent: float | None = None
    plain_seconds: float = 0.0
    plan_seconds: float = 0.0
    solve_seconds: float = 0.0
    equal: bool = False


def run(case: Case, arguments: argparse.Namespace) -> Row:
    torch.manual_seed(0)
    model = case.build().to(arguments.device)
    sample = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(arguments.device), case.sample())
    plain = Trial(model, case.loss)
    budget = arguments.budget if arguments.budget != TABLE_4 else table_4_budget(case.name, plain, sample)
    started = time.perf_counter()
    inside = rematch.remat(
        model, sample, budget=budget, loss=case.loss, solver=arguments.solver, time_limit=arguments.limit,
        progress=False, cache=False,
    )  # fmt: skip
    plan_seconds = time.perf_counter() - started
    ours, rounds = Trial(inside, case.loss), arguments.rounds
    equal = same_outcome(ours, plain, sample)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    plain_seconds, seconds = map(statistics.median, alternate([plain, ours], sample, rounds, clock))
    (plan,) = rematch.plans_of(inside)
    figures = plan.figures
    return Row(
        name=case.name,
        operators=plan.graph_ops,
        budget_bytes=figures.budget_bytes,
        predicted_peak_bytes=figures.peak_bytes or 0,
        peak_bytes=ours.peak_bytes(sample),
        plain_peak_bytes=plain.peak_bytes(sample),
        predicted_percent=figures.overhead_pct,
        bound_percent=figures.lower_bound_pct,
        measured_percent=extra_pct(seconds, plain_seconds),
        plain_seconds=plain_seconds,
        plan_seconds=plan_seconds,
        solve_seconds=figures.solve_seconds,
        equal=equal,
    )


def table_4_budget(name: str, plain: Trial, sample: Any) -> int:
    """What parameters and inputs take, and the paper's share of the rest of the peak without recomputation."""
    tensors = [*plain.model.parameters(), *plain.model.buffers(), *pytree.tree_leaves(sample)]
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor))
    return held + int(PEAKS_OF_TABLE_4[name] / 100 * (plain.peak_bytes(sample) - held))


def run_or_say_why(case: Case, arguments: argparse.Namespace) -> Row:
    """A model that cannot be trained so is a result too."""
    try:
        return run(case, arguments)
    except Exception as error:
        return Row(case.name, failure=f"{type(error).__name__}: {str(error).splitlines()[0]}")


HEADER = (
    f"{'model':22} {'ops':>5} {'plain':>9} {'budget':>9} {'predicted':>9} {'measured':>9} {'extra':>8} {'bound':>8} "
    f"{'measured':>8} {'step':>8} {'plan':>7} {'equal':>5}"
)


def line(row: Row) -> str:
    if row.failure is not None:
        return f"{row.name:22} {row.failure}"

    def percent(value: float | None) -> str:
        return f"{'-':>8}" if value is None else f"{value:>+7.2f}%"

    sizes = (row.plain_peak_bytes, row.budget_bytes, row.predicted_peak_bytes, row.peak_bytes)
    return (
        f"{row.name:22} {row.operators:>5} {' '.join(f'{format_bytes(size):>9}' for size in sizes)} "
        f"{percent(row.predicted_percent)} {percent(row.bound_percent)} {percent(row.measured_percent)} "
        f"{row.plain_seconds:>7.2f}s {row.plan_seconds:>6.1f}s {'yes' if row.equal else 'NO':>5}"
    )


def keep(rows: list[Row], arguments: argparse.Namespace) -> None:
    """All rows so far as JSON, so that a run that is stopped loses nothing."""
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"rematch": rematch.__version__, "torch": torch.__version__},
        "models": arguments.models,
        "budget": arguments.budget,
        "solver": arguments.solver,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device,
        "limit_seconds": arguments.limit,
        "rounds": arguments.rounds,
        "threads": torch.get_num_threads(),
        "rows": [asdict(row) for row in rows],
    }
    write_text(arguments.results / results_name(arguments.models, arguments.budget), json.dumps(kept, indent=1))


def results_name(models: str, budget: str) -> str:
    return f"training-{models}-{TABLE_4}.json" if budget == TABLE_4 else f"training-{models}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=MODELS, default="machine")
    parser.add_argument("--budget", default="50%", help="of the peak without recomputation, an amount, or 'table4'")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to solve each model for")
    parser.add_argument("--rounds", type=int, default=5, help="steps to time of each kind")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.results.mkdir(parents=True, exist_ok=True)
    cases = [case for case in MODELS[arguments.models]().values() if re.search(arguments.only, case.name)]
    if not cases:
        parser.error(f"no model matches {arguments.only!r}")
    rows: list[Row] = []
    print(HEADER)
    for case in cases:
        rows.append(run_or_say_why(case, arguments))
        print(line(rows[-1]), flush=True)
        keep(rows, arguments)
    return 0 if all(row.equal and row.peak_bytes <= row.budget_bytes for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
