"""The replay engine: the module traced as a whole, and its schedule run as generated code.

`Replay(module, forward, planner)(batch)`

The first call with new shapes traces the module, asks the planner for a schedule and compiles it; Dynamo's guards
choose among what was compiled from then on.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError, Unsupported
from torch.fx import GraphModule, Node

from rematch.capture.joint.corrections import Corrections, TraceAgain
from rematch.capture.joint.read import Capture, Input, Layout, LossCost
from rematch.capture.joint.traced import device_of
from rematch.capture.joint.tracing import (
    as_eager_runs,
    describe_inputs,
    dynamo_settings,
    explain_failure,
    inputs_of_joint,
)
from rematch.capture.memory import PeakMemory, allocated_bytes
from rematch.capture.stand_ins import stood_in_for
from rematch.errors import CaptureError, RematchError
from rematch.execute.loss_meter import LossMeter, give_up_measuring
from rematch.execute.own_code import own_code
from rematch.execute.replay.ahead import Ahead, arguments_of_others, hands_over_arguments
from rematch.execute.replay.double_backward import refuse_double_backward
from rematch.execute.replay.partition import partition
from rematch.execute.replay.source import compile_module
from rematch.execute.replay.stretches import Call, Places, first_stretch
from rematch.execute.replay.tangents import TangentArguments, expect_absent_tangents
from rematch.execute.transfers import HostMemory
from rematch.graph import Schedule


class Planner(Protocol):
    """Turns a traced graph into a capture with costs, and a capture into a schedule."""

    corrections: Corrections

    @property
    def tangent_layouts(self) -> tuple[Layout, ...]: ...

    def capture(self, joint: GraphModule, *, forward_outputs: int, inputs: list[Input]) -> Capture: ...

    def schedule(self, capture: Capture) -> Schedule: ...

    def loss_measured(self, capture: Capture, cost: LossCost) -> bool: ...


class Retraced(BaseException):
    """A call that was planned is traced anew, because a guard failed: it needs a recording and a plan first."""


class _Planned(BaseException):
    """Raised instead of running, once a plan is made: not an error, so that no user's handler takes it for one."""


class Replay:
    """Callable like the `forward` it replaces; see the module."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], planner: Planner, host: HostMemory | None = None
    ) -> None:
        self.module = module
        self.host = host
        self.plain = forward
        self.planner = planner
        self._compiled: Callable[..., Any] | None = None
        self.dry = False
        self.referee: Callable[[GraphModule], str | None] | None = None  # while a trace may be taken in
        self.traced = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = self._compile()
        with _explained():
            return compiled(*args, **kwargs)

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], referee: Callable[[GraphModule], str | None]
    ) -> None:
        """Trace, plan and compile for these arguments without running anything on them.

        `referee` says how a trace differs from what eager runs, or None; `CaptureError` if it does.
        """
        self.dry = True
        self.referee = referee
        before = self.traced
        try:
            with _refused_in_words(), torch.enable_grad():
                self(*args, **kwargs)
        except _Planned:
            pass
        finally:
            self.dry = False
            self.referee = None
        if self.traced == before and self._compiled is None:
            raise CaptureError(
                f"{type(self.module).__name__} was not captured: its forward has no tensor operation to plan, "
                "or torch.compile is disabled (TORCHDYNAMO_DISABLE, torch._dynamo.config.disable)"
            )

    def measure_loss(
        self, loss: Callable[[Any], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LossCost:
        """What `loss` and its gradient cost on outputs of the shapes that these arguments give."""
        give_up_measuring()
        made: list[Any] = []

        def outline(module: GraphModule, _: list[Any]) -> Callable[..., Any]:
            """In place of the module, tensors as it would return."""
            returned = _outputs_of(module)
            examples = [node.meta["example_value"] if isinstance(node, Node) else node for node in returned]
            made.extend(_zeros_like(example) for example in examples)
            return lambda *_: made

        with (
            stood_in_for(self.module, {}),
            _refused_in_words(),
            _explained(),
            _tracing(),
            torch.enable_grad(),
        ):
            traced = torch.compile(own_code(self.plain), backend=outline, fullgraph=True, dynamic=False)
            outputs = traced(*args, **kwargs)
        leaves = {place: leaf for place, leaf in enumerate(made) if isinstance(leaf, torch.Tensor)}
        device = next((leaf.device for leaf in leaves.values()), torch.device("cpu"))
        forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with forked, torch.enable_grad(), _without_hooks_of_others():
            layouts = _watch_tangents(leaves.values())
            _loss_step(loss, outputs)  # once to warm up, so that no cache counts as memory of the loss
            for leaf in leaves.values():
                leaf.grad = None
            started = time.perf_counter()
            with PeakMemory(device) as used:
                value = _loss_step(loss, outputs)
            seconds = time.perf_counter() - started
            # Whoever calls backward holds the gradient of the loss until it returns; here it has.
            end_bytes = used.end_bytes + allocated_bytes(value.nbytes, device)
            del value
        tangent_bytes = sum(leaf.nbytes for leaf in leaves.values() if leaf.grad is not None)
        unused = frozenset(place for place, leaf in leaves.items() if leaf.requires_grad and leaf.grad is None)
        cost = loss_cost(used.peak_bytes, end_bytes, tangent_bytes, seconds)
        made.clear()  # Dynamo keeps the backend, and with it this list
        return replace(cost, unused=unused, tangents=tuple(layouts))

    def forget(self) -> None:
        """Trace and plan again at the next call, because the plan has changed."""
        self._compiled = None

    def _compile(self) -> Callable[..., Any]:
        """A compiled function of its own code, so that no other module shares its cache or its limit of shapes."""
        ours = weakref.WeakMethod(self._backend)

        def backend(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            """Dynamo never lets go of a backend that failed, so it must not hold the module."""
            method = ours()
            assert method is not None, "called by the module, which holds the runner"
            return method(module, example_inputs)

        context: Any = torch._dynamo.optimize(backend, nopython=True, dynamic=False, guard_filter_fn=_that_count)
        context.callback = _WithOurSettings(context.callback)
        function: Callable[..., Any] = context(own_code(self.plain))
        return function

    def _backend(self, module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graph = _CompiledGraph(self, describe_inputs(module))
        compiled = graph.compile(module, example_inputs)
        meter = graph.meter
        ours = weakref.ref(self)

        def run(*args: Any) -> Any:
            replay = ours()
            if replay is not None and replay.dry:
                raise _Planned
            ahead = graph.ahead
            try:
                if ahead is not None:
                    ahead.run(args)
                if graph.stretches:
                    call = Call(graph.stretches)
                    outputs = compiled(*call.handed(args))
                    call.watch(outputs)
                else:
                    outputs = compiled(*args)
            finally:
                if ahead is not None:
                    ahead.forget()
            if meter is not None:
                refuse_double_backward(outputs)
                if graph.drops_tangents:
                    expect_absent_tangents(outputs)
                if meter.waiting:
                    meter.forward_ended()
            return outputs

        return run


# What it warns itself of, and fails by where warnings are errors: inputs without gradient, autograd functions.
_WARNINGS_OF_DYNAMO = ("The .grad attribute of a Tensor", ".*autograd.* should not be instantiated")


class _Thread(threading.local):
    traces = False  # for us, and not for a torch.compile of the user's


_thread = _Thread()


def is_tracing() -> bool:
    """Whether this thread traces a module for the replay engine."""
    return _thread.traces


@contextmanager
def _tracing() -> Iterator[None]:
    before, _thread.traces = _thread.traces, True
    try:
        with torch._dynamo.config.patch(dynamo_settings()), warnings.catch_warnings():
            for message in _WARNINGS_OF_DYNAMO:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        _thread.traces = before


class _WithOurSettings:
    """Dynamo's callback, which traces a frame that is new to it, under our settings.

    To set and reset them around each call instead would cost a step 70 us, and nobody reads them but the tracer.
    """

    def __init__(self, callback: Callable[..., Any]) -> None:
        self._torchdynamo_orig_backend = callback  # where Dynamo looks for the backend when it compares cached code

    def __call__(self, *frame: Any) -> Any:
        with _tracing():
            return self._torchdynamo_orig_backend(*frame)


_EMPTY_HOOKS = "EMPTY_NN_MODULE_HOOKS_DICT"


def _that_count(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards to keep: not those on which hooks of a module take keywords, where it has no hooks.

    Of the guards that a step has to look at, these are one in seven.
    """
    empty = {guard.name for guard in guards if guard.guard_type == _EMPTY_HOOKS}
    implied = {f"{name}_with_kwargs" for name in empty} & empty
    return [guard.guard_type != _EMPTY_HOOKS or guard.name not in implied for guard in guards]


class _CompiledGraph:
    """One traced graph of a module, between its joint form and two compiled functions.

    Dynamo keeps what is compiled among the globals of its code, so it must not hold the module, or that would stay.
    """

    def __init__(self, runner: Replay, described: list[Input]) -> None:
        self._runner = weakref.ref(runner)
        self.described = described
        self.capture: Capture | None = None
        self.stretches: tuple[Places, ...] = ()  # in which gradients leave, if not all at once
        self.ahead: Ahead | None = None
        self.meter: LossMeter | None = None

    @property
    def runner(self) -> Replay:
        runner = self._runner()
        assert runner is not None, "it is what compiles"
        return runner

    @property
    def drops_tangents(self) -> bool:
        return self.capture is not None and bool(self.capture.dropped)

    def compile(self, module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        give_up_measuring()
        planner = self.runner.planner
        while True:
            backend = aot_autograd(
                fw_compiler=self.compile_forward,
                bw_compiler=self.compile_backward,
                inference_compiler=self.compile_inference,
                partition_fn=self.partition,
                keep_inference_input_mutations=False,
            )
            try:
                with as_eager_runs(planner.tangent_layouts), planner.corrections.applied():
                    return backend(module, example_inputs)
            except TraceAgain:
                continue

    def partition(
        self, joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[GraphModule, GraphModule]:
        modules = self._plan(joint, num_fwd_outputs)
        self.meter = LossMeter(device_of(joint))
        return modules

    def _plan(self, joint: GraphModule, forward_outputs: int) -> tuple[GraphModule, GraphModule]:
        planner = self.runner.planner
        self.runner.traced += 1
        if self.runner.referee is None:
            raise Retraced
        different = self.runner.referee(joint)
        if different is not None:
            raise CaptureError(f"what torch.compile traces is not what eager runs: {different}")
        inputs = inputs_of_joint(joint, self.described)
        self.capture = planner.capture(joint, forward_outputs=forward_outputs, inputs=inputs)
        forward, backward = partition(self.capture, planner.schedule(self.capture), self.runner.host)
        if self.capture.leaves:
            at_end = tuple(place for place, gradient in enumerate(_outputs_of(backward)) if gradient is not None)
            self.stretches = (*self.capture.leaves.values(), at_end)
        return forward, backward

    def compile_forward(self, module: GraphModule, _: Any) -> Any:
        run = compile_module(module, "forward")
        context = torch._guards.TracingContext.try_get()
        if context is None or context.fw_metadata is None:
            return run
        # AOTAutograd leaves open whether backward may write over what is saved, and then refuses to keep the graph.
        context.fw_metadata.bw_donated_idxs = []
        assert self.capture is not None
        returned = _outputs_of(module)[: self.capture.forward_outputs]
        if not hands_over_arguments(self.capture.joint.graph, returned, context.fw_metadata, len(self.described)):
            return run
        self.ahead = Ahead(run, arguments_of_others(context.fw_metadata))
        return self.ahead

    def compile_inference(self, traced: GraphModule, _: Any) -> Any:
        return compile_module(self._plan(traced, len(_outputs_of(traced)))[0], "inference")

    def compile_backward(self, module: GraphModule, _: Any) -> Any:
        run = compile_module(module, "backward")
        meter = self.meter
        assert meter is not None

        assert self.capture is not None
        tangents = TangentArguments(self.capture)
        count = len(_outputs_of(module))

        def backward(args: list[Any]) -> Any:
            if meter.running:
                meter.backward_starts(self._loss_measured)
            if tangents.may_be_absent:
                tangents.complete(args)
            return first_stretch(run(args), self.stretches, count) if self.stretches else run(args)

        backward._boxed_call = True  # type: ignore[attr-defined]
        return backward

    def _loss_measured(self, peak_bytes: int, end_bytes: int) -> None:
        runner = self._runner()  # the user may have let go of the module, and kept a loss
        assert self.capture is not None
        cost = loss_cost(peak_bytes, end_bytes, self.capture.differentiable_output_bytes)
        if runner is not None and runner.planner.loss_measured(self.capture, cost):
            runner.forget()


def _outputs_of(module: GraphModule) -> Sequence[Any]:
    returned: Any = module.graph.output_node().args[0]
    found: Sequence[Any] = returned
    return found


def _watch_tangents(outputs: Iterable[torch.Tensor]) -> list[Layout]:
    """Layouts of the gradients of differentiable `outputs`, known once backward has reached them."""
    differentiable = [output for output in outputs if output.requires_grad]
    layouts = [Layout(tuple(output.shape), None) for output in differentiable]

    def note(tangent: torch.Tensor, place: int) -> None:
        # One that is expanded shows one number in many places, and could hold no other loss's gradient.
        if torch._debug_has_internal_overlap(tangent) == 0:
            layouts[place] = Layout(tuple(tangent.shape), tangent.stride())

    for place, output in enumerate(differentiable):
        output.register_hook(partial(note, place=place))
    return layouts


def _zeros_like(example: Any) -> Any:
    if not isinstance(example, torch.Tensor):
        return example
    zeros = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device).zero_()
    return zeros.requires_grad_(example.requires_grad)


def loss_cost(peak_bytes: int, end_bytes: int, tangent_bytes: int, seconds: float = 0.0) -> LossCost:
    """What was allocated between the end of forward and the start of backward, taken apart."""
    retained = max(0, end_bytes - tangent_bytes)
    return LossCost(max(0, peak_bytes - tangent_bytes - retained), retained, seconds)


def _loss_step(loss: Callable[[Any], torch.Tensor], outputs: Any) -> torch.Tensor:
    value = loss(outputs)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise CaptureError(
            f"loss= must return one differentiable number for the model's output, not {type(value).__name__}"
            + (f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "")
        )
    value.backward()
    return value


_current_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


@contextmanager
def _without_hooks_of_others() -> Iterator[None]:
    """What is saved inside stays as it is: torch.utils.checkpoint around the module would call that once more."""

    def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is) if _current_hooks(True) else nullcontext():
        yield


@contextmanager
def _refused_in_words() -> Iterator[None]:
    """Whatever a tracer raises is a refusal: the module itself has been recorded, so it is not at fault."""
    try:
        yield
    except RematchError:
        raise
    except Exception as error:
        raise explain_failure(error) from error


@contextmanager
def _explained() -> Iterator[None]:
    """Errors of ours as they are, and in words what Dynamo refuses or finds to fail."""
    try:
        yield
    except BackendCompilerFailed as error:
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, RematchError):
            raise inner from None
        raise explain_failure(inner if isinstance(inner, Exception) else error) from error
    except (TorchRuntimeError, Unsupported) as error:
        raise explain_failure(error) from None
