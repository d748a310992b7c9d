"""A tape's plan as what JSON can say, and back.

`from_data(to_data(plan)) == plan`
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from rematch.errors import FormatError
from rematch.execute.tape.plan import TapePlan
from rematch.records import from_json, to_json


def to_data(plan: TapePlan) -> Any:
    """The plan with operators by their names; `FormatError` if one has none that finds it again."""
    return {**to_json(replace(plan, calls=())), "calls": [_name_of(call) for call in plan.calls]}


def from_data(data: Any) -> TapePlan:
    """What `to_data` wrote; `FormatError` for anything else, and for operators that are not there now."""
    named = from_json(TapePlan, data, "tape")
    return replace(named, calls=tuple(_operator(name) for name in named.calls))


def _name_of(call: Any) -> str:
    if not isinstance(call, OpOverload):
        raise FormatError(f"{call} has no name that finds it again")
    return f"{call.namespace}.{call.overloadpacket.__name__}.{call._overloadname}"


def _operator(name: Any) -> OpOverload:
    found: Any = torch.ops
    for part in str(name).split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise FormatError(f"there is no operator {name!r} here")
    return found
