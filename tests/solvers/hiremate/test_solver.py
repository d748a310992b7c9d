"""The solver `hiremate`: injected partitioners and solvers, executors of others, and what a hierarchy gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import rematch
from rematch.errors import SolverError
from rematch.graph import Graph, simulate
from rematch.graph.generators import encoder_decoder, gpt, unet
from rematch.solvers import Deadline, OnProgress, Problem, Solution, Solver, Status, solve
from rematch.solvers.common.blocks import gap_graph
from rematch.solvers.default.anneal import Anneal
from rematch.solvers.default.greedy import Greedy
from rematch.solvers.hiremate import Part, Partitioner
from rematch.solvers.hiremate.solver import HILP, HiRemate
from rematch.solvers.hiremate.tasks import Task, solve_task
from tests.problems import peak_bytes

ALONE = {"polish": False, "workers": 1}


def half(graph: Graph) -> Problem:
    return Problem(graph, peak_bytes(graph) // 2)


@dataclass(frozen=True)
class InThrees(Partitioner):
    """A user's own: three operators after the other, whatever they do."""

    name = "in threes"

    def partition(self, graph: Graph) -> Part:
        forward = [op for op in graph.order if graph.ops[op].phase.value == "forward"]
        stretches = [tuple(forward[at : at + 3]) for at in range(0, len(forward), 3)]
        return Part(tuple(forward), tuple(Part(ops) for ops in stretches))


@dataclass(frozen=True)
class Counting(Solver):
    """A user's own: XLA's greedy, and a note of what it was asked."""

    name = "counting"
    paper = ""
    asked: list[Problem] = None  # type: ignore[assignment]

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        self.asked.append(problem)
        return replace(Greedy().solve(problem, deadline=deadline, on_progress=on_progress), solver=self.name)


@pytest.mark.parametrize("graph", [gpt(layers=4), unet(depth=3), encoder_decoder(2, 2)], ids=["gpt", "unet", "encdec"])
def test_a_hierarchy_alone_keeps_half_the_memory(graph: Graph) -> None:
    problem = half(graph)
    solution = solve(problem, HiRemate(**ALONE), time_limit=4.0)
    assert solution.status is Status.FEASIBLE
    assert any("levels" in progress.message for progress in solution.log)


def test_a_partitioner_and_a_solver_of_ones_own_at_one_level() -> None:
    """Level 2, where `InThrees` cuts what H-Partition left there; only its parts are asked of the solver."""
    graph = gpt(layers=4)
    asked: list[Problem] = []
    solver = HiRemate(partitioners_at={2: InThrees()}, solvers_at={3: (HILP, Counting(asked))}, **ALONE)
    pieces = solver.hierarchy(graph)
    bottom = [piece for piece in pieces.root.walk() if not piece.children]
    assert max(len(piece.part.forward) for piece in bottom) == 3
    solution = solve(half(graph), solver, time_limit=4.0)
    assert solution.schedule is not None
    largest = max(len(piece.ops) for piece in bottom) + 1  # and the gap between its passes
    assert asked and all(len(problem.graph.ops) <= largest for problem in asked)


def test_a_partition_that_cannot_run_is_refused() -> None:
    @dataclass(frozen=True)
    class Backwards(Partitioner):
        name = "backwards"

        def partition(self, graph: Graph) -> Part:
            root = InThrees().partition(graph)
            return Part(root.forward, root.children[::-1])

    with pytest.raises(SolverError, match="topological order"):
        solve(half(gpt(layers=2)), HiRemate(partitioner=Backwards(), **ALONE))


@pytest.fixture(params=["threads", "dask"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Executors that people have: of the standard library, and of a Dask cluster on this machine."""
    if request.param == "threads":
        with ThreadPoolExecutor(2) as pool:
            yield pool
        return
    distributed = pytest.importorskip("distributed", reason="needs dask's scheduler: pip install distributed")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning")
def test_pieces_are_solved_alike_in_any_executor(executor: Executor) -> None:
    """Local search makes so many moves and looks at no clock, so that options must be the same."""
    graph = gpt(layers=2)
    pieces = HiRemate().hierarchy(graph)
    blocks = [piece.block for piece in pieces.root.children]
    tasks = [Task(block, gap_graph(graph, block), (), (Anneal(),), 6, 60, seconds=600.0) for block in blocks[:4]]
    assert list(executor.map(solve_task, tasks)) == list(map(solve_task, tasks))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning")
def test_the_solver_uses_the_executor_it_is_given(executor: Executor) -> None:
    solution = solve(half(gpt(layers=2)), HiRemate(executor=executor, polish=False), time_limit=4.0)
    assert solution.schedule is not None


def test_processes_need_no_guard_in_the_script(tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"`, as most are."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('started')\n"
        "from rematch.solvers.hiremate.workers import process_pool\n"
        "with process_pool(2) as pool:\n"
        "    print(sum(pool.map(abs, range(-5, 5))))\n"
    )
    here = {**os.environ, "PYTHONPATH": str(Path(rematch.__file__).parents[1])}
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=here)
    assert ran.stdout.split() == ["started", "25"]


def test_polish_ends_near_the_bound() -> None:
    graph = gpt(layers=4)
    solution = solve(half(graph), "hiremate", time_limit=8.0)
    assert solution.schedule is not None and solution.lower_bound_seconds is not None
    seconds = simulate(graph, solution.schedule).seconds
    assert seconds <= 1.02 * solution.lower_bound_seconds


def test_bad_options_are_named() -> None:
    with pytest.raises(SolverError, match="options=0"):
        HiRemate(options=0)
