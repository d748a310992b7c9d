"""Through torch.compile: step time against peak memory for PyTorch's own budget, checkpointed blocks and rematch.

    python benchmarks/compiled.py [--only REGEX] [--seconds 900] [--jobs 4] [--points POINT,...] [--tiny]

The four models of gpu_settings.py, and those of gpu_more.py with a few points (`--more-points`), which come last.
Peers are torch.compile with `activation_memory_budget` at 1.0, 0.7, 0.5, 0.3 and 0.0, and `torch.utils.checkpoint`
around every block under torch.compile. rematch gets a peer's peak as its budget ("at 0.5", "at block"), or a part of
the lowest of them ("low*0.85"). Points are taken in the order of `--points`, for all models each, for a run that is cut
short should have the most telling ones.

Each point is a process of its own (`crew.py`). Several compile at once; while one measures (steps, or the costs that
rematch plans with), the others are stopped. rematch's first steps measure and
correct its plan; they belong to `compile_seconds`, as the first steps of the others do. Then steps are timed one by
one, and in a row without waiting (`flowing`). `loss` and `gradient_norm` are of one step from the same random state:
alike for all who draw inductor's random numbers. On CUDA, `kernels` are milliseconds, by name, and rematch's rows say
how many percent above the budget the process must be allowed to reserve to train (`least_cap_pct`).
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import crew
import torch
import torch._dynamo
import torch._functorch.config
from crew import Benchmark, Task, alone, working_seconds
from gpu_more import more_settings
from gpu_settings import (
    DEVICE,
    EAGER,
    Setting,
    by_name,
    checkpointed,
    flowing_ms,
    kernel_times,
    least_cap,
    settings,
    wrapped,
)
from torch import nn

from rematch.execute.compiled.backend import backends, rematch_backend
from rematch.report.charts import Panel, draw_curves

TORCH, BLOCKS, OURS = "torch.compile", "block checkpoint, compiled", "rematch"
POINTS = "1.0,0.5,at 0.5,0.0,block,low*0.85,at block,low*0.7,at 1.0*0.9,0.7,0.3,at 0.7,at 0.3,at 0.0,eager"
MORE_POINTS = "1.0,0.5,at 0.5"
_ABOVE = [0.0, 1.0, 2.0, 4.0, 8.0]  # caps that are tried, in percent above the budget
_CAPPED_STEPS = 10
_FIRST_STEPS = 9  # in which rematch compiles at most three times, and measures
_LOWEST = ("0.5", "0.0", "block")  # points of peers, one of which has the lowest peak
_CLOSE = 0.01  # peaks of peers that differ by less are one point


@dataclass(frozen=True)
class Row(crew.Row):
    """One way to train one model. Times are milliseconds, memory is MiB."""

    step_ms: float = 0.0
    flowing_ms: float = 0.0
    peak_mib: float = 0.0
    predicted_mib: float | None = None
    predicted_pct: float | None = None
    compile_seconds: float = 0.0
    compilations: int = 1
    graphs: int = 1
    loss: float = 0.0
    gradient_norm: float = 0.0
    kernel_ms: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)
    least_cap_pct: float | None = None  # above the budget, with which the process trains; None if none that was tried
    recomputed: dict[str, int] = field(default_factory=dict)  # rematch's plans: operators, and how often each kind
    history: tuple[str, ...] = ()  # rematch's compilations: what was predicted and measured
    notes: tuple[str, ...] = ()


def all_settings(tiny: bool) -> list[Setting]:
    return [*settings(tiny), *more_settings(tiny)]


# One point, in a process of its own


def measured(task: Task, setting: Setting, model: nn.Module, sample: Any, rounds: int, steps: int) -> Row:
    """Compile in so many first steps, then time and measure."""
    trial = setting.trial(model)
    started = working_seconds()
    for _ in range(steps):
        trial.timed_step(sample)
    compile_seconds = working_seconds() - started
    with alone():
        times = [trial.timed_step(sample)[1] for _ in range(rounds)]
        flowing = flowing_ms(trial, sample)
        kernels = kernel_times(trial, sample)
        torch.manual_seed(0)
        loss = float(trial.step(sample))
        gradients = [parameter.grad.double().norm() for parameter in model.parameters() if parameter.grad is not None]
        norm = float(torch.stack(gradients).norm())
        peak_bytes = trial.peak_bytes(sample)
    return Row(
        model=task.model,
        method=task.method,
        point=task.point,
        budget_mib=None if task.budget is None else task.budget / 2**20,
        step_ms=statistics.median(times) * 1e3,
        flowing_ms=flowing,
        peak_mib=peak_bytes / 2**20,
        compile_seconds=compile_seconds,
        loss=loss,
        gradient_norm=norm,
        **kernels,
    )


def compile_plainly(model: nn.Module) -> Any:
    return torch.compile(model, dynamic=False)


def ours(task: Task, setting: Setting, model: nn.Module, sample: Any, arguments: argparse.Namespace) -> Row:
    """rematch within the task's budget."""
    assert task.budget is not None
    options = {"budget": task.budget, "time_limit": arguments.limit}
    # By its function: torch knows the name only where rematch is installed.
    compiled: Any = torch.compile(model, backend=rematch_backend, options=options, dynamic=False)
    row = measured(task, setting, compiled, sample, arguments.rounds, _FIRST_STEPS)
    cap_pct = None
    if DEVICE.type == "cuda":
        cap_pct = least_cap(setting.trial(compiled), sample, task.budget, _ABOVE, _CAPPED_STEPS)
    graphs = [graph for backend in backends.values() for graph in backend.alive()]
    plans = [plan for backend in backends.values() for plan in backend.planner.plans]
    if not plans:
        raise RuntimeError("nothing was planned; the log says why")
    seconds = sum(plan.figures.seconds or 0.0 for plan in plans)
    baseline = sum(plan.figures.baseline_seconds for plan in plans)
    again: dict[str, int] = {}
    for plan in plans:
        for op in plan.recomputed:
            name = re.sub(r"_\d+$", "", op.name)
            again[name] = again.get(name, 0) + op.extra_runs
    return replace(
        row,
        compilations=max((graph.compilations for graph in graphs), default=1),
        graphs=len(graphs),
        least_cap_pct=cap_pct,
        predicted_mib=max((plan.figures.peak_bytes or 0) / 2**20 for plan in plans),
        predicted_pct=100 * (seconds / baseline - 1) if baseline else None,
        recomputed=dict(sorted(again.items(), key=lambda item: -item[1])),
        history=tuple(line for graph in graphs for line in graph.history),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
    )


def work(task: Task, arguments: argparse.Namespace) -> Row:
    setting = by_name((*settings(arguments.tiny), *more_settings(arguments.tiny)), task.model)
    model, sample = setting.made()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what transformers takes anyway, with a warning that breaks the graph
    rounds = arguments.rounds
    if task.method == EAGER:
        with alone():  # for memory
            return measured(task, setting, model, sample, rounds, 3)
    if task.method == BLOCKS:
        with wrapped(setting.blocks(model), checkpointed):
            return measured(task, setting, compile_plainly(model), sample, rounds, 3)
    if task.method == TORCH:
        with torch._functorch.config.patch(activation_memory_budget=float(task.point)):
            return measured(task, setting, compile_plainly(model), sample, rounds, 3)
    return ours(task, setting, model, sample, arguments)


# All points


def tasks_of(models: list[str], points: str) -> Iterator[Task]:
    for point in filter(None, points.split(",")):
        is_ours = point.startswith(("at ", "low"))
        method = OURS if is_ours else {EAGER: EAGER, "block": BLOCKS}.get(point, TORCH)
        yield from (Task(model, method, point) for model in models)


def budgeted(task: Task, rows: list[Row], to_come: set[tuple[str, str, str]]) -> Task | None:
    """The task with the bytes of its point, from the peaks of peers.

    None while these are not known, and where another budget is as good as the same.
    """
    if task.method != OURS:
        return task
    of_model = [row for row in rows if row.model == task.model]
    peaks = {row.point: row.peak_mib for row in of_model if row.method in (TORCH, BLOCKS)}
    name, _, share = task.point.removeprefix("at ").partition("*")
    if name == "low":
        if not peaks or any(model == task.model and point in _LOWEST for model, _, point in to_come):
            return None
        peak_mib = min(peaks.values())
    elif name in peaks:
        peak_mib = peaks[name]
    else:
        return None
    budget_mib = peak_mib * float(share or 1)
    known = [row.budget_mib for row in of_model if row.budget_mib is not None]
    if any(abs(budget_mib - other) < _CLOSE * budget_mib for other in known):
        return None
    return replace(task, budget=int(budget_mib * 2**20))


def line(row: Row) -> str:
    if row.failure is not None:
        return f"{row.model:40} {row.method:26} {row.point:14} budget {row.budget_mib or 0:7.0f}: {row.failure}"

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        f"{row.model:40} {row.method:26} {row.point:14} {row.step_ms:8.1f} ms (flowing {row.flowing_ms:8.1f}, "
        f"kernels {row.kernel_ms:8.1f}) @ {row.peak_mib:7.0f} MiB  budget {shown(row.budget_mib, '7.0f'):>7} predicted "
        f"{shown(row.predicted_mib, '7.0f'):>7} {shown(row.predicted_pct, '+.1f'):>6} %  {row.graphs} graphs "
        f"compiled {row.compilations}x in {row.compile_seconds:.0f} s  loss {row.loss:.5f} |g| {row.gradient_norm:.5g} "
        f"cap {shown(row.least_cap_pct, '+.0f')} %"
    )


def chart(rows: list[Row], path: Path) -> None:
    panels = []
    for model in dict.fromkeys(row.model for row in rows):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.model == model and row.failure is None and row.method != EAGER:
                series.setdefault(row.method, []).append((row.peak_mib / 1024, row.step_ms))
        panels.append(Panel(model, series))
    draw_curves(panels, path, x="peak, GiB", y="step, ms", columns=2)


def main() -> None:
    parser = crew.options(__doc__, limit=10.0, rounds=10)
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--more-points", default=MORE_POINTS, help="of the models of gpu_more.py")
    arguments = parser.parse_args()
    tasks = [*tasks_of([setting.name for setting in settings(arguments.tiny)], arguments.points)]
    tasks += tasks_of([setting.name for setting in more_settings(arguments.tiny)], arguments.more_points)
    environment = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    found = crew.run(Benchmark("compiled", Row, tasks, work, line, budgeted, environment), arguments)
    rows = sorted(found, key=lambda row: (row.model, row.method, -row.peak_mib))
    chart(rows, arguments.results / "compiled.png")
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
