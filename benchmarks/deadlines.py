"""Does every solver answer in time? All of them on graphs of 40,000 operators, with limits of 1 s and 5 s.

    python benchmarks/deadlines.py [--operators 40000] [--limits 1,5] [--clock wall] [--only REGEX] [--again]
                                   [--results DIR]

A solver is in time if it returns within its limit plus the larger of 10 % and 2 s, or refuses the graph within those
2 s. `--only` is searched for in 'family solver limit'. What the results already have for the same size and clock is not
run again, so that a run that was stopped goes on where it was; `--again` runs it anew. Compiled code is warm.

Limits are wall-clock time. On a machine that others use, `--clock cpu` lets them count this process's processor seconds
instead, as on a machine that has nothing else to do; libraries that keep time themselves still look at the wall. Exits
with 1 if a solver was late.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import rematch
from rematch.errors import SolverError
from rematch.files import write_text
from rematch.graph import Graph, baseline, generators, simulate
from rematch.solvers import Problem, base as solvers_base, make_solver, solve, solver_names

PERCENT = 50  # of the peak without recomputation
LEAST_ALLOWANCE, SHARE = 2.0, 0.1
FAMILIES: dict[str, Callable[[int], Graph]] = {  # by the number of operators of the training step
    "chain": lambda size: generators.chain(size // 2),
    "feed-forward": lambda size: generators.feed_forward(size // 4),
    "gpt": lambda size: generators.gpt(size // 30),
    "encoder-decoder": lambda size: generators.encoder_decoder(size // 80, size // 80),
    "unet": lambda size: generators.unet(4, size // 55),
    "random layered": lambda size: generators.random_layered(size),
}
Key = tuple[str, str, float, int, str]
CLOCKS = {"wall": time.monotonic, "cpu": time.process_time}


@dataclass(frozen=True)
class Row:
    family: str
    solver: str
    limit_seconds: float
    operators: int
    asked: int  # the operators that were asked for; families come as near as they can
    status: str  # "refused" where the solver does not take such a graph
    extra_percent: float | None
    wall_seconds: float
    cpu_seconds: float
    load_average: float
    clock: str  # by which limits were kept, "wall" or "cpu"

    @property
    def key(self) -> Key:
        return self.family, self.solver, self.limit_seconds, self.asked, self.clock

    @property
    def allowed_seconds(self) -> float:
        limit = 0.0 if self.status == "refused" else self.limit_seconds
        return limit + max(LEAST_ALLOWANCE, SHARE * limit)

    @property
    def late(self) -> bool:
        return (self.wall_seconds if self.clock == "wall" else self.cpu_seconds) > self.allowed_seconds


def run(family: str, graph: Graph, asked: int, solver: str, limit: float, clock: str) -> Row:
    problem = Problem(graph, simulate(graph, baseline(graph)).peak_bytes * PERCENT // 100)
    make_solver(solver).prepare()
    wall, cpu = time.perf_counter(), time.process_time()
    extra = None
    try:
        with mock.patch.object(solvers_base, "time", SimpleNamespace(monotonic=CLOCKS[clock])):
            solution = solve(problem, solver, time_limit=limit)
        status = solution.status.value
    except SolverError:
        solution, status = None, "refused"
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if solution is not None and solution.schedule is not None:
        extra = (simulate(graph, solution.schedule).seconds / graph.baseline_seconds - 1) * 100
    load = os.getloadavg()[0]
    return Row(family, solver, limit, len(graph.ops), asked, status, extra, wall, cpu, load, clock)


def line(row: Row) -> str:
    extra = "-" if row.extra_percent is None else f"{row.extra_percent:.1f}"
    return (
        f"{row.family:16} {row.operators:>7,} {row.solver:18} {row.limit_seconds:>6g} s {row.status:10} {extra:>7} % "
        f"{row.wall_seconds:>7.1f} s {row.cpu_seconds:>7.1f} s of CPU, load {row.load_average:4.1f}"
        f"{'  LATE' if row.late else ''}"
    )


def known_rows(path: Path) -> dict[Key, Row]:
    rows = [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []
    return {row.key: row for row in rows}


def keep(rows: list[Row], path: Path) -> None:
    """All rows so far as JSON, so that a run that is stopped loses nothing."""
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "rematch": rematch.__version__,
        "rows": [asdict(row) for row in rows],
    }
    write_text(path, json.dumps(kept, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", type=int, default=40_000)
    parser.add_argument("--limits", default="1,5", help="seconds, with commas between them")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="what limits count")
    parser.add_argument("--only", default="", help="regular expression on 'family solver limit'")
    parser.add_argument("--again", action="store_true", help="run again what the results have already")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "deadlines.json"
    rows, shown = known_rows(path), []
    limits = [float(limit) for limit in arguments.limits.split(",")]
    for family, make in FAMILIES.items():
        wanted = [
            (solver, limit)
            for limit in limits
            for solver in solver_names()
            if re.search(arguments.only, f"{family} {solver} {limit:g}")
        ]
        graph = make(arguments.operators) if wanted else None
        for solver, limit in wanted:
            assert graph is not None
            key = (family, solver, limit, arguments.operators, arguments.clock)
            if key not in rows or arguments.again:
                rows[key] = run(family, graph, arguments.operators, solver, limit, arguments.clock)
                keep(list(rows.values()), path)
            shown.append(rows[key])
            print(line(rows[key]), flush=True)
    late = [row for row in shown if row.late]
    print(f"{len(late)} of {len(shown)} late")
    return 1 if late or not shown else 0


if __name__ == "__main__":
    sys.exit(main())
