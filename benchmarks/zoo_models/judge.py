"""Train one model plainly and inside a budget, and say how the two compare.

`judge(ENTRIES["llama"], time_limit=10)`

Plain training runs twice, so that we know whether it repeats itself. Then the model is trained at 60 % of its memory,
else at 80 %, else at the least that `rematch.BudgetInfeasible` names. Losses, gradients, buffers, random states and
what the example observes are compared bit by bit after each of two steps; the peak is that of the second step.
"""

from __future__ import annotations

import random
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

import rematch
from rematch.api import as_arguments
from rematch.capture.memory import PeakMemory
from rematch.planning.budget import parse_budget
from rematch.trial import same_bits

from .base import Entry, Example

STEPS, WARM_UP, LEARNING_RATE, BUILD_SEED, TRAINING_SEED = 2, 3, 0.01, 0, 7
BUDGETS = ("60%", "80%")
NAMED_MINIMUM = "least"

EQUAL = "equal"
OTHER_BITS = "other bits"
OVER_BUDGET = "over budget"
REFUSED = "refused"
RAW_EXCEPTION = "raw exception"
EAGER_VARIES = "eager varies"
EAGER_REFUSES = "eager refuses"
TIMED_OUT = "timed out"
CRASHED = "crashed"
SKIPPED = "skipped"
OUTCOMES = (
    EQUAL,
    OTHER_BITS,
    OVER_BUDGET,
    REFUSED,
    RAW_EXCEPTION,
    CRASHED,
    TIMED_OUT,
    EAGER_VARIES,
    EAGER_REFUSES,
    SKIPPED,
)


@dataclass(frozen=True)
class Verdict:
    """What was found; fields that a model did not get to are None."""

    outcome: str
    reason: str = ""
    engine: str | None = None
    budget: str | None = None  # as it was asked for
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    plain_peak_bytes: int | None = None
    time_ratio: float | None = None  # of a step, to plain training's
    predicted_ratio: float | None = None
    planning_seconds: float | None = None
    operators: int | None = None
    plans: int | None = None


@dataclass(frozen=True)
class Trained:
    """What training left behind, step by step, and the peak of the last step with all that was there before it."""

    steps: list[dict[str, Any]]
    peak_bytes: int


class OtherRandomState(Exception):
    """Planning drew random numbers, which training then does not get."""


def judge(entry: Entry, *, time_limit: float) -> Verdict:
    """Build, train and compare one model in this process."""
    missing = _missing(entry)
    if missing is not None:
        return Verdict(SKIPPED, missing)
    try:
        plain, again = (_trained(example, example.module) for example in (_built(entry), _built(entry)))
    except Exception as error:
        return Verdict(EAGER_REFUSES, _told(error))
    found: dict[str, Any] = {"plain_peak_bytes": plain.peak_bytes}
    try:
        example, module, budget = _planned(entry, time_limit, found)
        ours = _trained(example, module)
    except rematch.RematchError as error:
        return Verdict(REFUSED, _told(error), **found)
    except OtherRandomState as error:
        return Verdict(OTHER_BITS, str(error), **found)
    except Exception as error:
        return Verdict(RAW_EXCEPTION, _told(error), **found)
    budget_bytes = _asked_bytes(module, budget, plain.peak_bytes)
    found |= {"peak_bytes": ours.peak_bytes, "budget_bytes": budget_bytes, **_plan_figures(module)}
    outcome, reason = _compared(example, plain, again, ours, budget_bytes)
    if outcome == EQUAL:
        try:
            found["time_ratio"] = _time_ratio(_built(entry), example, module)
        except Exception as error:
            return Verdict(RAW_EXCEPTION, f"in a later step: {_told(error)}", **found)
    return Verdict(outcome, reason, **found)


def _missing(entry: Entry) -> str | None:
    """Why the model cannot be built here; a library that is there may still fail to load."""
    for name in entry.needs:
        try:
            __import__(name)
        except Exception as error:
            return f"{name} cannot be imported: {str(error).splitlines()[0]}"
    return None


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _built(entry: Entry) -> Example:
    _seed(BUILD_SEED)
    return entry.build()


def _planned(entry: Entry, time_limit: float, found: dict[str, Any]) -> tuple[Example, nn.Module, str | int]:
    """The module inside the first budget that can be kept, and that; `found` also says how long planning took."""
    started = time.perf_counter()
    budgets: list[str | int] = [*BUDGETS]
    while True:
        budget = budgets.pop(0)
        example = _built(entry)
        found["budget"] = NAMED_MINIMUM if isinstance(budget, int) else budget
        _seed(TRAINING_SEED)
        before = _random_states()
        try:
            with example.context():
                module = rematch.remat(
                    example.module,
                    example.sample,
                    budget=budget,
                    loss=example.loss,
                    time_limit=time_limit,
                    progress=False,
                    cache=False,
                )
        except rematch.BudgetInfeasible as error:
            if not budgets and not isinstance(budget, int) and error.feasible_from_bytes is not None:
                budgets.append(error.feasible_from_bytes)
            if not budgets:
                raise
            continue
        finally:
            found["planning_seconds"] = round(time.perf_counter() - started, 2)
        if not _same(before, _random_states()):
            raise OtherRandomState("planning draws random numbers")
        return example, module, budget


def _asked_bytes(module: nn.Module, budget: str | int, plain_peak_bytes: int) -> int:
    """The budget as the user gave it: plans keep a little of it back. Without a plan, of plain training's peak."""
    return parse_budget(budget, _whole_bytes(module) or plain_peak_bytes)


def _whole_bytes(module: nn.Module) -> int | None:
    """What a percentage is of: the peak of the first graph, as eager would run it."""
    found: int | None = module.forward.planner.whole_bytes  # type: ignore[union-attr]
    return found


def _plan_figures(module: nn.Module) -> dict[str, Any]:
    plans = rematch.plans_of(module)
    if not plans:
        return {"engine": "no plan", "plans": 0}
    figures = plans[0].figures
    return {
        "engine": str(getattr(plans[-1], "engine", "replay")),
        "predicted_peak_bytes": figures.peak_bytes,
        "predicted_ratio": None if figures.overhead_pct is None else round(1 + figures.overhead_pct / 100, 4),
        "operators": plans[0].graph_ops,
        "plans": len(plans),
    }


def _compared(example: Example, plain: Trained, again: Trained, ours: Trained, budget_bytes: int) -> tuple[str, str]:
    """The outcome, and what differs."""
    if not all(_same(one, other) for one, other in zip(plain.steps, again.steps, strict=True)):
        return EAGER_VARIES, "two plain runs from the same seeds differ"
    for number, (mine, theirs) in enumerate(zip(ours.steps, plain.steps, strict=True)):
        differing = [name for name in theirs.keys() | mine.keys() if not _same(mine.get(name), theirs.get(name))]
        if differing:
            shown = ", ".join(sorted(differing)[:4])
            return OTHER_BITS, f"step {number + 1}: {len(differing)} of {len(theirs)} differ: {shown}"
    if example.bounded and ours.peak_bytes > budget_bytes:
        return OVER_BUDGET, f"{ours.peak_bytes:,} bytes for a budget of {budget_bytes:,}"
    return EQUAL, ""


def _trained(example: Example, module: nn.Module) -> Trained:
    _seed(TRAINING_SEED)
    step = _step_of(example)
    steps: list[dict[str, Any]] = []
    peak_bytes = 0
    for number in range(STEPS):
        module.zero_grad(set_to_none=True)
        held_bytes = _held_bytes(module, () if example.makes_inputs else example.sample)
        with PeakMemory(torch.device("cpu")) as used:
            returned = step(module, number)
        peak_bytes = held_bytes + used.peak_bytes
        steps.append(_noted(example, module, returned))
        del returned
        if not example.updates:
            _descend(module)
    module.zero_grad(set_to_none=True)
    return Trained(steps, peak_bytes)


def _step_of(example: Example) -> Callable[[nn.Module, int], Any]:
    if example.step is not None:
        return example.step
    args, kwargs = as_arguments(example.sample)

    def step(module: nn.Module, number: int) -> torch.Tensor:
        with example.context():
            value = example.loss(module(*args, **kwargs))
        value.backward()  # type: ignore[no-untyped-call]
        return value

    return step


def _noted(example: Example, module: nn.Module, returned: Any) -> dict[str, Any]:
    """Copies of everything that must be as in plain training."""
    leaves = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
    noted: dict[str, Any] = {f"returned[{index}]": leaf.detach().clone() for index, leaf in enumerate(leaves)}
    for name, parameter in module.named_parameters():
        noted[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
    noted |= {f"buffer {name}": buffer.detach().clone() for name, buffer in module.named_buffers()}
    return noted | _random_states() | {"observed": example.observe(module)}


def _random_states() -> dict[str, Any]:
    _, keys, position, *rest = numpy.random.get_state(legacy=True)
    return {
        "torch's random state": torch.get_rng_state(),
        "Python's random state": random.getstate(),
        "numpy's random state": (keys.tolist(), position, *rest),  # type: ignore[union-attr]
    }


def _same(ours: Any, theirs: Any) -> bool:
    """Equal to the bit, for tensors of any layout, dicts of them, and plain values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[name], theirs[name]) for name in ours)
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return type(ours) is type(theirs) and bool(ours == theirs)
    if ours.layout != theirs.layout:
        return False
    if ours.layout == torch.sparse_coo:
        return same_bits(ours._indices(), theirs._indices()) and same_bits(ours._values(), theirs._values())
    return same_bits(ours, theirs)


def _descend(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-LEARNING_RATE)


def _held_bytes(module: nn.Module, sample: Any) -> int:
    """What is there before a step and counts towards its budget."""
    leaves = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers(), *leaves)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _time_ratio(plain: Example, example: Example, module: nn.Module, *, enough_seconds: float = 1.5) -> float:
    """How much longer a step takes than a plain one: medians of CPU time of steps taken in turns.

    The first steps do not count: rematch may plan again there.
    """
    turns = ((_step_of(plain), plain.module, []), (_step_of(example), module, []))
    for number in range(WARM_UP):
        module.zero_grad(set_to_none=True)
        turns[1][0](module, number % STEPS)
    started = time.perf_counter()
    rounds = 0
    while rounds < 3 or (rounds < 25 and time.perf_counter() - started < enough_seconds):
        rounds += 1
        for step, trained, seconds in turns:
            trained.zero_grad(set_to_none=True)
            before = time.thread_time()
            step(trained, rounds % STEPS)
            seconds.append(time.thread_time() - before)
    mine, theirs = (statistics.median(seconds) for _, _, seconds in reversed(turns))
    return round(mine / theirs, 3)


def _told(error: BaseException) -> str:
    """An exception in a few lines: its words, and the innermost place in rematch that it passed."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= 600 else text[:597] + "..."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "rematch" in frame.filename]
    inside = [frame for frame in frames if "/benchmarks/" not in frame.filename]
    place = f" (at {inside[-1].filename.rpartition('/')[2]}:{inside[-1].lineno})" if inside else ""
    return f"{type(error).__name__}: {shown}{place}"
