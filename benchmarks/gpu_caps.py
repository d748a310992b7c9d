"""On a CUDA card: the smallest share of it with which a budget trains, as if the card were no larger.

    python benchmarks/gpu_caps.py [--only REGEX] [--points 70,50,35,least] [--steps 100]

The models of `benchmarks/gpu.py`. The allocator is capped at the budget, then a little above (`--above`, in percent),
until so many steps train without running out; `torch.cuda.set_per_process_memory_fraction` does that, and what it caps
is reserved memory without CUDA's own context. Peers are capped above their own peak. Rows are kept as they come.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu import DEVICE, PEERS, conditions, peer, settings, tidy, within

import rematch
from rematch.files import write_text
from rematch.trial import Trial


@dataclass(frozen=True)
class Row:
    """One way to train one model; memory is MiB."""

    model: str
    method: str
    point: str
    budget_mib: float  # or, of peers, their peak
    peak_mib: float
    least_cap_pct: float | None  # above the budget; None if none that was tried is enough
    engine: str = ""
    predicted_pct: float | None = None  # extra time


def least_cap(trial: Trial, sample: Any, budget: int, above: list[float], steps: int) -> float | None:
    """How many percent above the budget the cap must be; None if no cap that was tried is enough."""
    total = torch.cuda.get_device_properties(0).total_memory
    for pct in above:
        trial.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget * (1 + pct / 100) / total))
        try:
            for _ in range(steps):
                trial.step(sample)
            torch.cuda.synchronize()
            return pct
        except torch.cuda.OutOfMemoryError:
            continue
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, to try this script")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--points", default="70,50,35,least")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--above", default="0,0.5,1,2,4,8,16,32")
    parser.add_argument("--limit", type=float, default=15.0)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if DEVICE.type != "cuda":
        raise SystemExit("this benchmark needs a CUDA device: only its allocator can be capped")
    arguments.rounds = arguments.steps
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    above = [float(pct) for pct in arguments.above.split(",")]
    path = arguments.results / "gpu-caps.json"
    rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] if path.exists() else []

    def add(row: Row) -> None:
        rows.append(row)
        write_text(path, json.dumps({**conditions(arguments), "rows": [asdict(row) for row in rows]}, indent=1))
        cap = "no cap that was tried" if row.least_cap_pct is None else f"+{row.least_cap_pct:g} %"
        extra = "" if row.predicted_pct is None else f", {row.predicted_pct:+.1f} % predicted"
        print(
            f"{row.model:40} {row.method} {row.point:6} {row.engine}: budget {row.budget_mib:.0f}, peak "
            f"{row.peak_mib:.0f} MiB, least cap {cap}{extra}",
            flush=True,
        )
        tidy()

    for setting in settings(arguments.tiny):
        done = {(row.method, row.point) for row in rows if row.model == setting.name}
        points = [point for point in arguments.points.split(",") if ("rematch", point) not in done]
        if not re.search(arguments.only, setting.name) or not points:
            continue
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = setting.build().to(DEVICE).train()
        sample = setting.sample()
        eager = Trial(model, setting.loss, setting.context)
        eager.step(sample)
        whole = eager.peak_bytes(sample)
        if ("eager", "") not in done:
            pct = least_cap(eager, sample, whole, above, arguments.steps)
            add(Row(setting.name, "eager", "", whole / 2**20, whole / 2**20, pct))
            with peer("block", setting, model) as trial:
                peak = trial.peak_bytes(sample)
                pct = least_cap(trial, sample, peak, above, arguments.steps)
            add(Row(setting.name, PEERS["block"], "", peak / 2**20, peak / 2**20, pct))
        for point in points:
            share = 0.02 if point == "least" else float(point) / 100
            inside, budget = within(setting, model, sample, int(share * whole), arguments.limit)
            trial = Trial(inside, setting.loss, setting.context)
            plan = rematch.plans_of(inside)[-1]
            trial.step(sample)
            peak = trial.peak_bytes(sample)
            pct = least_cap(trial, sample, budget, above, arguments.steps)
            figures = plan.figures
            add(
                Row(
                    setting.name, "rematch", point, budget / 2**20, peak / 2**20, pct, plan.engine, figures.overhead_pct
                )
            )
            del inside, trial
            tidy()
        del model, sample, eager
        tidy()


if __name__ == "__main__":
    main()
