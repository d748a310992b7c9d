"""HiRemate's pieces solved by a process pool, by Dask and by Ray: the same schedule search, spread three ways.

    python benchmarks/executors.py [--only processes dask ray] [--layers 4] [--limit 30]

Dask needs `distributed`, Ray needs `ray`; each starts two worker processes on this machine. Prints how long the search
took, what it found, and how many pieces the workers solved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from rematch.graph import baseline, simulate
from rematch.graph.generators import gpt
from rematch.solvers import Problem, solve
from rematch.solvers.hiremate.solver import HiRemate
from rematch.solvers.hiremate.workers import process_pool
from rematch.units import extra_pct


@contextmanager
def dask() -> Iterator[Executor]:
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        yield client.get_executor()


class RayExecutor(Executor):
    """As docs/hierarchy.md shows it."""

    def __init__(self) -> None:
        from ray.util.multiprocessing import Pool

        self.pool = Pool(2)

    def map(self, function: Callable[..., Any], *iterables: Any, **_: Any) -> Iterator[Any]:
        return iter(self.pool.starmap(function, zip(*iterables, strict=False)))


@contextmanager
def ray() -> Iterator[Executor]:
    executor = RayExecutor()
    yield executor
    executor.pool.terminate()


class Counting(Executor):
    """Counts the pieces that another executor solves."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.pieces = 0

    def map(self, function: Callable[..., Any], *iterables: Any, **options: Any) -> Iterator[Any]:
        sent = [list(each) for each in iterables]
        results = list(self.inner.map(function, *sent, **options))
        self.pieces += len(results)
        return iter(results)


EXECUTORS: dict[str, Any] = {"processes": lambda: process_pool(2), "dask": dask, "ray": ray}


def main() -> None:
    parser = argparse.ArgumentParser(description="HiRemate's pieces solved by several kinds of workers.")
    parser.add_argument("--only", nargs="+", choices=EXECUTORS, default=list(EXECUTORS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for the whole search")
    asked = parser.parse_args()
    graph = gpt(layers=asked.layers)
    problem = Problem(graph, simulate(graph, baseline(graph)).peak_bytes * 6 // 10)
    print(f"{graph.name}, {len(graph.ops)} operators, 60 % of the memory")
    for name in asked.only:
        with EXECUTORS[name]() as executor:
            counting = Counting(executor)
            start = time.perf_counter()
            found = solve(problem, HiRemate(executor=counting), time_limit=asked.limit)
            took = time.perf_counter() - start
        cost = (
            "nothing"
            if found.schedule is None
            else (f"+{extra_pct(simulate(graph, found.schedule).checked().seconds, graph.baseline_seconds):.2f} %")
        )
        print(f"{name:10s} {took:5.1f} s  {cost}  {counting.pieces} pieces solved there", flush=True)


if __name__ == "__main__":
    main()
