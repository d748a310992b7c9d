"""Budgets as people write them, and budgets that cannot work."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rematch.errors import BudgetError, BudgetInfeasible
from rematch.graph import Graph, Op, Value
from rematch.planning.budget import parse_budget, require_possible
from rematch.units import format_bytes


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("2tib", 2 * 2**40),
        (".5kb", 500),
        ("4096B", 4096),
        ("80%", 800),
        (" 33.3 % ", 333),
        ("120%", 1200),
        ("5.05e9", 5_050_000_000),
        (5.05e9, 5_050_000_000),
        (12345, 12345),
    ],
)
def test_reads_what_people_write(written: str | float, expected: int) -> None:
    assert parse_budget(written, baseline_peak_bytes=1000) == expected


@pytest.mark.parametrize(
    "written", ["", "much", "8G", "8GB of", "8 %%", "-3", "-3GiB", "0", "0%", "0.4", "nan", "inf", float("nan"), True]
)
def test_refuses_rubbish_and_says_what_works(written: str | float) -> None:
    with pytest.raises(BudgetError, match="80%") as caught:
        parse_budget(written, baseline_peak_bytes=1000)
    assert repr(written) in str(caught.value)


@pytest.mark.parametrize("written", ["1e99", "9" * 40, "2000000TiB", 10**5000], ids=["1", "2", "3", "4"])
def test_refuses_more_than_any_machine_has(written: str | int) -> None:
    with pytest.raises(BudgetError, match="beyond"):
        parse_budget(written, baseline_peak_bytes=1000)


@pytest.mark.parametrize("written", ["1e999999999", "9" * 5000])
def test_hostile_numbers_are_not_computed(written: str) -> None:
    with pytest.raises(BudgetError, match="cannot be read") as caught:
        parse_budget(written, baseline_peak_bytes=1000)
    assert len(str(caught.value)) < 200


@given(st.integers(100, 2**50), st.integers(1, 100))
def test_a_percentage_is_rounded_down_exactly(peak_bytes: int, percent: int) -> None:
    assert parse_budget(f"{percent}%", peak_bytes) == peak_bytes * percent // 100


@given(st.integers(1, 2**49))
def test_what_is_shown_is_near_and_can_be_read_back(size_bytes: int) -> None:
    assert parse_budget(format_bytes(size_bytes), 1) == pytest.approx(size_bytes, rel=0.006, abs=1)


def needy_graph() -> Graph:
    values = (Value("weight", 100, resident=True), Value("x", 10), Value("y", 1000), Value("z", 3))
    ops = (
        Op("small", 1.0, (0,), (1,)),
        Op("hungry", 1.0, (1, 0), (2,), workspace_bytes=7),
        Op("last", 1.0, (2,), (3,)),
    )
    return Graph(ops, values, targets=frozenset({3}))


def test_names_the_operator_that_needs_more_than_the_budget_and_the_nearest_value() -> None:
    graph = needy_graph()
    require_possible(graph, 1117)
    with pytest.raises(BudgetInfeasible) as caught:
        require_possible(graph, 1116)
    said = str(caught.value)
    assert "'hungry' alone holds 1.09 KiB" in said
    assert "resident 100 B, inputs 10 B, outputs 0.98 KiB, workspace 7 B" in said
    assert "1117 bytes" in said


def test_values_that_must_be_there_at_the_end_count_together() -> None:
    values = (Value("a", 60), Value("b", 50))
    graph = Graph((Op("a", 1.0, (), (0,)), Op("b", 1.0, (), (1,))), values, targets=frozenset({0, 1}))
    with pytest.raises(BudgetInfeasible, match="110 bytes"):
        require_possible(graph, 100)
    require_possible(graph, 110)
