"""Through torch.compile: step time against peak memory for PyTorch's own budget, checkpointed blocks and rematch.

    python benchmarks/compiled.py [--only REGEX] [--seconds 900] [--jobs 4] [--points POINT,...] [--tiny]

The four models of gpu.py, and those of gpu_more.py with a few points (`--more-points`), which come last. Peers are
torch.compile with `activation_memory_budget` at 1.0, 0.7, 0.5, 0.3 and 0.0, and `torch.utils.checkpoint` around every
block under torch.compile. rematch gets a peer's peak as its budget ("at 0.5", "at
block"), or a part of the lowest of them ("low*0.85"). Points are taken in the order of `--points`, for all models each,
for a run that is cut short should have the most telling ones.

Each point is a process of its own with a time limit, so a crash or a hang costs one row. Several compile at once; while
one measures (steps, or the costs that rematch plans with), the others are stopped. rematch's first steps measure and
correct its plan; they belong to `compile_seconds`, as the first steps of the others do. Then steps are timed one by
one, and in a row without waiting (`flowing`). `loss` and `gradient_norm` are of one step from the same random state:
alike for all who draw inductor's random numbers. On CUDA, `kernels` are milliseconds, by name, and rematch's rows say
how many percent above the budget the process must be allowed to reserve to train (`least_cap_pct`).

Rows are kept as JSON as they come, and a run that was stopped goes on where it was; rows that failed are tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from gpu import DEVICE, Setting, checkpointed, conditions, flowing_ms, settings, wrapped
from gpu_caps import least_cap
from gpu_more import more_settings
from torch import nn

from rematch.execute.compiled.backend import backends, rematch_backend
from rematch.files import write_text
from rematch.planning.compiled import GraphPlanner
from rematch.report.charts import Panel, draw_curves
from rematch.trial import Trial

EAGER, TORCH, BLOCKS, OURS = "eager", "torch.compile", "block checkpoint, compiled", "rematch"
POINTS = "1.0,0.5,at 0.5,0.0,block,low*0.85,at block,low*0.7,at 1.0*0.9,0.7,0.3,at 0.7,at 0.3,at 0.0,eager"
MORE_POINTS = "1.0,0.5,at 0.5"
_ABOVE = [0.0, 1.0, 2.0, 4.0, 8.0]  # caps that are tried, in percent above the budget
_CAPPED_STEPS = 10
_FIRST_STEPS = 9  # in which rematch compiles at most three times, and measures
_CLOSE = 0.01  # peaks of peers that differ by less are one point
_LISTED_KERNELS = 30
_ROW = "row: "  # what a worker prints before its row
_ALONE, _TOGETHER = "alone", "together"  # what a worker prints before and after it measures


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


def measured(
    setting: Setting, method: str, model: nn.Module, sample: Any, rounds: int, steps: int, **known: Any
) -> Row:
    """Compile in so many first steps, then time and measure."""
    trial = Trial(model, setting.loss, setting.context)
    started = time.perf_counter()
    for _ in range(steps):
        trial.timed_step(sample)
    compile_seconds = time.perf_counter() - started
    with alone():
        times = [trial.timed_step(sample)[1] for _ in range(rounds)]
        flowing = flowing_ms(trial, sample)
        kernels = kernel_times(trial, sample)
    torch.manual_seed(0)
    loss = float(trial.step(sample))
    gradients = [parameter.grad.double().norm() for parameter in model.parameters() if parameter.grad is not None]
    return Row(
        model=setting.name,
        method=method,
        step_ms=statistics.median(times) * 1e3,
        flowing_ms=flowing,
        peak_mib=trial.peak_bytes(sample) / 2**20,
        compile_seconds=compile_seconds,
        loss=loss,
        gradient_norm=float(torch.stack(gradients).norm()),
        kernel_ms=sum(kernels.values()),
        kernels=dict(list(kernels.items())[:_LISTED_KERNELS]),
        **known,
    )


def kernel_times(trial: Trial, sample: Any) -> dict[str, float]:
    """Milliseconds of each kernel of a step, longest first; numbers at the end of names do not tell them apart."""
    if DEVICE.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        trial.timed_step(sample)
    total: dict[str, float] = {}
    for event in seen.key_averages():
        name = re.sub(r"_\d+$", "", event.key)[:100]
        total[name] = total.get(name, 0.0) + event.self_device_time_total / 1e3
    return dict(sorted(total.items(), key=lambda item: -item[1]))


@contextmanager
def alone() -> Iterator[None]:
    """Have whoever started this process stop the others meanwhile."""
    print(_ALONE, flush=True)
    sys.stdin.readline()
    try:
        yield
    finally:
        print(_TOGETHER, flush=True)


def measure_costs_alone() -> None:
    """Have rematch measure the costs of operators while nobody else is on the device."""
    read = GraphPlanner._read

    def read_alone(*args: Any) -> Any:
        with alone():
            return read(*args)

    GraphPlanner._read = read_alone  # type: ignore[method-assign]


def compile_plainly(model: nn.Module) -> Any:
    return torch.compile(model, dynamic=False)


def ours(setting: Setting, model: nn.Module, sample: Any, budget: int, arguments: argparse.Namespace) -> Row:
    """rematch within `budget`."""
    measure_costs_alone()
    options = {"budget": budget, "time_limit": arguments.limit}
    # By its function: torch knows the name only where rematch is installed.
    compiled: Any = torch.compile(model, backend=rematch_backend, options=options, dynamic=False)
    known = {"point": arguments.point, "budget_mib": budget / 2**20}
    row = measured(setting, OURS, compiled, sample, arguments.rounds, _FIRST_STEPS, **known)
    cap_pct = None
    if DEVICE.type == "cuda":
        with alone():
            cap_pct = least_cap(Trial(compiled, setting.loss, setting.context), sample, budget, _ABOVE, _CAPPED_STEPS)
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
    return Row(
        **{
            **asdict(row),
            "compilations": max((graph.compilations for graph in graphs), default=1),
            "graphs": len(graphs),
            "least_cap_pct": cap_pct,
            "predicted_mib": max((plan.figures.peak_bytes or 0) / 2**20 for plan in plans),
            "predicted_pct": 100 * (seconds / baseline - 1) if baseline else None,
            "recomputed": dict(sorted(again.items(), key=lambda item: -item[1])),
            "history": tuple(line for graph in graphs for line in graph.history),
            "notes": tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        }
    )


def one_point(setting: Setting, arguments: argparse.Namespace) -> Row:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = setting.build().to(DEVICE).train()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what transformers takes anyway, with a warning that breaks the graph
    sample = setting.sample()
    rounds, point = arguments.rounds, arguments.point
    if point == EAGER:
        return measured(setting, EAGER, model, sample, rounds, 3, point=point)
    if point == "block":
        with wrapped(setting.blocks(model), checkpointed):
            return measured(setting, BLOCKS, compile_plainly(model), sample, rounds, 3, point=point)
    if arguments.budget is None:
        with torch._functorch.config.patch(activation_memory_budget=float(point)):
            return measured(setting, TORCH, compile_plainly(model), sample, rounds, 3, point=point)
    return ours(setting, model, sample, arguments.budget, arguments)


def work(arguments: argparse.Namespace) -> None:
    """Print the row of one point."""
    torch.set_float32_matmul_precision("high")  # tf32 where nothing is cast
    torch.backends.cudnn.allow_tf32 = True
    (setting,) = [setting for setting in all_settings(arguments.tiny) if setting.name == arguments.model]
    row = one_point(setting, arguments)
    print(_ROW + json.dumps(asdict(row)), flush=True)


# All points


@dataclass(frozen=True)
class Task:
    """A point of a model; for rematch, with a budget."""

    model: str
    point: str
    budget: int | None

    def failed(self, why: str) -> Row:
        method = OURS if self.budget is not None else {EAGER: EAGER, "block": BLOCKS}.get(self.point, TORCH)
        budget_mib = None if self.budget is None else self.budget / 2**20
        return Row(self.model, method, self.point, failure=why, budget_mib=budget_mib)


class Bench:
    """Runs tasks in processes, several at once, and keeps their rows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.path = arguments.results / "compiled.json"
        self.ends = time.monotonic() + arguments.seconds
        self.rows: list[Row] = []
        if self.path.exists() and not arguments.again:
            kept = [Row(**row) for row in json.loads(self.path.read_text(encoding="utf-8"))["rows"]]
            forgotten = [row for row in kept if arguments.forget and re.search(arguments.forget, row.method)]
            self.rows = [row for row in kept if row.failure is None and row not in forgotten]
        main = [setting.name for setting in settings(arguments.tiny)]
        more = [setting.name for setting in more_settings(arguments.tiny)]
        asked = {**dict.fromkeys(main, arguments.points), **dict.fromkeys(more, arguments.more_points)}
        self.points = {
            name: points.split(",") for name, points in asked.items() if points and re.search(arguments.only, name)
        }
        wanted = [(point, name) for names in (main, more) for point in self._order(names) for name in names]
        self.wanted = [(point, name) for point, name in wanted if point in self.points.get(name, ())]
        self.taken: set[tuple[str, str]] = {(row.model, row.point) for row in self.rows}
        self.running: dict[subprocess.Popen[str], Task] = {}
        self.changed = threading.Condition()  # guards all of this
        self.measures = threading.Lock()  # held by the task that has the device for itself

    def run(self) -> None:
        workers = [threading.Thread(target=self._take_tasks) for _ in range(self.arguments.jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _take_tasks(self) -> None:
        while True:
            with self.changed:
                task = self._next()
                while task is None and self.running and time.monotonic() < self.ends:
                    self.changed.wait(1.0)  # a peer's peak may become a budget
                    task = self._next()
                if task is None or time.monotonic() > self.ends:
                    return
                self.taken.add((task.model, task.point))
            row = self._result(task)
            with self.changed:
                self.rows.append(row)
                self._write()
                print(line(row), flush=True)
                self.changed.notify_all()

    def _order(self, names: list[str]) -> list[str]:
        return list(dict.fromkeys(point for name in names for point in self.points.get(name, ())))

    def _next(self) -> Task | None:
        for point, model in self.wanted:
            if (model, point) not in self.taken and (task := self._task(model, point)) is not None:
                return task
        return None

    def _task(self, model: str, point: str) -> Task | None:
        if not point.startswith(("at ", "low")):
            return Task(model, point, None)
        of_model = [row for row in self.rows if row.model == model and row.failure is None]
        peaks = {row.point: row.peak_mib for row in of_model if row.method in (TORCH, BLOCKS)}
        name, _, share = point.removeprefix("at ").partition("*")
        if name == "low":
            waits_for = {"0.5", "0.0", "block"} & set(self.points[model])
            if not peaks or any((model, peer) not in self.taken for peer in waits_for):
                return None
            if any(task.model == model and task.budget is None for task in self.running.values()):
                return None
            peak = min(peaks.values())
        elif name in peaks:
            peak = peaks[name]
        else:
            return None
        budget_mib = peak * float(share or 1)
        known = [row.budget_mib for row in of_model if row.budget_mib is not None]
        if any(abs(budget_mib - other) < _CLOSE * budget_mib for other in known):
            return None
        return Task(model, point, int(budget_mib * 2**20))

    def _result(self, task: Task) -> Row:
        """Run the task in a process of its own group, which can be stopped with all that it starts."""
        given = [sys.executable, __file__, "--model", task.model, "--point", task.point]
        given += ["--limit", str(self.arguments.limit), "--rounds", str(self.arguments.rounds)]
        given += ["--tiny"] if self.arguments.tiny else []
        given += [] if task.budget is None else ["--budget", str(task.budget)]
        log = self.arguments.results / "compiled.log"
        with log.open("a", encoding="utf-8") as errors:
            process = subprocess.Popen(
                given,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"},
            )
        with self.changed:
            self.running[process] = task
        limit = max(1.0, min(self.arguments.point_seconds, self.ends - time.monotonic()))
        watch = threading.Timer(limit, _end, [process])
        watch.start()
        said: list[str] = []
        row = self._listen(process, said)
        process.wait()
        watch.cancel()
        with self.changed:
            del self.running[process]
            self.changed.notify_all()
        last = next((text for text in reversed(_tail(log)) if text.strip()), "")
        return row or task.failed(f"exit {process.returncode}: {said[-1] if said else last}"[:300])

    def _listen(self, process: subprocess.Popen[str], said: list[str]) -> Row | None:
        assert process.stdout is not None and process.stdin is not None
        row = None
        stopped: list[subprocess.Popen[str]] | None = None
        for text in process.stdout:
            text = text.rstrip("\n")
            if text == _ALONE:
                self.measures.acquire()
                stopped = self._stop_others(process)
                process.stdin.write("\n")
                process.stdin.flush()
            elif text == _TOGETHER:
                self._go_on(stopped)
                stopped = None
            elif text.startswith(_ROW):
                row = Row(**json.loads(text.removeprefix(_ROW)))
            else:
                said.append(text)
        self._go_on(stopped)  # of a process that died while it measured
        return row

    def _stop_others(self, process: subprocess.Popen[str]) -> list[subprocess.Popen[str]]:
        with self.changed:
            others = [other for other in self.running if other is not process]
        for other in others:
            _signal(other, signal.SIGSTOP)
        time.sleep(0.3)  # for kernels that are queued
        return others

    def _go_on(self, stopped: list[subprocess.Popen[str]] | None) -> None:
        if stopped is None:
            return
        for other in stopped:
            _signal(other, signal.SIGCONT)
        self.measures.release()

    def _write(self) -> None:
        """Write all rows so far, so that a run that is stopped loses nothing."""
        kept = {**conditions(self.arguments), "rows": [asdict(kept) for kept in self.rows]}
        write_text(self.path, json.dumps(kept, indent=1))


def _signal(process: subprocess.Popen[str], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process that took too long, stopped as it may be."""
    _signal(process, signal.SIGKILL)


def _tail(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:].splitlines()


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models, for any machine")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--points", default=POINTS)
    parser.add_argument("--more-points", default=MORE_POINTS, help="of the models of gpu_more.py")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds to solve for each budget")
    parser.add_argument("--rounds", type=int, default=10, help="steps to time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for the whole run; points that run are ended")
    parser.add_argument("--point-seconds", type=float, default=400.0, help="for one point")
    parser.add_argument("--jobs", type=int, default=4, help="points that compile at once")
    parser.add_argument("--forget", default="", help="regular expression on the methods to measure again")
    parser.add_argument("--again", action="store_true", help="forget the rows there are")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    for one in ("--model", "--point"):
        parser.add_argument(one, help=argparse.SUPPRESS)  # of a worker
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model is not None:
        work(arguments)
        return
    arguments.results.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments)
    bench.run()
    rows = sorted(bench.rows, key=lambda row: (row.model, row.method, -row.peak_mib))
    chart(rows, arguments.results / "compiled.png")
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
