"""Pieces of a hierarchy solved on clusters: Dask's and Ray's, both on this machine, beside this process alone.

    python benchmarks/cluster.py [--only dask|ray] [--results DIR]

Needs `pip install distributed ray`. First, tasks that look at no clock are solved in this process and by two worker
processes of each cluster, and must give the same options. Then `hiremate` solves a GPT at half its memory with the
cluster as its executor. The record says which processes did the work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rematch
from rematch.files import write_text
from rematch.graph import Graph, baseline, simulate
from rematch.graph.generators import gpt
from rematch.solvers import Problem, solve
from rematch.solvers.common.blocks import gap_graph
from rematch.solvers.default.anneal import Anneal
from rematch.solvers.hiremate.solver import HiRemate
from rematch.solvers.hiremate.tasks import Task, solve_task
from rematch.units import extra_pct

_WORKERS = 2
_SECONDS = 20.0


@contextmanager
def dask_cluster() -> Iterator[Executor]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=_WORKERS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client.get_executor()


class RayExecutor(Executor):
    """Ray's pool as an executor; `map` is all that rematch asks of one."""

    def __init__(self) -> None:
        from ray.util.multiprocessing import Pool

        self.pool = Pool(_WORKERS)

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any], **options: Any) -> Iterator[Any]:
        return iter(self.pool.starmap(function, zip(*iterables, strict=True)))


@contextmanager
def ray_cluster() -> Iterator[Executor]:
    import ray

    ray.init(num_cpus=_WORKERS, include_dashboard=False, log_to_driver=False)
    try:
        yield RayExecutor()
    finally:
        ray.shutdown()


class Watched(Executor):
    """Another executor, and the processes in which it solved tasks."""

    def __init__(self, inside: Executor) -> None:
        self._inside = inside
        self.tasks_of: dict[int, int] = {}

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any], **options: Any) -> Iterator[Any]:
        def told(*args: Any) -> tuple[int, Any]:
            return os.getpid(), function(*args)

        for process, result in self._inside.map(told, *iterables):
            self.tasks_of[process] = self.tasks_of.get(process, 0) + 1
            yield result


CLUSTERS = {"dask": (dask_cluster, "distributed"), "ray": (ray_cluster, "ray")}


def repeatable_tasks(graph: Graph) -> list[Task]:
    pieces = next(HiRemate().hierarchies(graph))
    blocks = [piece.block for piece in pieces.root.children][:4]
    return [Task(block, gap_graph(graph, block), (), (Anneal(),), 6, 60, seconds=600.0) for block in blocks]


def run(name: str) -> dict[str, Any]:
    cluster, package = CLUSTERS[name]
    tasks = repeatable_tasks(gpt(layers=2))
    graph = gpt(layers=3)
    problem = Problem(graph, simulate(graph, baseline(graph)).peak_bytes // 2)
    with cluster() as executor:
        watched = Watched(executor)
        same = list(watched.map(solve_task, tasks)) == list(map(solve_task, tasks))
        equal_by = sorted(watched.tasks_of.values())
        assert os.getpid() not in watched.tasks_of, "the cluster should have other processes"
        watched.tasks_of.clear()
        found = solve(problem, HiRemate(executor=watched), time_limit=_SECONDS)
    assert same, "a cluster should find the same options"
    assert found.schedule is not None and watched.tasks_of, "the cluster should have been used"
    seen = simulate(graph, found.schedule).checked()
    return {
        "made": date.today().isoformat(),
        "version": version(package),
        "rematch": rematch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "workers": _WORKERS,
        "repeatable_tasks": len(tasks),
        "same_options_as_alone": same,
        "repeatable_tasks_of_each_worker": equal_by,
        "graph": graph.name,
        "budget_pct": 50,
        "status": found.status.value,
        "extra_pct": extra_pct(seen.seconds, graph.baseline_seconds),
        "peak_within_budget": seen.peak_bytes <= problem.budget_bytes,
        "tasks_of_each_worker": sorted(watched.tasks_of.values()),
        "solve_seconds": round(found.solve_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CLUSTERS, help="one cluster alone")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    path = arguments.results / "cluster.json"
    runs = json.loads(path.read_text()) if path.exists() else {}
    for name in [arguments.only] if arguments.only else CLUSTERS:
        row = runs[name] = run(name)
        write_text(path, json.dumps(runs, indent=1) + "\n")
        print(
            f"{name} {row['version']}: the options of this process alone; {row['graph']} at half its memory "
            f"+{row['extra_pct']:.2f} % ({row['status']}), tasks of each worker {row['tasks_of_each_worker']}"
        )


if __name__ == "__main__":
    main()
