"""Dataclasses to JSON and back, and what is said when the JSON does not fit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given, strategies as st

from rematch.errors import FormatError
from rematch.graph import Schedule
from rematch.records import from_json, to_json


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    label: str
    ratio: float | None = None


@dataclass(frozen=True)
class Outer:
    count: int
    good: bool
    colour: Colour
    inners: tuple[Inner, ...]
    schedule: Schedule
    mode: Literal["any", "default"] = "any"


inners = st.builds(Inner, st.text(), st.none() | st.floats(allow_nan=False, allow_infinity=False))
outers = st.builds(
    Outer,
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.sampled_from(Colour),
    st.lists(inners).map(tuple),
    st.lists(st.integers(-99, 99)).map(Schedule),
    st.sampled_from(["any", "default"]),
)


@given(outers)
def test_comes_back_equal(record: Outer) -> None:
    assert from_json(Outer, json.loads(json.dumps(to_json(record))), "outer") == record


def good_data() -> dict[str, Any]:
    return {"count": 1, "good": True, "colour": "red", "inners": [{"label": "a"}], "schedule": [0, -1]}


def test_defaults_may_be_left_out_and_unknown_keys_are_ignored() -> None:
    record = from_json(Outer, {**good_data(), "later": 3}, "outer")
    assert record.mode == "any"
    assert record.inners == (Inner("a", None),)


@pytest.mark.parametrize(
    ("key", "wrong", "said"),
    [
        ("count", "1", 'outer.count should be a whole number, not "1"'),
        ("count", True, "outer.count should be a whole number, not true"),
        ("count", 1.0, "outer.count should be a whole number"),
        ("good", 1, "outer.good should be true or false, not 1"),
        ("colour", "green", 'outer.colour should be one of "red", "blue", not "green"'),
        ("colour", [], "outer.colour should be one of"),
        ("inners", {}, "outer.inners should be a list"),
        ("inners", [{"label": "a"}, 3], r"outer.inners\[1\] should be an object, not 3"),
        ("inners", [{}], r'outer.inners\[0\] has no "label"'),
        ("inners", [{"label": "a", "ratio": "x"}], r"outer.inners\[0\].ratio should be a number, not"),
        ("schedule", [0, "x"], r"outer.schedule\[1\]"),
        ("schedule", [2**40], r"outer.schedule is wrong: a step is beyond"),
        (
            "inners",
            [{"label": "a", "ratio": 10**400}],
            r"outer.inners\[0\].ratio should be a finite number below 1e308",
        ),
        ("mode", "some", 'outer.mode should be one of "any", "default"'),
        ("count", 2**63, "outer.count should be a whole number of at most 64 bits"),
        ("inners", [{"label": "a", "ratio": float("inf")}], "should be a finite number"),
        ("count", "\x1b[31mred", r'not "\\u001b\[31mred"'),
        ("count", "\ud800", r'not "\\ud800"'),
        ("count", "x" * 99, r"x\.\.\.$"),
    ],
)
def test_says_where_and_what_does_not_fit(key: str, wrong: Any, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        from_json(Outer, {**good_data(), key: wrong}, "outer")


def test_a_whole_number_is_a_float_too() -> None:
    assert from_json(Inner, {"label": "a", "ratio": 2}, "inner") == Inner("a", 2.0)


def test_strict_refuses_unknown_keys() -> None:
    with pytest.raises(FormatError, match=r'^outer has an unknown field "later"'):
        from_json(Outer, {**good_data(), "later": 3}, "outer", strict=True)


def test_a_row_with_a_name_is_named() -> None:
    @dataclass(frozen=True)
    class Row:
        name: str
        size: int

    with pytest.raises(FormatError, match=r'^\[1\] \("b"\).size should be a whole number, not null'):
        from_json(tuple[Row, ...], [{"name": "a", "size": 1}, {"name": "b", "size": None}])  # type: ignore[arg-type]


def test_defaults_are_left_out_on_demand() -> None:
    assert to_json(Inner("a"), defaults=False) == {"label": "a"}


def test_what_json_cannot_hold_is_said() -> None:
    with pytest.raises(FormatError, match="a bytes cannot be given as text"):
        from_json(bytes, "x")
    assert from_json(int | bytes, 3) == 3  # type: ignore[arg-type]
