"""On a CUDA card: step time against peak memory for eager, block checkpointing and rematch, model by model.

    python benchmarks/gpu.py [--only REGEX] [--peers block,amb] [--points keep,block*1.5,60] [--jobs 8] [--seconds 900]

The four models of `gpu_settings.py`, then those of `gpu_more.py` with fewer points (`--more-points`, `--more-peers`).
Peers are plain eager, `torch.utils.checkpoint` around every block and every second one, selective checkpointing that
saves matrix products, PyTorch's `activation_memory_budget` under aot_eager (no fusion, so that schedules are compared),
and the batch in two halves. rematch runs with everything kept, at each peer's own peak ("block", or a multiple of it),
at percentages of eager's peak and at the least budget that its refusal names; and at the smallest share of the card
with which block checkpointing trains ("block-cap", from the results of `gpu_caps.py`). Points are taken in the order
of `--points`, for all models each.

Every row is a process of its own, and measures alone (`crew.py`). Steps of eager and of rematch are taken in turns,
each waited for, and medians compared; a peer's come after eager's, for its wrapping would change eager too. `flowing`
is the time of a step when ten are queued without waiting, as training does. Outputs are dropped before backward. On
CUDA, `kernels` are milliseconds of one step's kernels, by name, and `reserved_mib` is what the allocator held at most
in a step that began with an empty cache. `--tiny` has small models for any machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import crew
import torch
from crew import Benchmark, Task, alone, working_seconds
from gpu_more import more_settings
from gpu_settings import (
    DEVICE,
    EAGER,
    PEERS,
    Setting,
    by_name,
    empty_cache,
    flowing_ms,
    kernel_times,
    peer,
    settings,
    within,
)
from torch import nn
from torch.utils import _pytree as pytree

import rematch
from rematch.report.charts import Panel, draw_curves
from rematch.trial import Trial, alternate, same_outcome
from rematch.units import extra_pct

OURS, BLOCK_CAP = "rematch", "block-cap"
POINTS = "keep,block,block-cap,block*1.2,block*1.5,second,products,amb,micro,80,60,50,40,30,least"
_FIRST_STEPS = 4  # blocks are captured and learned in the first ones; what comes then is what trains


@dataclass(frozen=True)
class Row(crew.Row):
    """One way to train one model. Times are milliseconds, memory is MiB; `point` says where on rematch's curve."""

    step_ms: float = 0.0
    flowing_ms: float = 0.0
    eager_ms: float = 0.0  # of the steps taken in turns with these, or before a peer's
    samples_per_second: float = 0.0
    peak_mib: float = 0.0
    reserved_mib: float = 0.0
    predicted_mib: float | None = None
    predicted_pct: float | None = None
    bound_pct: float | None = None
    measured_pct: float | None = None
    engine: str = ""
    plan_seconds: float = 0.0
    equal: bool | None = None  # loss and gradients of a step to the bit; None where eager does not repeat itself
    host_mib: float = 0.0  # that the plan moves to host memory
    stall_pct: float = 0.0  # of a plain step, that the plan waits for copies
    kernel_ms: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)


# One row, in a process of its own


def medians_ms(trials: list[Trial], sample: Any, rounds: int) -> list[float]:
    """Of steps taken in turns, after two of each."""
    alternate(trials, sample, rounds=2)
    return [statistics.median(taken) * 1e3 for taken in alternate(trials, sample, rounds)]


def measured(task: Task, trial: Trial, sample: Any, step_ms: float, eager_ms: float) -> Row:
    """The row of a way to train, whose step times are known; to be called alone."""
    flowing = flowing_ms(trial, sample)
    kernels = kernel_times(trial, sample)
    empty_cache()
    peak_bytes = trial.peak_bytes(sample)
    batch = len(next(leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)))
    return Row(
        model=task.model,
        method=task.method,
        point=task.point,
        step_ms=step_ms,
        flowing_ms=flowing,
        eager_ms=eager_ms,
        samples_per_second=batch / step_ms * 1e3,
        peak_mib=peak_bytes / 2**20,
        reserved_mib=torch.cuda.max_memory_reserved() / 2**20 if DEVICE.type == "cuda" else 0.0,
        measured_pct=extra_pct(step_ms, eager_ms),
        **kernels,
    )


def eagerly(task: Task, setting: Setting, rounds: int) -> Row:
    model, sample = setting.made()
    eager = setting.trial(model)
    with alone():
        eager_ms, step_ms = medians_ms([eager, eager], sample, rounds)
        return measured(task, eager, sample, step_ms, eager_ms)


Peer = Callable[[str, Setting, nn.Module], AbstractContextManager[Trial]]


def by_peer(task: Task, setting: Setting, rounds: int, peer: Peer = peer) -> Row:
    """Eager is timed before: hooks and wrapped blocks would change its steps too."""
    name = next(name for name, method in PEERS.items() if method == task.method)
    model, sample = setting.made()
    with alone():
        (eager_ms,) = medians_ms([setting.trial(model)], sample, rounds)
    with peer(name, setting, model) as trial:
        trial.step(sample)  # which compiles, where a peer does
        with alone():
            (step_ms,) = medians_ms([trial], sample, rounds)
            return measured(task, trial, sample, step_ms, eager_ms)


def ours(task: Task, setting: Setting, limit: float, rounds: int, **options: Any) -> Row:
    """rematch within the task's budget; `options` are what `rematch.remat` takes besides."""
    assert task.budget is not None
    model, sample = setting.made()
    eager = setting.trial(model)
    started = working_seconds()
    inside, budget = within(setting, model, sample, task.budget, limit, **options)
    plan_seconds = working_seconds() - started
    trial = setting.trial(inside)
    for _ in range(_FIRST_STEPS):
        trial.step(sample)
    with alone():
        comparable = "chunk_loss" not in options and same_outcome(eager, eager, sample)
        equal = same_outcome(trial, eager, sample) if comparable else None
        eager_ms, step_ms = medians_ms([eager, trial], sample, rounds)
        row = measured(task, trial, sample, step_ms, eager_ms)
    plan = rematch.plans_of(inside)[-1]
    figures = plan.figures
    return replace(
        row,
        budget_mib=budget / 2**20,
        predicted_mib=(figures.peak_bytes or 0) / 2**20,
        predicted_pct=figures.overhead_pct,
        bound_pct=figures.lower_bound_pct,
        engine=plan.engine if plan.recomputed or plan.moved else "plain",
        host_mib=plan.moved.host_bytes / 2**20 if plan.moved else 0.0,
        stall_pct=100 * plan.moved.stall_seconds / figures.baseline_seconds if plan.moved else 0.0,
        plan_seconds=plan_seconds,
        equal=equal,
    )


def work(task: Task, arguments: argparse.Namespace) -> Row:
    setting = by_name((*settings(arguments.tiny), *more_settings(arguments.tiny)), task.model)
    if task.method == EAGER:
        return eagerly(task, setting, arguments.rounds)
    if task.method in PEERS.values():
        return by_peer(task, setting, arguments.rounds)
    return ours(task, setting, arguments.limit, arguments.rounds)


# All rows


def tasks_of(models: list[str], points: str, peers: str) -> Iterator[Task]:
    """Eager, then point by point, where a peer comes before the first point that names it; other peers come last."""
    yield from (Task(model, EAGER) for model in models)
    names = [name for name in peers.split(",") if name]
    for point in filter(None, points.split(",")):
        name = point.partition("*")[0]
        if name in names:
            names.remove(name)
            yield from (Task(model, PEERS[name]) for model in models)
        yield from (Task(model, OURS, point) for model in models)
    yield from (Task(model, PEERS[name]) for name in names for model in models)


def least_caps(results: Path) -> dict[str, int]:
    """The smallest share of the card with which block checkpointing trains, in bytes, by model as far as known."""
    path = results / "gpu-caps.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    known = [row for row in rows if row["method"] == PEERS["block"] and row.get("least_cap_mib")]
    return {
        model: int(min(row["least_cap_mib"] for row in known if row["model"] == model) * 2**20)
        for model in {row["model"] for row in known}
    }


def budgeted(task: Task, rows: list[Any], to_come: Any = (), caps: dict[str, int] | None = None) -> Task | None:
    """The task with the bytes of its point: of eager's peak, or of a peer's. None while that is not known."""
    if not task.point or task.method in (EAGER, *PEERS.values()):
        return task
    peaks = {row.method: int(row.peak_mib * 2**20) for row in rows if row.model == task.model and not row.point}
    name, _, factor = task.point.partition("*")
    if name in PEERS:
        peak, share = peaks.get(PEERS[name]), float(factor or 1)
    elif name == BLOCK_CAP:
        peak, share = (caps or {}).get(task.model), float(factor or 1)
    else:  # what is least, the refusal of too little says
        peak, share = peaks.get(EAGER), {"keep": 1.02, "least": 0.02}.get(name) or float(name) / 100
    return None if peak is None else replace(task, budget=int(share * peak))


def line(row: Row) -> str:
    if row.failure is not None:
        return f"{row.model:40} {row.method} {row.point}: {row.failure}"

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    equal = {True: "equal", False: "NOT EQUAL", None: ""}[row.equal]
    return (
        f"{row.model:40} {row.method:40} {row.point:10} {row.step_ms:7.1f} ms (flowing {row.flowing_ms:7.1f}) @ "
        f"{row.peak_mib:7.0f} MiB  budget {shown(row.budget_mib, '7.0f'):>7} "
        f"predicted {shown(row.predicted_mib, '7.0f'):>7}  "
        f"extra {shown(row.measured_pct, '+.1f'):>6} predicted {shown(row.predicted_pct, '+.1f'):>6} "
        f"bound {shown(row.bound_pct, '+.1f'):>6} %  {row.engine} {row.plan_seconds:.1f} s {equal}"
        + (f"  kernels {row.kernel_ms:.1f} ms" if row.kernel_ms else "")
        + (f"  host {row.host_mib:.0f} MiB, waits {row.stall_pct:.1f} %" if row.host_mib else "")
    )


def chart(rows: list[Row], path: Path, *, logarithmic: bool = False) -> None:
    panels = []
    for model in dict.fromkeys(row.model for row in rows):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.model == model and row.failure is None:
                series.setdefault(row.method, []).append((row.peak_mib / 1024, row.step_ms))
        panels.append(Panel(model, series))
    draw_curves(panels, path, x="peak, GiB (max_memory_allocated)", y="step, ms", columns=2, logarithmic=logarithmic)


def main() -> None:
    parser = crew.options(__doc__, limit=15.0, rounds=10)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--more-peers", default="block", help="for the models of gpu_more.py")
    parser.add_argument("--more-points", default="60", help="for the models of gpu_more.py")
    arguments = parser.parse_args()
    models = [setting.name for setting in settings(arguments.tiny)]
    more = [setting.name for setting in more_settings(arguments.tiny)]
    tasks = [*tasks_of(models, arguments.points, arguments.peers)]
    if arguments.more_points or arguments.more_peers:
        tasks += tasks_of(more, arguments.more_points, arguments.more_peers)
    ready = partial(budgeted, caps=least_caps(arguments.results))
    rows = crew.run(Benchmark("gpu", Row, tasks, work, line, ready), arguments)
    chart(rows, arguments.results / "gpu.png")
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
