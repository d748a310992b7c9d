"""Training inside a budget: HiRemate's twelve models, measured beside plain training.

    python benchmarks/training.py [--budget 50%|table4] [--solver auto,hiremate] [--device cpu] [--only REGEX]
                                  [--limit 60] [--rounds 5] [--threads N] [--engine auto] [--ahead N] [--again]
                                  [--results DIR]

Models come from `benchmarks/models`, by default at sizes that a laptop can train (`--models paper` needs a large card,
`--models tiny` runs in minutes). Prints a line for each model and solver and keeps all as JSON. What the results have
already for the same budget, device, solver and limit is not run again, except by `--again`. Time is the median of steps
taken in turns, in per cent more than plain training; with one thread it is CPU time, which other programs disturb less.
"equal" means loss and gradients to the bit; "-" that plain training itself differs from run to run.

`--ahead N` plans before anything is timed. The operators of all models are measured first, one model after the other;
then N processes plan at the same time, into rematch's cache of plans; what follows finds the plans there, so that it
only trains, on a machine with nothing else to do.

`--budget table4` gives each model the relative peak of HiRemate's table 4 (c), of what it needs beside what is held
before a step: parameters, inputs and libraries' workspace, and also the gradients of GPT 24, which alone nearly fill
its share. `--models paper --budget table4 --solver hiremate,auto --device cuda` fills the observed columns of that
table, which `benchmarks/hiremate.py` prints.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
from models import TINY, Case, twelve
from torch import nn
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
GRADIENTS_HELD = ("gpt24",)  # whose gradients count as allocated before: they alone take most of its share
ROUNDED_BYTES = 2**16  # budgets of table 4, so that a run that measures the same again finds the same plans
FIRST_STEPS = 4  # on a card, blocks are captured and learned in the first ones; what comes then is what trains
MODELS: dict[str, Callable[[], dict[str, Case]]] = {
    "machine": lambda: twelve("machine"),
    "paper": lambda: twelve("paper"),
    "tiny": lambda: TINY,
}


@dataclass(frozen=True)
class Row:
    """What was found for one model by one solver; `failure` says why nothing was."""

    name: str
    solver: str
    limit_seconds: float
    failure: str | None = None
    found_by: str = ""  # another search, if the solver found nothing
    engine: str = ""
    operators: int = 0
    budget_bytes: int = 0
    predicted_peak_bytes: int = 0
    peak_bytes: int = 0
    plain_peak_bytes: int = 0
    held_bytes: int = 0  # of both peaks, what was there before the step
    predicted_percent: float | None = None
    bound_percent: float | None = None
    measured_percent: float | None = None
    plain_seconds: float = 0.0
    plan_seconds: float = 0.0
    solve_seconds: float = 0.0
    equal: bool = False
    plain_repeats: bool = True  # whether plain training is equal to itself, to the bit

    @property
    def good(self) -> bool:
        return (self.equal or not self.plain_repeats) and self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True)
class Task:
    """A model to plan with one solver for a budget."""

    case: Case
    solver: str
    budget: str | int | None = None  # None: as the arguments say
    plan_seconds: float | None = None  # if it was planned ahead
    failure: str | None = None

    def failed(self, why: str, arguments: argparse.Namespace) -> Row:
        return Row(self.case.name, self.solver, arguments.limit, failure=why)


# One model


def run(task: Task, arguments: argparse.Namespace) -> Row:
    case = task.case
    model, sample = loaded(case, arguments.device)
    plain = Trial(model, case.loss)
    used = memory_of(plain, sample, gradients_held=case.name in GRADIENTS_HELD and arguments.budget == TABLE_4)
    budget = task.budget or budget_of(case, used, arguments)
    inside, plan_seconds = planned(model, sample, task, budget, arguments)
    ours, rounds = Trial(inside, case.loss), arguments.rounds
    equal = same_outcome(ours, plain, sample)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    if arguments.device == "cuda":
        alternate([plain, ours], sample, FIRST_STEPS)
    plain_seconds, seconds = map(statistics.median, alternate([plain, ours], sample, rounds, clock))
    plan = rematch.plans_of(inside)[-1]
    figures = plan.figures
    return Row(
        name=case.name,
        solver=task.solver,
        limit_seconds=arguments.limit,
        found_by=figures.solver,
        engine=plan.engine,
        operators=plan.graph_ops,
        budget_bytes=figures.budget_bytes,
        predicted_peak_bytes=figures.peak_bytes or 0,
        peak_bytes=ours.peak_bytes(sample),
        plain_peak_bytes=used.peak_bytes,
        held_bytes=used.held_bytes,
        predicted_percent=figures.overhead_pct,
        bound_percent=figures.lower_bound_pct,
        measured_percent=extra_pct(seconds, plain_seconds),
        plain_seconds=plain_seconds,
        plan_seconds=max(figures.solve_seconds, task.plan_seconds or plan_seconds),
        solve_seconds=figures.solve_seconds,
        equal=equal,
        plain_repeats=equal or same_outcome(plain, plain, sample),
    )


def loaded(case: Case, device: str) -> tuple[nn.Module, Any]:
    """The model, made on the device, and the sample there, with nothing left of the models before."""
    release_memory()
    torch.manual_seed(0)
    with torch.device(device):
        model = case.build()
    return model, pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), case.sample())


def planned(
    model: nn.Module, sample: Any, task: Task, budget: str | int, arguments: argparse.Namespace
) -> tuple[nn.Module, float]:
    """The model inside the budget, and the seconds to plan it: few, if the cache has a plan for these arguments."""
    started = time.perf_counter()
    inside = rematch.remat(
        model, sample, budget=budget, loss=task.case.loss, solver=task.solver, time_limit=arguments.limit,
        engine=arguments.engine, progress=False, cache=bool(arguments.ahead),
    )  # fmt: skip
    return inside, time.perf_counter() - started


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_or_say_why(task: Task, arguments: argparse.Namespace) -> Row:
    """A model that cannot be trained so is a result too."""
    if task.failure is not None:
        return task.failed(task.failure, arguments)
    try:
        return run(task, arguments)
    except Exception as error:
        return task.failed(reason(error), arguments)


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# Budgets of table 4


@dataclass(frozen=True)
class Used:
    """The peak of a plain step, and what of it was held before."""

    peak_bytes: int
    held_bytes: int


def memory_of(plain: Trial, sample: Any, *, gradients_held: bool = False) -> Used:
    """What a plain step uses; `gradients_held`: as if all gradients had been allocated before it."""
    if not gradients_held:
        peak_bytes = plain.peak_bytes(sample)
        return Used(peak_bytes, held_bytes(plain, sample))
    parameters = list(plain.model.parameters())
    hooks = [parameter.register_post_accumulate_grad_hook(drop_gradient) for parameter in parameters]
    try:
        used = memory_of(plain, sample)
    finally:
        for hook in hooks:
            hook.remove()
    gradient_bytes = sum(parameter.nbytes for parameter in parameters)
    return Used(used.peak_bytes + gradient_bytes, used.held_bytes + gradient_bytes)


def drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def held_bytes(plain: Trial, sample: Any) -> int:
    """What is allocated before a step, once there was one; on CPU, where nobody counts, the model and the sample."""
    if plain.device.type == "cuda":
        return torch.cuda.memory_allocated(plain.device)
    tensors = [*plain.model.parameters(), *plain.model.buffers(), *pytree.tree_leaves(sample)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor))


def budget_of(case: Case, used: Used, arguments: argparse.Namespace) -> str | int:
    """As the arguments say; for table 4, what is held and the paper's share of the rest of the plain peak."""
    if arguments.budget != TABLE_4:
        return str(arguments.budget)
    share = PEAKS_OF_TABLE_4[case.name] / 100
    asked = used.held_bytes + int(share * (used.peak_bytes - used.held_bytes))
    return asked // ROUNDED_BYTES * ROUNDED_BYTES


# Planning ahead


def plan_ahead(tasks: Iterable[Task], arguments: argparse.Namespace) -> list[Task]:
    """The tasks with their budgets, planned into rematch's cache, or with why they cannot be."""
    measured: dict[str, tuple[str | int, int]] = {}  # budget and operators, by model
    failures: dict[str, str] = {}
    for case in {task.case.name: task.case for task in tasks}.values():
        started = time.perf_counter()
        try:
            measured[case.name] = measure(case, arguments)
        except Exception as error:
            failures[case.name] = reason(error)
        report(f"measured {case.name}", started)
    feasible = [replace(task, budget=measured[task.case.name][0]) for task in tasks if task.case.name not in failures]
    feasible.sort(key=lambda task: -measured[task.case.name][1])  # what takes longest begins first
    release_memory()
    with ProcessPoolExecutor(arguments.ahead, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {task: pool.submit(plan_in_cache, task, arguments) for task in feasible}
        done = {(task.case.name, task.solver): outcome(task, future) for task, future in futures.items()}
    return [
        done.get((task.case.name, task.solver)) or replace(task, failure=failures[task.case.name]) for task in tasks
    ]


def outcome(task: Task, future: Future[Task]) -> Task:
    """What became of a task; if a process was killed, it is left to be planned when it is run."""
    try:
        return future.result()
    except BrokenExecutor:
        return task


def measure(case: Case, arguments: argparse.Namespace) -> tuple[str | int, int]:
    """The model's budget, and how many operators it has, once their costs are measured and stored."""
    model, sample = loaded(case, arguments.device)
    budget: str | int = arguments.budget
    if budget == TABLE_4:
        used = memory_of(Trial(model, case.loss), sample, gradients_held=case.name in GRADIENTS_HELD)
        budget = budget_of(case, used, arguments)
    return budget, len(rematch.trace(model, sample, loss=case.loss, progress=False).ops)


def plan_in_cache(task: Task, arguments: argparse.Namespace) -> Task:
    """Plan, in a process of its own, what `planned` will then find in the cache."""
    torch.set_num_threads(arguments.threads)
    assert task.budget is not None
    started = time.perf_counter()
    try:
        model, sample = loaded(task.case, arguments.device)
        on_card = arguments.device == "cuda"
        if on_card:  # libraries then hold the same workspace as when the model is run
            memory_of(Trial(model, task.case.loss), sample)
            release_memory()
        inside, plan_seconds = planned(model, sample, task, task.budget, arguments)
        if on_card:
            for _ in range(3):  # a plan is made again if its first step needs more than the budget
                Trial(inside, task.case.loss).step(sample)
    except torch.OutOfMemoryError:  # with all the others on the card; it is left to be planned when it is run
        return task
    except Exception as error:
        return replace(task, failure=reason(error))
    finally:
        report(f"planned {task.case.name} by {task.solver}", started)
    return replace(task, plan_seconds=plan_seconds)


def report(what: str, started: float) -> None:
    print(f"{what} in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)


# Results


HEADER = (
    f"{'model':18} {'solver':>9} {'ops':>5} {'plain':>9} {'budget':>9} {'predicted':>9} {'measured':>9} {'extra':>8} "
    f"{'bound':>8} {'measured':>8} {'step':>8} {'plan':>7} {'equal':>5}"
)


def line(row: Row) -> str:
    if row.failure is not None:
        return f"{row.name:18} {row.solver:>9} {row.failure}"

    def percent(value: float | None) -> str:
        return f"{'-':>8}" if value is None else f"{value:>+7.2f}%"

    sizes = (row.plain_peak_bytes, row.budget_bytes, row.predicted_peak_bytes, row.peak_bytes)
    equal = "yes" if row.equal else "NO" if row.plain_repeats else "-"
    return (
        f"{row.name:18} {row.solver:>9} {row.operators:>5} {' '.join(f'{format_bytes(size):>9}' for size in sizes)} "
        f"{percent(row.predicted_percent)} {percent(row.bound_percent)} {percent(row.measured_percent)} "
        f"{row.plain_seconds:>7.2f}s {row.plan_seconds:>6.1f}s {equal:>5}"
    )


Rows = dict[tuple[str, str], Row]  # by model and solver


def known_rows(arguments: argparse.Namespace) -> Rows:
    """What the results have for this budget and device."""
    path = results_path(arguments)
    kept = json.loads(path.read_text()) if path.exists() else {}
    if (kept.get("budget"), kept.get("device", "cpu")) != (arguments.budget, device_name(arguments.device)):
        return {}
    common = {"solver": kept.get("solver", "auto"), "limit_seconds": kept.get("limit_seconds", 0.0)}  # in older files
    rows = (Row(**{**common, **row}) for row in kept["rows"])
    return {(row.name, row.solver): row for row in rows}


def keep(rows: Rows, arguments: argparse.Namespace) -> None:
    """All rows so far as JSON, so that a run that is stopped loses nothing."""
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"rematch": rematch.__version__, "torch": torch.__version__},
        "models": arguments.models,
        "budget": arguments.budget,
        "device": device_name(arguments.device),
        "rounds": arguments.rounds,
        "threads": torch.get_num_threads(),
        "rows": [asdict(row) for row in rows.values()],
    }
    write_text(results_path(arguments), json.dumps(kept, indent=1))


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def results_path(arguments: argparse.Namespace) -> Path:
    suffix = f"-{TABLE_4}" if arguments.budget == TABLE_4 else ""
    folder: Path = arguments.results
    return folder / f"training-{arguments.models}{suffix}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=MODELS, default="machine")
    parser.add_argument("--budget", default="50%", help="of the peak without recomputation, an amount, or 'table4'")
    parser.add_argument("--solver", default="auto", help="one or more, with commas between them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to solve each model for")
    parser.add_argument("--rounds", type=int, default=5, help="steps to time of each kind")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--engine", default="auto", help="that runs the plans; see rematch.remat")
    parser.add_argument("--ahead", type=int, default=0, help="processes that plan all models before any is timed")
    parser.add_argument("--again", action="store_true", help="run again what the results have already")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.results.mkdir(parents=True, exist_ok=True)
    cases = [case for case in MODELS[arguments.models]().values() if re.search(arguments.only, case.name)]
    if not cases:
        parser.error(f"no model matches {arguments.only!r}")
    rows = known_rows(arguments)
    asked = [Task(case, solver) for case, solver in product(cases, arguments.solver.split(","))]
    tasks = [task for task in asked if arguments.again or not is_known(task, rows, arguments)]
    if arguments.ahead and tasks:
        tasks = plan_ahead(tasks, arguments)
    print(HEADER)
    for row in rows.values():
        print(line(row))
    for task in tasks:
        row = run_or_say_why(task, arguments)
        rows[row.name, row.solver] = row
        print(line(row), flush=True)
        keep(rows, arguments)
    return 0 if all(rows[task.case.name, task.solver].good for task in asked) else 1


def is_known(task: Task, rows: Rows, arguments: argparse.Namespace) -> bool:
    row = rows.get((task.case.name, task.solver))
    return row is not None and row.limit_seconds == arguments.limit


if __name__ == "__main__":
    sys.exit(main())
