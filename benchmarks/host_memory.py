"""What a link to host memory saves: `auto` with and without it on GPTs at a half, a third and a quarter of their peak.

    python benchmarks/host_memory.py [--layers 12 24 48 96] [--speed 55e9] [--limit 60] [--results DIR]

The graphs are generated. The link has the same speed in both directions and as much host memory as it takes. `alone` is
what `auto` found by recomputation in its share of the time, `joint` what it found with the link, both as extra time in
percent of the time without recomputation; `bound` holds for schedules that keep, recompute and move. Cases are written
to the results as they end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import rematch
from rematch.files import write_text
from rematch.graph import Link, baseline, simulate
from rematch.graph.generators import gpt
from rematch.solvers import Problem, make_solver, solve

BUDGETS = (0.5, 0.35, 0.25)
HOST_BYTES = 2**50


@dataclass(frozen=True)
class Row:
    layers: int
    operators: int
    budget_share: float
    alone_percent: float | None
    joint_percent: float | None
    bound_percent: float | None
    moved_bytes: int
    stall_percent: float
    wall_seconds: float
    load: float  # of the machine, the mean of a minute


def measured(layers: int, share: float, speed: float, limit: float) -> Row:
    graph = replace(gpt(layers=layers), link=Link(speed, speed, HOST_BYTES))
    problem = Problem(graph, int(share * simulate(graph, baseline(graph)).peak_bytes))
    started = time.perf_counter()
    solution = solve(problem, "auto", time_limit=limit)
    wall = time.perf_counter() - started

    def extra(seconds: float | None) -> float | None:
        return None if seconds is None else (seconds / graph.baseline_seconds - 1.0) * 100.0

    alone = next((entry.best_seconds for entry in solution.log if entry.solver == "recomputation alone"), None)
    seen = None if solution.schedule is None else simulate(graph, solution.schedule)
    return Row(
        layers=layers,
        operators=len(graph.ops),
        budget_share=share,
        alone_percent=extra(alone),
        joint_percent=extra(None if seen is None else seen.seconds),
        bound_percent=extra(solution.lower_bound_seconds),
        moved_bytes=0 if seen is None else seen.host_bytes,
        stall_percent=0.0 if seen is None else seen.stall_seconds / graph.baseline_seconds * 100.0,
        wall_seconds=wall,
        load=os.getloadavg()[0],
    )


def line(row: Row) -> str:
    figures = (row.alone_percent, row.joint_percent, row.bound_percent)
    shown = " ".join(f"{'-':>8}" if figure is None else f"{figure:>8.2f}" for figure in figures)
    case = f"{row.layers:>6} {row.operators:>9,} {row.budget_share:>6.0%}"
    return f"{case} {shown} {row.wall_seconds:>7.1f} {row.load:>5.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--speed", type=float, default=55e9, help="bytes in a second, each way")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each case")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    make_solver("auto").prepare()
    print(f"layers operators budget {'alone %':>8} {'joint %':>8} {'bound %':>8} {'wall s':>7}  load")
    rows: list[Row] = []
    for layers in arguments.layers:
        for share in BUDGETS:
            rows.append(measured(layers, share, arguments.speed, arguments.limit))
            print(line(rows[-1]), flush=True)
            kept = {
                "date": date.today().isoformat(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
                "versions": {"rematch": rematch.__version__, **{n: version(n) for n in ("highspy", "numba", "numpy")}},
                "limit_seconds": arguments.limit,
                "bytes_per_second": arguments.speed,
                "rows": [asdict(row) for row in rows],
            }
            write_text(arguments.results / "host-memory.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
