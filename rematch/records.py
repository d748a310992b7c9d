"""Frozen dataclasses to and from plain JSON data, checked on the way in.

`from_json(Point, to_json(Point(1, 2.0)), "point")`

Fields may be dataclasses, enums (by value), literals, tuples, frozen sets, mappings (as pairs), optional or one of
several types, str, int, float, bool, `Any` (as it is in the JSON), and classes added with `add_codec`. Data that does
not fit raises `FormatError`, which names the place. Numbers must be finite and whole numbers fit 64 bits, so that
nobody who computes with them has to expect anything else.

A decoder is made once for each type, and the place is put together only when there is an error to report: graphs of
many thousand operators are read through here.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rematch.errors import FormatError, RematchError

T = TypeVar("T")
_Decoder = Callable[[Any], Any]
_SMALLEST_WHOLE, _LARGEST_WHOLE = -(2**63), 2**63 - 1
_SHOWN_LETTERS = 40


class _MisfitError(Exception):
    """What is wrong with a piece of data. `place` grows from the inside out as the error passes through decoders."""

    def __init__(self, complaint: str) -> None:
        super().__init__(complaint)
        self.place = ""

    def inside(self, outer: str) -> _MisfitError:
        """The same error, seen from around `outer`."""
        apart = "." if outer and self.place and not self.place.startswith("[") else ""
        self.place = f"{outer}{apart}{self.place}"
        return self


@dataclass(frozen=True)
class _Codec:
    encode: Callable[[Any], Any]
    plain: Any  # the type of what `encode` gives
    decode: Callable[[Any], Any]


_CODECS: dict[type, _Codec] = {}


def add_codec(kind: type[T], *, plain: Any, encode: Callable[[T], Any], decode: Callable[[Any], T]) -> None:
    """Let records have fields of type `kind`, written as `encode` gives them and read back from data of type `plain`.

    `decode` may raise a `RematchError` for data that cannot be.
    """
    _CODECS[kind] = _Codec(encode, plain, decode)


def to_json(record: Any, *, defaults: bool = True) -> Any:
    """`record` as dicts, lists, numbers and strings; without `defaults`, fields at their default are left out."""
    kind = type(record)
    if kind in _CODECS:
        return _CODECS[kind].encode(record)
    if isinstance(record, Enum):
        return record.value
    if isinstance(record, tuple):
        return [to_json(entry, defaults=defaults) for entry in record]
    if isinstance(record, frozenset):
        return [to_json(entry, defaults=defaults) for entry in sorted(record)]
    if isinstance(record, Mapping):
        return [[to_json(part, defaults=defaults) for part in pair] for pair in record.items()]
    if is_dataclass(kind):
        row = {}
        for name, default in _defaults(kind):
            entry = getattr(record, name)
            if defaults or default is MISSING or entry != default:
                row[name] = to_json(entry, defaults=defaults)
        return row
    return record


def from_json(kind: type[T], data: Any, where: str = "", *, strict: bool = False) -> T:
    """`data` as a `kind`; errors begin with `where`. Unknown keys are ignored, or errors if `strict`."""
    try:
        return cast(T, _decoder(cast(Any, kind), strict)(data))
    except _MisfitError as misfit:
        raise FormatError(f"{misfit.inside(where).place} {misfit}".lstrip()) from None


def show_json(data: Any) -> str:
    """`data` as it is shown in an error: as JSON, cut short, and safe on a terminal."""
    try:
        shown = json.dumps(data, ensure_ascii=False, default=repr)
    except (RecursionError, ValueError):  # nested too deeply; more digits than Python writes
        return f"a {type(data).__name__}"
    shown = shown if shown.isprintable() else json.dumps(data, default=repr)
    return shown if len(shown) <= _SHOWN_LETTERS else f"{shown[: _SHOWN_LETTERS - 3]}..."


@cache
def _decoder(kind: Any, strict: bool) -> _Decoder:
    if kind in _CODECS:
        return _coded(_CODECS[kind], strict)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if get_origin(kind) in (Union, types.UnionType):
        return _one_of_several(get_args(kind), strict)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), strict)
    if get_origin(kind) is frozenset:
        members = _list_of(get_args(kind)[0], strict)
        return lambda data: frozenset(members(data))
    if get_origin(kind) is Mapping:
        return _pairs(get_args(kind), strict)
    if get_origin(kind) is Literal:
        return _choice({name: name for name in get_args(kind)})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choice({member.value: member for member in kind})
    if is_dataclass(kind):
        return _dataclass(kind, strict)
    raise _undecodable(kind)


def _undecodable(kind: Any) -> FormatError:
    return FormatError(f"a {getattr(kind, '__name__', kind)} cannot be given as text, only from Python")


def _misfit(expected: str, data: Any) -> _MisfitError:
    return _MisfitError(f"should be {expected}, not {show_json(data)}")


def _text(data: Any) -> str:
    if type(data) is not str:
        raise _misfit("text", data)
    return data


def _flag(data: Any) -> bool:
    if type(data) is not bool:
        raise _misfit("true or false", data)
    return data


def _whole(data: Any) -> int:
    if type(data) is not int:
        raise _misfit("a whole number", data)
    if not _SMALLEST_WHOLE <= data <= _LARGEST_WHOLE:
        raise _misfit("a whole number of at most 64 bits", data)
    return data


def _number(data: Any) -> float:
    if type(data) not in (int, float):
        raise _misfit("a number", data)
    try:
        found = float(data)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise _misfit("a finite number below 1e308", data)
    return found


_SIMPLE: dict[Any, _Decoder] = {str: _text, bool: _flag, int: _whole, float: _number, Any: lambda data: data}


def _coded(codec: _Codec, strict: bool) -> _Decoder:
    plain = _decoder(codec.plain, strict)

    def decode(data: Any) -> Any:
        try:
            return codec.decode(plain(data))
        except RematchError as error:
            raise _MisfitError(f"is wrong: {error}") from error

    return decode


def _one_of_several(kinds: Sequence[Any], strict: bool) -> _Decoder:
    """Types that JSON cannot hold are left out; of the others, the first that fits."""
    nullable = types.NoneType in kinds
    decoders = []
    for kind in kinds:
        if kind is not types.NoneType:
            try:
                decoders.append(_decoder(kind, strict))
            except FormatError:
                continue
    if not decoders:
        raise _undecodable(kinds[0])

    def decode(data: Any) -> Any:
        if data is None and nullable:
            return None
        for one in decoders[:-1]:
            try:
                return one(data)
            except _MisfitError:
                continue
        return decoders[-1](data)

    return decode


def _tuple(kinds: Sequence[Any], strict: bool) -> _Decoder:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return _list_of(kinds[0], strict)
    decoders = [_decoder(kind, strict) for kind in kinds]

    def decode(data: Any) -> tuple[Any, ...]:
        if type(data) is not list or len(data) != len(decoders):
            raise _misfit(f"a list of {len(decoders)}", data)
        return tuple(one(entry) for one, entry in zip(decoders, data, strict=True))

    return decode


def _pairs(kinds: Sequence[Any], strict: bool) -> _Decoder:
    pair = _tuple(kinds, strict)

    def decode(data: Any) -> dict[Any, Any]:
        if type(data) is not list:
            raise _misfit("a list of pairs", data)
        return dict(pair(entry) for entry in data)

    return decode


def _list_of(kind: Any, strict: bool) -> _Decoder:
    one = _decoder(kind, strict)

    def decode(data: Any) -> tuple[Any, ...]:
        if type(data) is not list:
            raise _misfit("a list", data)
        found: list[Any] = []
        try:
            for entry in data:
                found.append(one(entry))
        except _MisfitError as misfit:
            raise misfit.inside(f"[{len(found)}]{_name_of(data[len(found)])}") from None
        return tuple(found)

    return decode


def _name_of(entry: Any) -> str:
    """` ('conv1')` for a row that has a name, which says more than its number."""
    name = entry.get("name") if isinstance(entry, dict) else None
    return f" ({show_json(name)})" if isinstance(name, str) else ""


def _choice(members: dict[Any, Any]) -> _Decoder:
    expected = f"one of {', '.join(map(show_json, members))}"

    def decode(data: Any) -> Any:
        if type(data) in (list, dict) or data not in members or type(data) is bool:
            raise _misfit(expected, data)
        return members[data]

    return decode


def _dataclass(kind: Any, strict: bool) -> _Decoder:
    hints = get_type_hints(kind)
    decoders = {field.name: _decoder(hints[field.name], strict) for field in fields(kind) if field.init}
    required = {name for name, default in _defaults(kind) if default is MISSING}

    def decode(data: Any) -> Any:
        if type(data) is not dict:
            raise _misfit("an object", data)
        given = {}
        for name, entry in data.items():
            one = decoders.get(name)
            if one is not None:
                try:
                    given[name] = one(entry)
                except _MisfitError as misfit:
                    raise misfit.inside(name) from None
            elif strict:
                raise _MisfitError(f"has an unknown field {show_json(name)}")
        if not required <= given.keys():
            raise _MisfitError(f"has no {show_json(min(required - given.keys()))}")
        return kind(**given)

    return decode


@cache
def _defaults(kind: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that its constructor takes, each with its default or MISSING."""
    return [(field.name, _default(field)) for field in fields(kind) if field.init]


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
