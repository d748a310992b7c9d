"""Run every solver on the same graphs and budgets, and put the results into docs/solvers.md and docs/solvers.png.

    python docs/compare_solvers.py [--limit 60] [--only REGEX] [--again] [--results DIR]

`--only` is searched for in 'graph budget solver'. What the results already have for the same limit is not solved again,
so that a run that was stopped goes on where it was; `--again` solves it anew. The page shows whatever there is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import rematch
from rematch.files import write_text
from rematch.graph import Graph, baseline, simulate
from rematch.graph.generators import FAMILIES
from rematch.solvers import Problem, make_solver, solve, solver_names

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "solvers.md", DOCS / "solvers.png"
RESULTS = DOCS.parent / "benchmarks" / "results"
TABLE = re.compile(r"(?<=<!-- compared -->\n).*(?=<!-- end -->)", flags=re.DOTALL)

GRAPHS = {
    "chain 50": ("chain", {"layers": 50}),
    "feed-forward 24": ("feed_forward", {"layers": 24}),
    "GPT 12": ("gpt", {"layers": 12}),
    "encoder-decoder 3+3": ("encoder_decoder", {"encoder_layers": 3, "decoder_layers": 3}),
    "U-Net 4x2": ("unet", {"depth": 4, "convolutions": 2}),
    "layered 100": ("random_layered", {"nodes": 100}),
}
PERCENTS = (80, 60, 40)
COLOURS = {80: "#56B4E9", 60: "#0072B2", 40: "#D55E00"}  # Okabe and Ito's, apart in hue and in lightness
AREAS = {80: 70, 60: 34, 40: 12}  # of dots in points, so that equal results are seen inside one another
LEFT_OUT = ("exhaustive",)  # takes no graph of this size


@dataclass(frozen=True)
class Row:
    graph: str
    percent: int
    solver: str
    limit_seconds: float
    status: str  # "refused" where the solver does not apply
    extra_percent: float | None
    bound_percent: float | None
    solve_seconds: float
    date: str
    load_average: float | None  # of the last minute, None where it was not noted

    @property
    def key(self) -> tuple[str, int, str]:
        return self.graph, self.percent, self.solver


def run(name: str, graph: Graph, percent: int, solver: str, limit: float) -> Row:
    problem = Problem(graph, simulate(graph, baseline(graph)).peak_bytes * percent // 100)
    today, load = date.today().isoformat(), os.getloadavg()[0]
    if not make_solver(solver).applicable(problem):
        return Row(name, percent, solver, limit, "refused", None, None, 0.0, today, load)
    to_the_proof = {"gap": 0.0} if solver == "auto" else {}
    solution = solve(problem, solver, time_limit=limit, **to_the_proof)

    def extra(seconds: float | None) -> float | None:
        return None if seconds is None else (seconds / graph.baseline_seconds - 1) * 100

    best = None if solution.schedule is None else simulate(graph, solution.schedule).seconds
    bound, status = extra(solution.lower_bound_seconds), solution.status.value
    return Row(name, percent, solver, limit, status, extra(best), bound, solution.solve_seconds, today, load)


def cases(only: str) -> Iterator[tuple[str, Graph, int, str]]:
    for name, (family, options) in GRAPHS.items():
        graph = FAMILIES[family](**options)
        for percent in PERCENTS:
            for solver in solver_names():
                if solver not in LEFT_OUT and re.search(only, f"{name} {percent} {solver}"):
                    yield name, graph, percent, solver


# The page


def markdown(rows: Sequence[Row], about: str) -> str:
    """A line for each solver, a column for each graph with its budgets."""
    by_key = {row.key: row for row in rows}
    solvers = [name for name in solver_names() if any(row.solver == name for row in rows)]
    lines = [
        f"Extra time in percent at budgets of {', '.join(map(str, PERCENTS))} % of the peak without recomputation.",
        f"**Bold**: proved optimal; \N{EN DASH}: found no schedule; \N{MIDDLE DOT}: does not apply. {about}",
        "",
        "| solver | " + " | ".join(GRAPHS) + " | seconds |",
        "|---|" + "---|" * len(GRAPHS) + "---|",
    ]
    for solver in solvers:
        cells = [" / ".join(cell(by_key.get((graph, p, solver))) for p in PERCENTS) for graph in GRAPHS]
        spent = [row.solve_seconds for row in rows if row.solver == solver and row.status != "refused"]
        median = f"{statistics.median(spent):.1f}" if spent else ""
        lines.append(f"| `{solver}` | " + " | ".join(map(one_mark_if_alike, cells)) + f" | {median} |")
    return "\n".join(lines) + "\n"


def conditions(rows: Sequence[Row]) -> str:
    """Under which limits, when and beside how much other work the rows were made."""
    limits = " or ".join(f"{limit:g}" for limit in sorted({row.limit_seconds for row in rows}))
    lines = [f"Limit {limits} s a case on {os.cpu_count()} cores; the last column is the median time."]
    for day in sorted({row.date for row in rows}):
        of_day = [row for row in rows if row.date == day]
        solvers = ", ".join(f"`{name}`" for name in solver_names() if any(row.solver == name for row in of_day))
        loads = [row.load_average for row in of_day if row.load_average is not None]
        load = f"load average {min(loads):.0f} to {max(loads):.0f}" if loads else "load average not noted"
        lines.append(f"{day} ({load}): {solvers}.")
    return "\n".join(lines)


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.status == "refused":
        return "\N{MIDDLE DOT}"
    if row.extra_percent is None:
        return "\N{EN DASH}"
    shown = f"{abs(row.extra_percent):.1f}"
    return f"**{shown}**" if row.status == "optimal" else shown


def one_mark_if_alike(cells: str) -> str:
    different = set(cells.split(" / "))
    return different.pop() if len(different) == 1 and not cells[0].isdigit() else cells


# The picture


def draw(rows: Sequence[Row]) -> None:
    """A panel for each graph, a line for each solver, a dot for each budget."""
    from rematch.report.figure import new_figure, save_figure

    found = [row for row in rows if row.extra_percent is not None]
    solvers = [name for name in solver_names() if any(row.solver == name for row in found)]
    figure = new_figure(13, 1.4 + 0.24 * len(solvers))
    panels = figure.subplots(1, len(GRAPHS), sharey=True)
    for axes, graph in zip(panels, GRAPHS, strict=True):
        for percent in PERCENTS:
            points = [row for row in found if (row.graph, row.percent) == (graph, percent)]
            extra = [max(row.extra_percent or 0.0, 0.0) for row in points]
            axes.scatter(
                extra, [solvers.index(row.solver) for row in points], label=f"{percent} % of the memory",
                s=AREAS[percent], color=COLOURS[percent], linewidths=0, zorder=3,
            )  # fmt: skip
            if extra:
                axes.axvline(min(extra), color=COLOURS[percent], lw=0.8, ls=":", zorder=1)
        axes.set_xscale("symlog", linthresh=1.0)
        worst = max((row.extra_percent or 0.0 for row in found if row.graph == graph), default=1.0)
        axes.set_xlim(left=0.0, right=1.6 * max(worst, 1.0))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(graph, fontsize=10)
        axes.set_xlabel("extra time, %", fontsize=8)
        axes.set_yticks(range(len(solvers)), solvers, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", color="#E3E6E9", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside upper center", ncols=len(PERCENTS), frameon=False, fontsize=9,
    )  # fmt: skip
    save_figure(figure, PICTURE, dpi=130)


# The run


def known_rows(path: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def keep(rows: Sequence[Row], path: Path) -> None:
    """All rows so far as JSON, so that a run that is stopped loses nothing."""
    libraries = ("highspy", "numba", "numpy", "ortools")
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"rematch": rematch.__version__, **{name: version(name) for name in libraries}},
        "rows": [asdict(row) for row in rows],
    }
    write_text(path, json.dumps(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each case and solver")
    parser.add_argument("--only", default="", help="regular expression on 'graph budget solver'")
    parser.add_argument("--again", action="store_true", help="solve again what the results have already")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "compare-solvers.json"
    rows = {row.key: row for row in known_rows(path)}
    for name, graph, percent, solver in cases(arguments.only):
        known = rows.get((name, percent, solver))
        if known is None or known.limit_seconds != arguments.limit or arguments.again:
            row = run(name, graph, percent, solver, arguments.limit)
            rows[row.key] = row
            print(
                f"{name:20} {percent:>3} % {solver:18} {row.status:10} {cell(row):>8} {row.solve_seconds:7.1f} s",
                flush=True,
            )
            keep(list(rows.values()), path)
    shown = [row for row in rows.values() if row.solver in solver_names()]
    page = TABLE.sub(lambda _: markdown(shown, conditions(shown)), PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    draw(shown)


if __name__ == "__main__":
    main()
