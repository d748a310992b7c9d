"""How long compiling takes, cold: torch.compile, and rematch within parts of its peak.

    python benchmarks/compile_time.py [--only REGEX] [--models card|small] [--points 75%,55%] [--seconds 900]

On a card the four models of gpu_settings.py, elsewhere small ones. Each row is a process of its own with empty caches,
one at a time. `compile_seconds` are those of the first steps, until rematch has measured and settled its plan, less
what as many steps take afterwards. Goal: at most twice torch.compile's, with at most two recompilations.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import crew
import torch
from crew import Benchmark, Task, working_seconds
from gpu_settings import DEVICE, Setting, by_name, gpt2, llama, settings
from torch import nn

from rematch.execute.compiled.backend import backends, rematch_backend

TORCH, OURS = "torch.compile", "rematch"
_STEPS = {TORCH: 3, OURS: 9}  # rematch compiles at most three times, and measures


@dataclass(frozen=True)
class Row(crew.Row):
    """One way to compile one model, cold."""

    compile_seconds: float = 0.0
    compilations: int = 1
    solve_seconds: float = 0.0
    peak_mib: float = 0.0
    step_ms: float = 0.0
    history: tuple[str, ...] = ()


def small_settings() -> list[Setting]:
    """Language models in float32, and a small ResNet."""
    language = [gpt2(3, 256, 4, 128, 4096), llama(3, 256, 4, 128, vocabulary=4096)]
    made = [replace(one, name=one.name.rpartition(", ")[0], context=nullcontext) for one in language]
    return [*(replace(one, build=_in_float32(one)) for one in made), _small_resnet()]


def _in_float32(setting: Setting) -> Any:
    return lambda: setting.build().float()


def _small_resnet() -> Setting:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2])
    return Setting(
        "ResNet 2-2-2, 16 x 96",
        lambda: ResNetForImageClassification(config),
        lambda: {"pixel_values": torch.randn(16, 3, 96, 96, device=DEVICE)},
        lambda output: output.logits.square().mean(),
        lambda model: list(model.resnet.encoder.stages),
    )


def all_settings(models: str) -> list[Setting]:
    return list(settings(tiny=False)) if models == "card" else small_settings()


def work(task: Task, arguments: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor", REMATCH_CACHE=f"{folder}/rematch")
        return measured(task, by_name(all_settings(arguments.models), task.model), arguments)


def measured(task: Task, setting: Setting, arguments: argparse.Namespace) -> Row:
    model, sample = setting.made()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what transformers takes anyway, with a warning that breaks the graph
    ours: dict[str, Any] = {}
    if task.budget is not None:
        ours = {"backend": rematch_backend, "options": {"budget": task.budget, "time_limit": arguments.limit}}
    compiled: nn.Module = torch.compile(model, dynamic=False, **ours)  # type: ignore[assignment]
    trial = setting.trial(compiled)
    steps = _STEPS[task.method]
    started = working_seconds()
    for _ in range(steps):
        trial.timed_step(sample)
    first_seconds = working_seconds() - started
    step_seconds = statistics.median(trial.timed_step(sample)[1] for _ in range(arguments.rounds))
    graphs = [graph for backend in backends.values() for graph in backend.alive()]
    plans = [plan for backend in backends.values() for plan in backend.planner.plans]
    return Row(
        model=task.model,
        method=task.method,
        point=task.point,
        budget_mib=None if task.budget is None else task.budget / 2**20,
        compile_seconds=first_seconds - steps * step_seconds,
        compilations=max((graph.compilations for graph in graphs), default=1),
        solve_seconds=sum(plan.figures.solve_seconds for plan in plans),
        peak_mib=trial.peak_bytes(sample) / 2**20,
        step_ms=step_seconds * 1e3,
        history=tuple(line for graph in graphs for line in graph.history),
    )


def budgeted(task: Task, rows: list[Row], _: set[tuple[str, str, str]]) -> Task | None:
    """The task with the bytes of its point; None while torch.compile's peak is not known."""
    if task.method == TORCH:
        return task
    peaks = [row.peak_mib for row in rows if row.model == task.model and row.method == TORCH]
    share = float(task.point.rstrip("%")) / 100
    return replace(task, budget=int(share * peaks[0] * 2**20)) if peaks else None


def line(row: Row, torch_seconds: float | None = None) -> str:
    if row.failure is not None:
        return f"{row.model:40} {row.method:14} {row.point:5} {row.failure}"
    ratio = f" = {row.compile_seconds / torch_seconds:.2f} of torch.compile's" if torch_seconds else ""
    return (
        f"{row.model:40} {row.method:14} {row.point:5} {row.compile_seconds:6.1f} s{ratio}, {row.compilations} "
        f"compilations, solved {row.solve_seconds:.1f} s, {row.step_ms:.1f} ms @ {row.peak_mib:.0f} MiB"
    )


def main() -> None:
    parser = crew.options(__doc__, limit=10.0, rounds=3)
    parser.add_argument("--models", choices=["card", "small"], default="card" if DEVICE.type == "cuda" else "small")
    parser.add_argument("--points", default="75%,55%", help="parts of torch.compile's peak")
    parser.set_defaults(jobs=1)
    arguments = parser.parse_args()
    names = [setting.name for setting in all_settings(arguments.models)]
    tasks = [Task(name, TORCH) for name in names]
    tasks += [Task(name, OURS, point) for point in arguments.points.split(",") for name in names]
    rows = crew.run(Benchmark("compile-time", Row, tasks, work, line, budgeted), arguments)
    theirs = {row.model: row.compile_seconds for row in rows if row.method == TORCH and row.failure is None}
    for row in rows:
        print(line(row, theirs.get(row.model)))


if __name__ == "__main__":
    main()
