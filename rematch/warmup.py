"""Compile all kernels ahead of time, so that no user waits for them: `python -m rematch.warmup`.

This solves a small graph with every built-in solver. numba caches what it compiles.
"""

from __future__ import annotations

import time

from rematch.graph import baseline, simulate
from rematch.graph.generators import gpt
from rematch.solvers import Problem, make_solver, solve, solver_names

_SECONDS_PER_SOLVER = 2.0


def warm() -> None:
    graph = gpt(layers=2)
    problem = Problem(graph, simulate(graph, baseline(graph)).peak_bytes // 2)
    for name in solver_names():
        solver = make_solver(name)
        if solver.applicable(problem):
            solve(problem, solver, time_limit=_SECONDS_PER_SOLVER)


if __name__ == "__main__":
    started = time.monotonic()
    warm()
    print(f"all kernels are compiled ({time.monotonic() - started:.1f} s)")
