"""A module whose parameters and buffers are stood in for while its Python runs, and which nothing of that changes.

`with stood_in_for(module, {id(parameter): stand_in}): module(...)`
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, dict, set)


@contextmanager
def stood_in_for(module: nn.Module, stand_ins: dict[int, torch.Tensor]) -> Iterator[None]:
    """Inside, tensors of `module` are replaced by the stand-ins for their identities; afterwards all is as before.

    Attributes that the module's Python sets or changes meanwhile are put back: counters, caches, hooks, lists of its
    modules.
    """
    kept = [(part, dict(part.__dict__)) for part in module.modules()]
    contents = {
        id(value): (value, kind(value))
        for _, attributes in kept
        for value in attributes.values()
        for kind in _CONTAINERS
        if isinstance(value, kind)
    }
    try:
        for part, attributes in kept:
            for name, value in attributes.items():
                part.__dict__[name] = _replaced(value, stand_ins)
        yield
    finally:
        for part, attributes in kept:
            part.__dict__.clear()
            part.__dict__.update(attributes)
        for value, content in contents.values():
            _restore(value, content)


def _replaced(value: Any, stand_ins: dict[int, torch.Tensor]) -> Any:
    """`value`, or a copy of it in which stand-ins take the place of tensors."""
    if isinstance(value, torch.Tensor):
        return stand_ins.get(id(value), value)
    if type(value) in (list, tuple) and any(id(entry) in stand_ins for entry in value):
        return type(value)(stand_ins.get(id(entry), entry) for entry in value)
    if type(value) is dict and any(id(entry) in stand_ins for entry in value.values()):
        return {key: stand_ins.get(id(entry), entry) for key, entry in value.items()}
    return value


def _restore(value: Any, content: Any) -> None:
    """Give a container its entries back, unless it has them: some refuse to be written to."""
    if _entries(value) == _entries(content):
        return
    if isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        value.update(content)


def _entries(container: Any) -> Any:
    """What two containers have in common if they hold the same objects, in the same order where they have one."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(entry) for entry in container] if isinstance(container, list) else {id(entry) for entry in container}


@contextmanager
def random_states_kept(devices: list[torch.device]) -> Iterator[None]:
    """Draws inside leave no trace: torch's generators, Python's and numpy's are put back."""
    numpy = sys.modules.get("numpy")
    pythons = random.getstate()
    numpys = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(pythons)
        if numpy is not None and numpys is not None:
            numpy.random.set_state(numpys)
