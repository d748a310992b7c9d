"""What planning costs against the size of the graph: 10^2 to 10^5 operators of five families at half their peak.

    python benchmarks/scaling.py [--most 100000] [--limit 120] [--only REGEX] [--results DIR]

Each case is solved by `auto` with its default `gap` in a process of its own, whose memory is the largest resident set;
`CPU` counts all threads from the call of `solve` on, the making of the graph and the compilation not counted. The
growth at the end is the exponent e of CPU seconds = c * operators^e, fitted to all sizes of a family. A picture shows
seconds and memory against size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import rematch
from rematch.files import write_text
from rematch.graph import Graph, baseline, generators, simulate
from rematch.solvers import Problem, make_solver, solve

SIZES = (100, 1_000, 10_000, 100_000)
FAMILIES: dict[str, Callable[[int], Graph]] = {  # by the number of operators of the training step
    "chain": lambda size: generators.chain(max(2, size // 2)),
    "feed-forward": lambda size: generators.feed_forward(max(2, size // 4)),
    "gpt": lambda size: generators.gpt(max(2, size // 30)),
    "encoder-decoder": lambda size: generators.encoder_decoder(max(1, size // 80), max(1, size // 80)),
    "unet": lambda size: generators.unet(4, max(1, size // 55)),
}


@dataclass(frozen=True)
class Row:
    family: str
    operators: int
    status: str
    extra_percent: float | None
    gap_points: float | None
    wall_seconds: float
    cpu_seconds: float
    memory_mb: int


def measured(family: str, size: int, limit: float) -> Row:
    graph = FAMILIES[family](size)
    problem = Problem(graph, simulate(graph, baseline(graph)).peak_bytes // 2)
    make_solver("auto").prepare()
    wall, cpu = time.perf_counter(), time.process_time()
    solution = solve(problem, "auto", time_limit=limit)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    extra = gap = None
    if solution.schedule is not None:
        seconds, once = simulate(graph, solution.schedule).seconds, graph.baseline_seconds
        extra = (seconds / once - 1.0) * 100.0
        gap = None if solution.lower_bound_seconds is None else (seconds - solution.lower_bound_seconds) / once * 100.0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return Row(family, len(graph.ops), solution.status.value, extra, gap, wall, cpu, memory)


def growth(rows: list[Row]) -> float:
    """The slope of CPU seconds against operators, both as logarithms."""
    slope, _ = np.polyfit([math.log(row.operators) for row in rows], [math.log(row.cpu_seconds) for row in rows], 1)
    return float(slope)


def line(row: Row) -> str:
    def number(value: float | None) -> str:
        return f"{'-':>8}" if value is None else f"{value:>8.3f}"

    return (
        f"{row.family:16} {row.operators:>9,} {row.status:>10} {number(row.extra_percent)} {number(row.gap_points)} "
        f"{row.wall_seconds:>7.1f} {row.cpu_seconds:>7.1f} {row.memory_mb:>7,}"
    )


def draw(rows: list[Row], exponents: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (seconds, memory) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for family in dict.fromkeys(row.family for row in rows):
        of_family = [row for row in rows if row.family == family]
        operators = [row.operators for row in of_family]
        label = f"{family}, operators^{exponents[family]:.2f}" if family in exponents else family
        seconds.plot(operators, [row.cpu_seconds for row in of_family], marker="o", label=label)
        memory.plot(operators, [row.memory_mb for row in of_family], marker="o")
    seconds.set(xscale="log", yscale="log", xlabel="operators", ylabel="CPU seconds")
    memory.set(xscale="log", yscale="log", xlabel="operators", ylabel="largest resident set, MB")
    seconds.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=max(SIZES), help="operators of the largest graphs, about")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each case")
    parser.add_argument("--only", default="", help="regular expression on the family of graphs")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    cases = [(f, size) for f in FAMILIES if re.search(arguments.only, f) for size in SIZES if size <= arguments.most]
    if not cases:
        parser.error(f"no case matches {arguments.only!r}")
    header = ("extra %", "gap", "wall s", "CPU s", "MB")
    print(f"{'family':16} {'operators':>9} {'status':>10} {'{:>8} {:>8} {:>7} {:>7} {:>7}'.format(*header)}")
    rows: list[Row] = []
    for family, size in cases:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows.append(pool.submit(measured, family, size, arguments.limit).result())
        print(line(rows[-1]), flush=True)
    exponents = {}
    for family in dict.fromkeys(row.family for row in rows):
        of_family = [row for row in rows if row.family == family]
        if len(of_family) > 1:
            exponents[family] = growth(of_family)
            print(f"{family:16} grows with operators^{exponents[family]:.2f}")
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load": os.getloadavg()[2],
        "versions": {"rematch": rematch.__version__, **{name: version(name) for name in ("highspy", "numba", "numpy")}},
        "limit_seconds": arguments.limit,
        "rows": [asdict(row) for row in rows],
        "growth": exponents,
    }
    write_text(arguments.results / "scaling.json", json.dumps(kept, indent=1))
    draw(rows, exponents, arguments.results / "scaling.png")


if __name__ == "__main__":
    main()
