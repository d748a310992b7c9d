"""Faster ways to call an operator from Python, each shown to be the same call.

`binding_of(node)` is `torch.addmm` for a node that calls `aten.addmm.default`

`torch.ops` converts arguments by the operator's schema, which takes a few microseconds each time; PyTorch's generated
bindings, the functions of `torch` and the methods of `Tensor`, have code for it. Which overload a binding picks depends
on the kinds of its arguments. So each is tried on the traced tensors, without computing anything, and taken only if the
dispatcher then gets this one call: the operator of the graph with the arguments of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rematch.capture.measure import below_autograd

_HOMES: tuple[Any, ...] = (
    torch._C._VariableFunctions,
    torch._C._nn,  # type: ignore[attr-defined]
    torch._C._fft,  # type: ignore[attr-defined]
    torch._C._linalg,  # type: ignore[attr-defined]
    torch._C.TensorBase,
)


def binding_of(node: Node) -> Callable[..., Any] | None:
    """A binding that makes the call of `node`; None if there is none, or none that is sure to."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda arg: arg.meta.get("val"))  # type: ignore[misc]
    name = target._schema.name.removeprefix("aten::")
    for home in _HOMES:
        binding: Callable[..., Any] | None = getattr(home, name, None)
        if binding is not None and _makes_the_call(binding, target, args, kwargs, node.meta.get("val")):
            return binding
    return None


class _Listening(TorchDispatchMode):
    """Notes calls that reach the dispatcher and answers with a known result."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return self.result


def _makes_the_call(binding: Callable[..., Any], target: OpOverload, args: Any, kwargs: Any, result: Any) -> bool:
    try:
        with _disable_current_modes(), below_autograd(), _Listening(result) as heard:
            binding(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError):  # it does not take these arguments, or returns something else
        return False
    if len(heard.calls) != 1:
        return False
    called, heard_args, heard_kwargs = heard.calls[0]
    return called is target and _same(_by_name(target, heard_args, heard_kwargs), _by_name(target, args, kwargs))


def _by_name(target: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments that are not at their defaults."""
    schema = target._schema.arguments
    given = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {name: value for name, value in given.items() if not (name in defaults and _same(value, defaults[name]))}


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        return ours is theirs
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)
