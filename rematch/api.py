"""The verbs for PyTorch modules: `remat` trains inside a budget, `plan` looks first, `apply` uses a plan.

`model = rematch.remat(model, batch, budget="8GiB")`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn

from rematch.capture.recorded_graph import RecordedGraph
from rematch.capture.recorder import CannotRecord
from rematch.errors import CaptureError, RematchError, unknown_name
from rematch.execute.module import runner_of, strip, twin_of
from rematch.execute.ranks import plan_of_rank_0, require_order
from rematch.execute.runner import Runner
from rematch.graph import Graph
from rematch.planning.budget import parse_budget
from rematch.planning.host import host_bytes
from rematch.planning.plan import Plan
from rematch.planning.planner import Planner
from rematch.planning.settings import AUTO, COMPILED, ENGINES, REPLACE, RESPECT, TAPE, Settings
from rematch.solvers.base import DEFAULT_SOLVER, DEFAULT_TIME_LIMIT, Solver, make_solver

M = TypeVar("M", bound=nn.Module)
Loss = Callable[[Any], torch.Tensor]
DEFAULT_ENGINE = AUTO


def remat(
    model: M,
    sample: Any = None,
    *,
    budget: str | int | float,
    loss: Loss | None = None,
    engine: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    solver: str | Solver = DEFAULT_SOLVER,
    time_limit: float = DEFAULT_TIME_LIMIT,
    reserve: str | int = 0,
    accumulate: bool = False,
    in_place: bool = False,
    share: bool = True,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    checkpoints: str | None = None,
    chunk_loss: int = 1,
    offload: bool | str | int = False,
    cache: bool = True,
    progress: bool | None = None,
    **options: Any,
) -> M:
    """Make `model` train inside `budget`; returns a module of the same class that shares its parameters.

    The peak of device memory during forward and backward stays within the budget, everything counted: parameters,
    gradients, inputs, outputs, what the loss allocates, workspace, and what was allocated before. Losses and gradients
    are those of plain training, bit by bit.

    sample: a tensor, tuple, dict or `(args, kwargs)`, as `model` is called. Without it, the first call plans.
    budget: bytes, "8GiB", "60%" of the peak without recomputation, or "auto" for what the device has free.
    loss: from the model's output to the scalar that is differentiated. If you give it, the plan counts exactly what it
        allocates; otherwise the first step measures it, and until then twice the differentiable outputs is assumed.
    engine: "tape" runs the module's own Python and drops and recomputes saved tensors; "replay" runs generated code
        for modules that can be traced as a whole; "compiled" runs inductor's, as torch.compile does, with results as
        close to eager's as torch.compile's. By default rematch chooses among the first two; `Plan.engine` says which.
    optimizer: the one you train with. Its state, which appears in the first `step()`, is then counted from the start.
    solver, time_limit, options: how schedules are found; see `rematch.solvers.solve`.
    reserve: bytes to leave for what is allocated later.
    accumulate: gradients are added up over several backward passes, so plan for `.grad` being there already.
    in_place: change and return `model` itself, for code that holds on to it already.
    share: with a sample and in a process group, rank 0 plans and the other ranks take its plan; all of them must then
        call `remat` equally often. Turn it off where ranks have different modules, as in a pipeline.
    keep, recompute: patterns of submodules ("layers.*.attn") or operators ("gelu*") whose results are always kept for
        backward or always recomputed, whatever that costs.
    checkpoints: what becomes of regions that the module runs under `torch.utils.checkpoint`. "respect" leaves them as
        they are and plans around them; "replace" runs them as plain code and has the plan choose what is recomputed.
        By default they are respected, except by engines "replay" and "compiled", which can only replace them.
    chunk_loss: so many slices of the tokens, in which the linear layer that makes the logits and their cross entropy
        run, in forward and backward, so that the logits are never there as a whole. The loss and the gradients are then
        equal up to rounding, and no longer to the bit; logits that forward returns are computed when you read them.
    offload: how much host memory values may move to and come back from, beside computation: "32GiB", bytes, or True for
        half of what the machine, or its container, has available, shared with the other ranks there. The plan then
        chooses between keeping, recomputing and moving. On CUDA that memory is pinned. Off by default.
    cache: use the plan of an earlier start of the same training, if there is one, and keep this one for later starts.
    progress: show what takes long; None does so on a terminal and in a notebook.
    """
    settings = make_settings(budget, solver, time_limit, reserve, progress, options, engine=engine)
    settings = with_checkpoints(replace(settings, accumulate=accumulate, cache=cache), checkpoints)
    settings = with_offload(with_chunks(_with_pins(settings, keep, recompute), chunk_loss), offload)
    return _wrap(model, sample, settings, loss=loss, optimizer=optimizer, in_place=in_place, share=share)


def plan(
    model: nn.Module,
    sample: Any,
    *,
    budget: str | int | float,
    loss: Loss | None = None,
    engine: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | None = None,
    solver: str | Solver = DEFAULT_SOLVER,
    time_limit: float = DEFAULT_TIME_LIMIT,
    reserve: str | int = 0,
    accumulate: bool = False,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    checkpoints: str | None = None,
    chunk_loss: int = 1,
    offload: bool | str | int = False,
    cache: bool = True,
    progress: bool | None = None,
    **options: Any,
) -> Plan:
    """Return the plan that `remat` would use; nothing is changed and nothing is run.

    device: the name of a device that is not here ("h100"), to plan for it by its figures.
    """
    settings = make_settings(budget, solver, time_limit, reserve, progress, options, device, engine)
    settings = with_checkpoints(replace(settings, accumulate=accumulate, cache=cache), checkpoints)
    settings = with_offload(with_chunks(_with_pins(settings, keep, recompute), chunk_loss), offload)
    runner = runner_of(_wrap(model, _required_sample(sample), settings, loss=loss, optimizer=optimizer))
    assert runner is not None
    if not runner.planner.plans:
        raise CaptureError(
            f"there is nothing to plan: nothing that {type(model).__name__} returns for this sample needs gradients, "
            "or what it returns depends on data that a recording does not have"
        )
    return runner.planner.plans[-1]


def trace(
    model: nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool = False,
    checkpoints: str = RESPECT,
    chunk_loss: int = 1,
    device: str | None = None,
    progress: bool | None = None,
) -> Graph:
    """Return the graph of a training step of `model`, with costs: what solvers work on and `save_graph` keeps.

    Costs are measured, or those of the `device` named; nothing is changed and nothing is run.
    """
    settings = replace(make_settings("100%", DEFAULT_SOLVER, 0.0, 0, progress, {}, device), accumulate=accumulate)
    settings = with_chunks(with_checkpoints(settings, checkpoints), chunk_loss)
    return record_step(model, sample, settings, loss=loss, optimizer=optimizer)[1].graph


def record_step(
    model: nn.Module,
    sample: Any,
    settings: Settings,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[Runner, RecordedGraph]:
    """Record a training step without a plan for it: what `trace` and the questions of `rematch.foresight` build on."""
    args, kwargs = as_arguments(_required_sample(sample))
    runner = Runner(_twin(model), Planner(settings), loss)
    _require_fitting(runner, args, kwargs)
    if optimizer is not None:
        runner.expect(optimizer)
    try:
        return runner, runner.recorded(args, kwargs)
    except CannotRecord as refused:
        raise CaptureError(f"{type(model).__name__} cannot be recorded without running it: {refused}") from None


def apply(model: M, plan: Plan | str | PathLike[str], sample: Any = None, *, loss: Loss | None = None) -> M:
    """Make `model` train by `plan`; `ScheduleError` says why if the plan is for another graph.

    With `sample` that is checked here, otherwise in the first training step. Other shapes than the plan's are planned
    anew. Give the `loss` that the plan was made with, if there was one: it is part of the plan's graph.
    """
    known = plan if isinstance(plan, Plan) else Plan.load(plan)
    offload = known.moved.host_bytes if known.moved is not None else False
    settings = Settings(budget=known.figures.budget_bytes, offload=offload)
    return _wrap(model, sample, settings, required=known, loss=loss)


def plans_of(model: nn.Module) -> tuple[Plan, ...]:
    """Return the plans that a module made by `remat` or `apply` has so far, one for each graph it met."""
    runner = runner_of(model)
    if runner is None:
        raise CaptureError(f"{type(model).__name__} was not made by rematch.remat or rematch.apply, so it has no plans")
    return tuple(runner.planner.plans)


def make_settings(
    budget: str | int | float,
    solver: str | Solver,
    time_limit: float,
    reserve: str | int,
    progress: bool | None,
    options: dict[str, Any],
    device: str | None = None,
    engine: str | None = None,
) -> Settings:
    """Refuse what cannot be read before anything is recorded."""
    if budget != "auto":
        parse_budget(budget, baseline_peak_bytes=2**40)
    if isinstance(solver, str):
        make_solver(solver, **options)
    if device is not None:
        from rematch.capture.devices import find_device

        find_device(device)
    engine = engine or DEFAULT_ENGINE
    if engine not in ENGINES:
        raise RematchError(unknown_name("engine", engine, ENGINES))
    reserve_bytes = parse_budget(reserve, baseline_peak_bytes=0) if reserve else 0
    return Settings(
        budget=budget,
        solver=solver,
        options=options,
        time_limit=time_limit,
        reserve_bytes=reserve_bytes,
        device=device,
        progress=progress,
        engine=engine,
    )


def with_checkpoints(settings: Settings, checkpoints: str | None) -> Settings:
    """The settings with what is to become of regions under `torch.utils.checkpoint`; see `remat`."""
    replaces = settings.engine not in (AUTO, TAPE)  # these engines run traced code, in which such regions are inlined
    checkpoints = checkpoints or (REPLACE if replaces else RESPECT)
    if checkpoints not in (RESPECT, REPLACE):
        raise RematchError(unknown_name("value for checkpoints=", checkpoints, (RESPECT, REPLACE)))
    if replaces and checkpoints == RESPECT:
        raise RematchError(
            f"checkpoints='respect' needs engine='tape', which runs the regions as they are, not {settings.engine!r}"
        )
    return replace(settings, checkpoints=checkpoints)


def _with_pins(settings: Settings, keep: Sequence[str], recompute: Sequence[str]) -> Settings:
    for what, patterns in (("keep", keep), ("recompute", recompute)):
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise RematchError(f"{what}= takes a list of patterns, such as {what}=['layers.*.mlp'], not {patterns!r}")
    pinned = replace(settings, keep=tuple(keep), recompute=tuple(recompute))
    if pinned.pins and settings.engine not in (AUTO, TAPE):
        raise RematchError(
            f"keep= and recompute= need engine='tape', which runs what they name, not {settings.engine!r}"
        )
    return pinned


def with_chunks(settings: Settings, chunk_loss: int) -> Settings:
    """The settings with the head and its cross entropy in so many slices; see `remat`."""
    if isinstance(chunk_loss, bool) or not isinstance(chunk_loss, int) or chunk_loss < 1:
        raise RematchError(f"chunk_loss= takes a number of slices, 1 or more, such as chunk_loss=8, not {chunk_loss!r}")
    if chunk_loss > 1 and settings.engine not in (AUTO, TAPE):
        raise RematchError(f"chunk_loss= needs engine='tape', which runs the module's Python, not {settings.engine!r}")
    return replace(settings, chunk_loss=chunk_loss)


def with_offload(settings: Settings, offload: bool | str | int) -> Settings:
    host_bytes(offload)
    if offload is not False and settings.engine == COMPILED:
        raise RematchError("offload= needs engine='tape' or 'replay': inductor decides itself how long buffers live")
    if offload is not False and settings.recompute:
        raise RematchError("recompute= names what is recomputed whatever that costs; offload= cannot be given with it")
    return replace(settings, offload=offload)


def _twin(model: M) -> M:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"rematch takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("a scripted module cannot be recorded; give the nn.Module it was made from")
    require_order(model)
    return twin_of(model)


def _wrap(
    model: M,
    sample: Any,
    settings: Settings,
    *,
    loss: Loss | None = None,
    required: Plan | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    in_place: bool = False,
    share: bool = False,
) -> M:
    twin = _twin(model)
    planned = model if in_place else twin
    before = planned.__dict__.get("forward")
    strip(planned)
    try:
        runner = _runner_class(settings, required)(planned, Planner(settings, required), loss)
        if optimizer is not None:
            runner.expect(optimizer)
        if sample is not None:
            args, kwargs = as_arguments(sample)
            _require_fitting(runner, args, kwargs)
            with plan_of_rank_0(runner) if share else nullcontext():
                runner.prepare(args, kwargs)
    except BaseException:
        if before is not None:
            planned.__dict__["forward"] = before
        raise
    planned.__dict__["forward"] = runner
    return planned


def _runner_class(settings: Settings, required: Plan | None) -> type[Runner]:
    engine = required.engine if required is not None and settings.engine == AUTO else settings.engine
    if engine != COMPILED:
        return Runner
    from rematch.execute.compiled.runner import CompiledRunner  # inductor takes long to load

    return CompiledRunner


def as_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How to call with `sample`: `(args, kwargs)`, a dict of keywords, a tuple of arguments, or one argument."""
    if isinstance(sample, tuple):
        if len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict):
            return sample[0], sample[1]
        return sample, {}
    if isinstance(sample, dict):
        if not all(isinstance(key, str) for key in sample):
            raise CaptureError(
                "a dict as sample holds keyword arguments; to give one dict as argument, write ((dict,), {})"
            )
        return (), sample
    return (sample,), {}


def _require_fitting(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a sample that `forward` cannot even be called with."""
    signature = inspect.signature(runner)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the sample does not fit {type(runner.module).__name__}.forward{signature}: {error}. Give it as the "
            "module is called: one tensor, a tuple of arguments, a dict of keyword arguments, or (args, kwargs)"
        ) from None


def _required_sample(sample: Any) -> Any:
    if sample is None:
        raise CaptureError("rematch needs a sample: the arguments that the model will be called with")
    return sample
