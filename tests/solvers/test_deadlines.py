"""What cannot be interrupted is not begun where there is no time for it, and the log says so."""

from __future__ import annotations

from importlib import import_module

import pytest

from rematch.graph.generators import gpt
from rematch.solvers import Problem, Status, solve
from tests.problems import peak_bytes


@pytest.mark.parametrize(
    ("solver", "rate", "message"),
    [
        ("ap_sqrt", "common.policy._ENTRIES_PER_SECOND", "no room or time for a policy of"),
        ("linearized_greedy", "common.policy._MOST_ENTRIES", "no room or time for a policy of"),
        ("pwremat", "treewidth.pwremat._ENTRIES_PER_SECOND", "no time for a path whose bags have"),
        ("hiremate", "hiremate.solver._CUT_PER_SECOND", "no time to cut"),
    ],
)
def test_no_time_is_said_and_nothing_begun(
    monkeypatch: pytest.MonkeyPatch, solver: str, rate: str, message: str
) -> None:
    """The machine that is given does next to nothing in a second."""
    graph = gpt(layers=1)
    problem = Problem(graph, peak_bytes(graph) * 9 // 10)
    options = {"solvers": ("hilp",)} if solver == "hiremate" else {}
    found = solve(problem, solver, time_limit=5.0, **options)
    assert found.status is Status.FEASIBLE
    module, _, name = rate.rpartition(".")
    monkeypatch.setattr(import_module(f"rematch.solvers.{module}"), name, 1e-6)
    without = solve(problem, solver, time_limit=5.0, **options)
    assert without.status is Status.NOT_FOUND
    assert any(message in entry.message for entry in without.log)
