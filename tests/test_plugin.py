"""A user's own solver, registered from outside the package: `examples/own_solver.py`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rematch.errors import SolverError
from rematch.graph import baseline, simulate
from rematch.graph.generators import chain, gpt, random_layered, unet
from rematch.solvers import Problem, Progress, Status, base, make_solver, register, solve, solver_names
from rematch.solvers.noremat import NoRemat

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_solver.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example, loaded as a user's program would, and forgotten afterwards."""
    monkeypatch.setattr(base._solvers, "_added", {})
    spec = importlib.util.spec_from_file_location("own_solver", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_solver", module)
    spec.loader.exec_module(module)
    yield module


def half(graph: base.Graph, share: float = 0.7) -> Problem:
    return Problem(graph, int(share * simulate(graph, baseline(graph)).peak_bytes))


@pytest.mark.parametrize("graph", [chain(layers=30), gpt(layers=3), unet(depth=2)], ids=lambda graph: graph.name)
def test_is_found_by_name_and_keeps_the_budget(example: ModuleType, graph: base.Graph) -> None:
    seen: list[Progress] = []
    problem = half(graph)
    solution = solve(problem, "keep-every", on_progress=seen.append, most=20)
    assert solution.status is Status.FEASIBLE
    assert solution.schedule is not None
    assert simulate(graph, solution.schedule).peak_bytes <= problem.budget_bytes
    assert solution.log == tuple(seen)
    assert seen[-1].best_seconds == simulate(graph, solution.schedule).seconds


def test_refuses_politely_what_it_cannot_take(example: ModuleType) -> None:
    with pytest.raises(SolverError, match=r"'keep-every' does not apply .* it needs a graph with a loss"):
        solve(half(random_layered(nodes=20)), "keep-every")


def test_its_options_are_checked(example: ModuleType) -> None:
    assert make_solver("keep-every", most=3).most == 3
    with pytest.raises(SolverError, match="no option 'least'; it has: most"):
        make_solver("keep-every", least=3)


def test_a_name_can_be_taken_only_once(example: ModuleType) -> None:
    assert "keep-every" in solver_names()
    with pytest.raises(SolverError, match="'keep-every' is registered already"):
        register(example.KeepEvery)


def test_keeping_everything_recomputes_nothing(example: ModuleType) -> None:
    graph = gpt(layers=2)
    assert example.keep_every(graph, 1) == baseline(graph)


def test_options_beside_a_solver_that_has_them_already_are_refused() -> None:
    with pytest.raises(SolverError, match=r"pass nonsense to NoRemat\(\.\.\.\) instead"):
        solve(Problem(chain(layers=3), 2**40), NoRemat(), nonsense=3)
