"""Extra time against budget, and the smallest budget: both are what planning then gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import rematch
from rematch.foresight.tradeoff import Pareto, pareto_of
from rematch.graph.generators import chain
from rematch.solvers import Status
from tests.modules import Net, batch, mean_square

OPTIONS = {"loss": mean_square, "device": "h200", "time_limit": 2.0}


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def curve(net: Net) -> Pareto:
    return rematch.pareto(net, batch(), budgets=4, **OPTIONS)


def test_more_memory_never_takes_more_time(curve: Pareto) -> None:
    budgets = [point.budget_bytes for point in curve.points]
    extra = [point.overhead_pct for point in curve.points]
    assert budgets == sorted(set(budgets))
    assert budgets[-1] == curve.baseline_peak_bytes
    assert extra == sorted(extra, reverse=True)
    assert extra[-1] == 0.0 < extra[0]
    for point in curve.points:
        assert point.lower_bound_pct <= point.overhead_pct + 1e-9
        assert point.peak_bytes <= point.budget_bytes


def test_it_says_so_in_words_data_and_a_picture(curve: Pareto, tmp_path: Path) -> None:
    assert repr(curve) == str(curve)
    assert "100.0 %  +0.00 % time, bound +0.00 %" in str(curve)
    assert len(json.loads(json.dumps(curve.to_data()))["points"]) == 4
    curve.plot(tmp_path / "curve.svg")
    assert "no schedule is faster" in (tmp_path / "curve.svg").read_text()


def test_budgets_can_be_named_and_may_have_no_schedule() -> None:
    graph = chain(layers=8)
    curve = pareto_of(graph, ["100%", "1%"], time_limit=2.0)
    assert [point.status for point in curve.points] == [Status.INFEASIBLE, Status.OPTIMAL]
    assert "infeasible by auto" in str(curve)


def test_the_smallest_budget_works_and_what_is_proved_does_not(net: Net, tmp_path: Path) -> None:
    found = rematch.min_budget(net, batch(), **OPTIONS)
    assert found.infeasible_up_to_bytes < found.budget_bytes < found.baseline_peak_bytes
    plan = rematch.plan(net, batch(), engine="tape", budget=found.budget_bytes, **OPTIONS)
    assert plan.figures.peak_bytes <= found.budget_bytes
    with pytest.raises(rematch.BudgetInfeasible):
        rematch.plan(net, batch(), engine="tape", budget=found.infeasible_up_to_bytes, **OPTIONS)
    assert repr(found) == str(found)
    assert f"{found.budget_bytes} bytes" in str(found)
    assert json.loads(json.dumps(found.to_data()))["budget_bytes"] == found.budget_bytes
    found.plot(tmp_path / "smallest.png")
    assert (tmp_path / "smallest.png").stat().st_size > 0


def test_host_memory_makes_budgets_smaller_and_cheaper() -> None:
    """Values of 8 MiB, which an H200 copies in less time than it takes to compute them."""
    layers = [
        torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512)) for _ in range(6)
    ]
    module, x = torch.nn.Sequential(*layers), torch.randn(4096, 512)
    alone, moved = (
        rematch.pareto(module, x, budgets=["60%"], offload=offload, **OPTIONS).points[0] for offload in (False, "1GiB")
    )
    assert alone.overhead_pct is not None and moved.overhead_pct is not None
    assert moved.lower_bound_pct <= moved.overhead_pct < alone.overhead_pct
    least = rematch.min_budget(module, x, **OPTIONS)
    with_host = rematch.min_budget(module, x, offload="1GiB", **OPTIONS)
    assert with_host.infeasible_up_to_bytes < with_host.budget_bytes <= least.budget_bytes
    plan = rematch.plan(module, x, budget=with_host.budget_bytes, offload="1GiB", **OPTIONS)
    assert plan.figures.peak_bytes <= with_host.budget_bytes
