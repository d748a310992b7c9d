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
"gap" is how far the plan can be from the fastest one with the same order of first computations, in points. A cell of
tables 2 and 3 is the plan with the longest limit that the results have, so that methods may be run with limits of their
own (`--methods`).

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
from dataclasses import asdict, dataclass, replace
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

# The methods of tables 2 to 4, by the names that the tables have for them: solver and options.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "H-ILP": ("hiremate", {"solvers": ("hilp",), "unite": False}),  # the hierarchy alone, H-ILP on every level
    "HiRemate": ("hiremate", {"solvers": ("hilp", "rotor", "twremat"), "unite": False}),  # the paper's framework
    "ours": ("hiremate", {}),  # the same with local search for parts, and its results united
    "rotor": ("rotor", {}),  # on blocks, for the paper's Rockmate
    "TWRemat": ("twremat", {}),  # pruned to the budget
    "Checkmate": ("checkmate", {}),  # its own program
    "auto": ("auto", {"gap": 0.0}),  # to the proof
}
WHO_RAN = """\
  H-ILP: the hierarchy with H-ILP on every level, nothing else. HiRemate: the paper's framework, with rotor and TWRemat.
  ours: solver="hiremate" as it is, which adds local search for parts and unites the results; no polish, no `auto`.
  rotor: ours, on blocks, in place of the paper's Rockmate. TWRemat: pruned to the budget. Checkmate: its own program,
  by HiGHS. auto: the default solver, to the proof, with its bound."""
MOST_CHECKMATE_OPERATORS = 450  # beyond, its program is too large to be built in the time of a plan


@dataclass(frozen=True)
class Published:
    """A model's row of table 4."""

    title: str
    before: int  # operators before the paper's simplification
    forward: int  # operators after the paper's simplification
    joint: int
    nodes: int  # with data
    cut: tuple[int, int, int, int]  # levels, sub-graphs, unique ones, largest
    minutes: float
    budget_gb: float
    peak_percent: float
    time_percent: float  # predicted
    observed_percent: float | None


OBSERVE = "make bench-training ARGS='--models paper --budget table4 --solver hiremate,auto --device cuda --ahead 8'"
TABLE_4 = {
    "gpt24": Published("GPT 24", 1858, 367, 734, 1614, (3, 28, 8, 15), 7.9, 1.7, 36.6, 122.3, 120.3),
    "gpt96": Published("GPT 96", 7402, 1447, 2894, 6366, (4, 61, 21, 10), 15.0, 4.5, 47.2, 119.6, 126.0),
    "unet": Published("UNet", 73, 50, 101, 205, (2, 9, 9, 15), 9.0, 5, 51.3, 113.5, 113.3),
    "mlp_mixer": Published("MLP-Mixer", 203, 125, 250, 549, (2, 15, 6, 10), 1.5, 4.5, 53.3, 107.3, 109.0),
    "regnet32": Published("RegNet32", 245, 173, 347, 721, (2, 15, 10, 15), 5.0, 3.5, 41.1, 107.0, 105.8),
    "resnet101": Published("ResNet101", 346, 211, 423, 851, (2, 19, 10, 15), 5.5, 4.5, 42.6, 115.3, 115.3),
    "transformer6_6": Published("Transformer 6-6", 1030, 224, 417, 991, (3, 23, 20, 17), 20.0, 3.5, 46.9, 117.6, 114.8),
    "transformer36_36": Published(
        "Transformer 36-36", 6160, 1334, 2457, 5851, (16, 128, 67, 19), 147.0, 4.9, 44.6, 118.4, None
    ),
    "fno1d": Published("FNO 1d", 71, 42, 82, 167, (2, 10, 5, 8), 2.5, 5, 53.1, 114.7, 111.0),
    "fno3d": Published("FNO 3d", 317, 64, 121, 257, (2, 12, 12, 10), 5.3, 4, 47.2, 117.4, 104.1),
    "ufno": Published("U-FNO", 567, 118, 221, 467, (2, 11, 9, 17), 16.3, 5.2, 56.7, 116.3, 116.5),
    "uno": Published("UNO", 997, 129, 229, 495, (4, 12, 12, 19), 46.0, 5.2, 58.5, 121.9, 116.7),
}
TABLE_3: dict[str, tuple[str, tuple[float, ...]]] = {  # budgets in percent
    "resnet34": ("ResNet34", (80, 65, 50, 40)),
    "unet": ("UNet", (80, 65, 50, 40)),
    "transformer2": ("Transformer 2-2", (80, 65, 50, 40)),
    "mlp_mixer": ("MLP-Mixer", (80, 65, 50, 40)),
    "gpt5": ("GPT 5", (90, 80, 70, 65)),  # 60 % is impossible: logits and their gradient alone are 52 %
}
PUBLISHED_TABLE_3: dict[str, tuple[tuple[float, float | None, float], ...]] = {  # budget in GB, Checkmate, H-ILP
    "ResNet34": ((5.0, 101.38, 101.84), (4.0, 103.60, 103.94), (3.5, 105.17, 105.54), (3.0, 107.12, 107.61)),
    "UNet": ((9.1, 100.90, 100.90), (8.1, 102.93, 103.17), (7.1, 105.32, 105.44), (6.1, 107.76, 108.30)),
    "Transformer 2-2": ((9.0, 101.95, 101.94), (8.0, 103.55, 103.56), (7.0, 105.32, 105.34), (6.0, 107.00, 107.02)),
    "MLP-Mixer": ((8.0, 100.50, 100.44), (7.0, 101.37, 101.37), (6.0, 102.47, 102.44), (5.0, 104.66, 105.45)),
    "GPT 5": ((1.4, 101.13, 101.17), (1.25, 106.02, 109.24), (1.1, 115.15, 119.29), (1.0, None, 125.93)),
}
LARGE: dict[str, Callable[[int], Graph]] = {
    "gpt": lambda size: generators.gpt(size // 30),
    "encoder-decoder": lambda size: generators.encoder_decoder(size // 80, size // 80),
}
LARGE_SIZES = (1_000, 3_000, 10_000, 20_000, 50_000)
LARGE_PERCENT = 50.0
LARGE_GAP = 0.1  # points of extra time: planning ends when the plan is proved to be this near
LARGE_SECONDS = 300.0
LARGE_BY_HIREMATE = ("gpt", 3_000, 60.0)  # 100 layers, by solver="hiremate": family, size and seconds
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
    load_average: float | None = None  # of the machine, in the minute before the search ended

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
        load_average=os.getloadavg()[0],
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

    def longest(self, task: Task) -> Planned | None:
        """What is known of a task without planning it, by the longest limit."""
        same = [row for known, row in self._plans.items() if replace(known, limit_seconds=task.limit_seconds) == task]
        return max(same, key=lambda row: row.task.limit_seconds, default=None)

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
    print(
        "\nTable 4 (a, b): graphs, and their partition; in brackets the paper's, after its simplification (before it,"
    )
    print("forward operators: " + ", ".join(f"{TABLE_4[name].title} {TABLE_4[name].before:,}" for name in names) + ")")
    print(f"{'model':20} {'forward':>14} {'operators':>14} {'values':>14}  levels, sub-graphs, unique, largest")
    for name in names:
        print(sizes_line(TABLE_4[name], name, library.graph(name), results), flush=True)
    print("\nTable 4 (c): planned by `hiremate` and by `auto`; * gradients do not count. Peaks are in % of the peak")
    print(
        "without recomputation, both less what is held before a step. Observed, in training with a loss on a card (in"
    )
    print("brackets: by a plan that the solver did not find itself), by")
    print(f"  {OBSERVE}")
    print(
        f"{'model':20} {'solver':>8} {'GB':>5} {'paper':>5} {'peak %':>7} {'paper':>6} {'time %':>7} {'paper':>6} "
        f"{'bound':>7} {'gap':>6} {'status':>9} {'plan s':>7} {'paper s':>8} {'CPU s':>6} {'MB':>6} "
        f"{'observed peak, time %':>22} {'paper':>6}  found by"
    )
    good, observed = True, observations(results.folder)
    for name, method in product(names, ("ours", "auto")):
        task = Task("4", name, TABLE_4[name].peak_percent, limit, library.device, method)
        row = results.plan(task, partial(library.graph, name))
        print(plan_line(TABLE_4[name], row, library.graph(name), observed), flush=True)
        good &= method != "auto" or (row.time_percent is not None and row.time_percent <= TABLE_4[name].time_percent)
    return good


def sizes_line(theirs: Published, name: str, graph: Graph, results: Results) -> str:
    cut = results.cut(name, graph)
    sizes = (len(forward_ops(graph)), theirs.forward), (len(graph.ops), theirs.joint), (len(graph.values), None)
    shown = " ".join(f"{ours:>6,} {f'({published:,})' if published else '':>7}" for ours, published in sizes)
    ours = (cut.levels, cut.parts, cut.unique, cut.largest)
    return f"{theirs.title:20} {shown}  {', '.join(map(str, ours))} ({', '.join(map(str, theirs.cut))})"


def plan_line(theirs: Published, row: Planned, graph: Graph, observed: dict[tuple[str, str], str]) -> str:
    solver, _ = METHODS[row.task.solver]
    counted = graph if row.gradients_count else without_gradients(graph)
    budget_gb = (budget_bytes(counted, row.task.percent) - counted.resident_bytes) / 1e9
    title = theirs.title + ("" if row.gradients_count else " *")
    seen = observed.get((row.task.name, solver), "-")
    return (
        f"{title:20} {solver:>8} {budget_gb:>5.1f} {theirs.budget_gb:>5.1f} "
        f"{number(row.peak_percent, 7, 1)} {theirs.peak_percent:>6.1f} {number(row.time_percent, 7)} "
        f"{theirs.time_percent:>6.1f} {number(row.bound_percent, 7)} {number(row.gap_points, 6)} {row.status:>9} "
        f"{row.solve_seconds:>7.1f} {theirs.minutes * 60:>8,.0f} {row.cpu_seconds:>6.1f} "
        f"{row.memory_bytes / 1e6:>6,.0f} {seen:>22} {number(theirs.observed_percent, 6, 1)}  {row.found_by or '-'}"
    )


def observations(folder: Path) -> dict[tuple[str, str], str]:
    """What training on a card showed, by model and solver: peak and time in percent of plain training.

    Peaks are less what is held before a step, as budgets are. In brackets where another search than the solver's found
    the plan.
    """
    path = folder / "training-paper-table4.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["name"], row["solver"]): observation(row) for row in rows if row["failure"] is None}


def observation(row: dict[str, Any]) -> str:
    held = row["held_bytes"]
    peak_percent = 100 * (row["peak_bytes"] - held) / (row["plain_peak_bytes"] - held)
    shown = f"{peak_percent:.1f}, {100 + row['measured_percent']:.1f}"
    return shown if row["found_by"] == row["solver"] else f"({shown})"


def print_table_3(library: Library, results: Results, only: str, methods: str, limit: float) -> None:
    """Tables 2 and 3: each method's time; table 2 is a part of table 3."""
    print(
        f"\nTables 2 and 3: time in % of the step without recomputation, times of a {library.device} by its roofline;"
    )
    print("- nothing found, or does not apply; . not run")
    print(WHO_RAN)
    print(f"{'model':20} {'budget':>7} " + " ".join(f"{label:>9}" for label in METHODS) + f" {'bound':>9}")
    shown: list[Planned] = []
    for name, title, percent in table_3_budgets(only):
        graph = library.graph(name)
        rows = []
        for label in METHODS:
            task = Task("3", name, percent, limit, library.device, label)
            too_large = label == "Checkmate" and len(graph.ops) > MOST_CHECKMATE_OPERATORS
            if re.search(methods, label) and not too_large:
                results.plan(task, partial(library.graph, name))
            rows.append(results.longest(task))
        times = " ".join(f"{'.':>9}" if row is None else number(row.time_percent, 9) for row in rows)
        bound = rows[-1] and rows[-1].bound_percent
        print(f"{title:20} {percent:>5.0f} % {times} {number(bound, 9)}", flush=True)
        shown += [row for row in rows if row is not None]
    for label in METHODS:
        used = sorted({row.task.limit_seconds for row in shown if row.task.solver == label})
        loads = [row.load_average for row in shown if row.task.solver == label and row.load_average is not None]
        noted = f", load average {min(loads):.0f} to {max(loads):.0f} where noted" if loads else ""
        print(f"  {label}: {' or '.join(f'{seconds:g}' for seconds in used)} s a plan{noted}")
    print("Published, at its own sizes (budget in GB: Checkmate, H-ILP):")
    for title, published in PUBLISHED_TABLE_3.items():
        cells = (f"{gb:g}: {number(checkmate, 0)}, {hilp:.2f}" for gb, checkmate, hilp in published)
        print(f"  {title:20} {'; '.join(cells)}")


def table_3_budgets(only: str) -> Iterator[tuple[str, str, float]]:
    for name, (title, percents) in TABLE_3.items():
        yield from ((name, title, percent) for percent in percents if re.search(only, f"3 {name} {percent:g}"))


def print_large(results: Results, only: str) -> None:
    print(f"\nLarge graphs at {LARGE_PERCENT:.0f} %: `auto` until the gap is {LARGE_GAP} points, `hiremate` alone")
    print(
        f"{'graph':18} {'solver':>8} {'operators':>9} {'time %':>7} {'bound':>7} {'gap':>6} {'first s':>8} "
        f"{'plan s':>7} {'CPU s':>7} {'MB':>6}  found by"
    )
    for family, make in LARGE.items():
        for size in LARGE_SIZES:
            if not re.search(only, f"large {family} {size}"):
                continue
            task = Task("large", f"{family} {size}", LARGE_PERCENT, LARGE_SECONDS)
            print(large_line(results.plan(task, partial(make, size), gap=LARGE_GAP)), flush=True)
            if (family, size) == LARGE_BY_HIREMATE[:2]:
                alone = replace(task, solver="ours", limit_seconds=LARGE_BY_HIREMATE[2])
                print(large_line(results.plan(alone, partial(make, size))), flush=True)


def large_line(row: Planned) -> str:
    return (
        f"{row.task.name:18} {METHODS[row.task.solver][0]:>8} {row.operators:>9,} {number(row.time_percent, 7)} "
        f"{number(row.bound_percent, 7)} {number(row.gap_points, 6, 3)} {number(row.first_seconds, 8, 1)} "
        f"{row.solve_seconds:>7.1f} {row.cpu_seconds:>7.1f} {row.memory_bytes / 1e6:>6,.0f}  {row.found_by or '-'}"
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
