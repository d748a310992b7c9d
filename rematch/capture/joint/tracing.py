"""Trace a module with Dynamo and AOTAutograd so that the joint graph holds the kernels eager would run.

`with as_eager_runs(): trace()`

Three things make a traced graph differ from eager. Python decompositions stand in for composite operators (dropout,
lstm, batch norm, upsampling): eager never runs them, so they are put aside. Autocast of the forward would also be
active while backward is traced, where eager has none. And tangents are taken to lie in memory as the outputs do, where
the loss lays them out as it likes, which decides what kernels of backward compute and copy.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
import torch._functorch.config
import torch.fx.traceback
from torch._C import DispatchKey
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import GraphModule

from rematch.capture.aten import IN_PLACE
from rematch.capture.joint.read import Input, Layout
from rematch.capture.joint.traced import clean_path, is_tangent
from rematch.errors import CaptureError

_COMPOSITE = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)

# What Dynamo must allow or do for whole modules; read whenever it traces.
DYNAMO_SETTINGS: dict[str, Any] = {
    "allow_rnn": True,  # LSTM and GRU are single operators to us
    "recompile_limit": 1024,  # each shape has its plan
    "accumulated_recompile_limit": 4096,
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "suppress_errors": False,
    "skip_nnmodule_hook_guards": False,  # a hook that is added later counts
}
# A log message is no reason to cut a graph in two; it is left out while the captured graph runs.
_LOGGING = (
    "debug",
    "info",
    "warning",
    "error",
    "critical",
    "exception",
    "log",
    "warning_once",
    "info_once",
    "warning_advice",
)


class _Methods(set[Any]):
    """A set to look things up in, empty to whoever walks over it: Dynamo sorts its settings for a log, and fails."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@lru_cache(maxsize=1)
def _logging_setting() -> str:
    names = ("ignore_logging_functions", "ignore_logger_methods")  # the second one before torch 2.12
    return next(name for name in names if hasattr(torch._dynamo.config, name))


def dynamo_settings() -> dict[str, Any]:
    """`DYNAMO_SETTINGS` with what depends on the libraries that are loaded."""
    methods = _Methods(getattr(logging.Logger, name) for name in _LOGGING if hasattr(logging.Logger, name))
    return {**DYNAMO_SETTINGS, _logging_setting(): methods}


@contextmanager
def as_eager_runs(tangents: Sequence[Layout] = ()) -> Iterator[None]:
    """While AOTAutograd traces inside, operators break down as they do in eager and no further.

    `tangents` are the layouts, where they are known, of the gradients of the differentiable outputs.
    """
    settings = {
        "donated_buffer": False,
        "backward_pass_autocast": "off",
        "guess_tangent_strides_as_outputs": bool(tangents),  # as the tensors that stand for them are, to be exact
    }
    known = {name: value for name, value in settings.items() if hasattr(torch._functorch.config, name)}
    with ExitStack() as stack:
        stack.enter_context(torch._functorch.config.patch(known))
        stack.enter_context(_in_place_marked())
        if tangents:
            stack.enter_context(_laid_out(tangents))
        for op, keys in _python_decompositions():
            stack.callback(_restore, op, {key: op.py_kernels.pop(key) for key in keys})
            _forget_dispatch(op)
        yield


@contextmanager
def _in_place_marked() -> Iterator[None]:
    """Nodes remember that eager would overwrite their first argument; tracing makes a new tensor of the result."""
    plain = FunctionalTensorMode.__torch_dispatch__

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and func.overloadpacket.__name__.endswith("_") and func._schema.is_mutable:
            with torch.fx.traceback.annotate({IN_PLACE: True}):
                return plain(mode, func, types, args, kwargs)
        return plain(mode, func, types, args, kwargs)

    with patch.object(FunctionalTensorMode, "__torch_dispatch__", dispatch):
        yield


@contextmanager
def _laid_out(tangents: Sequence[Layout]) -> Iterator[None]:
    """Trace tangents with these strides. AOTAutograd asks for them in the order of the outputs, perhaps repeatedly."""
    name = "coerce_tangent_and_suggest_memory_format"
    plain = getattr(collect_metadata_analysis, name)
    turns = cycle(tangents)
    waiting = next(turns)

    def coerce(output: Any) -> Any:
        nonlocal waiting
        coerced, *rest = plain(output)
        if isinstance(coerced, torch.Tensor) and waiting.shape == tuple(coerced.shape):
            stride, waiting = waiting.stride, next(turns)
            coerced = coerced if stride is None else coerced.new_empty_strided(coerced.shape, stride)
        return coerced, *rest

    with patch.object(collect_metadata_analysis, name, coerce):
        yield


@lru_cache(maxsize=1)
def _python_decompositions() -> tuple[tuple[OpOverload, tuple[DispatchKey, ...]], ...]:
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            keys = tuple(key for key in _COMPOSITE if key in op.py_kernels)
            if keys:
                found.append((op, keys))
    return tuple(found)


def _restore(op: OpOverload, kernels: dict[DispatchKey, Any]) -> None:
    op.py_kernels.update(kernels)
    _forget_dispatch(op)


def _forget_dispatch(op: OpOverload) -> None:
    op._dispatch_cache.clear()


def describe_inputs(module: GraphModule) -> list[Input]:
    """What Dynamo says that the placeholders of its graph are."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [replace(_describe_source(_source_name(node)), is_leaf=_is_leaf(node)) for node in nodes]


def _is_leaf(node: torch.fx.Node) -> bool:
    example = node.meta.get("example_value")
    return not isinstance(example, torch.Tensor) or example.is_leaf


def _source_name(node: torch.fx.Node) -> str:
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None) or getattr(node, "_dynamo_source", None)
    if source is None:
        return node.name
    return source.name if isinstance(source.name, str) else source.name()


def _describe_source(source: str) -> Input:
    if match := re.fullmatch(r"(.*)\._(parameters|buffers)\['([^']*)'\]", source):
        return Input(f"{clean_path(match[1])}.{match[3]}".lstrip("."), match[2])
    return Input(clean_path(source) or source, "inputs")


def inputs_of_joint(joint: GraphModule, described: Sequence[Input]) -> list[Input]:
    """The description of each placeholder of the joint graph that is no tangent.

    AOTAutograd may leave some out (the same tensor given twice), so it says which is which.
    """
    found = []
    for node in joint.graph.nodes:
        if node.op == "placeholder" and not is_tangent(node):
            index = getattr(node.meta.get("desc"), "idx", None)
            known = isinstance(index, int) and index < len(described)
            found.append(described[index] if known else Input(node.name, "inputs"))  # type: ignore[index]
    return found


def explain_failure(error: Exception) -> CaptureError:
    """A graph break or another refusal of Dynamo, as the user's line, the reason and the ways around it."""
    if (raised := _RAISED.search(str(error))) is not None:
        return CaptureError(
            f"forward fails with these arguments{_user_line(error)}: {raised[1]}\n"
            "Give the arguments that the module is called with; the plain module should fail with these in the same way"
        )
    if "set the storage of a tensor on device" in str(error):
        return CaptureError(
            "cuDNN's recurrent layers (nn.LSTM, nn.GRU, nn.RNN on a CUDA device) cannot be captured: they pack their "
            "weights and draw dropout in ways of their own\n"
            "Ways around it: set torch.backends.cudnn.enabled = False around planning and training, which runs them "
            "with other kernels of PyTorch; or apply rematch to the submodules before and after them"
        )
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    hint = next((m[1].strip() for m in re.finditer(r"Hint: (.*)", str(error))), "")
    explanation = next((m[1].strip() for m in re.finditer(r"Explanation: (.*)", str(error))), "")
    said = " ".join(part for part in (reason, explanation, f"Hint: {hint}" if hint else "") if part)
    return CaptureError(
        f"the module cannot be captured as one graph{_user_line(error)}: {said}\n"
        "Ways around it: move that line out of forward; guard it with `if not torch.compiler.is_compiling()`; "
        "or apply rematch to the submodules before and after it instead of the whole module"
    )


# How Dynamo reports an error that the traced code itself has.
_RAISED = re.compile(r"(?:raised exception|: got) (\w+\(.*\))$", re.MULTILINE)


def _user_line(error: Exception) -> str:
    stack = getattr(error, "real_stack", None) or ()
    frames = [frame for frame in stack if "/torch/" not in frame.filename and "/rematch/" not in frame.filename]
    return f' at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: "{frames[-1].line}"' if frames else ""
