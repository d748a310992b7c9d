"""What another order of first computations brings: `auto` with the default order and with `order="any"`.

    python benchmarks/orders.py --graphs DIR [--limit 60] [--only REGEX] [--results DIR]

Wide graphs above all, as `solvers.py` has them: traces, random layered graphs and nested skips. Both have the same
limit and search for the proof. "lighter" is the peak without recomputation in the order that `auto` would take, in
percent of the default order's: what an order alone saves. The first bound holds for the default order, the second for
every order. Rows are kept as JSON; cases that are solved again replace theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

from solvers import Case, cases

from rematch.files import write_text
from rematch.graph import Graph, baseline, simulate
from rematch.solvers import Problem, Solution, solve
from rematch.solvers.default.orders import lighter_order

WIDE = "^(random layered|traces|small and hard|checkmate .*unet|generated encoder)"


@dataclass(frozen=True)
class Row:
    family: str
    name: str
    budget: str
    operators: int
    lighter_percent: float | None  # None: no lighter order was found
    default_percent: float | None
    default_bound_percent: float | None
    any_percent: float | None
    any_bound_percent: float | None
    date: str
    load: float


def run(case: Case, limit: float) -> Row:
    graph, budget = case.load()
    order = lighter_order(graph)
    lighter = None
    if order is not None:
        other = replace(graph, order=order)
        lighter = simulate(other, baseline(other)).peak_bytes / simulate(graph, baseline(graph)).peak_bytes * 100.0
    in_order = solve(Problem(graph, budget), "auto", time_limit=limit, gap=0.0)
    in_any = solve(Problem(graph, budget), "auto", time_limit=limit, gap=0.0, order="any")
    return Row(
        case.family,
        case.name,
        case.budget,
        len(graph.ops),
        lighter,
        *extra(graph, in_order),
        *extra(graph, in_any),
        date.today().isoformat(),
        os.getloadavg()[0],
    )


def extra(graph: Graph, solution: Solution) -> tuple[float | None, float | None]:
    """Extra time of the schedule and its bound, in percent of no recomputation."""
    found = None if solution.schedule is None else simulate(graph, solution.schedule).seconds
    both = (found, solution.lower_bound_seconds)
    percents = [None if seconds is None else (seconds / graph.baseline_seconds - 1.0) * 100.0 for seconds in both]
    return percents[0], percents[1]


HEADER = (
    f"{'graph':26} {'budget':>8} {'ops':>6} {'lighter':>8} {'default':>8} {'bound':>8} {'any':>8} {'bound':>8} "
    f"{'load':>5}"
)


def line(row: Row) -> str:
    figures = (
        row.lighter_percent,
        row.default_percent,
        row.default_bound_percent,
        row.any_percent,
        row.any_bound_percent,
    )
    shown = " ".join(f"{'-':>8}" if figure is None else f"{figure:8.3f}" for figure in figures)
    return f"{row.name:26} {row.budget:>8} {row.operators:>6,} {shown} {row.load:5.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, help="folder of benchmark graphs; without it, generated ones alone")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each of the two")
    parser.add_argument("--only", default=WIDE, help="regular expression on 'family name budget'")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    path = arguments.results / "orders.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"limit_seconds": arguments.limit}
    if kept["limit_seconds"] != arguments.limit:
        kept = {"limit_seconds": arguments.limit}
    rows = {(row["family"], row["name"], row["budget"]): Row(**row) for row in kept.get("rows", [])}
    print(HEADER)
    for case in cases(arguments.graphs):
        if re.search(arguments.only, f"{case.family} {case.name} {case.budget}"):
            row = run(case, arguments.limit)
            rows[row.family, row.name, row.budget] = row
            print(line(row), flush=True)
            kept = {"limit_seconds": arguments.limit, "rows": [asdict(known) for known in rows.values()]}
            write_text(path, json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
