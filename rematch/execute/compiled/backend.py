"""The backend of torch.compile: inductor, with graphs cut so that a training step keeps a budget.

`torch.compile(model, backend="rematch", options={"budget": "8GiB"})`

Each graph that Dynamo hands over is compiled by inductor with our partitioner. The first steps are measured: if the
peak is over the budget, or so far below it that less recomputation would do, what was measured corrects the plan and
the graph is compiled again, at most twice. Graphs without gradients are inductor's alone.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config, list_mode_options, list_options
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from rematch import __version__
from rematch.capture.inductor.copies import copy_module
from rematch.capture.memory import use_expandable_segments
from rematch.errors import BudgetError, BudgetInfeasible
from rematch.execute.compaction import Compaction
from rematch.execute.compiled.ledger import Call, Ledger, SharedStep
from rematch.execute.compiled.meter import Outside, StepMeter, Storages
from rematch.execute.compiled.notebook import Note, Notebook, graph_key
from rematch.execute.compiled.order import PlannedOrder
from rematch.execute.compiled.partitioner import Partitioner, Unchanged, Unrepeatable
from rematch.execute.compiled.unused import Gradients, Moment, detach_outputs, likely_unused, watch
from rematch.execute.loss_meter import give_up_measuring
from rematch.planning.budget import is_share, parse_budget
from rematch.planning.compiled import Around, Decision, GraphPlanner, OtherGraph
from rematch.planning.planner import Planner
from rematch.planning.settings import COMPILED, Settings
from rematch.units import format_bytes

_MOST_COMPILATIONS = 3
_MOST_MEASUREMENTS = 8  # of one compilation, before we stop waiting for one that says something
_MARGIN = 0.005  # of the budget, left free when a plan is corrected
_SLACK = 0.04  # of the budget: with more than this left over, another plan could be faster
_OURS = ("budget", "solver", "time_limit", "reserve")
# Inductor keeps a buffer that is no longer needed for a later one of its size, across peaks too where its own estimate
# has room, which leaves out what libraries take. An allocator serves the later one as well, and keeps nothing.
INDUCTOR: dict[str, Any] = {"_post_fusion_custom_pass": PlannedOrder(), "allow_buffer_reuse": False}
VERSION = 8  # of what we make of a graph, for inductor's caches
backends: dict[str, CompiledBackend] = {}  # those of the name, by their options


class CompiledBackend:
    """Compiles graphs for one budget. They may be alive at once, and share it."""

    def __init__(self, planner: Planner, inductor_options: dict[str, Any] | None = None) -> None:
        self.planner = planner
        self.inductor_options = dict(inductor_options or {})
        self.state_bytes = 0  # that the user keeps besides parameters: gradients, optimizers
        self.graphs: list[weakref.ref[CompiledGraph]] = []
        self.ledger = Ledger()
        self.dry = False  # compile, and run nothing

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = CompiledGraph(self, module, example_inputs)
        self.graphs.append(weakref.ref(graph))
        try:
            graph.compile()
        except (BudgetInfeasible, OtherGraph) as refusal:  # Dynamo would wrap it in an error of its own
            return _refusing(refusal)
        return graph

    def alive(self) -> Iterator[CompiledGraph]:
        """The graphs that are still in use."""
        return (graph for reference in self.graphs if (graph := reference()) is not None)


class Planned(Exception):
    """Everything is compiled, and nothing was to be run."""


class CompiledGraph:
    """One graph: callable as Dynamo calls it, compiled again where measuring says so."""

    def __init__(self, backend: CompiledBackend, module: GraphModule, example_inputs: Sequence[Any]) -> None:
        self.backend = backend
        own_memory = _uses_cuda_graphs(backend.inductor_options)
        self.planner = GraphPlanner(backend.planner, backend.state_bytes, placed=not own_memory)
        self.device = _device(example_inputs)
        self._compaction: Compaction | None = None
        if not own_memory:
            use_expandable_segments(self.device)
            self._compaction = Compaction()
        self.outside = Outside()
        self._free = self.planner.free_share(self.device)  # when the graph was first seen
        self._module: GraphModule | None = module  # as long as it may be compiled again
        self._settled = False  # nothing is measured any more
        self._all_used = False  # every output is to have a gradient, whatever one would expect or steps show
        self._example_inputs = list(example_inputs)
        self._traced = _like(TracingContext.try_get())
        self._run: Callable[..., Any] | None = None
        self._runs: tuple[Decision, Around] | None = None  # what it was compiled for
        self.compilations = 0
        self._steps = 0  # of this compilation
        self._fitting: Around | None = None  # with which the budget was measured to be kept
        self._given_up = False  # what is compiled next is the last
        self._closest: tuple[int, Around] | None = None  # the smallest peak that was measured, and with what
        self._between_bytes = 0  # that other graphs took between forward and backward, where no allocator tells
        self._again = False
        self._notebook: Notebook | None = None
        self.history: list[str] = []  # of compilations: what was planned, and what a step took

    def compile(self) -> None:
        """Have inductor compile the graph with the corrections there are."""
        assert self._module is not None
        give_up_measuring()  # the loss of a graph that this one follows: planning measures too
        self._again = self._settled = False
        self._steps = 0
        self.compilations += 1
        if self.compilations == 1:
            held_bytes = self.backend.ledger.held_bytes
            self.planner.lenient = held_bytes > 0
            if self.device.type != "cuda":
                self.planner.around = replace(self.planner.around, before_bytes=held_bytes)
        options = repr(sorted(self.backend.inductor_options.items()))
        machine = (VERSION, __version__, _device_name(self.device), options)
        identity = (*machine, self.planner.identity, self._free)
        notebook = Notebook(*(graph_key(self._module, self._example_inputs, known) for known in (identity, machine)))
        self.planner.layouts.remember(notebook.tried)
        settled = notebook.settled
        if self.compilations == 1 and settled is not None:
            self.planner.around = settled
            self.compilations += 1  # as many as there were, when another process measured
        elif self.compilations == 1 and not self._all_used:
            self.planner.around = replace(self.planner.around, unused=likely_unused(self._module))
        around = self.planner.around
        known = notebook.read(around)
        if known is not None:
            self.planner.adopt(_noted(known), known.asked_bytes)
        try:
            try:
                asked = self._compile((*identity, str(around)), self._compiled)
            except Unchanged:
                assert self._runs is not None
                _, self.planner.around = self._runs
                self.history.append(f"compilation {self.compilations}: no other plan")
                return
            except Unrepeatable:
                self._all_used = True
                self.planner.around = around = replace(around, unused=())
                asked = self._compile((*identity, str(around)))
            if not asked and known is None and self._trains:
                # Inductor has this graph from a run whose notes are gone: have it ask.
                asked = self._compile((*identity, str(around), time.time_ns()))
        finally:
            notebook.note_tried(self.planner.tried)
        decision = self.planner.decision
        if asked and decision is not None and self.planner.asked_bytes is not None:
            notebook.note(around, _note_of(decision, self.planner.asked_bytes))
        self._notebook = notebook
        self._runs = None if decision is None else (decision.remembered, self.planner.around)
        self.history.append(f"compilation {self.compilations}: {_described(decision)}, {around}")
        if decision is None:
            self._settle()  # nothing to train, or a graph that cannot be planned

    @property
    def _compiled(self) -> Decision | None:
        """What runs now, if that is of the graph as it would be compiled again."""
        if self._runs is None or self._runs[1].unused != self.planner.around.unused:
            return None
        return self._runs[0]

    def _compile(self, identity: tuple[object, ...], compiled: Decision | None = None) -> bool:
        """Compile, and say whether inductor asked for a partition: it does for training graphs that it has not kept.

        `Unchanged` if it would make what is `compiled`.
        """
        from torch._inductor.compile_fx import compile_fx

        assert self._module is not None
        results = len(self._module.graph.output_node().args[0])  # type: ignore[arg-type]
        partitioner = Partitioner(self.planner, identity, results, compiled)
        patches = {**INDUCTOR, **self.backend.inductor_options, "custom_partitioner_fn": partitioner}
        try:
            with _tracing_like_dynamo(self._traced):
                copied = _copy(self._module)
                detach_outputs(copied, self.planner.around.unused)
                run: Any = compile_fx(copied, self._example_inputs, config_patches=patches)
        except Exception as error:
            refusal = _refusal_in(error)
            raise (error if refusal is None else refusal) from None
        self._run = run
        return partitioner.called

    @property
    def _trains(self) -> bool:
        assert self._module is not None
        given = (*self._example_inputs, *self._module.parameters())
        differentiable = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in given)
        return differentiable and torch.is_grad_enabled()

    def __call__(self, *args: Any) -> Any:
        if self.backend.dry:
            raise Planned
        if not self.backend.ledger.whole.running:
            give_up_measuring()
        if self._again:
            try:
                self.compile()
            except BudgetInfeasible as refusal:
                raise self._refusal(refusal) from None
            if self._given_up:
                self._settle(measured=True)
        assert self._run is not None
        unused: tuple[int, ...] = ()
        if torch.is_grad_enabled() and not _is_fake(args):
            unused = self.planner.around.unused
            if self._compaction is not None:
                self._compaction.before_step(self.device)
        before = Moment.now(self.device) if unused else None
        outputs = self._run(*args) if self._settled else self._measured(args)
        return outputs if before is None else watch(outputs, unused, args, partial(self._gradients_of, unused, before))

    def _gradients_of(
        self, places: Sequence[int], moment: Moment, args: Sequence[Any], gradients: Gradients
    ) -> Gradients:
        """Gradients of `args` through outputs at `places`, which were taken to have none: forward runs again."""
        with moment.again():
            if self.planner.around.unused:
                self._compile_with_all_outputs()
            assert self._run is not None
            outputs = self._run(*args)
        used = [(outputs[place], given) for place, given in zip(places, gradients, strict=True) if given is not None]
        wanted = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
        made = iter(torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used], allow_unused=True))
        return [next(made) if isinstance(arg, torch.Tensor) and arg.requires_grad else None for arg in args]

    def _compile_with_all_outputs(self) -> None:
        """From now on, all outputs have gradients."""
        self._all_used = True
        self._given_up = False
        self._fitting = self._closest = None
        self.compilations = 0
        self.planner.around = replace(self.planner.around, unused=())
        if self._notebook is not None:
            self._notebook.settle(self.planner.around)
        self.backend.ledger.drop(self)  # what is measured of this step was another compilation's
        self.compile()

    def _measured(self, args: tuple[Any, ...]) -> Any:
        assert self._run is not None
        if _is_fake(args):
            return self._run(*args)
        ledger = self.backend.ledger
        if torch.is_grad_enabled() and ledger.whole.includes_next_call():
            return self._run(*args)
        if not any(call.graph is self for call in ledger.pending):
            self._steps += 1
        if self._steps > _MOST_MEASUREMENTS:
            self._settle()
        if not torch.is_grad_enabled() or self._settled:
            return self._run(*args)
        call = Call(self, args, ledger.held_bytes, self._call_ended)
        outputs = call.meter.forward(self._run, args)
        ledger.begin(call)
        return outputs

    def _call_ended(self, _: Call) -> None:
        calls = self.backend.ledger.complete()
        graphs = {each.graph for each in calls}
        if len(calls) > 1:
            for graph in graphs:
                graph.outside.alone = False
        if any(each.meter.peak_bytes is None for each in calls):
            return
        if any(graph._again or graph.planner.decision is None for graph in graphs):
            return
        if self.device.type == "cuda" and any(graph._steps == 1 for graph in graphs):
            return  # kernels were tuned, which takes memory
        if len(calls) > 1 and is_share(self.planner.settings.budget):
            # Each graph has its own share. The first one leaves room for the others.
            first, *inner = calls
            for each in inner:
                each.graph._settle(measured=True)
                taken_bytes = (each.meter.peak_bytes or 0) - first.saved_bytes
                first.graph._between_bytes = max(first.graph._between_bytes, taken_bytes)
            calls = [first]
        if len(calls) > 1:
            step = SharedStep(calls)
            if self.device.type == "cuda":
                self._judge_together(step)
            else:
                self.backend.ledger.whole.measure_next(len(calls), partial(self._judge_whole, step))
        elif calls:
            calls[0].graph._judge(calls[0].meter)

    def _judge_whole(self, step: SharedStep, whole_bytes: int, leaves: Storages) -> None:
        """Judge a step that was measured call by call, and then as a whole."""
        self._judge_together(replace(step, whole_bytes=whole_bytes, leaves=leaves))

    def _judge_together(self, step: SharedStep) -> None:
        """Keep the compilations of several calls, or have all of them compiled again so that they share the budget."""
        graphs = list(dict.fromkeys(call.graph for call in step.calls))
        asked_bytes = min(graph.planner.asked_bytes or 0 for graph in graphs)
        peak_bytes = step.peak_bytes
        compilations = max(graph.compilations for graph in graphs)
        for graph in graphs:
            graph.history.append(
                f"measured {format_bytes(peak_bytes)} of {format_bytes(asked_bytes)} in {len(step.calls)} calls of "
                f"{len(graphs)} graphs"
            )
        margin_bytes = int(_MARGIN * asked_bytes)
        if peak_bytes > asked_bytes and compilations >= _MOST_COMPILATIONS:
            closest_bytes = min(graph._back_to_closest(peak_bytes) for graph in graphs)
            _give_up(graphs, closest_bytes, asked_bytes)
            return
        if peak_bytes <= asked_bytes:
            planned = any(graph.planner.decision and not graph.planner.decision.by_torch for graph in graphs)
            if not planned or compilations > 1 or asked_bytes - peak_bytes <= _SLACK * asked_bytes:
                for graph in graphs:
                    graph._settle(measured=True)
                return
        elif compilations > 1:
            margin_bytes += peak_bytes - asked_bytes
        for graph, around in step.corrected(peak_bytes + margin_bytes - asked_bytes).items():
            around = replace(around, unused=()) if graph._all_used else around
            graph._correct(around, peak_bytes, fits=peak_bytes <= asked_bytes)

    def _judge(self, meter: StepMeter) -> None:
        """Keep this compilation, or correct the plan by what was measured and compile again."""
        planner, asked_bytes = self.planner, self.planner.asked_bytes
        assert planner.decision is not None and asked_bytes is not None and meter.peak_bytes is not None
        between_bytes = max(meter.between_bytes, self._between_bytes)
        at_loss_bytes = meter.at_loss_bytes + meter.tangent_bytes
        peak_bytes = max(meter.peak_bytes, at_loss_bytes + self._between_bytes)
        self.history.append(
            f"measured {format_bytes(peak_bytes)} of {format_bytes(asked_bytes)}: forward "
            f"{format_bytes(meter.forward_peak_bytes)}, at the loss {format_bytes(at_loss_bytes)}, "
            f"between forward and backward {format_bytes(between_bytes)}"
        )
        planner.measured(peak_bytes, between_bytes)
        if self._notebook is not None:
            self._notebook.note_tried(planner.tried)
        margin_bytes = int(_MARGIN * asked_bytes)
        if self.compilations > 1:  # a tighter plan turned out to exceed its prediction by more: the next one may too
            margin_bytes += max(0, peak_bytes - asked_bytes)
        around = planner.corrected(peak_bytes, between_bytes, margin_bytes)
        unused_bytes = 0
        if meter.unused and not self._all_used:
            unused_bytes = meter.unused_bytes
            # What is above the prediction may be these gradients, which the next graph does not have.
            correction_bytes = min(around.correction_bytes, max(margin_bytes, around.correction_bytes - unused_bytes))
            unused = tuple(sorted({*around.unused, *meter.unused}))
            around = replace(around, unused=unused, correction_bytes=correction_bytes)
        if peak_bytes <= asked_bytes:
            lost_bytes = planner.decision.lost_bytes
            wasted = asked_bytes - lost_bytes - peak_bytes + unused_bytes > _SLACK * asked_bytes
            if planner.decision.by_torch or not wasted or self.compilations > 1:
                self._settle(measured=True)
                return
        elif self.compilations >= _MOST_COMPILATIONS:
            _give_up([self], self._back_to_closest(peak_bytes), asked_bytes)
            return
        self._correct(around, peak_bytes, fits=peak_bytes <= asked_bytes)

    def _correct(self, around: Around, peak_bytes: int, *, fits: bool) -> None:
        """Compile again with `around`, or as it was when a step did keep the budget."""
        if fits:
            self._fitting = self.planner.around
        elif self._fitting is not None:
            around = self._fitting
        if self._closest is None or peak_bytes < self._closest[0]:
            self._closest = peak_bytes, self.planner.around
        self.planner.around = around
        self._again = True

    def _back_to_closest(self, peak_bytes: int) -> int:
        """The budget is not kept: go on with the compilation that came closest, which inductor's caches have."""
        if self._closest is not None and self._closest[0] < peak_bytes:
            peak_bytes, self.planner.around = self._closest
            self._again = self._given_up = True
        else:
            self._settle(measured=True)
        return peak_bytes

    def _refusal(self, refusal: BudgetInfeasible) -> BudgetInfeasible:
        """The error, or one that names what was measured if that is less."""
        asked_bytes, works_bytes = self.planner.asked_bytes, refusal.feasible_from_bytes
        if self._closest is None or asked_bytes is None or works_bytes is None:
            return refusal
        measured = _impossible(1, self._closest[0], asked_bytes)
        return measured if works_bytes > (measured.feasible_from_bytes or 0) > asked_bytes else refusal

    def _refuse(self, refusal: BudgetInfeasible) -> None:
        """Raise it from now on."""
        self._run = _refusing(refusal)
        self._settled, self._again = True, False

    def _settle(self, *, measured: bool = False) -> None:
        """Measure no more. What was `measured` is noted for other processes."""
        if measured and self._notebook is not None:
            self._notebook.settle(self.planner.around)
        self._settled = True
        self.planner.rest()
        if not self.planner.around.unused:  # else an output may be used after all
            self._module = None
            self._traced = TracingContext(None)
            self._example_inputs = []


def rematch_backend(
    module: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """What `torch.compile(model, backend="rematch", options={"budget": "8GiB", ...})` calls for each graph.

    `options` are ours (budget, solver, time_limit, reserve) and inductor's (`max_autotune`, `triton.cudagraphs`, ...).
    `mode` stands for several of inductor's: "max-autotune", "reduce-overhead".
    """
    try:
        return _backend_for(dict(options or {}), others)(module, example_inputs)
    except BudgetError as refusal:  # Dynamo would wrap it in an error of its own
        return _refusing(refusal)


def _backend_for(options: dict[str, Any], others: Collection[str] = ()) -> CompiledBackend:
    """One backend for the same options: the graphs of a model that breaks into several share a budget."""
    if others:
        raise BudgetError(f'torch.compile(backend="rematch") takes no {", ".join(others)}; give options instead')
    if "budget" not in options:
        raise BudgetError(
            'torch.compile(backend="rematch") needs a budget: options={"budget": "8GiB"}; inductor\'s own options go '
            "into the same dict"
        )
    key = repr(sorted(options.items()))
    if key not in backends:
        ours = {name: options[name] for name in _OURS if name in options}
        reserve = ours.pop("reserve", 0)
        if ours["budget"] != "auto":
            parse_budget(ours["budget"], baseline_peak_bytes=2**40)
        reserve_bytes = parse_budget(reserve, baseline_peak_bytes=0) if reserve else 0
        settings = Settings(**ours, reserve_bytes=reserve_bytes, progress=False, engine=COMPILED)
        backends[key] = CompiledBackend(Planner(settings), _inductor_options(options))
    return backends[key]


def _inductor_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those that are not ours, with what a `mode` stands for."""
    given = {name.replace("-", "_"): value for name, value in options.items() if name not in _OURS}
    mode = given.pop("mode", None)
    unknown = [name for name in given if name not in list_options()]
    if unknown:
        raise BudgetError(f"{', '.join(unknown)}: options of neither rematch ({', '.join(_OURS)}) nor inductor")
    if mode is None:
        return given
    try:
        return {**list_mode_options(mode), **given}
    except RuntimeError as error:  # names the modes there are
        raise BudgetError(f"the option mode: {error}") from None


def _uses_cuda_graphs(options: dict[str, Any]) -> bool:
    return bool(options.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def _give_up(graphs: Sequence[CompiledGraph], peak_bytes: int, asked_bytes: int) -> None:
    """A step takes `peak_bytes` at best: a little more than the budget deserves a warning, much more an error."""
    if peak_bytes > (1 + _SLACK) * asked_bytes:
        for graph in graphs:
            graph._refuse(_impossible(len(graphs), peak_bytes, asked_bytes))
        return
    warnings.warn(
        f"a step through torch.compile takes {format_bytes(peak_bytes)}, more than the budget of "
        f"{format_bytes(asked_bytes)}: after {_MOST_COMPILATIONS} compilations, inductor's order of kernels "
        "still takes more than was planned. Name a smaller budget",
        stacklevel=2,
    )


def _impossible(graphs: int, peak_bytes: int, asked_bytes: int) -> BudgetInfeasible:
    works_bytes = int((1 + _SLACK) * peak_bytes)  # plans are made anew, and end a little above or below
    several = f" by the {graphs} graphs that a step runs through" if graphs > 1 else ""
    return BudgetInfeasible(
        f"a budget of {format_bytes(asked_bytes)} cannot be kept{several}: the smallest peak that its kernels were "
        f"measured to have is {peak_bytes} bytes ({format_bytes(peak_bytes)}).\n"
        f"  Try budget={works_bytes}, or a smaller batch" + (", or fewer graph breaks" if graphs > 1 else ""),
        feasible_from_bytes=works_bytes,
    )


def _note_of(decision: Decision, asked_bytes: int) -> Note:
    return Note(decision.plan, decision.by_torch, decision.predicted_bytes, asked_bytes, decision.lost_bytes)


def _noted(note: Note) -> Decision:
    return Decision(note.plan, note.by_torch, note.predicted_bytes, note.lost_bytes)


def _described(decision: Decision | None) -> str:
    if decision is None:
        return "no plan"
    whose = "torch's own partition" if decision.by_torch else f"{len(decision.plan.recomputed)} operators run again"
    return f"{whose}, predicted {format_bytes(decision.predicted_bytes)}"


def _refusing(refusal: Exception) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise refusal

    return refuse


def _refusal_in(error: BaseException | None) -> BudgetInfeasible | OtherGraph | Unchanged | Unrepeatable | None:
    """Our own error, which torch may have wrapped."""
    while error is not None:
        if isinstance(error, (BudgetInfeasible, OtherGraph, Unchanged, Unrepeatable)):
            return error
        inner = getattr(error, "inner_exception", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__
    return None


def _like(traced: TracingContext | None) -> TracingContext:
    """A context that knows what Dynamo's does, which is gone when we compile again: the sizes that are symbols."""
    if traced is None:
        return TracingContext(None)
    context = TracingContext(traced.fake_mode)
    context.tensor_to_context = traced.tensor_to_context.copy()
    return context


@contextmanager
def _tracing_like_dynamo(context: TracingContext) -> Iterator[None]:
    """While Dynamo traces there is a context that AOTAutograd reads and writes; later on we bring our own."""
    if TracingContext.try_get() is not None:
        yield
        return
    with tracing(context):
        yield


def _copy(module: GraphModule) -> GraphModule:
    """A module that inductor may change, with what Dynamo notes on one: the sources of inputs and parameters."""
    copied, counterpart = copy_module(module)
    if hasattr(module, "_param_name_to_source"):
        copied._param_name_to_source = module._param_name_to_source
    for theirs, ours in counterpart.items():
        if hasattr(theirs, "_dynamo_source"):
            ours._dynamo_source = theirs._dynamo_source  # type: ignore[attr-defined]
    return copied


def _is_fake(args: Sequence[Any]) -> bool:
    """DDP's buckets run so while they are compiled. Every step asks, so hundreds of arguments are gone through in C."""
    return FakeTensor in map(type, args)


def _device(example_inputs: Sequence[Any]) -> torch.device:
    devices = [given.device for given in example_inputs if isinstance(given, torch.Tensor)]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
