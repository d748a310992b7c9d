"""Kumar et al.'s Tables 1 and 2 and figures 2 to 4, on captured modules of the networks that they name.

    python benchmarks/twremat.py [--limit 20] [--only REGEX] [--again] [--traced DIR] [--results DIR]

The graphs are training steps of PyTorch modules, traced with fake tensors and kept in `--traced`; `models/papers.py`
says which sizes are the paper's and which are ours. The paper's graphs are TensorFlow's, with the optimizer and with
finer operators. Here gradients of parameters stay to the end. Seconds are a V100's by its roofline.

The length of a schedule is its number of operators (the paper's unit) or its seconds, relative to running everything
once. GreedyRemat gets the smallest limit that it keeps, found by halving. TWRemat is algorithm 1 with k = 1, as far as
captured graphs allow (`rematch/solvers/treewidth/twremat.py` says where it differs); pruned is the same with all
recomputations taken out that its own peak leaves room for. In Table 2 `twremat` and the default solver also get two
budgets: the peak of TWRemat, and half of the peak without recomputation; both stop after `--limit` seconds. What the
results already have is not done again, unless `--again` is given. `--only` is searched for in the names of graphs ("FFN
100", "figure 4").
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiremate_figures.graphs import Library

import rematch
from rematch.files import write_text
from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.report.figure import new_figure, save_figure
from rematch.solvers import Deadline, Problem, solve
from rematch.solvers.common.pruning import pruned
from rematch.solvers.default.greedy import greedy_schedule
from rematch.solvers.treewidth.elimination import Heuristic, decompose
from rematch.solvers.treewidth.tree_decomposition import operator_neighbours
from rematch.solvers.treewidth.twremat import Recursion
from rematch.units import format_bytes

if TYPE_CHECKING:
    from models.cases import Case

DEVICE = "V100"
HALVINGS = 10
CURVE_POINTS = 40  # of figure 4
# Table 1 of the paper: n, m, width.
PUBLISHED_WIDTHS = {
    "ResNet200": (17_705, 27_312, 11),
    "FFN 100": (3_217, 4_447, 6),
    "Transformer Base": (15_842, 21_771, 18),
}
# Table 2 of the paper: GiB and relative length in units.
PUBLISHED_OUTCOMES = {
    "Transformer Base": {"NoRemat": (3.97, 1.21), "GreedyRemat": (2.92, 1.21), "TWRemat": (1.14, 10.61)},
    "Transformer Big": {"NoRemat": (13.25, 1.27), "GreedyRemat": (10.12, 1.27), "TWRemat": (2.89, 10.64)},
}
TABLES = ("FFN 100", "ResNet200", "Transformer Base", "Transformer Big")
FAMILIES = {  # by depth; 18 and 34 layers have other blocks
    "feed-forward": {depth: f"FFN {depth}" for depth in (25, 50, 100, 200, 400)},
    "ResNet": {depth: f"ResNet{depth}" for depth in (50, 101, 152, 200)},
    "Transformer Base": {
        3: "Transformer Base, 3 layers", 6: "Transformer Base", 12: "Transformer Base, 12 layers",
    },
}  # fmt: skip
FIGURE_4 = "ResNet200"
STYLES = {"NoRemat": "k-", "GreedyRemat": "g--", "TWRemat": "b-", "pruned": "r:"}


def case(name: str) -> Case:
    """The module behind a name."""
    from models.papers import feed_forward, residual, transformer

    if name.startswith("FFN "):
        return feed_forward(int(name.removeprefix("FFN ")))
    if name.startswith("ResNet"):
        return residual(int(name.removeprefix("ResNet")), 32, in_place=False)
    size, _, layers = name.removeprefix("Transformer ").partition(", ")
    return transformer(size, int(layers.removesuffix(" layers") or 6))


@dataclass(frozen=True)
class Width:
    """A row of Table 1."""

    operators: int
    edges: int
    width: int
    bags: int
    seconds: float
    min_degree_width: int
    min_degree_seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a method did; lengths are relative to running every operator once."""

    method: str
    peak_bytes: int | None
    fixed_bytes: int  # parameters, inputs and their gradients, which every schedule has in the end
    length_units: float | None
    length_seconds: float | None
    seconds: float | None
    cpu_seconds: float


def measure_width(graph: Graph) -> Width:
    neighbours = operator_neighbours(graph)

    def timed(heuristic: Heuristic) -> tuple[Any, float]:
        started = time.process_time()
        return decompose(neighbours, heuristic), time.process_time() - started

    fill, fill_seconds = timed("min-fill")
    degree, degree_seconds = timed("min-degree")
    edges = sum(map(len, neighbours)) // 2
    return Width(len(graph.ops), edges, fill.width, len(fill.bags), fill_seconds, degree.width, degree_seconds)


def outcome(graph: Graph, method: str, schedule: Schedule | None, started: float) -> Outcome:
    """`started` is in seconds of this process's own time."""
    cpu_seconds = time.process_time() - started
    a = graph.arrays
    fixed = a.resident_bytes + int(a.size[a.target].sum())
    if schedule is None:
        return Outcome(method, None, fixed, None, None, None, cpu_seconds)
    seen = simulate(graph, schedule).checked()
    units, relative = float(seen.counts.sum()) / len(graph.ops), seen.seconds / graph.baseline_seconds
    return Outcome(method, seen.peak_bytes, fixed, units, relative, seen.seconds, cpu_seconds)


def without(graph: Graph) -> Outcome:
    return outcome(graph, "NoRemat", baseline(graph), time.process_time())


def greedy(graph: Graph) -> Outcome:
    """GreedyRemat with the smallest limit it keeps, as near as halving finds it."""
    started = time.process_time()
    best = baseline(graph)
    low, high = graph.largest_op_bytes, simulate(graph, best).peak_bytes
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        schedule = greedy_schedule(Problem(graph, middle), Deadline())
        peak = simulate(graph, schedule).peak_bytes
        if peak <= middle:
            best, high = schedule, peak
        else:
            low = middle
    return outcome(graph, "GreedyRemat", best, started)


def tree_width(graph: Graph) -> tuple[Outcome, Outcome]:
    """TWRemat, and the same pruned without a higher peak."""
    started = time.process_time()
    sequence = Recursion.of(graph).sequence(1)
    plain = outcome(graph, "TWRemat", Schedule.from_ops(graph, sequence), started)
    started = time.process_time()
    shorter = pruned(graph, sequence, 0)
    return plain, outcome(graph, "pruned", Schedule.from_ops(graph, shorter), started)


def without_budget(graph: Graph) -> list[Outcome]:
    """The paper's three methods, and ours that prunes."""
    return [without(graph), greedy(graph), *tree_width(graph)]


def within_budgets(graph: Graph, known: list[Outcome], limit: float) -> Iterator[Outcome]:
    """`twremat` and the default solver at the peak of TWRemat, and at half of the peak without recomputation."""
    peaks = {found.method: found.peak_bytes or 0 for found in known}
    for budget, label in ((peaks["TWRemat"], "its peak"), (peaks["NoRemat"] // 2, "half")):
        for solver, options in (("twremat", {}), ("auto", {"gap": 0.0})):
            started = time.process_time()
            solution = solve(Problem(graph, budget), solver, time_limit=limit, **options)
            yield outcome(graph, f"{solver} at {label}", solution.schedule, started)


def trade_off(graph: Graph) -> dict[str, list[tuple[float, float, float]]]:
    """Figure 4: units, seconds and GiB of TWRemat(k) for values of k; and of the solver at budgets of these peaks."""

    def point(schedule: Schedule) -> tuple[float, float, float]:
        found = outcome(graph, "", schedule, 0.0)
        return found.length_units or 0.0, found.length_seconds or 0.0, (found.peak_bytes or 0) / 2**30

    recursion = Recursion.of(graph)
    stops = recursion.stops[:: max(1, len(recursion.stops) // CURVE_POINTS)]
    plain = [point(Schedule.from_ops(graph, recursion.sequence(stop))) for stop in stops]
    budgets = sorted({int(gib * 2**30) for _, _, gib in plain})
    found = [solve(Problem(graph, budget), "twremat", time_limit=10.0).schedule for budget in budgets]
    return {
        "TWRemat(k)": plain,
        "the fastest k, pruned": [point(schedule) for schedule in found if schedule is not None],
    }


# What is kept


class Ledger:
    """Results by what they show and of which graph, written after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, what: str, name: str) -> Any:
        return self._kept.get(what, {}).get(name)

    def put(self, what: str, name: str, result: Any) -> None:
        self._kept.setdefault(what, {})[name] = result
        about = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "versions": {"rematch": rematch.__version__, **{name: version(name) for name in ("torch", "numba")}},
        }
        write_text(self._path, json.dumps({**self._kept, **about}, indent=1))


def outcomes_of(ledger: Ledger, what: str, name: str) -> list[Outcome]:
    return [Outcome(**found) for found in ledger.get(what, name) or []]


# Tables


def table_1(ledger: Ledger) -> None:
    print(f"{'Table 1':28} {'n':>7} {'m':>7} {'min-fill':>9} {'bags':>6} {'cpu s':>6} {'min-degree':>11}  published")
    for name in TABLES:
        if (kept := ledger.get("table 1", name)) is not None:
            row, paper = Width(**kept), PUBLISHED_WIDTHS.get(name)
            published = "" if paper is None else f"n {paper[0]:,}, m {paper[1]:,}, width {paper[2]}"
            print(
                f"{name:28} {row.operators:>7,} {row.edges:>7,} {row.width:>9} {row.bags:>6,} {row.seconds:>6.2f} "
                f"{row.min_degree_width:>11}  {published}"
            )


def print_outcomes(name: str, outcomes: list[Outcome]) -> None:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    for found in outcomes:
        peak = "-" if found.peak_bytes is None else format_bytes(found.peak_bytes)
        theirs = PUBLISHED_OUTCOMES.get(name, {}).get(found.method)
        published = "" if theirs is None else f"   published: {theirs[0]} GiB, {theirs[1]} units"
        print(
            f"{name:28} {found.method:20} {peak:>10} {number(found.length_units):>7} units "
            f"{number(found.length_seconds):>7} of seconds, {found.cpu_seconds:6.1f} s of CPU{published}",
            flush=True,
        )


# Pictures


def draw_depths(ledger: Ledger, path: Path) -> None:
    """Figures 2 and 3."""
    heights: dict[str, Callable[[Outcome], float]] = {
        "peak, GiB (figure 2)": lambda found: (found.peak_bytes or 0) / 2**30,
        "length in units (figure 3)": lambda found: found.length_units or 0.0,
        "length in seconds": lambda found: found.length_seconds or 0.0,
    }
    figure = new_figure(13, 11)
    for row, (label, height) in zip(figure.subplots(3, 3), heights.items(), strict=True):
        for axes, (family, names) in zip(row, FAMILIES.items(), strict=True):
            measured = {depth: outcomes_of(ledger, "outcomes", name) for depth, name in names.items()}
            for method, style in STYLES.items():
                points = [(depth, height(f)) for depth, found in measured.items() for f in found if f.method == method]
                axes.plot(*zip(*points, strict=True), style, marker="o", ms=3, label=method)
            if label.startswith("peak"):
                fixed = [(depth, found[0].fixed_bytes / 2**30) for depth, found in measured.items() if found]
                axes.plot(*zip(*fixed, strict=True), ":", color="grey", label="parameters, inputs, gradients")
            axes.set(title=family, xlabel="layers", ylabel=label, ylim=(0, None))
            axes.legend(fontsize=7)
    figure.suptitle(
        "Kumar et al., figures 2 and 3, on training steps captured from PyTorch modules; seconds by a V100's roofline; "
        "1 is everything run once\n"
        "GreedyRemat: the least limit it keeps; TWRemat: algorithm 1, k = 1, unpruned; pruned: the same without "
        "recomputations that its peak has room for (ours)",
        fontsize=10,
    )
    save_figure(figure, path)


def draw_trade_off(curves: dict[str, list[tuple[float, float, float]]], path: Path) -> None:
    """Figure 4."""
    figure = new_figure(10, 4.4)
    for axes, (column, label) in zip(figure.subplots(1, 2), enumerate(("units", "seconds")), strict=True):
        for (method, points), style in zip(curves.items(), ("b.", "r."), strict=True):
            axes.plot([p[column] for p in points], [p[2] for p in points], style, ms=5, label=method)
        axes.set(xlabel=f"length in {label}, 1 is everything run once", ylabel="peak, GiB", ylim=(0, None))
        axes.set_xlim(0.0, None)
        axes.legend(fontsize=8)
    figure.suptitle(
        f"Kumar et al., figure 4: {FIGURE_4}, batch 32, captured from a PyTorch module; seconds by a V100's roofline\n"
        "TWRemat(k): algorithm 1, unpruned; the fastest k, pruned: `twremat` within the same peaks (ours)",
        fontsize=10,
    )
    save_figure(figure, path)


# The run


def measure(name: str, graph: Graph, ledger: Ledger, limit: float, again: bool) -> None:
    """All that is shown of one graph, as far as it is not there."""
    if again or ledger.get("outcomes", name) is None:
        ledger.put("outcomes", name, [asdict(found) for found in without_budget(graph)])
    outcomes = outcomes_of(ledger, "outcomes", name)
    print_outcomes(name, outcomes)
    if name not in TABLES:
        return
    if again or ledger.get("table 1", name) is None:
        ledger.put("table 1", name, asdict(measure_width(graph)))
    if again or (ledger.get("conditions", name) or {}).get("limit_seconds") != limit:
        ledger.put("budgets", name, [asdict(found) for found in within_budgets(graph, outcomes, limit)])
        ledger.put("conditions", name, {"limit_seconds": limit, "load_average": os.getloadavg()[0]})
    print_outcomes(name, outcomes_of(ledger, "budgets", name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each solver and budget of table 2")
    parser.add_argument("--only", default="", help="regular expression on the names of graphs")
    parser.add_argument("--again", action="store_true", help="do again what the results have already")
    parser.add_argument("--traced", type=Path, default=Path(__file__).parent / ".graphs", help="where graphs are kept")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    names = [*dict.fromkeys([*TABLES, *(name for family in FAMILIES.values() for name in family.values())])]
    chosen = [name for name in (*names, "figure 4") if re.search(arguments.only, name)]
    if not chosen:
        parser.error(f"no graph matches {arguments.only!r}; there are: {', '.join(names)}, figure 4")
    arguments.results.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(arguments.results / "twremat.json")
    library = Library(arguments.traced / "kumar", DEVICE, with_loss=True)
    print("Table 2 and figures 2 and 3: peak, and length relative to running everything once")
    print(f"(twremat and auto within budgets: {arguments.limit:g} s each; pruned, twremat and auto are ours)")
    for name in chosen:
        graph = library.graph_of(case(FIGURE_4 if name == "figure 4" else name))
        if name != "figure 4":
            measure(name, graph, ledger, arguments.limit, arguments.again)
        elif arguments.again or ledger.get("figure 4", FIGURE_4) is None:
            ledger.put("figure 4", FIGURE_4, trade_off(graph))
    table_1(ledger)
    if all(ledger.get("outcomes", name) for family in FAMILIES.values() for name in family.values()):
        draw_depths(ledger, arguments.results / "twremat.png")
    if (curves := ledger.get("figure 4", FIGURE_4)) is not None:
        draw_trade_off(curves, arguments.results / "twremat-figure4.png")


if __name__ == "__main__":
    main()
