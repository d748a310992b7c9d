"""Moccasin's Table 3, Table 1 and figures 5 and 6 from our own solvers, and the MONeT schedules that Gurobi found.

    python benchmarks/moccasin.py --graphs DIR [--limit 60] [--only REGEX] [--again] [--results DIR]

DIR holds the benchmark graphs as JSON; without it only generated graphs are solved. What the results already have for
the same limit is not solved again, so that a run that was stopped goes on where it was; `--again` solves it anew. The
picture takes the row with the longest limit for each point, and says which limits it has. TDI
is the extra time in percent of no recomputation, and the time to best counts from when the solver is loaded. A bound,
and what is called optimal, speaks of the schedules in the column `scope`: those of Moccasin compute an operator twice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from solvers import LAYERED, Case, at_percent, from_file, published, time_to_best

import rematch
from rematch.files import write_text
from rematch.graph import Graph, generators, simulate
from rematch.solvers import Deadline, Problem, Solution, solve
from rematch.solvers.checkmate.model import CheckmateModel
from rematch.solvers.moccasin.model import RetentionModel
from rematch.solvers.moccasin.solver import Moccasin, ModelSize

SOLVERS = ("checkmate", "rounding", "moccasin", "auto")
FIGURE_SOLVERS = ("checkmate", "moccasin", "auto")
WITHOUT_STAGES = ("moccasin", "auto")
PERCENTS = (90, 80)
MORE_PERCENTS = (95, 85)  # figure 5 has four budgets, which its text does not name: these two and those of the tables
# Table 3 of the paper, at 90 and 80 %: TDI in percent and seconds, on 16 cores; None where it has a dash. Its rounding
# exceeds the budget in all but the last graph's rows. RW 1 to RW 4 are not public.
PUBLISHED: dict[str, dict[str, tuple[tuple[float, float] | None, ...]]] = {
    "rl_g1_n100": {
        "checkmate": ((0.8, 18.5), (2.3, 22.7)),
        "rounding": ((0.1, 16.0), (7.3, 20.1)),
        "moccasin": ((0.8, 9.3), (2.3, 9.5)),
    },
    "rl_g2_n250": {
        "checkmate": ((0.9, 685.1), None),
        "rounding": ((93.0, 401.7), (328.6, 696.9)),
        "moccasin": ((0.9, 55.0), (4.9, 639.5)),
    },
    "rl_g3_n500": {"moccasin": ((0.7, 1803.3), (3.4, 1804.8))},
    "rl_g4_n1000": {"moccasin": ((0.7, 3612.9), (3.4, 3611.8))},
    "cm_fcn_8_vgg_b32_train": {
        "checkmate": ((0.0, 6.3), (0.1, 5.6)),
        "rounding": ((0.0, 6.8), (0.1, 6.7)),
        "moccasin": ((0.0, 3.1), (0.1, 3.1)),
    },
    "cm_resnet50_b256_train": {
        "checkmate": ((0.1, 434.1), (0.3, 485.3)),
        "rounding": ((0.1, 505.2), (0.5, 1065.4)),
        "moccasin": ((0.2, 65.2), (0.3, 69.3)),
    },
}
SIZES = (25, 50, 100, 150, 250, 400, 600, 1000)  # figure 6
MOST_STAGES = 250  # operators: beyond, Checkmate's program has millions of columns, and the paper's run finds nothing
MORE_STAGES = ("rl_g3_n500", "rl_g4_n1000")


@dataclass(frozen=True)
class Row:
    family: str
    name: str
    budget: str
    solver: str
    limit_seconds: float
    operators: int
    edges: int
    budget_bytes: int
    status: str
    best_percent: float | None
    bound_percent: float | None
    bound_scope: str
    peak_bytes: int | None
    seconds_to_best: float | None
    solve_seconds: float
    reference_percent: float | None
    curve: list[tuple[float, float]]  # seconds, TDI
    load_average: float | None = None  # of the machine, in the minute before the search ended

    @property
    def key(self) -> tuple[str, str, str, str, float]:
        return self.family, self.name, self.budget, self.solver, self.limit_seconds


def cases(folder: Path | None) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """What to solve, and by whom."""
    if folder is not None:
        for name in PUBLISHED:
            for percent in PERCENTS:
                yield from_file("table 3", folder / f"{name}.json", percent), solvers_for(name, SOLVERS)
    for nodes in SIZES:
        yield layered(nodes), FIGURE_SOLVERS if nodes <= MOST_STAGES else WITHOUT_STAGES
    if folder is not None:
        for name in LAYERED:
            for percent in MORE_PERCENTS:
                yield from_file("figure 5", folder / f"{name}.json", percent), solvers_for(name, FIGURE_SOLVERS)
        for case in published(folder):
            if case.family == "monet":
                yield case, WITHOUT_STAGES


def solvers_for(name: str, solvers: tuple[str, ...]) -> tuple[str, ...]:
    return WITHOUT_STAGES if name in MORE_STAGES else solvers


def layered(nodes: int) -> Case:
    return Case("figure 6", f"layered {nodes}", "90 %", lambda: at_percent(generators.random_layered(nodes), 90))


def run(case: Case, solver: str, limit: float) -> Row:
    graph, budget = case.load()
    to_the_proof = {"gap": 0.0} if solver == "auto" else {}
    solution = solve(Problem(graph, budget), solver, time_limit=limit, **to_the_proof)
    seen = simulate(graph, solution.schedule) if solution.schedule is not None else None

    def percent(seconds: float | None) -> float | None:
        return None if seconds is None else (seconds / graph.baseline_seconds - 1) * 100

    return Row(
        family=case.family,
        name=case.name,
        budget=case.budget,
        solver=solver,
        limit_seconds=limit,
        operators=len(graph.ops),
        edges=len(graph.arrays.inputs),
        budget_bytes=budget,
        status=solution.status.value,
        best_percent=percent(seen.seconds) if seen else None,
        bound_percent=percent(solution.lower_bound_seconds),
        bound_scope=solution.bound_scope.value,
        peak_bytes=seen.peak_bytes if seen else None,
        seconds_to_best=time_to_best(solution),
        solve_seconds=solution.solve_seconds,
        reference_percent=case.reference_percent,
        curve=progress(solution, graph),
        load_average=os.getloadavg()[0],
    )


def published_of(name: str, budget: str, solver: str) -> tuple[float, float] | None:
    """TDI in percent and seconds that table 3 of the paper has for a solver."""
    if name not in PUBLISHED or budget not in (f"{percent} %" for percent in PERCENTS):
        return None
    at = PERCENTS.index(int(budget.split()[0]))
    return PUBLISHED[name].get(solver, (None, None))[at]


def progress(solution: Solution, graph: Graph) -> list[tuple[float, float]]:
    """The curve of figure 5: a point for each better schedule."""
    points: list[tuple[float, float]] = []
    for entry in solution.log:
        if entry.best_seconds is not None:
            percent = (entry.best_seconds / graph.baseline_seconds - 1) * 100
            if not points or percent < points[-1][1]:
                points.append((entry.at_seconds, percent))
    return points


HEADER = (
    "checkmate: its program by HiGHS; rounding: with our search and pruning; moccasin: CP-SAT from a greedy start; "
    "auto: ours\n"
    "published: the same method in the paper's table 3, on 16 cores; for MONeT's graphs, what Gurobi found\n"
    f"{'graph':26} {'(n, m)':>12} {'budget':>8} {'solver':>10} {'limit s':>7} {'status':>10} {'TDI %':>8} "
    f"{'published: %, s':>16} {'bound %':>8} {'peak/budget':>11} {'to best s':>9} {'total s':>8}  scope"
)


def line(row: Row) -> str:
    def number(value: float | None, width: int, digits: int = 3) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"

    share = None if row.peak_bytes is None else row.peak_bytes / row.budget_bytes
    return (
        f"{row.name:26} {f'({row.operators}, {row.edges})':>12} {row.budget:>8} {row.solver:>10} "
        f"{row.limit_seconds:>7g} {row.status:>10} {number(row.best_percent, 8)} {published_text(row):>16} "
        f"{number(row.bound_percent, 8)} {number(share, 11)} {number(row.seconds_to_best, 9, 1)} "
        f"{number(row.solve_seconds, 8, 1)}  {row.bound_scope}"
    )


def published_text(row: Row) -> str:
    if row.family == "monet":
        return "-" if row.reference_percent is None else f"{row.reference_percent:.3f}"
    found = published_of(row.name, row.budget, row.solver)
    return "-" if found is None else f"{found[0]:.1f}, {found[1]:,.1f}"


def print_sizes(folder: Path) -> list[dict[str, Any]]:
    """Table 1 with the models' real sizes: variables and constraints of Moccasin with C = 2, and of Checkmate."""
    print(f"\n{'graph':26} {'model':24} {'Boolean':>10} {'integer':>8} {'constraints':>12}")
    sizes = []
    for name in PUBLISHED:
        graph, budget = from_file("table 1", folder / f"{name}.json", 90).load()
        for model, size in model_sizes(graph, budget):
            print(f"{name:26} {model:24} {size.booleans:>10,} {size.integers:>8,} {size.constraints:>12,}", flush=True)
            sizes.append({"name": name, "model": model, **asdict(size)})
    return sizes


def model_sizes(graph: Graph, budget: int) -> Iterator[tuple[str, ModelSize]]:
    options = Moccasin()
    start = options.as_modelled(graph, options.first_schedule(Problem(graph, budget), Deadline()))
    limits = options.limits(graph, start)
    for precedences in ("reservoir", "literals"):
        model = RetentionModel(graph, options.events(graph, limits), limits, precedences)
        model.limit_memory(budget, budget)
        yield f"moccasin, {precedences}", ModelSize.of(model)
    if len(graph.ops) <= MOST_STAGES:
        program = CheckmateModel(graph, budget).program
        yield "checkmate", ModelSize(program.column_count, 0, program.row_count)


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 2, figsize=(11, 11), layout="constrained")
    colours = dict(zip(SOLVERS, ("tab:blue", "tab:green", "tab:red", "black"), strict=True))
    for axis, name in zip(axes.flat, LAYERED, strict=False):
        progress_of = [row for row in rows if row.family in ("table 3", "figure 5") and row.name == name]
        draw_progress(axis, progress_of, colours)
        axis.set(title=f"{name}: solve progress (figure 5)", xlabel="seconds", ylabel="TDI, %", xscale="log")
    draw_scaling(axes[2, 0], [row for row in rows if row.family == "figure 6"], colours)
    draw_monet(axes[2, 1], [row for row in rows if row.family == "monet"], colours)
    panels = {"figure 5": ("table 3", "figure 5"), "figure 6": ("figure 6",), "MONeT": ("monet",)}
    limits = "; ".join(f"{panel}: {limits_of(rows, families)} a point" for panel, families in panels.items())
    figure.suptitle(
        "checkmate: its program, by HiGHS, up to 250 operators; rounding: its LP, with our search and pruning; "
        "moccasin: CP-SAT from a greedy start; auto: ours\n"
        f"no curve: nothing found; stars: published, on 16 cores; {limits}\n{load_of(rows)}, {os.cpu_count()} cores",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


BUDGET_STYLES = {"95 %": ":", "90 %": "-", "85 %": "-.", "80 %": "--"}


def longest(rows: Iterable[Row]) -> list[Row]:
    """Of the rows for the same case and solver, the one with the longest limit."""
    best: dict[tuple[str, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row.limit_seconds):
        best[row.key[:-1]] = row
    return list(best.values())


def limits_of(rows: list[Row], families: tuple[str, ...]) -> str:
    """The limits under which the points of a panel were made, in words."""
    seconds = sorted({row.limit_seconds for row in rows if row.family in families})
    return " or ".join(f"{limit:.0f} s" for limit in seconds)


def load_of(rows: list[Row]) -> str:
    """How much else the machine had to do, as far as that was noted."""
    noted = [row.load_average for row in rows if row.load_average is not None]
    some = f"load average {min(noted):.0f} to {max(noted):.0f}" if noted else ""
    others = "load average not noted" if len(noted) < len(rows) else ""
    return " or ".join(filter(None, (some, others)))


def draw_progress(axis: Any, rows: list[Row], colours: dict[str, str]) -> None:
    for row in rows:
        if row.curve:
            seconds, percents = zip(*row.curve, strict=True)
            style = BUDGET_STYLES[row.budget]
            axis.step(
                [max(s, 0.01) for s in (*seconds, row.solve_seconds)], [*percents, percents[-1]], style,
                where="post", color=colours[row.solver], label=f"{row.solver}, {row.budget}, {row.limit_seconds:g} s",
            )  # fmt: skip
    draw_published(axis, {(row.name, row.budget) for row in rows}, colours)
    if rows:
        axis.legend(fontsize=6)


def draw_published(axis: Any, cases: set[tuple[str, str]], colours: dict[str, str]) -> None:
    """A star where table 3 of the paper has a method's result and how long it took."""
    for name, budget in sorted(cases, reverse=True):
        for solver in ("checkmate", "moccasin"):
            if (found := published_of(name, budget, solver)) is not None:
                percent, seconds = found
                label = f"{solver} published, {budget}"
                filled = colours[solver] if budget == "90 %" else "none"
                axis.plot(seconds, percent, "*", ms=9, mec=colours[solver], mfc=filled, ls="none", label=label)


def draw_scaling(axis: Any, rows: list[Row], colours: dict[str, str]) -> None:
    for solver in dict.fromkeys(row.solver for row in rows):
        points = [
            (r.operators, r.seconds_to_best) for r in rows if r.solver == solver and r.seconds_to_best is not None
        ]
        if points:
            nodes, seconds = zip(*sorted(points), strict=True)
            axis.plot(nodes, [max(s, 0.001) for s in seconds], "o-", color=colours[solver], label=solver)
            axis.legend(fontsize=7)
    axis.set(title="time to best against n, 90 % (figure 6)", xlabel="operators", ylabel="seconds")
    axis.set(xscale="log", yscale="log")


def draw_monet(axis: Any, rows: list[Row], colours: dict[str, str]) -> None:
    for solver in dict.fromkeys(row.solver for row in rows):
        points = [
            (row.reference_percent, row.best_percent - row.reference_percent)
            for row in rows
            if row.solver == solver and row.best_percent is not None and row.reference_percent is not None
        ]
        if points:
            axis.plot(*zip(*points, strict=True), "o", ms=4, color=colours[solver], label=solver)
    axis.axhline(0.0, color="grey", lw=0.8)
    axis.set(title="MONeT's graphs: below 0 is faster than Gurobi's", xlabel="Gurobi's TDI, %", ylabel="ours less that")
    if rows:
        axis.legend(fontsize=7)


def known_rows(path: Path) -> dict[tuple[str, str, str, str, float], Row]:
    if not path.exists():
        return {}
    rows = [Row(**entry) for entry in json.loads(path.read_text())["rows"]]
    return {row.key: row for row in rows}


def keep(rows: list[Row], sizes: list[dict[str, Any]], path: Path) -> None:
    """All rows so far as JSON, so that a run that is stopped loses nothing."""
    libraries = ("highspy", "numba", "numpy", "ortools")
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"rematch": rematch.__version__, **{name: version(name) for name in libraries}},
        "sizes": sizes,
        "rows": [asdict(row) for row in rows],
    }
    write_text(path, json.dumps(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, help="folder of benchmark graphs")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each case and solver")
    parser.add_argument("--only", default="", help="regular expression on 'family name budget solver'")
    parser.add_argument("--again", action="store_true", help="solve again what the results have already")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "moccasin.json"
    rows, matched = known_rows(path), False
    sizes = print_sizes(arguments.graphs) if arguments.graphs is not None else []
    print(f"\n{HEADER}")
    for case, solvers in cases(arguments.graphs):
        for solver in solvers:
            if not re.search(arguments.only, f"{case.family} {case.name} {case.budget} {solver}"):
                continue
            matched, key = True, (case.family, case.name, case.budget, solver, arguments.limit)
            if key not in rows or arguments.again:
                rows[key] = run(case, solver, arguments.limit)
                keep(list(rows.values()), sizes, path)
            print(line(rows[key]), flush=True)
    if not matched:
        parser.error(f"no case matches {arguments.only!r}")
    draw(longest(rows.values()), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
