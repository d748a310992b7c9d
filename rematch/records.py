"""Frozen dataclasses to and from plain JSON data, checked on the way in.

`from_json(Point, to_json(Point(1, 2.0)), "point")`

Knows what plans are made of: dataclasses, enums by value, literals, tuples of one type, optional fields, schedules, and
str, int, float and bool. What does not fit raises `FormatError` and names the place.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rematch.errors import FormatError, ScheduleError
from rematch.graph import Schedule

T = TypeVar("T")
_LARGEST_WHOLE_FLOAT = 10**308


def to_json(record: Any) -> Any:
    """`record` as dicts, lists, numbers and strings."""
    if isinstance(record, Schedule):
        return record.steps.tolist()
    if is_dataclass(record):
        return {field.name: to_json(getattr(record, field.name)) for field in fields(record)}
    if isinstance(record, Enum):
        return record.value
    if isinstance(record, tuple):
        return [to_json(entry) for entry in record]
    return record


def from_json(kind: type[T], data: Any, where: str) -> T:
    """`data` as a `kind`; `where` is how errors call it. Keys that `kind` does not have are ignored."""
    return cast(T, _decode(kind, data, where))


def _decode(kind: Any, data: Any, where: str) -> Any:
    if kind is Schedule:
        return _decode_schedule(data, where)
    if is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (option for option in get_args(kind) if option is not types.NoneType)
        return None if data is None else _decode(inner, data, where)
    if get_origin(kind) is tuple:
        entry_kind = get_args(kind)[0]
        _require(isinstance(data, list), "a list", data, where)
        return tuple(_decode(entry_kind, entry, f"{where}[{index}]") for index, entry in enumerate(data))
    if get_origin(kind) is Literal:
        return _one_of(get_args(kind), data, where)
    if issubclass(kind, Enum):
        return kind(_one_of([member.value for member in kind], data, where))
    if kind is float and type(data) is int:
        _require(abs(data) < _LARGEST_WHOLE_FLOAT, "a number below 1e308", data, where)
        return float(data)
    _require(type(data) is kind, f"a value of type {kind.__name__}", data, where)
    return data


def _decode_schedule(data: Any, where: str) -> Schedule:
    try:
        return Schedule(_decode(tuple[int, ...], data, where))
    except ScheduleError as error:
        raise FormatError(f"{where}: {error}") from error


def _decode_dataclass(kind: Any, data: Any, where: str) -> Any:
    _require(isinstance(data, dict), "an object", data, where)
    hints = get_type_hints(kind)
    return kind(**{f.name: _decode(hints[f.name], _entry(data, f, where), f"{where}.{f.name}") for f in fields(kind)})


def _one_of(known: Sequence[Any], data: Any, where: str) -> Any:
    _require(data in known, f"one of {', '.join(map(repr, known))}", data, where)
    return data


def _entry(data: dict[str, Any], field: Field[Any], where: str) -> Any:
    if field.name in data:
        return data[field.name]
    if field.default is MISSING:
        raise FormatError(f"{where} has no {field.name!r}")
    return to_json(field.default)


def _require(fits: bool, expected: str, data: Any, where: str) -> None:
    if not fits:
        shown = repr(data)
        raise FormatError(f"{where} should be {expected}, not {shown if len(shown) <= 40 else shown[:37] + '...'}")
