"""A registry of classes that are found by name: solvers have one, and so do HiRemate's partitioners.

`Registry("solver", {"noremat": "rematch.solvers.noremat:NoRemat"}).make("noremat")`

Built-in classes are listed as "module:class" and imported when they are asked for, so that listing their names loads
none of their libraries. Users add classes of their own with `register`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rematch.errors import SolverError, unknown_name


class Named(Protocol):
    """A class with a name to find it by. Its options are the fields of a dataclass."""

    name: ClassVar[str]


Kind = TypeVar("Kind", bound=Named)


class Registry(Generic[Kind]):
    """Classes of one kind by name; `kind` is the word for them in error messages."""

    def __init__(self, kind: str, built_in: Mapping[str, str]) -> None:
        self._kind = kind
        self._built_in = dict(built_in)
        self._added: dict[str, type[Kind]] = {}

    def names(self) -> list[str]:
        """All names, built-in ones first."""
        return [*self._built_in, *self._added]

    def register(self, cls: type[Kind]) -> type[Kind]:
        """Add a class under its name; it is returned, so that this can be a decorator."""
        if cls.name in self.names():
            raise SolverError(f"a {self._kind} named {cls.name!r} is registered already")
        self._added[cls.name] = cls
        return cls

    def find(self, name: str) -> type[Kind]:
        """The class of this name; `SolverError` with the nearest name if there is none."""
        if name in self._added:
            return self._added[name]
        if name not in self._built_in:
            raise SolverError(unknown_name(self._kind, name, self.names()))
        module, _, attribute = self._built_in[name].partition(":")
        found: type[Kind] = getattr(import_module(module), attribute)
        return found

    def make(self, name: str, **options: Any) -> Kind:
        """An instance of the class of this name; `SolverError` if it has no such option."""
        cls = self.find(name)
        self.check_options(cls, options)
        return cls(**options)

    def check_options(self, cls: type[Kind], options: Iterable[str]) -> None:
        """Raise `SolverError` unless each option is a field of the dataclass `cls`."""
        known: list[str] = [f.name for f in fields(cls)] if is_dataclass(cls) else []
        for option in options:
            if option not in known:
                raise SolverError(
                    f"{self._kind} {cls.name!r} has no option {option!r}; it has: {', '.join(known) or 'none'}"
                )
