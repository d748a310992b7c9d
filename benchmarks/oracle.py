"""How fast the oracle is: steps a second, and seconds from a file of 100,000 operators to its verdict.

`python benchmarks/oracle.py`

Both are medians of five runs, after a first one that compiles the kernels. The goals: 10 million steps a second, and
under 3 seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rematch.graph import Graph, Schedule, baseline, simulate
from rematch.graph.formats import load_graph, save_graph
from rematch.graph.generators import chain, gpt, random_layered

STEPS = 1_000_000
OPERATORS = 100_000
REPEATS = 5


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for graph in (gpt(layers=96), random_layered(nodes=1000)):
        report_speed(graph, long_schedule(graph, STEPS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        for large in (gpt(layers=OPERATORS // 30), chain(layers=OPERATORS // 2)):
            save_graph(large, path)
            report_load(path, large)


def report_speed(graph: Graph, schedule: Schedule) -> None:
    simulate(graph, schedule).checked()
    seconds = median_seconds(lambda: simulate(graph, schedule))
    print(f"{graph.name:<24} {len(schedule):>9,} steps  {len(schedule) / seconds / 1e6:6.1f} M steps/s")


def report_load(path: Path, graph: Graph) -> None:
    loading = median_seconds(lambda: load_graph(path))
    judging = median_seconds(lambda: simulate(graph, baseline(graph)).checked())
    print(
        f"{graph.name:<24} {len(graph.ops):>9,} operators  {path.stat().st_size / 2**20:6.1f} MiB  "
        f"load and validate {loading:5.2f} s, simulate {judging:5.3f} s, together {loading + judging:5.2f} s"
    )


def long_schedule(graph: Graph, steps: int) -> Schedule:
    """A valid schedule of at least `steps` steps: everything once, then operators at random.

    At random, because repeating one pass is two to three times faster: the processor learns its branches.
    """
    rng = np.random.default_rng(0)
    repeatable = np.flatnonzero(~graph.arrays.once)
    return Schedule.from_ops(graph, np.concatenate((graph.arrays.order, rng.choice(repeatable, steps // 2))))


def median_seconds(action: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
