"""HiRemate's tables 3 and 4 and its figures from our own solvers, and graphs of up to 50,000 operators.

    python benchmarks/hiremate.py [--tables 3,4,large,figures] [--only REGEX] [--methods REGEX] [--limit 55]
                                  [--again] [--graphs DIR] [--device V100] [--results DIR]

The models of `benchmarks/models` are traced from real modules with fake tensors; times are those of the roofline model
for `--device`. Traced graphs are kept in `--graphs` and traced only once. What the results already have for the same
device and limit is not solved again; `--again` solves it anew. Each case is planned in a process of its own, so that
its memory can be told; planning takes two threads.

What the paper (Gusak et al., HiRemate, ICML 2025) gives as memory is without parameters: its budget for GPT-medium is
less than these. So 100 % is the peak without recomputation less what is resident, and a budget of p % is what is
resident plus that share. Gradients of parameters count as part of the peak, except where they alone exceed the budget:
such rows are marked "*" and take them as allocated before. The paper measures modules without a loss; here the loss
takes no time and no memory but the gradients it returns. All times are in percent of the step without recomputation.
"gap" is how far the plan can be from the fastest one with the same order of first computations, in points.

`figures` draws the paper's figures 4 to 7 and 10 to 15 (`benchmarks/hiremate_figures`), with a tenth of the limit for
each point.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from hiremate_figures import FIGURES, FigureSettings
from hiremate_figures.graphs import Library, budget_bytes, plain_peak_bytes, without_gradients
from hiremate_figures.ledger import best_entry
from partition import Row as Cut, measured as measure_cut

import rematch
from rematch.files import write_text
from rematch.graph import Graph, generators, simulate
from rematch.solvers import Problem, make_solver, solve
from rematch.solvers.common.forward_pass import forward_ops
from rematch.solvers.minimum import surely_needed_bytes

# The methods of tables 3 and 4, by the names that the tables have for them: solver and options.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "H-ILP": ("hiremate", {"solvers": ("hilp",), "unite": False}),  # the hierarchy alone, H-ILP on every level
    "HiRemate": ("hiremate", {"solvers": ("hilp", "rotor", "twremat"), "unite": False}),  # the paper's framework
    "ours": ("hiremate", {}),  # the same with local search for parts, and its results united
    "rotor": ("rotor", {}),  # on blocks, for the paper's Rockmate
    "TWRemat": ("twremat", {}),  # pruned to the budget
    "Checkmate": ("checkmate", {}),  # its own program
    "auto": ("auto", {"gap": 0.0}),  # to the proof
}
MOST_CHECKMATE_OPERATORS = 450  # beyond, its program is too large to be built in the time of a plan


@dataclass(frozen=True)
class Published:
    """A model's row of table 4."""

    title: str
    forward: int  # operators after the paper's simplification
    joint: int
    nodes: int  # with data
    cut: tuple[int, int, int, int]  # levels, sub-graphs, unique ones, largest
    minutes: float
    peak_percent: float
    time_percent: float  # predicted


OBSERVE = "make bench-training ARGS='--models paper --budget table4 --solver hiremate --device cuda'"
TABLE_4 = {
    "gpt24": Published("GPT 24", 367, 734, 1614, (3, 28, 8, 15), 7.9, 36.6, 122.3),
    "gpt96": Published("GPT 96", 1447, 2894, 6366, (4, 61, 21, 10), 15.0, 47.2, 119.6),
    "unet": Published("UNet", 50, 101, 205, (2, 9, 9, 15), 9.0, 51.3, 113.5),
    "mlp_mixer": Published("MLP-Mixer", 125, 250, 549, (2, 15, 6, 10), 1.5, 53.3, 107.3),
    "regnet32": Published("RegNet32", 173, 347, 721, (2, 15, 10, 15), 5.0, 41.1, 107.0),
    "resnet101": Published("ResNet101", 211, 423, 851, (2, 19, 10, 15), 5.5, 42.6, 115.3),
    "transformer6_6": Published("Transformer 6-6", 224, 417, 991, (3, 23, 20, 17), 20.0, 46.9, 117.6),
    "transformer36_36": Published("Transformer 36-36", 1334, 2457, 5851, (16, 128, 67, 19), 147.0, 44.6, 118.4),
    "fno1d": Published("FNO 1d", 42, 82, 167, (2, 10, 5, 8), 2.5, 53.1, 114.7),
    "fno3d": Published("FNO 3d", 64, 121, 257, (2, 12, 12, 10), 5.3, 47.2, 117.4),
    "ufno": Published("U-FNO", 118, 221, 467, (2, 11, 9, 17), 16.3, 56.7, 116.3),
    "uno": Published("UNO", 129, 229, 495, (4, 12, 12, 19), 46.0, 58.5, 121.9),
}
TABLE_3: dict[str, tuple[str, tuple[float, ...]]] = {  # budgets in percent
    "resnet34": ("ResNet34", (80, 65, 50, 40)),
    "unet": ("UNet", (80, 65, 50, 40)),
    "transformer2": ("Transformer 2-2", (80, 65, 50, 40)),
    "mlp_mixer": ("MLP-Mixer", (80, 65, 50, 40)),
    "gpt5": ("GPT 5", (90, 80, 70, 65)),  # 60 % is impossible: logits and their gradient alone are 52 %
}
LARGE: dict[str, Callable[[int], Graph]] = {
    "gpt": lambda size: generators.gpt(size // 30),
    "encoder-decoder": lambda size: generators.encoder_decoder(size // 80, size // 80),
}
LARGE_SIZES = (1_000, 3_000, 10_000, 20_000, 50_000)
LARGE_PERCENT = 50.0
LARGE_GAP = 0.1  # points of extra time: planning ends when the plan is proved to be this near
LARGE_SECONDS = 300.0
FIGURE_SHARE = 0.1  # of the limit, for each of the hundreds of points of the figures


# Plans


@dataclass(frozen=True)
class Task:
    """What to plan, by whom and for how long; results are known by it."""

    table: str
    name: str
    percent: float
    limit_seconds: float
    device: str = ""  # none: times are generated
    solver: str = "auto"


@dataclass(frozen=True)
class Planned:
    """A task's outcome; times and the peak are in percent of the step without recomputation."""

    task: Task
    operators: int
    gradients_count: bool
    status: str
    time_percent: float | None
    bound_percent: float | None
    peak_percent: float | None
    found_by: str | None
    first_seconds: float | None  # until any plan was known
    solve_seconds: float
    cpu_seconds: float
    memory_bytes: int  # of the process that planned

    @property
    def gap_points(self) -> float | None:
        if self.time_percent is None or self.bound_percent is None:
            return None
        return max(0.0, self.time_percent - self.bound_percent)


def plan_apart(task: Task, graph: Graph, options: dict[str, Any]) -> Planned:
    """Plan in a process of its own, which begins with nothing loaded."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(plan, task, graph, options).result()


def plan(task: Task, graph: Graph, options: dict[str, Any]) -> Planned:
    gradients_count = budget_bytes(graph, task.percent) >= surely_needed_bytes(graph)
    counted = graph if gradients_count else without_gradients(graph)
    budget, resident = budget_bytes(counted, task.percent), counted.resident_bytes
    started = time.process_time()
    name, own = METHODS[task.solver]
    solver = make_solver(name, **{**own, **options})
    problem = Problem(counted, budget)
    if not solver.applicable(problem):
        facts = (task, len(counted.ops), gradients_count, "does not apply")
        return Planned(*facts, None, None, None, None, None, 0.0, 0.0, peak_memory_bytes())
    solution = solve(problem, solver, time_limit=task.limit_seconds)
    cpu_seconds = time.process_time() - started
    best = best_entry(solution)
    seen = simulate(counted, solution.schedule) if solution.schedule is not None else None
    scale = 100 / counted.baseline_seconds
    return Planned(
        task=task,
        operators=len(counted.ops),
        gradients_count=gradients_count,
        status=solution.status.value,
        time_percent=seen.seconds * scale if seen else None,
        bound_percent=None if solution.lower_bound_seconds is None else solution.lower_bound_seconds * scale,
        peak_percent=(seen.peak_bytes - resident) / (plain_peak_bytes(counted) - resident) * 100 if seen else None,
        found_by=best and best.solver,
        first_seconds=next((entry.at_seconds for entry in solution.log if entry.best_seconds is not None), None),
        solve_seconds=solution.solve_seconds,
        cpu_seconds=cpu_seconds,
        memory_bytes=peak_memory_bytes(),
    )


def peak_memory_bytes() -> int:
    """The most that this process has had in memory; `getrusage` would tell what its parent had, if that is more."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())
    return int(kib) * 1024


# Results


class Results:
    """Plans so far, kept as JSON after each, so that a run that is stopped loses nothing."""

    def __init__(self, path: Path, again: bool) -> None:
        self._path, self._again = path, again
        stored = json.loads(path.read_text()) if path.exists() else {}
        rows = (Planned(**{**entry, "task": Task(**entry["task"])}) for entry in stored.get("plans", []))
        self._plans = {row.task: row for row in rows}
        self._cuts: dict[str, dict[str, Any]] = stored.get("partitions", {})

    @property
    def folder(self) -> Path:
        return self._path.parent

    def plan(self, task: Task, graph: Callable[[], Graph], **options: Any) -> Planned:
        if self._again or task not in self._plans:
            self._plans[task] = plan_apart(task, graph(), options)
            self._write()
        return self._plans[task]

    def known(self, task: Task) -> Planned | None:
        """What is known of a task without planning it."""
        return self._plans.get(task)

    def cut(self, name: str, graph: Graph) -> Cut:
        if self._again or name not in self._cuts:
            self._cuts[name] = asdict(measure_cut(name, graph))
            self._write()
        return Cut(**self._cuts[name])

    def _write(self) -> None:
        libraries = ("highspy", "numba", "numpy")
        kept = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "versions": {"rematch": rematch.__version__, **{name: version(name) for name in libraries}},
            "partitions": self._cuts,
            "plans": [asdict(row) for row in self._plans.values()],
        }
        write_text(self._path, json.dumps(kept, indent=1))


# Tables


def number(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width},.{digits}f}"


def print_table_4(library: Library, results: Results, only: str, limit: float) -> bool:
    """Whether every model is planned in time and no plan is slower than the paper's."""
    names = [name for name in TABLE_4 if re.search(only, f"4 {name}")]
    print("\nTable 4 (a, b): graphs, and their partition; the paper's in brackets, after its simplification")
    print(f"{'model':20} {'forward':>14} {'operators':>14} {'values':>14}  levels, sub-graphs, unique, largest")
    for name in names:
        print(sizes_line(TABLE_4[name], name, library.graph(name), results), flush=True)
    print("\nTable 4 (c): planned by `hiremate` and by `auto`; * gradients do not count; observed: measured by")
    print(f"  {OBSERVE}")
    print(
        f"{'model':20} {'peak %':>7} {'paper':>6} {'time %':>7} {'paper':>6} {'bound':>7} {'gap':>6} {'status':>9} "
        f"{'plan s':>7} {'paper s':>8} {'CPU s':>6} {'MB':>6} {'observed peak, time %':>22}  found by"
    )
    good, observed = True, observations(results.folder)
    for name, method in product(names, ("ours", "auto")):
        task = Task("4", name, TABLE_4[name].peak_percent, limit, library.device, method)
        row = results.plan(task, partial(library.graph, name))
        seen = observed.get(name, "-") if method == "ours" else ""
        print(plan_line(TABLE_4[name], row, seen), flush=True)
        good &= method != "auto" or (row.time_percent is not None and row.time_percent <= TABLE_4[name].time_percent)
    return good


def sizes_line(theirs: Published, name: str, graph: Graph, results: Results) -> str:
    cut = results.cut(name, graph)
    sizes = (len(forward_ops(graph)), theirs.forward), (len(graph.ops), theirs.joint), (len(graph.values), None)
    shown = " ".join(f"{ours:>6,} {f'({published:,})' if published else '':>7}" for ours, published in sizes)
    ours = (cut.levels, cut.parts, cut.unique, cut.largest)
    return f"{theirs.title:20} {shown}  {', '.join(map(str, ours))} ({', '.join(map(str, theirs.cut))})"


def plan_line(theirs: Published, row: Planned, observed: str) -> str:
    return (
        f"{theirs.title + ('' if row.gradients_count else ' *'):20} {number(row.peak_percent, 7, 1)} "
        f"{theirs.peak_percent:>6.1f} {number(row.time_percent, 7)} {theirs.time_percent:>6.1f} "
        f"{number(row.bound_percent, 7)} {number(row.gap_points, 6)} {row.status:>9} {row.solve_seconds:>7.1f} "
        f"{theirs.minutes * 60:>8,.0f} {row.cpu_seconds:>6.1f} {row.memory_bytes / 1e6:>6,.0f} "
        f"{observed:>22}  {row.found_by or '-'}"
    )


def observations(folder: Path) -> dict[str, str]:
    """What training on a card showed, by model: peak and time relative to plain training; empty where none was run."""
    path = folder / "training-paper-table4.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {
        row["name"]: f"{100 * row['peak_bytes'] / row['plain_peak_bytes']:.1f}, {100 + row['measured_percent']:.1f}"
        for row in rows
        if row["failure"] is None
    }


def print_table_3(library: Library, results: Results, only: str, methods: str, limit: float) -> None:
    """Tables 2 and 3: each method's time; table 2 is a part of table 3."""
    print(
        "\nTables 2 and 3: time in % of the step without recomputation; - nothing found, or does not apply; . not run"
    )
    print("(published: H-ILP is -0.1 to 0.8 points above Checkmate, and 3.2 and 4.1 for GPT2 at 1.25 and 1.1 GB)")
    print(f"{'model':20} {'budget':>7} " + " ".join(f"{label:>9}" for label in METHODS) + f" {'bound':>9}")
    for name, title, percent in table_3_budgets(only):
        graph = library.graph(name)
        rows = []
        for label in METHODS:
            task = Task("3", name, percent, limit, library.device, label)
            too_large = label == "Checkmate" and len(graph.ops) > MOST_CHECKMATE_OPERATORS
            if too_large or not re.search(methods, label):
                rows.append(results.known(task))
            else:
                rows.append(results.plan(task, partial(library.graph, name)))
        times = " ".join(f"{'.':>9}" if row is None else number(row.time_percent, 9) for row in rows)
        bound = rows[-1] and rows[-1].bound_percent
        print(f"{title:20} {percent:>5.0f} % {times} {number(bound, 9)}", flush=True)


def table_3_budgets(only: str) -> Iterator[tuple[str, str, float]]:
    for name, (title, percents) in TABLE_3.items():
        yield from ((name, title, percent) for percent in percents if re.search(only, f"3 {name} {percent:g}"))


def print_large(results: Results, only: str) -> None:
    print(f"\nLarge graphs at {LARGE_PERCENT:.0f} %, planned until the gap is {LARGE_GAP} points")
    print(
        f"{'graph':18} {'operators':>9} {'time %':>7} {'bound':>7} {'gap':>6} {'first s':>8} {'plan s':>7} "
        f"{'CPU s':>7} {'MB':>6}  found by"
    )
    for family, make in LARGE.items():
        for size in LARGE_SIZES:
            if not re.search(only, f"large {family} {size}"):
                continue
            task = Task("large", f"{family} {size}", LARGE_PERCENT, LARGE_SECONDS)
            row = results.plan(task, partial(make, size), gap=LARGE_GAP)
            print(
                f"{family:18} {row.operators:>9,} {number(row.time_percent, 7)} {number(row.bound_percent, 7)} "
                f"{number(row.gap_points, 6, 3)} {number(row.first_seconds, 8, 1)} {row.solve_seconds:>7.1f} "
                f"{row.cpu_seconds:>7.1f} {row.memory_bytes / 1e6:>6,.0f}  {row.found_by or '-'}",
                flush=True,
            )


def draw_figures(settings: FigureSettings, only: str) -> None:
    for name, draw in FIGURES.items():
        if re.search(only, name):
            print(f"\n{name}, {settings.limit:g} s for a point", flush=True)
            for path in draw(settings):
                print(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="3,4,large,figures", help="which to make, with commas between them")
    parser.add_argument(
        "--only", default="", help="regular expression on '3 model percent', 'table model' and 'figure number'"
    )
    parser.add_argument(
        "--methods", default="", help="regular expression on the methods to run in tables 2 and 3 and in figures"
    )
    parser.add_argument("--limit", type=float, default=55.0, help="seconds for each plan of a model; figures: a tenth")
    parser.add_argument("--again", action="store_true", help="solve again what the results have already")
    parser.add_argument("--graphs", type=Path, default=Path(__file__).parent / ".graphs", help="where graphs are kept")
    parser.add_argument("--device", default="V100", help="whose times the roofline model gives")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    library, tables = Library(arguments.graphs, arguments.device), arguments.tables.split(",")
    results = Results(arguments.results / "hiremate.json", arguments.again)
    if "3" in tables:
        print_table_3(library, results, arguments.only, arguments.methods, arguments.limit)
    good = "4" not in tables or print_table_4(library, results, arguments.only, arguments.limit)
    if "large" in tables:
        print_large(results, arguments.only)
    if "figures" in tables:
        limit = FIGURE_SHARE * arguments.limit
        settings = FigureSettings(library, arguments.results, limit, arguments.again, arguments.methods)
        draw_figures(settings, arguments.only)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
