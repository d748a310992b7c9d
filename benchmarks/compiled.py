"""Through torch.compile: step time against peak memory for PyTorch's own budget, checkpointed blocks and rematch.

    python benchmarks/compiled.py [--only REGEX] [--points PEERS,low*0.9,low*0.8] [--limit 10] [--rounds 10] [--tiny]

Models as in gpu.py. Peers are torch.compile with `activation_memory_budget` at 1.0, 0.7, 0.5, 0.3 and 0.0, and
`torch.utils.checkpoint` around every block under torch.compile. rematch gets each peer's peak as its budget, and parts
of the lowest of them ("low*0.9"). Its first steps measure and correct the plan; they belong to `compile_seconds`, as
the first steps of the others do. Then steps are timed one by one, and in a row without waiting (`flowing`). `loss` and
`gradient_norm` are of one step from the same random state: alike for all who draw inductor's random numbers. Rows are
kept as JSON as they come, and a run that was stopped goes on where it was; the chart comes last.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from gpu import DEVICE, Setting, block_checkpoints, conditions, flowing_ms, settings, tidy
from torch import nn

from rematch.execute.compiled.backend import backends, rematch_backend
from rematch.files import write_text
from rematch.report.charts import Panel, draw_curves
from rematch.trial import Trial

EAGER, TORCH, BLOCKS, OURS = "eager", "torch.compile", "block checkpoint, compiled", "rematch"
SHARES = (1.0, 0.7, 0.5, 0.3, 0.0)
_PEERS = "PEERS"
_FIRST_STEPS = 9  # in which rematch compiles at most three times, and measures
_CLOSE = 0.01  # peaks of peers that differ by less are one point


@dataclass(frozen=True)
class Row:
    """One way to train one model. Times are milliseconds, memory is MiB."""

    model: str
    method: str
    point: str = ""
    failure: str | None = None
    step_ms: float = 0.0
    flowing_ms: float = 0.0
    peak_mib: float = 0.0
    budget_mib: float | None = None
    predicted_mib: float | None = None
    predicted_pct: float | None = None
    compile_seconds: float = 0.0
    compilations: int = 1
    loss: float = 0.0
    gradient_norm: float = 0.0


def measured(
    setting: Setting, method: str, model: nn.Module, sample: Any, rounds: int, steps: int, **known: Any
) -> Row:
    """Compile in so many first steps, then time and measure."""
    trial = Trial(model, setting.loss, setting.context)
    started = time.perf_counter()
    for _ in range(steps):
        trial.timed_step(sample)
    compile_seconds = time.perf_counter() - started
    times = [trial.timed_step(sample)[1] for _ in range(rounds)]
    torch.manual_seed(0)
    loss = float(trial.step(sample))
    gradients = [parameter.grad.double().norm() for parameter in model.parameters() if parameter.grad is not None]
    return Row(
        model=setting.name,
        method=method,
        step_ms=statistics.median(times) * 1e3,
        flowing_ms=flowing_ms(trial, sample),
        peak_mib=trial.peak_bytes(sample) / 2**20,
        compile_seconds=compile_seconds,
        loss=loss,
        gradient_norm=float(torch.stack(gradients).norm()),
        **known,
    )


def peers(setting: Setting, model: nn.Module, sample: Any, rounds: int, done: set[str]) -> Iterator[Row]:
    """The points that others reach, less those that are `done`."""
    if EAGER not in done:
        yield measured(setting, EAGER, model, sample, rounds, 3, point=EAGER)
    for share in SHARES:
        if f"{TORCH} {share}" not in done:
            with torch._functorch.config.patch(activation_memory_budget=share):
                compiled = compile_plainly(model)
                yield measured(setting, TORCH, compiled, sample, rounds, 3, point=f"{TORCH} {share}")
    if BLOCKS not in done:
        with block_checkpoints(setting.blocks(model)):
            yield measured(setting, BLOCKS, compile_plainly(model), sample, rounds, 3, point=BLOCKS)


def compile_plainly(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, dynamic=False)


def ours(setting: Setting, model: nn.Module, sample: Any, point: str, budget: int, limit: float, rounds: int) -> Row:
    """rematch within `budget`, or within the least that its refusal names."""
    torch._dynamo.reset()
    backends.clear()
    options = {"budget": budget, "time_limit": limit}
    # By its function: torch knows the name only where rematch is installed.
    compiled: Any = torch.compile(model, backend=rematch_backend, options=options, dynamic=False)
    row = measured(setting, OURS, compiled, sample, rounds, _FIRST_STEPS, point=point, budget_mib=budget / 2**20)
    graphs = [graph for backend in backends.values() for graph in backend.alive()]
    plans = [plan for backend in backends.values() for plan in backend.planner.plans]
    seconds = sum(plan.figures.seconds or 0.0 for plan in plans)
    baseline = sum(plan.figures.baseline_seconds for plan in plans)
    return Row(
        **{
            **asdict(row),
            "compilations": max((graph.compilations for graph in graphs), default=1),
            "predicted_mib": max((plan.figures.peak_bytes or 0) / 2**20 for plan in plans) if plans else None,
            "predicted_pct": 100 * (seconds / baseline - 1) if baseline else None,
        }
    )


def budgets(points: list[str], rows: list[Row]) -> dict[str, int]:
    """What each point of rematch's is in bytes, largest first."""
    peaks = {row.point: row.peak_mib for row in rows if row.method in (TORCH, BLOCKS) and row.failure is None}
    found: dict[str, float] = {}
    for point in points:
        if point == _PEERS:
            for name, peak in sorted(peaks.items(), key=lambda item: -item[1]):
                if all(abs(peak - other) > _CLOSE * peak for other in found.values()):
                    found[f"at {name}"] = peak
        elif point.startswith("low"):
            found[point] = float(point.partition("*")[2] or 1) * min(peaks.values())
        else:
            found[point] = float(point) / 100 * peaks[f"{TORCH} 1.0"]
    return {name: int(peak * 2**20) for name, peak in found.items()}


def run(setting: Setting, arguments: argparse.Namespace, rows: list[Row], keep: Callable[[Row], None]) -> None:
    """Fill in the rows that this model has not yet."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = setting.build().to(DEVICE).train()
    sample = setting.sample()
    done = {row.point for row in rows if row.model == setting.name}
    for row in peers(setting, model, sample, arguments.rounds, done):
        keep(row)
        tidy()
    own = [row for row in rows if row.model == setting.name]
    for point, budget in budgets(arguments.points.split(","), own).items():
        if point in done:
            continue
        try:
            row = ours(setting, model, sample, point, budget, arguments.limit, arguments.rounds)
        except Exception as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            row = Row(setting.name, OURS, point, failure=failure, budget_mib=budget / 2**20)
        keep(row)
        tidy()


def line(row: Row) -> str:
    if row.failure is not None:
        return f"{row.model:40} {row.method:26} {row.point:24} budget {row.budget_mib or 0:7.0f}: {row.failure}"

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        f"{row.model:40} {row.method:26} {row.point:24} {row.step_ms:8.1f} ms (flowing {row.flowing_ms:8.1f}) @ "
        f"{row.peak_mib:7.0f} MiB  budget {shown(row.budget_mib, '7.0f'):>7} predicted "
        f"{shown(row.predicted_mib, '7.0f'):>7} {shown(row.predicted_pct, '+.1f'):>6} %  "
        f"compiled {row.compilations}x in {row.compile_seconds:.0f} s  loss {row.loss:.5f} |g| {row.gradient_norm:.5g}"
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, for any machine")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--points", default=f"{_PEERS},low*0.9,low*0.8")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds to solve for each budget")
    parser.add_argument("--rounds", type=int, default=10, help="steps to time")
    parser.add_argument("--again", action="store_true", help="forget the rows there are")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "compiled.json"
    torch.set_float32_matmul_precision("high")  # tf32 where nothing is cast
    torch.backends.cudnn.allow_tf32 = True
    rows: list[Row] = []
    if path.exists() and not arguments.again:
        kept = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
        rows = [row for row in kept if row.failure is None]  # what failed gets another chance

    def keep(row: Row) -> None:
        """Write all rows so far, so that a run that is stopped loses nothing."""
        rows.append(row)
        kept = {**conditions(arguments), "rows": [asdict(kept) for kept in rows]}
        write_text(path, json.dumps(kept, indent=1))
        print(line(row), flush=True)

    for setting in settings(arguments.tiny):
        if re.search(arguments.only, setting.name):
            run(setting, arguments, rows, keep)
    chart(rows, arguments.results / "compiled.png")
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
