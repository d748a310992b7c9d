"""The verbs for PyTorch modules: `remat` trains inside a budget, `plan` looks first, `apply` uses a plan.

`model = rematch.remat(model, batch, budget="8GiB")`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn

from rematch.errors import CaptureError, RematchError
from rematch.execute.module import runner_of, twin_of
from rematch.execute.runner import Runner
from rematch.graph import Graph
from rematch.planning.budget import parse_budget
from rematch.planning.plan import Plan
from rematch.planning.planner import Planner, Settings
from rematch.solvers.base import DEFAULT_SOLVER, DEFAULT_TIME_LIMIT, Solver, make_solver

M = TypeVar("M", bound=nn.Module)
Loss = Callable[[Any], torch.Tensor]


def remat(
    model: M,
    sample: Any = None,
    *,
    budget: str | int | float,
    loss: Loss | None = None,
    solver: str | Solver = DEFAULT_SOLVER,
    time_limit: float = DEFAULT_TIME_LIMIT,
    reserve: str | int = 0,
    accumulate: bool = False,
    progress: bool | None = None,
    **options: Any,
) -> M:
    """`model`, made to train inside `budget`: a module of the same class that shares its parameters.

    The peak of device memory during forward and backward stays within the budget, everything counted: parameters,
    gradients, inputs, outputs, what the loss allocates, workspace, and what was allocated before. Losses and gradients
    are those of plain training, bit by bit.

    sample: a tensor, tuple, dict or `(args, kwargs)`, as `model` is called. Without it, the first call plans.
    budget: bytes, "8GiB", "60%" of the peak without recomputation, or "auto" for what the device has free.
    loss: from the model's output to the scalar that is differentiated. Given, it is measured here; else in the first
        step, and until then twice the differentiable outputs is assumed for what it allocates.
    solver, time_limit, options: how schedules are found; see `rematch.solve`.
    accumulate: gradients are added up over several backward passes. The schedule then adds each to `.grad` as soon as
        it is computed, where autograd would hold all of them twice; parameters with hooks are left to autograd.
    reserve: bytes to leave for what is allocated later, such as the state of an optimizer.
    progress: show what takes long; None does so on a terminal.
    """
    settings = replace(_settings(budget, solver, time_limit, reserve, progress, options), accumulate=accumulate)
    return _wrap(model, sample, settings, loss=loss)


def plan(
    model: nn.Module,
    sample: Any,
    *,
    budget: str | int | float,
    loss: Loss | None = None,
    device: str | None = None,
    solver: str | Solver = DEFAULT_SOLVER,
    time_limit: float = DEFAULT_TIME_LIMIT,
    reserve: str | int = 0,
    progress: bool | None = None,
    **options: Any,
) -> Plan:
    """The plan that `remat` would use; nothing is changed and nothing is run.

    device: the name of a device that is not here ("h100"), to plan for it by its figures.
    """
    settings = _settings(budget, solver, time_limit, reserve, progress, options, device)
    runner = runner_of(_wrap(model, _required_sample(sample), settings, loss=loss))
    assert runner is not None and isinstance(runner.planner, Planner)
    return runner.planner.plans[-1]


def trace(model: nn.Module, sample: Any, *, loss: Loss | None = None, device: str | None = None) -> Graph:
    """The graph of a training step of `model`, with costs: what solvers work on and `save_graph` keeps.

    Costs are measured, or those of the `device` named; nothing is changed and nothing is run.
    """
    settings = Settings(budget="110%", solver="noremat", device=device)
    runner = runner_of(_wrap(model, _required_sample(sample), settings, loss=loss))
    assert runner is not None and isinstance(runner.planner, Planner) and runner.planner.graph is not None
    return runner.planner.graph


def apply(model: M, plan: Plan | str | PathLike[str], sample: Any = None) -> M:
    """`model`, made to train by `plan`; `ScheduleError` says why if the plan is for another graph.

    With `sample` that is checked here, else in the first training step. Other shapes than the plan's are planned anew.
    """
    known = plan if isinstance(plan, Plan) else Plan.load(plan)
    settings = Settings(budget=known.figures.budget_bytes)
    return _wrap(model, sample, settings, required=known)


def plans_of(model: nn.Module) -> tuple[Plan, ...]:
    """The plans that a module made by `remat` or `apply` has so far, one for each graph it met."""
    runner = runner_of(model)
    if runner is None or not isinstance(runner.planner, Planner):
        raise CaptureError(f"{type(model).__name__} was not made by rematch.remat or rematch.apply, so it has no plans")
    return tuple(runner.planner.plans)


def _settings(
    budget: str | int | float,
    solver: str | Solver,
    time_limit: float,
    reserve: str | int,
    progress: bool | None,
    options: dict[str, Any],
    device: str | None = None,
) -> Settings:
    """Refuse what cannot be read before anything is traced."""
    if budget != "auto":
        parse_budget(budget, baseline_peak_bytes=2**40)
    if isinstance(solver, str):
        make_solver(solver, **options)
    if device is not None:
        from rematch.capture.devices import find_device

        find_device(device)
    reserve_bytes = parse_budget(reserve, baseline_peak_bytes=0) if reserve else 0
    return Settings(
        budget=budget,
        solver=solver,
        options=options,
        time_limit=time_limit,
        reserve_bytes=reserve_bytes,
        device=device,
        progress=progress,
    )


def _wrap(model: M, sample: Any, settings: Settings, *, loss: Loss | None = None, required: Plan | None = None) -> M:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"rematch takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("a scripted module cannot be captured; give the nn.Module it was made from")
    twin = twin_of(model)
    planner = Planner(twin, settings, required)
    runner = Runner(twin, planner)
    if sample is not None:
        args, kwargs = as_arguments(sample)
        _require_fitting(runner, args, kwargs)
        if loss is not None:
            planner.loss = runner.measure_loss(loss, args, kwargs)
        runner.prepare(args, kwargs)
    elif loss is not None:
        raise RematchError("loss= needs sample=: the loss is measured on outputs of the sample's shapes")
    twin.__dict__["forward"] = runner
    return twin


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
        raise CaptureError("rematch.plan needs a sample: the arguments that the model will be called with")
    return sample
