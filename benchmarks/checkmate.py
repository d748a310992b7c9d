"""Checkmate's experiments on its own graphs: Table 2, the curves of figure 5, the batches of figure 6, appendix A.

    python benchmarks/checkmate.py --graphs DIR [--limit 20] [--only REGEX] [--solvers REGEX]
                                   [--no-curves] [--no-batches] [--results FILE.json]

DIR holds the benchmark graphs as JSON; their times are the costs of the paper. Each graph is solved at six budgets,
spread evenly between what its largest operator needs and its peak without recomputation, by every heuristic of Table 1,
by LP rounding with our search and pruning, by Checkmate's own program in HiGHS, and by the default solver, whose
schedules are the best known. Points and batches that FILE.json has for at least this limit are not solved again, so
that a run that was stopped goes on where it was. Ratios are costs against the best cost known, as geometric means over
the budgets that a method keeps. Writes FILE.json, FILE-curves.png and FILE-batch.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rematch.files import write_text
from rematch.graph import Graph, baseline, simulate
from rematch.graph.formats import load_graph
from rematch.report.charts import Panel, draw_bars, draw_curves
from rematch.solvers import Deadline, Problem, make_solver, solve
from rematch.solvers.checkmate.solver import FORMS, integrality_gap, unit_chain
from rematch.solvers.max_batch import max_batch
from rematch.solvers.minimum import surely_needed_bytes

GRAPHS = (
    "vgg16_b256", "vgg19_b256", "mobilenet_b512", "vgg_unet_b32", "fcn_8_vgg_b32", "segnet_b32", "resnet50_b256",
)  # fmt: skip
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15)  # of the way from the largest operator to the peak
HEURISTICS = (
    "chen_sqrt", "chen_greedy", "ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy", "revolve",
)  # fmt: skip
SOLVERS = (*HEURISTICS, "rounding", "checkmate", "auto")
CURVES = ("auto", "checkmate", "rounding", "linearized_greedy", "linearized_sqrt", "ap_greedy", "ap_sqrt", "revolve")
BATCH_SOLVERS = ("noremat", "ap_sqrt", "linearized_greedy", "rounding", "checkmate", "auto")
PUBLISHED_BATCHES = {"vgg19_b256": 289, "mobilenet_b512": 1105, "vgg_unet_b32": 61}  # where its text names them
BATCH_BUDGET = 16 * 2**30  # the V100 of the paper's figure 6
PAPER = {  # Table 2: AP sqrt(n), AP greedy, Griewank log n, two-phase LP rounding
    "mobilenet_b512": {"ap_sqrt": 1.14, "ap_greedy": 1.07, "revolve": 7.07, "rounding": 1.06},
    "vgg16_b256": {"ap_sqrt": 1.28, "ap_greedy": 1.06, "revolve": 1.44, "rounding": 1.01},
    "vgg19_b256": {"ap_sqrt": 1.54, "ap_greedy": 1.39, "revolve": 1.75, "rounding": 1.00},
    "vgg_unet_b32": {"ap_sqrt": 1.27, "ap_greedy": 1.23, "rounding": 1.03},
    "resnet50_b256": {"ap_sqrt": 1.20, "ap_greedy": 1.25, "rounding": 1.05},
}
PAPER_GAPS = {"partitioned": 1.18, "unpartitioned": 21.56}
WHO_RAN = "checkmate: its program by HiGHS; rounding: thresholds searched and pruned, which is ours; auto: ours"


@dataclass(frozen=True)
class Point:
    """One solver on one graph at one budget; cost is None where it found nothing."""

    graph: str
    budget_bytes: int
    peak_share: float  # the budget as a share of the peak without recomputation
    solver: str
    status: str
    cost: float | None  # of no recomputation
    bound: float | None
    solve_seconds: float
    limit_seconds: float
    load_average: float | None = None  # of the machine, in the minute before the search ended


@dataclass(frozen=True)
class Batch:
    """The largest batch of one solver on one graph, with the seconds that it had for each batch tried."""

    batch: int
    limit_seconds: float
    load_average: float | None = None


def points_of(
    name: str, graph: Graph, limit: float, solvers: str, known: dict[tuple[str, int, str], Point]
) -> Iterator[Point]:
    """The points of a graph, in order: those known for long enough, or of solvers not asked for, as they are."""
    peak = simulate(graph, baseline(graph)).peak_bytes
    needed = surely_needed_bytes(graph)
    for share in SHARES:
        problem = Problem(graph, needed + int(share * (peak - needed)))
        for solver in SOLVERS:
            before = known.get((name, problem.budget_bytes, solver))
            asked = re.search(solvers, solver) and make_solver(solver).applicable(problem)
            if before is not None and (before.limit_seconds >= limit or not asked):
                yield before
                continue
            if not asked:
                continue
            to_the_proof = {"gap": 0.0} if solver == "auto" else {}
            solution = solve(problem, solver, time_limit=limit, **to_the_proof)
            cost = solution.schedule and simulate(graph, solution.schedule).seconds / graph.baseline_seconds
            bound = solution.lower_bound_seconds and solution.lower_bound_seconds / graph.baseline_seconds
            yield Point(
                name, problem.budget_bytes, problem.budget_bytes / peak, solver, solution.status.value,
                cost, bound, solution.solve_seconds, limit, os.getloadavg()[0],
            )  # fmt: skip


def line(points: list[Point]) -> str:
    """The extra time of every solver at one budget, in percent."""
    costs = {point.solver: f"{100 * (point.cost - 1):.2f}" if point.cost else "-" for point in points}
    proved = next((point.status for point in points if point.solver == "auto"), "")
    shown = " ".join(f"{costs.get(solver, 'n/a'):>10}" for solver in SOLVERS)
    return f"{points[0].graph:16} {100 * points[0].peak_share:>5.1f} % {shown} {proved}"


def ratios(points: list[Point]) -> dict[str, tuple[float, int, int]]:
    """Per solver: the geometric mean of its cost against the best known, the budgets it keeps, and all that can be."""
    best: dict[int, float] = {}
    for point in points:
        if point.cost is not None:
            best[point.budget_bytes] = min(point.cost, best.get(point.budget_bytes, math.inf))
    found: dict[str, tuple[float, int, int]] = {}
    for solver in dict.fromkeys(point.solver for point in points):
        kept = [point for point in points if point.solver == solver and point.cost is not None]
        logs = [math.log((point.cost or 1.0) / best[point.budget_bytes]) for point in kept]
        mean = math.exp(sum(logs) / len(logs)) if logs else math.nan
        found[solver] = mean, len(kept), len(best)
    return found


def print_table(points: list[Point]) -> None:
    print("\nTable 2: cost against the best known, geometric mean (budgets kept of budgets that can be; the paper's)")
    print(f"  {WHO_RAN}; {limits_of(points, SOLVERS)} a point")
    for name in GRAPHS:
        if not any(point.graph == name for point in points):
            continue
        print(f"  {name}")
        for solver, (ratio, kept, possible) in ratios([p for p in points if p.graph == name]).items():
            paper = PAPER.get(name, {}).get(solver)
            shown = "-" if math.isnan(ratio) else f"{ratio:.3f}"
            print(f"    {solver:18} {shown:>6}  {kept} of {possible}{f'  paper {paper:.2f}' if paper else ''}")


def print_gaps() -> dict[str, float]:
    """Appendix A on the paper's 8-layer chain of unit costs and sizes at a budget of 4."""
    print("\nAppendix A: integrality gap of 8 layers (17 operators) at a budget of 4")
    gaps: dict[str, float] = {}
    for form in FORMS:
        gap = integrality_gap(unit_chain(), 4, form, deadline=Deadline(60.0))
        gaps[form] = gap.ratio
        print(f"  {form:14} {gap.optimum:.0f} / {gap.relaxation:.3f} = {gap.ratio:.2f}  paper {PAPER_GAPS[form]:.2f}")
    return gaps


def batches_of(
    graph: Graph, captured: int, limit: float, solvers: str, known: dict[str, Batch]
) -> Iterator[tuple[str, Batch]]:
    """Figure 6: the largest batch in 16 GiB with at most one more forward pass, by each solver that is asked for."""
    for solver in BATCH_SOLVERS:
        before = known.get(solver)
        if re.search(solvers, solver) and (before is None or before.limit_seconds < limit):
            batch = max_batch(graph, BATCH_BUDGET, captured=captured, solver=solver, time_limit=limit).batch
            yield solver, Batch(batch, limit, os.getloadavg()[0])


def curves(points: list[Point]) -> list[Panel]:
    return [
        Panel(
            name,
            {
                solver: [
                    (point.budget_bytes / 2**30, 100 * (point.cost - 1))
                    for point in points
                    if (point.graph, point.solver) == (name, solver) and point.cost is not None
                ]
                for solver in CURVES  # Chen's own are the same as their generalizations, where they apply
                if any((p.graph, p.solver) == (name, solver) and p.cost is not None for p in points)
            },
        )
        for name in GRAPHS
        if any(point.graph == name for point in points)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True, metavar="DIR", help="folder of benchmark graphs")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each solver at each budget")
    parser.add_argument("--only", default="", help="regular expression on the names of graphs")
    parser.add_argument("--solvers", default="", help="regular expression on the names of solvers")
    parser.add_argument("--no-curves", action="store_true", help="leave figure 5 and table 2 as they are")
    parser.add_argument("--no-batches", action="store_true", help="leave figure 6 as it is")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "checkmate.json")
    arguments = parser.parse_args()
    chosen = [name for name in GRAPHS if re.search(arguments.only, name)]
    if not chosen:
        parser.error(f"no graph matches {arguments.only!r}; there are: {', '.join(GRAPHS)}")
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    run(chosen, arguments)


Known = tuple[dict[tuple[str, int, str], Point], dict[str, dict[str, Batch]]]


def known_results(path: Path) -> Known:
    """What earlier runs have left."""
    stored = json.loads(path.read_text()) if path.exists() else {"points": [], "batches": {}}
    points = {(p["graph"], p["budget_bytes"], p["solver"]): Point(**p) for p in stored["points"]}
    batches = {
        name: {solver: Batch(**found) for solver, found in row.items()} for name, row in stored["batches"].items()
    }
    return points, batches


def run(chosen: list[str], arguments: argparse.Namespace) -> None:
    known, batches = known_results(arguments.results)
    gaps = print_gaps()
    print(f"\nExtra time in percent\n{'graph':16} {'budget':>7} {' '.join(f'{solver[:10]:>10}' for solver in SOLVERS)}")

    def save() -> None:
        plain_batches = {name: {solver: asdict(b) for solver, b in row.items()} for name, row in batches.items()}
        points = [asdict(point) for point in known.values()]
        document = {"integrality_gaps": gaps, "points": points, "batches": plain_batches}
        write_text(arguments.results, json.dumps(document, indent=1))

    for name in chosen:
        graph = load_graph(arguments.graphs / f"cm_{name}_train.json", plain=True).graph
        if not arguments.no_curves:
            for point in points_of(name, graph, arguments.limit, arguments.solvers, known):
                known[point.graph, point.budget_bytes, point.solver] = point
                save()
        points = [point for point in known.values() if point.graph == name]
        for budget in sorted({point.budget_bytes for point in points}, reverse=True):
            print(line([point for point in points if point.budget_bytes == budget]), flush=True)
        if not arguments.no_batches:
            row = batches.setdefault(name, {})
            captured = int(name.rpartition("_b")[2])
            for solver, batch in batches_of(graph, captured, arguments.limit, arguments.solvers, dict(row)):
                row[solver] = batch
                save()
            print(f"{name:16} batches: {', '.join(f'{solver} {found.batch}' for solver, found in row.items())}")
    report(list(known.values()), batches, arguments.results.with_suffix(""))


def report(points: list[Point], batches: dict[str, dict[str, Batch]], stem: Path) -> None:
    """Table 2 and the pictures."""
    print_table(points)
    title = f"figure 5; no point: nothing found, or the method does not apply\n{WHO_RAN}\n{limits_of(points, CURVES)}"
    draw_curves(
        curves(points),
        f"{stem}-curves.png",
        x="budget, GiB",
        y="extra time, %",
        logarithmic=True,
        title=f"{title} a point; {load_of(points)}",
    )
    draw_bars(
        {name: bars_of(name, batches[name]) for name in GRAPHS if name in batches},
        f"{stem}-batch.png",
        y="largest batch in 16 GiB",
        title=f"figure 6, at most one more forward pass; no bar: not run, or not published\n{WHO_RAN}\n"
        f"{batch_limits(batches)} for each batch tried; {load_of(b for row in batches.values() for b in row.values())}",
    )


def bars_of(name: str, row: dict[str, Batch]) -> dict[str, int]:
    """The batches of a graph, and the published one."""
    bars = {solver: row[solver].batch for solver in BATCH_SOLVERS if solver in row}
    if name in PUBLISHED_BATCHES:
        bars["checkmate, published"] = PUBLISHED_BATCHES[name]
    return bars


def limits_of(points: list[Point], solvers: tuple[str, ...]) -> str:
    """Which solvers had how many seconds a point."""
    return in_words([(point.solver, point.limit_seconds) for point in points], solvers)


def batch_limits(batches: dict[str, dict[str, Batch]]) -> str:
    """Which solvers had how many seconds for a batch."""
    return in_words([(s, found.limit_seconds) for row in batches.values() for s, found in row.items()], BATCH_SOLVERS)


def load_of(results: Iterable[Point | Batch]) -> str:
    """How much else the machine had to do, as far as that was noted."""
    loads = [found.load_average for found in results]
    noted = [load for load in loads if load is not None]
    some = f"load average {min(noted):.0f} to {max(noted):.0f} on {os.cpu_count()} cores" if noted else ""
    others = "load average not noted" if len(noted) < len(loads) else ""
    return " or ".join(filter(None, (some, others)))


def in_words(limits: list[tuple[str, float]], solvers: tuple[str, ...]) -> str:
    by_limit: dict[tuple[float, ...], list[str]] = {}
    for solver in solvers:
        if seconds := sorted({limit for name, limit in limits if name == solver}):
            by_limit.setdefault(tuple(seconds), []).append(solver)
    return "; ".join(
        f"{', '.join(names)}: {' or '.join(f'{limit:g}' for limit in seconds)} s" for seconds, names in by_limit.items()
    )


if __name__ == "__main__":
    main()
