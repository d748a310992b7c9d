"""How long rotor's dynamic programme takes, by blocks, slots and options, and the whole solver, by depth and slots.

    python benchmarks/rotor.py [--results DIR]

The first table is the dynamic programme alone on random blocks, warm, in seconds of processor time; 96 blocks, 500
slots and 20 options should stay under 2. The second is the solver on GPTs at half and a fifth of their memory, and what
it costs to have fewer slots. TDI is the extra time in percent of no recomputation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rematch
from rematch.files import write_text
from rematch.graph import baseline, simulate
from rematch.graph.generators import gpt
from rematch.solvers import Problem, solve
from rematch.solvers.common.options import Option
from rematch.solvers.rotor.chain import Alone, ChainBlock, ChainTable

CHAINS = ((24, 500, 20), (48, 500, 20), (96, 100, 20), (96, 500, 1), (96, 500, 20), (96, 2000, 20), (192, 500, 20))
DEPTHS = (12, 24, 48, 96, 200)
PERCENTS = (50, 20)
SLOTS = (100, 500)


def random_block(rng: random.Random, options: int) -> ChainBlock:
    """A block of about the proportions of a transformer's: what it saves is ten times its output."""
    return ChainBlock(
        output_bytes=rng.randint(50, 100),
        gradient_bytes=rng.randint(50, 100),
        kept_bytes=rng.randint(0, 10),
        plain_seconds=rng.random(),
        plain_peak_bytes=rng.randint(200, 400),
        passing_peak_bytes=rng.randint(250, 500),
        options=tuple(
            Option(rng.randint(0, 1000), rng.random(), rng.randint(500, 1200), 2 * rng.random(), rng.randint(800, 1500))
            for _ in range(options)
        ),
        alone=tuple(Alone(3 * rng.random(), rng.randint(800, 1500)) for _ in range(4)),
        beside=(Alone(2 * rng.random(), rng.randint(800, 1500)),),
    )


def time_chain(blocks: int, slots: int, options: int) -> dict[str, Any]:
    rng = random.Random(0)
    chain = [random_block(rng, options) for _ in range(blocks)]
    slot_bytes = 500 * blocks // slots + 1  # about half of what saving everything takes
    started = time.process_time()
    table = ChainTable.of(chain, slots, slot_bytes)
    filled = time.process_time()
    steps = table.steps(slots)
    return {
        "blocks": blocks,
        "slots": slots,
        "options": options,
        "cpu_seconds": filled - started,
        "cpu_seconds_of_steps": time.process_time() - filled,
        "table_bytes": table.rows.nbytes,
        "steps": len(steps),
    }


def time_solver(layers: int, percent: int, slots: int) -> dict[str, Any]:
    graph = gpt(layers=layers)
    budget = simulate(graph, baseline(graph)).peak_bytes * percent // 100
    started = time.process_time()
    solution = solve(Problem(graph, budget), "rotor", slots=slots, time_limit=600.0)
    spent = time.process_time() - started
    seen = simulate(graph, solution.schedule) if solution.schedule is not None else None
    return {
        "graph": graph.name,
        "operators": len(graph.ops),
        "percent": percent,
        "slots": slots,
        "cpu_seconds": spent,
        "best_percent": (seen.seconds / graph.baseline_seconds - 1) * 100 if seen else None,
        "peak_of_budget": seen.peak_bytes / budget if seen else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    time_chain(4, 10, 2)  # compile
    print(f"{'blocks':>6} {'slots':>6} {'options':>7} {'CPU s':>8} {'steps s':>8} {'table MB':>9}")
    chains = []
    for shape in CHAINS:
        row = time_chain(*shape)
        chains.append(row)
        print(
            f"{row['blocks']:>6} {row['slots']:>6} {row['options']:>7} {row['cpu_seconds']:>8.3f} "
            f"{row['cpu_seconds_of_steps']:>8.3f} {row['table_bytes'] / 1e6:>9.1f}",
            flush=True,
        )
    print(f"\n{'graph':10} {'ops':>6} {'budget':>7} {'slots':>6} {'CPU s':>8} {'TDI %':>8} {'peak/budget':>12}")
    solver = []
    for layers in DEPTHS:
        for percent in PERCENTS:
            for slots in SLOTS:
                row = time_solver(layers, percent, slots)
                solver.append(row)
                best = "-" if row["best_percent"] is None else f"{row['best_percent']:.3f}"
                share = "-" if row["peak_of_budget"] is None else f"{row['peak_of_budget']:.3f}"
                print(
                    f"{row['graph']:10} {row['operators']:>6} {percent:>5} % {slots:>6} {row['cpu_seconds']:>8.2f} "
                    f"{best:>8} {share:>12}",
                    flush=True,
                )
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"rematch": rematch.__version__, **{name: version(name) for name in ("numba", "numpy")}},
        "dynamic_programme": chains,
        "solver": solver,
    }
    write_text(arguments.results / "rotor.json", json.dumps(kept))


if __name__ == "__main__":
    main()
