"""Tape plans as JSON: whatever a plan says is there again, and what no plan says is refused."""

from __future__ import annotations

import json

import pytest
import torch

from rematch.errors import FormatError
from rematch.execute.tape import TapePlan, UnpackEvent
from rematch.execute.tape.stored import from_data, to_data

aten = torch.ops.aten
PLAN = TapePlan(
    calls=(aten.mm.default, aten.relu_.default, aten.add.Tensor, torch.ops.prims.sum.default),
    noted=frozenset({0, 2}),
    dropped=frozenset({(2, 0), (0, 1)}),
    events=(UnpackEvent((2, 0), (0, (0, 1), 2), True, (2,)), UnpackEvent((0, 1))),
    shapes={2: (3, 4), 0: ()},
    rewritten=frozenset({1}),
)


def test_a_plan_is_what_was_written() -> None:
    found = from_data(json.loads(json.dumps(to_data(PLAN))))
    assert found == PLAN
    assert [step.call for step in found.steps] == list(PLAN.calls)


@pytest.mark.parametrize(
    "damage",
    [
        {"calls": ["aten.mm.default", "os.system"]},
        {"calls": [3]},
        {"noted": 3},
        {"events": [{"content": [1]}]},
        {"shapes": [[1]]},
        {"dropped": [["a", 0]]},
    ],
)
def test_anything_else_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        from_data({**to_data(PLAN), **damage})


def test_a_call_without_a_name_is_not_written() -> None:
    with pytest.raises(FormatError):
        to_data(TapePlan((print,), frozenset(), frozenset()))
