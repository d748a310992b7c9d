"""The solver `hiremate`: injected partitioners and solvers, executors of others, and what a hierarchy gives."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import rematch
from rematch.errors import SolverError
from rematch.graph import Graph, Op, Phase, Schedule, Value, simulate
from rematch.graph.generators import encoder_decoder, gpt, unet
from rematch.solvers import Deadline, OnProgress, Problem, Solution, Solver, Status, solve
from rematch.solvers.common.blocks import gap_graph
from rematch.solvers.common.options import Option
from rematch.solvers.default.anneal import Anneal
from rematch.solvers.default.greedy import Greedy
from rematch.solvers.hiremate import Part, Partitioner
from rematch.solvers.hiremate.combine import Gap, PieceRun, Solved, combined, operators_of
from rematch.solvers.hiremate.level import Pass
from rematch.solvers.hiremate.solver import HILP, HiRemate
from rematch.solvers.hiremate.tasks import Task, solve_task
from tests.modules import Net, batch, mean_square
from tests.problems import peak_bytes

ALONE = {"workers": 1, "options": 4, "unite": False}


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
class InHalves(Partitioner):
    """Two parts of equally many operators, in default order."""

    name = "in halves"

    def partition(self, graph: Graph) -> Part:
        forward = tuple(op for op in graph.order if graph.ops[op].phase is Phase.FORWARD)
        half = len(forward) // 2
        return Part(forward, (Part(forward[:half]), Part(forward[half:])))


@dataclass(frozen=True)
class Counting(Solver):
    """A user's own: XLA's greedy, and a note of what it was asked."""

    name = "counting"
    paper = ""
    asked: list[Problem] = None  # type: ignore[assignment]

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        self.asked.append(problem)
        return replace(Greedy().solve(problem, deadline=deadline, on_progress=on_progress), solver=self.name)


def first_found(problem: Problem, solver: HiRemate) -> Solution:
    """Until a schedule is known, so that a slow machine changes nothing but the time."""
    return solve(problem, solver, time_limit=30.0, enough_seconds=math.inf)


def finders(solution: Solution) -> set[str]:
    """Who found a schedule."""
    return {progress.solver for progress in solution.log if progress.message.startswith("+")}


@pytest.mark.parametrize("graph", [gpt(layers=2), unet(depth=2), encoder_decoder(1, 1)], ids=["gpt", "unet", "encdec"])
def test_hilp_alone_keeps_half_of_the_memory(graph: Graph) -> None:
    """No other solver takes part on any level: without H-ILP there would be no schedule."""
    solution = first_found(half(graph), HiRemate(solvers=(HILP,), **ALONE))
    assert solution.schedule is not None
    assert all(name.startswith("hiremate at") for name in finders(solution))


def test_hilp_combines_options_as_well_as_can_be() -> None:
    """Two parts and one share of the budget: the best sum of their options is known by trying all."""
    graph = gpt(layers=2)
    solver = HiRemate(partitioner=InHalves(), solvers=(HILP, "anneal"), options=4, budget_shares=(1.0,), workers=1)
    (pieces,) = solver.hierarchies(graph)
    assert len(pieces.root.children) == 2
    problem = Problem(graph, peak_bytes(graph) * 8 // 10)
    solved = [
        Solved(piece.block, part, solve_task(Task(piece.block, part, (), (Anneal(),), 4, 60, seconds=600.0)))
        for piece in pieces.root.children
        for part in [gap_graph(graph, piece.block)]
    ]
    room = problem.budget_bytes - pieces.base_bytes
    runs = combined(solved, Gap.loss_of(graph), room, most_options=60, deadline=Deadline(120.0))
    assert runs is not None
    found = simulate(graph, Schedule.from_ops(graph, operators_of(graph, solved, runs)))
    assert found.valid and found.peak_bytes <= problem.budget_bytes
    each_once = [
        simulate(graph, Schedule.from_ops(graph, operators_of(graph, solved, once(first, second))))
        for first in solved[0].options
        for second in solved[1].options
    ]
    within = [seen.seconds for seen in each_once if seen.valid and seen.peak_bytes <= problem.budget_bytes]
    assert within and found.seconds <= min(within) * (1 + 1e-6)
    assert min(within) > graph.baseline_seconds * (1 + 1e-6)  # so that options had to be chosen


def once(first: Option, second: Option) -> list[PieceRun]:
    forward = [PieceRun(Pass.FORWARD, 0, first), PieceRun(Pass.FORWARD, 1, second)]
    return [*forward, PieceRun(Pass.LOSS), PieceRun(Pass.BACKWARD, 1, second), PieceRun(Pass.BACKWARD, 0, first)]


def test_nothing_steps_in_when_the_hierarchy_finds_nothing() -> None:
    graph = gpt(layers=2)
    solution = solve(half(graph), HiRemate(solvers=(HILP,), budget_shares=(), **ALONE), time_limit=30.0)
    assert solution.status is Status.NOT_FOUND and solution.schedule is None
    assert solution.log[-1].message == "the hierarchy has no schedule within the budget"


def test_polish_is_said() -> None:
    graph = gpt(layers=2)
    polished = HiRemate(solvers=(HILP,), budget_shares=(), unite=False, polish=True, workers=1)
    solution = first_found(half(graph), polished)
    assert solution.schedule is not None
    assert any("polish" in progress.message for progress in solution.log)


def test_a_graph_that_marks_no_loss_gets_one_between_its_passes() -> None:
    graph = gpt(layers=2)
    ops = tuple(replace(op, phase=Phase.FORWARD) if op.phase is Phase.LOSS else op for op in graph.ops)
    unmarked = replace(graph, ops=ops, held=frozenset(), targets=graph.targets | graph.held)
    assert unmarked.loss is None
    solution = first_found(half(unmarked), HiRemate(solvers=(HILP,), **ALONE))
    assert solution.schedule is not None
    assert all(name.startswith("hiremate at") for name in finders(solution))


def test_without_a_backward_pass_it_is_refused_with_the_reason() -> None:
    graph = Graph(
        tuple(Op(str(i), 1.0, (i - 1,) if i else (), (i,)) for i in range(4)),
        tuple(Value(str(i), 1) for i in range(4)),
        targets=frozenset({0, 3}),
    )
    with pytest.raises(SolverError, match="needs forward and backward operators"):
        solve(Problem(graph, peak_bytes(graph) - 1), "hiremate")


def test_a_partitioner_and_a_solver_of_ones_own_at_one_level() -> None:
    """Level 2, where `InThrees` cuts what H-Partition left there; only its parts are asked of the solver."""
    graph = gpt(layers=4)
    asked: list[Problem] = []
    at_level = {3: (HILP, Counting(asked))}
    solver = HiRemate(partitioners_at={2: InThrees()}, solvers=(HILP,), solvers_at=at_level, **ALONE)
    threes = [part for pieces in solver.hierarchies(graph) for part in parts_at(pieces.root.part, 3)]
    assert max(len(part.forward) for part in threes) == 3
    assert first_found(half(graph), solver).schedule is not None
    assert asked and all(sum(op.phase is Phase.FORWARD for op in problem.graph.ops) <= 4 for problem in asked)


def parts_at(root: Part, level: int) -> list[Part]:
    row = [root]
    for _ in range(level - 1):
        row = [child for part in row for child in part.children]
    return row


def test_a_module_trains_on_a_plan_of_ones_own_partitioner_and_solver() -> None:
    """Same losses and gradients as plain training, in less memory, with the user's code at one level."""
    asked: list[Problem] = []
    solver = HiRemate(partitioners_at={1: InThrees()}, solvers_at={2: (HILP, Counting(asked))}, **ALONE)
    plain, sample = Net(norm=False), batch()
    ours = rematch.remat(copy.deepcopy(plain), sample, budget="85%", solver=solver, time_limit=5.0)
    losses = {model: [trained(model, sample, step) for step in range(3)] for model in (plain, ours)}
    assert losses[plain] == losses[ours] and len(set(losses[plain])) == 3
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name))
    (plan,) = rematch.plans_of(ours)
    assert asked and plan.recomputed
    assert plan.figures.peak_bytes <= plan.figures.budget_bytes
    assert plan.figures.solver == "hiremate"


def trained(model: torch.nn.Module, sample: torch.Tensor, seed: int) -> float:
    """The loss before one step of gradient descent."""
    torch.manual_seed(seed)
    loss = mean_square(model(sample))
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            parameter.grad = None
    return loss.item()


def test_a_partition_that_cannot_run_is_refused() -> None:
    @dataclass(frozen=True)
    class Backwards(Partitioner):
        name = "backwards"

        def partition(self, graph: Graph) -> Part:
            root = InThrees().partition(graph)
            return Part(root.forward, root.children[::-1])

    with pytest.raises(SolverError, match="topological order"):
        solve(half(gpt(layers=2)), HiRemate(partitioner=Backwards(), **ALONE))


@pytest.fixture(params=["threads", pytest.param("dask", marks=pytest.mark.slow)])
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
    pieces = next(HiRemate().hierarchies(graph))
    blocks = [piece.block for piece in pieces.root.children]
    tasks = [Task(block, gap_graph(graph, block), (), (Anneal(),), 6, 60, seconds=600.0) for block in blocks[:4]]
    assert list(executor.map(solve_task, tasks)) == list(map(solve_task, tasks))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning")
def test_the_solver_uses_the_executor_it_is_given(executor: Executor) -> None:
    solution = first_found(half(gpt(layers=2)), HiRemate(solvers=(HILP,), executor=executor))
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


def test_bad_options_are_named() -> None:
    with pytest.raises(SolverError, match="options=0"):
        HiRemate(options=0)
    with pytest.raises(SolverError, match="budget_shares from 0 to 1"):
        HiRemate(budget_shares=(1.3,))
