"""Tensors in what forward takes and returns, however deep.

`tensors_in(Outputs(logits=tensor, extra={"more": [tensor]}))`
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_DEPTH = 4  # objects in objects; what lies deeper is not looked for
_NO_TENSORS = (str, bytes, int, float, complex, type, nn.Module)


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """In containers, dataclasses and attributes of other objects; each place once, in order."""
    found: list[torch.Tensor] = []
    _visit(structure, 0, found, set())
    return found


def _visit(value: Any, depth: int, found: list[torch.Tensor], seen: set[int]) -> None:
    """No closure of the above: one that calls itself keeps what it finds until the next collection of garbage."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif depth < _DEPTH and id(leaf) not in seen and not isinstance(leaf, _NO_TENSORS):
            seen.add(id(leaf))
            _visit(_attributes(leaf), depth + 1, found, seen)


def _attributes(value: Any) -> list[Any]:
    if is_dataclass(value):
        return [getattr(value, field.name, None) for field in fields(value)]
    return list(getattr(value, "__dict__", {}).values())
