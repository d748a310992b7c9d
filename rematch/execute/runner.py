"""The `forward` of a module that trains inside a budget.

`module.forward = Runner(module, planner)`

The first call with new shapes traces the module, asks the planner for a schedule and compiles it; Dynamo's guards choose
among what was compiled from then on. Everything that must survive copying and pickling is data; the compiled functions
are made again when needed.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch.fx import GraphModule

from rematch.capture.joint import Capture, Input
from rematch.capture.tracing import DYNAMO_SETTINGS, as_eager_runs, describe_inputs, explain_failure, inputs_of_joint
from rematch.errors import CaptureError, RematchError
from rematch.execute.partition import partition
from rematch.execute.source import compile_module
from rematch.graph import Schedule


class Planner(Protocol):
    """Turns a traced graph into a capture with costs, and a capture into a schedule."""

    def capture(self, joint: GraphModule, *, forward_outputs: int, inputs: list[Input]) -> Capture: ...

    def schedule(self, capture: Capture) -> Schedule: ...


class _Planned(BaseException):
    """Raised instead of running, once a plan is made: not an error, so that no user's handler takes it for one."""


class Runner:
    """Callable like the `forward` it replaces; see the module."""

    def __init__(self, module: nn.Module, planner: Planner) -> None:
        self.module = module
        self.planner = planner
        self._inner = module.__dict__.get("forward")  # set by another library on this very module
        self._reset()

    def _reset(self) -> None:
        self._compiled: Callable[..., Any] | None = None
        self._dry = False
        self._traced = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "planner": self.planner, "_inner": self._inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plain)

    @property
    def plain(self) -> Callable[..., Any]:
        """The module's own forward."""
        if self._inner is not None:
            inner: Callable[..., Any] = self._inner
            return inner
        return types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside another capture, which takes this module as part of itself
            return self.plain(*args, **kwargs)
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = self._compile()
        with _explained(), torch._dynamo.config.patch(DYNAMO_SETTINGS):
            return compiled(*args, **kwargs)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace, plan and compile for these arguments without running anything on them."""
        self._dry = True
        before = self._traced
        try:
            with torch.enable_grad():
                self(*args, **kwargs)
        except _Planned:
            pass
        finally:
            self._dry = False
        if self._traced == before:
            raise CaptureError(
                f"{type(self.module).__name__} was not captured: its forward has no tensor operation that could be planned, "
                "or torch.compile is disabled (TORCHDYNAMO_DISABLE, torch._dynamo.config.disable)"
            )

    def forget(self) -> None:
        """Compile again at the next call, because the plan has changed."""
        self._compiled = None

    def _compile(self) -> Callable[..., Any]:
        """A compiled function of its own code, so that no other module shares its cache or its limit of shapes."""
        return torch.compile(_entry(self.plain), backend=self._backend, fullgraph=True, dynamic=False)

    def _backend(self, module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        described = describe_inputs(module)
        compile_part = lambda part, _: compile_module(part)  # noqa: E731

        def split(
            joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
        ) -> tuple[GraphModule, GraphModule]:
            return self._split(joint, num_fwd_outputs, described)

        def infer(traced: GraphModule, _: Any) -> Any:
            outputs = len(next(node for node in traced.graph.nodes if node.op == "output").args[0])
            return compile_module(self._split(traced, outputs, described)[0])

        backend = aot_autograd(
            fw_compiler=compile_part,
            bw_compiler=compile_part,
            inference_compiler=infer,
            partition_fn=split,
            keep_inference_input_mutations=False,
        )
        with as_eager_runs():
            compiled = backend(module, example_inputs)

        def run(*args: Any) -> Any:
            if self._dry:
                raise _Planned
            return compiled(*args)

        return run

    def _split(
        self, joint: GraphModule, forward_outputs: int, described: list[Input]
    ) -> tuple[GraphModule, GraphModule]:
        self._traced += 1
        inputs = inputs_of_joint(joint, described)
        capture = self.planner.capture(joint, forward_outputs=forward_outputs, inputs=inputs)
        return partition(capture, self.planner.schedule(capture))


def _entry(forward: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(forward, types.MethodType):
        self, method = forward.__self__, forward.__func__

        def call(*args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)
    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

    code = call.__code__.replace(co_name="forward")
    return types.FunctionType(code, globals(), "forward", None, call.__closure__)


@contextmanager
def _explained() -> Iterator[None]:
    """Errors of ours as they are, refusals of Dynamo in words; what the user's own code raises passes through."""
    try:
        yield
    except BackendCompilerFailed as error:
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, RematchError):
            raise inner from None
        raise
    except Unsupported as error:
        raise explain_failure(error) from None
