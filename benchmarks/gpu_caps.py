"""On a CUDA card: the smallest share of it with which a budget trains, as if the card were no larger.

    python benchmarks/gpu_caps.py [--only REGEX] [--points 70,50,35,least] [--peers block] [--steps 100] [--jobs 8]

The models of `gpu_settings.py`. The allocator is capped at the budget, then a little above (`--above`, in percent),
until so many steps train without running out; `torch.cuda.set_per_process_memory_fraction` does that, and what it caps
is reserved memory without CUDA's own context. Eager and peers are capped above their own peak, with the allocator as
it comes and with the expandable segments that rematch asks for ("expandable"). Every row is a process of its own, with
a cap of its own, so several train at once (`crew.py`); if they fill the card, rows fail and say so.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import crew
from crew import Benchmark, Task
from gpu import budgeted, tasks_of
from gpu_settings import DEVICE, EAGER, PEERS, by_name, least_cap, peer, settings, within

import rematch
from rematch.capture.memory import use_expandable_segments
from rematch.trial import Trial

EXPANDABLE = "expandable"


@dataclass(frozen=True)
class Row(crew.Row):
    """One way to train one model; memory is MiB, and `budget_mib` of eager and of peers is their peak."""

    peak_mib: float = 0.0
    least_cap_pct: float | None = None  # above the budget; None if none that was tried is enough
    least_cap_mib: float | None = None
    engine: str = ""
    predicted_pct: float | None = None  # extra time


def row_of(
    task: Task, trial: Trial, sample: Any, arguments: argparse.Namespace, budget: int | None = None, **known: Any
) -> Row:
    """The row of a way to train; without a budget its own peak is one."""
    trial.step(sample)
    peak_bytes = trial.peak_bytes(sample)
    budget = budget or peak_bytes
    above = [float(pct) for pct in arguments.above.split(",")]
    pct = least_cap(trial, sample, budget, above, arguments.steps)
    return Row(
        model=task.model,
        method=task.method,
        point=task.point,
        budget_mib=budget / 2**20,
        peak_mib=peak_bytes / 2**20,
        least_cap_pct=pct,
        least_cap_mib=None if pct is None else budget * (1 + pct / 100) / 2**20,
        **known,
    )


def work(task: Task, arguments: argparse.Namespace) -> Row:
    setting = by_name(settings(arguments.tiny), task.model)
    model, sample = setting.made()
    if task.point == EXPANDABLE:
        use_expandable_segments(DEVICE)
    if task.method == EAGER:
        return row_of(task, setting.trial(model), sample, arguments)
    if task.method in PEERS.values():
        name = next(name for name, method in PEERS.items() if method == task.method)
        with peer(name, setting, model) as trial:
            return row_of(task, trial, sample, arguments)
    assert task.budget is not None
    inside, budget = within(setting, model, sample, task.budget, arguments.limit)
    plan = rematch.plans_of(inside)[-1]
    known = {"engine": plan.engine, "predicted_pct": plan.figures.overhead_pct}
    return row_of(task, setting.trial(inside), sample, arguments, budget, **known)


def line(row: Row) -> str:
    said = f"{row.model:40} {row.method} {row.point:10} {row.engine}: "
    if row.failure is not None:
        return said + row.failure
    cap = "none that was tried"
    if row.least_cap_pct is not None:
        cap = f"+{row.least_cap_pct:g} % ({row.least_cap_mib or 0:.0f} MiB)"
    extra = "" if row.predicted_pct is None else f", {row.predicted_pct:+.1f} % predicted"
    return said + f"budget {row.budget_mib or 0:.0f}, peak {row.peak_mib:.0f} MiB, least cap {cap}{extra}"


def main() -> None:
    parser = crew.options(__doc__, limit=15.0, rounds=0)
    parser.add_argument("--points", default="70,50,35,least")
    parser.add_argument("--peers", default="block")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--above", default="0,0.5,1,2,3,4,6,8,10,12,14,16,20,24,32")
    arguments = parser.parse_args()
    if DEVICE.type != "cuda":
        raise SystemExit("this benchmark needs a CUDA device: only its allocator can be capped")
    arguments.rounds = arguments.steps
    tasks = [*tasks_of([setting.name for setting in settings(arguments.tiny)], arguments.points, arguments.peers)]
    tasks += [replace(task, point=EXPANDABLE) for task in tasks if task.method in PEERS.values()]
    rows = crew.run(Benchmark("gpu-caps", Row, tasks, work, line, budgeted), arguments)
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
