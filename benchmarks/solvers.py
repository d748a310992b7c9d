"""How near to optimal, how fast: the default solver on real and generated graphs.

    python benchmarks/solvers.py --graphs DIR [--limit 60] [--only REGEX] [--solver auto] [--results DIR]

DIR holds the benchmark graphs as JSON; without it only generated graphs are solved. Budgets are percentages of the peak
without recomputation, or bytes for the graphs with published schedules. Prints a line a case, keeps all as JSON (cases
that are solved again replace their rows), and draws gap against time for each family. TDI is the extra time in percent
of no recomputation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

import rematch
from rematch.files import write_text
from rematch.graph import Graph, baseline, generators, simulate
from rematch.graph.builder import TrainingGraphBuilder
from rematch.graph.formats import load_graph
from rematch.solvers import Problem, Solution, solve

CHECKMATE = (
    "fcn_8_vgg_b32",
    "mobilenet_b512",
    "resnet50_b256",
    "segnet_b32",
    "vgg16_b256",
    "vgg19_b256",
    "vgg_unet_b32",
)
LAYERED = ("rl_g1_n100", "rl_g2_n250", "rl_g3_n500", "rl_g4_n1000")
TRACES = ("dtr_unet", "dtr_resnet32", "dtr_inceptionv4", "dtr_transformer", "dtr_tv_densenet121")
HELD_OUT_SEED = 2026  # of graphs that no constant was chosen on
LONG_TRACES = ("dtr_unroll_gan", "dtr_treelstm", "dtr_lstm")


@dataclass(frozen=True)
class Case:
    family: str
    name: str
    budget: str
    load: Callable[[], tuple[Graph, int]]  # the graph and the budget in bytes
    reference_percent: float | None = None  # TDI that others published


@dataclass(frozen=True)
class Row:
    family: str
    name: str
    budget: str
    operators: int
    status: str
    best_percent: float | None
    bound_percent: float | None
    gap_points: float | None
    seconds_to_best: float | None
    seconds_to_proof: float | None
    solve_seconds: float
    peak_of_budget: float | None
    reference_percent: float | None
    curve: list[tuple[float, float]]  # seconds, gap in points
    date: str = ""  # when it was solved
    load: float | None = None  # processes that wanted to run on the machine meanwhile, the solver's own included


def cases(folder: Path | None) -> Iterator[Case]:
    if folder is not None:
        for name in CHECKMATE:
            for percent in (90, 80, 50):
                yield from_file("checkmate", folder / f"cm_{name}_train.json", percent)
        for name in LAYERED:
            for percent in (90, 80):
                yield from_file("random layered", folder / f"{name}.json", percent)
        yield from published(folder)
        for name in TRACES:
            for percent in (80, 50, 30):
                yield from_file("traces", folder / f"{name}.json", percent)
        for name in LONG_TRACES:
            for percent in (80, 50):
                yield from_file("long traces", folder / f"{name}.json", percent)
    for layers in (12, 24, 48, 96):
        for percent in (50, 30):
            yield generated("gpt", (layers,), percent)
    yield generated("gpt", (96,), 10)
    yield generated("gpt", (96,), 5)
    yield generated("gpt", (200,), 50)
    yield generated("encoder_decoder", (36, 36), 50)
    yield generated("encoder_decoder", (80, 80), 50)
    yield from small_and_hard("small and hard", seed=0)
    yield from small_and_hard("held out", seed=HELD_OUT_SEED)


def small_and_hard(family: str, seed: int) -> Iterator[Case]:
    """Nested skips and wide random graphs; the seed spreads times, or draws the graph."""
    for depth, convolutions in ((3, 2), (4, 1), (4, 2)):
        for percent in (50, 40):
            name = f"nested skips {depth}x{convolutions}"
            make = partial(nested_skips, depth, convolutions, seed)
            yield Case(family, name, f"{percent} %", partial(made_at_percent, make, percent))
    for nodes in (200, 400):
        for percent in (80, 50):
            make = partial(generators.random_layered, nodes, seed=seed)
            yield Case(family, f"random layered {nodes}", f"{percent} %", partial(made_at_percent, make, percent))


def nested_skips(depth: int, convolutions: int, seed: int, *, batch: int = 8, size: int = 256) -> Graph:
    """Training step of a U-Net++ (Zhou et al., 2018): node (i, j) reads all (i, k < j) and the upsampled (i+1, j-1)."""
    builder = TrainingGraphBuilder()
    pixels = [batch * (size >> level) ** 2 for level in range(depth + 1)]
    wide = [32 << level for level in range(depth + 1)]

    def convolve(name: str, x: int, level: int, channels_in: int, window: int = 9) -> int:
        return builder.convolution(
            name, x, pixels=pixels[level], channels_in=channels_in, channels_out=wide[level], window=window
        )

    def stage(name: str, x: int, level: int, channels_in: int) -> int:
        for i in range(convolutions):
            x = convolve(f"{name}.{i}.convolution", x, level, channels_in if i == 0 else wide[level])
            x = builder.relu(f"{name}.{i}.relu", builder.norm(f"{name}.{i}.norm", x, groups=batch))
        return x

    stem = convolve("stem", builder.resident("image", pixels[0] * 3 * 2), 0, 3)
    nodes = {(0, 0): stage("0.0", stem, 0, wide[0])}
    for level in range(1, depth + 1):
        pooled = builder.max_pool(f"{level}.0.pool", nodes[level - 1, 0])
        nodes[level, 0] = stage(f"{level}.0", pooled, level, wide[level - 1])
    for column in range(1, depth + 1):
        for level in range(depth + 1 - column):
            name = f"{level}.{column}"
            x = convolve(f"{name}.up", nodes[level + 1, column - 1], level, wide[level + 1], window=1)
            for earlier in range(column):
                x = builder.concatenate(f"{name}.concatenate{earlier}", x, nodes[level, earlier])
            nodes[level, column] = stage(name, x, level, wide[level] * (column + 1))
    logits = builder.convolution(
        "head", nodes[0, depth], pixels=pixels[0], channels_in=wide[0], channels_out=8, window=1
    )
    return generators.jittered(builder.build(logits, f"nested skips {depth}x{convolutions}"), 20 if seed else 0, seed)


def made_at_percent(make: Callable[[], Graph], percent: int) -> tuple[Graph, int]:
    return at_percent(make(), percent)


def from_file(family: str, path: Path, percent: int) -> Case:
    return Case(family, path.stem, f"{percent} %", lambda: at_percent(load_graph(path, plain=True).graph, percent))


def generated(family: str, layers: tuple[int, ...], percent: int) -> Case:
    make = generators.FAMILIES[family]
    name = f"{family} {'+'.join(map(str, layers))}"
    return Case("generated", name, f"{percent} %", lambda: at_percent(make(*layers), percent))


def at_percent(graph: Graph, percent: int) -> tuple[Graph, int]:
    return graph, simulate(graph, baseline(graph)).peak_bytes * percent // 100


def published(folder: Path) -> Iterator[Case]:
    """MONeT's graphs with Gurobi's schedules, whose solver ignored workspace; then the same budgets with workspace."""
    points = json.loads((folder / "reference_monet_checkmate.json").read_text())
    for point in points:
        path, budget = folder / f"{point['graph']}.json", point["budget_activation_bytes"]
        yield Case(
            "monet", path.stem, f"{budget / 1e9:.2f}e9", file_at(path, budget, plain=True), point["overhead_pct"]
        )
    for point in points:
        path, budget = folder / f"{point['graph']}.json", point["budget_total_bytes"]
        yield Case("monet with workspace", path.stem, f"{budget / 1e9:.2f}e9", file_at(path, budget, plain=False))


def file_at(path: Path, budget: int, *, plain: bool) -> Callable[[], tuple[Graph, int]]:
    return lambda: (load_graph(path, plain=plain).graph, budget)


def run(case: Case, solver: str, limit: float) -> Row:
    graph, budget = case.load()
    to_the_proof = {"gap": 0.0} if solver == "auto" else {}
    solution = solve(Problem(graph, budget), solver, time_limit=limit, **to_the_proof)

    def percent(seconds: float | None) -> float | None:
        return None if seconds is None else (seconds / graph.baseline_seconds - 1) * 100

    seen = simulate(graph, solution.schedule) if solution.schedule is not None else None
    best, bound = percent(seen.seconds) if seen else None, percent(solution.lower_bound_seconds)
    curve = gap_curve(solution, graph.baseline_seconds)
    return Row(
        family=case.family,
        name=case.name,
        budget=case.budget,
        operators=len(graph.ops),
        status=solution.status.value,
        best_percent=best,
        bound_percent=bound,
        gap_points=None if best is None or bound is None else best - bound,
        seconds_to_best=time_to_best(solution),
        seconds_to_proof=solution.solve_seconds if solution.status.value in ("optimal", "infeasible") else None,
        solve_seconds=solution.solve_seconds,
        peak_of_budget=seen.peak_bytes / budget if seen else None,
        reference_percent=case.reference_percent,
        curve=curve,
        date=date.today().isoformat(),
        load=os.getloadavg()[0],
    )


def time_to_best(solution: Solution) -> float | None:
    known = [entry for entry in solution.log if entry.best_seconds is not None]
    best = min((entry.best_seconds or math.inf for entry in known), default=None)
    return next((entry.at_seconds for entry in known if entry.best_seconds == best), None)


def gap_curve(solution: Solution, baseline_seconds: float) -> list[tuple[float, float]]:
    return [
        (entry.at_seconds, (entry.best_seconds - (entry.bound_seconds or baseline_seconds)) / baseline_seconds * 100)
        for entry in solution.log
        if entry.best_seconds is not None
    ]


HEADER = (
    f"{'graph':26} {'budget':>8} {'ops':>5} {'status':>10} {'TDI':>8} {'bound':>8} {'gap':>7} {'to best':>8} "
    f"{'to proof':>8} {'peak':>6} {'published':>9} {'load':>5}"
)


def line(row: Row) -> str:
    def number(value: float | None, width: int, digits: int = 3) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"

    return (
        f"{row.name:26} {row.budget:>8} {row.operators:>5} {row.status:>10} {number(row.best_percent, 8)} "
        f"{number(row.bound_percent, 8)} {number(row.gap_points, 7)} {number(row.seconds_to_best, 8, 1)} "
        f"{number(row.seconds_to_proof, 8, 1)} {number(row.peak_of_budget, 6)} {number(row.reference_percent, 9)} "
        f"{number(row.load, 5, 1)}"
    )


def draw(rows: list[Row], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    families = list(dict.fromkeys(row.family for row in rows))
    figure, axes = plt.subplots(len(families), 1, figsize=(9, 3.2 * len(families)), squeeze=False, layout="constrained")
    for axis, family in zip(axes[:, 0], families, strict=True):
        for row in (row for row in rows if row.family == family and row.curve):
            seconds, gaps = zip(*row.curve, strict=True)
            axis.step([*seconds, row.solve_seconds], [max(gap, 1e-4) for gap in (*gaps, gaps[-1])], where="post", lw=1)
            if row.status == "feasible":  # the closed ones all end on the floor, where names would cover each other
                axis.annotate(f" {row.name} {row.budget}", (row.solve_seconds, max(gaps[-1], 1e-4)), fontsize=6)
        axis.set(title=family, xscale="log", yscale="log", xlabel="seconds", ylabel="gap, points", xlim=(0.01, 400))
    figure.savefig(folder / "solvers-gap.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, help="folder of benchmark graphs")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each case")
    parser.add_argument("--only", default="", help="regular expression on 'family name budget'")
    parser.add_argument("--solver", default="auto")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    chosen = [
        case
        for case in cases(arguments.graphs)
        if re.search(arguments.only, f"{case.family} {case.name} {case.budget}")
    ]
    if not chosen:
        parser.error(f"no case matches {arguments.only!r}")
    rows = known_rows(arguments)
    print(HEADER)
    for case in chosen:
        row = run(case, arguments.solver, arguments.limit)
        rows[row.family, row.name, row.budget] = row
        print(line(row), flush=True)
        keep(list(rows.values()), arguments)
    draw(list(rows.values()), arguments.results)


def known_rows(arguments: argparse.Namespace) -> dict[tuple[str, str, str], Row]:
    """What an earlier run of the same solver with the same limit has; cases that are solved again replace theirs."""
    path = arguments.results / "solvers.json"
    if not path.exists():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    if (kept["solver"], kept["limit_seconds"]) != (arguments.solver, arguments.limit):
        return {}
    rows = [Row(**{"date": kept["date"], **row}) for row in kept["rows"]]
    return {(row.family, row.name, row.budget): row for row in rows}


def keep(rows: list[Row], arguments: argparse.Namespace) -> None:
    """All rows so far as JSON, so that a run that is stopped loses nothing."""
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"rematch": rematch.__version__, **{name: version(name) for name in ("highspy", "numba", "numpy")}},
        "solver": arguments.solver,
        "limit_seconds": arguments.limit,
        "rows": [asdict(row) for row in rows],
    }
    write_text(arguments.results / "solvers.json", json.dumps(kept))


if __name__ == "__main__":
    main()
