"""Compile everything that is compiled, once, so that no user waits for it: `python -m rematch.warmup`.

Solves a small graph with each built-in solver; numba keeps what it compiles beside the sources.
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
    print(f"compiled code is warm ({time.monotonic() - started:.1f} s)")
