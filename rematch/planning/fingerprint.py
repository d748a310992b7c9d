"""A name for everything that a plan depends on, the same in every process.

`fingerprint(module, (args, kwargs), loss, settings)`

Tensors count by their shapes and types, not by what they contain; modules by their parts, modes, hooks and attributes
of simple kinds; functions by their code, with the functions and simple values that it reaches by name. What is left out
(other global state, values inside tensors) can make two different trainings share a plan. That is safe: a tape that
leaves its plan plans again, and results do not depend on plans.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import sys
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rematch import __version__
from rematch.capture.measure import conditions

_DEPTH = 5  # objects in objects; what lies deeper counts by its type alone
_SIMPLE = (type(None), bool, int, str)
_WRITTEN = (float, complex, torch.dtype, torch.layout, torch.memory_format, range, slice)
_PARTS_OF_MODULES = ("_parameters", "_buffers", "_modules", "training")
_HOOKS = re.compile(r"^_.*hooks")  # of a module: by numbers that count all hooks of the process
_AUTOCAST_DEVICES = ("cpu", "cuda")
_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_OURS = "rematch."


def fingerprint(*things: Any, device: torch.device) -> str:
    """A hash of `things` and of where they run: device, versions and torch's settings."""
    told = _Teller().tell([*things, _surroundings(device)])
    return hashlib.sha256(json.dumps(told, separators=(",", ":")).encode("utf-8", "surrogatepass")).hexdigest()


def _surroundings(device: torch.device) -> list[Any]:
    return [
        conditions(device),
        [np.__version__, platform.python_version(), __version__, _own_sources()],
        [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in _AUTOCAST_DEVICES
        ],
        [torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled],
        [getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in _ATTENTION_KERNELS],
    ]


@functools.cache
def _own_sources() -> str:
    """Changes when rematch does, for whoever works on it: sizes and dates of its files."""
    root = Path(__file__).parents[1]
    dates = [(str(path.relative_to(root)), path.stat()) for path in sorted(root.rglob("*.py"))]
    return hashlib.sha256(repr([(name, seen.st_size, seen.st_mtime_ns) for name, seen in dates]).encode()).hexdigest()


class _Teller:
    """Turns objects into what JSON can say. What was told before is told by its number, which also ends cycles."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._alive: list[Any] = []  # so that no identity is used twice
        self._devices: dict[torch.device, int] = {}

    def tell(self, thing: Any, depth: int = 0) -> Any:
        if type(thing) in _SIMPLE:
            return thing
        if isinstance(thing, _WRITTEN):
            return [type(thing).__name__, repr(thing)]
        if isinstance(thing, torch.device):
            return [thing.type, self._devices.setdefault(thing, len(self._devices))]  # of two ranks with a card each
        if isinstance(thing, Enum):
            return [_name_of(type(thing)), thing.name]
        if isinstance(thing, (type, types.ModuleType, types.BuiltinFunctionType)):
            return _name_of(thing)
        if isinstance(thing, (bytes, bytearray)):
            return hashlib.sha256(thing).hexdigest()
        if isinstance(thing, tuple) and depth <= _DEPTH:  # equal ones may be one object or two
            return [_name_of(type(thing)), *(self.tell(member, depth + 1) for member in thing)]
        number = self._numbers.get(id(thing))
        if number is not None:
            return ["again", number]
        self._numbers[id(thing)] = len(self._numbers)
        self._alive.append(thing)
        return self._told(thing, depth)

    def _told(self, thing: Any, depth: int) -> Any:
        if isinstance(thing, torch.Tensor):
            return self._tensor(thing)
        if isinstance(thing, nn.Module):
            return self._module(thing, depth)
        if isinstance(thing, types.FunctionType):
            return self._function(thing, None, depth)
        if isinstance(thing, types.MethodType):
            return [self._function(thing.__func__, type(thing.__self__), depth), self.tell(thing.__self__, depth + 1)]
        if isinstance(thing, functools.partial):
            return ["partial", *(self.tell(part, depth) for part in (thing.func, thing.args, thing.keywords))]
        name = _name_of(type(thing))
        if depth > _DEPTH:
            return name
        if isinstance(thing, dict):
            pairs = [[self.tell(key, depth + 1), self.tell(value, depth + 1)] for key, value in thing.items()]
            return [name, *pairs]
        if isinstance(thing, (set, frozenset)):
            return [name, *sorted(json.dumps(self.tell(member, depth + 1)) for member in thing)]
        if isinstance(thing, list):
            return [name, *(self.tell(member, depth + 1) for member in thing)]
        if _is_foreign(type(thing).__module__) and not isinstance(thing, types.SimpleNamespace):
            return name
        return [name, self._attributes(getattr(thing, "__dict__", {}), depth)]

    def _tensor(self, tensor: torch.Tensor) -> list[Any]:
        stride = tensor.stride() if tensor.layout is torch.strided else None
        kinds = [_name_of(type(tensor)), str(tensor.dtype), str(tensor.layout), self.tell(tensor.device)]
        return [*kinds, list(tensor.shape), stride, tensor.requires_grad, tensor.is_leaf and tensor.grad is not None]

    def _module(self, module: nn.Module, depth: int) -> list[Any]:
        state = module.__dict__
        tensors = [[name, self.tell(t)] for kind in _PARTS_OF_MODULES[:2] for name, t in state.get(kind, {}).items()]
        parts = [[name, self.tell(part)] for name, part in state.get("_modules", {}).items()]
        attributes = {name: value for name, value in state.items() if name not in _PARTS_OF_MODULES}
        for name in [name for name in attributes if _HOOKS.search(name)]:
            attributes[name] = list(attributes[name].values() if isinstance(attributes[name], dict) else ())
        code = self._function(type(module).forward, type(module), depth)
        return [_name_of(type(module)), module.training, tensors, parts, self._attributes(attributes, depth), code]

    def _attributes(self, attributes: dict[str, Any], depth: int) -> list[Any]:
        """Left out are hashes that objects have of themselves, which differ between processes, and what is ours."""
        ours = [name for name, value in attributes.items() if _name_of(type(value)).startswith(_OURS)]
        told = sorted(name for name in attributes if "hash" not in name and name not in ours)
        return [[name, self.tell(attributes[name], depth + 1)] for name in told]

    # Functions

    def _function(self, function: Any, owner: type | None, depth: int) -> Any:
        """What a function does; `owner` is the class of `self`, if it is a method."""
        code = getattr(function, "__code__", None)
        if code is None or _is_foreign(getattr(function, "__module__", "")):
            return _name_of(function)
        number = self._numbers.get((code, owner))
        if number is not None:
            return ["again", number]
        self._numbers[code, owner] = len(self._numbers)
        depth = max(depth, _DEPTH - 1)  # what functions reach is told in short
        around = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        given = [function.__defaults__, function.__kwdefaults__, around]
        reached = [self._reached(value, owner, depth) for value in _reached_by(function, owner)]
        return [function.__qualname__, _code_text(code), self.tell(given, depth), reached]

    def _reached(self, value: Any, owner: type | None, depth: int) -> Any:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, types.FunctionType):
            return self._function(value, owner, depth)
        return self.tell(value) if isinstance(value, (*_SIMPLE, *_WRITTEN)) else _name_of(type(value))


def _reached_by(function: Any, owner: type | None) -> Iterator[Any]:
    """What the names in a function's code stand for: globals, functions of modules, attributes of its class."""
    names = list(dict.fromkeys(_names_in(function.__code__)))
    modules = []
    for name in names:
        if name in function.__globals__:
            value = function.__globals__[name]
            yield value
            if isinstance(value, types.ModuleType) and not _is_foreign(value.__name__):
                modules.append(value)
    for name in names:
        for module in modules:
            value = vars(module).get(name)
            if isinstance(value, types.FunctionType):
                yield value
        for kind in owner.__mro__ if owner is not None else ():
            if name in vars(kind) and not _is_foreign(kind.__module__):
                yield vars(kind)[name]
                break


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _code_text(code: types.CodeType) -> str:
    digest = hashlib.sha256(code.co_code)
    digest.update(repr([code.co_names, code.co_varnames, list(map(_constant_text, code.co_consts))]).encode())
    return digest.hexdigest()


def _constant_text(constant: Any) -> str:
    if isinstance(constant, types.CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):  # whose order differs between processes
        return repr(sorted(map(_constant_text, constant)))
    return repr(constant)


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_foreign(module: str | None) -> bool:
    """Whether what a module holds is known by the versions of torch, numpy, rematch and Python."""
    top = (module or "").partition(".")[0]
    return top in ("torch", "numpy", "rematch") or (top in sys.stdlib_module_names and top != "__main__")


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', getattr(thing, '__name__', ''))}"
