"""What is installed, what it can use, and whether it works: `rematch doctor`.

`run_doctor(print)` prints a line for each thing it looks at and returns whether all of them are well.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from rematch import __version__
from rematch.cache import cache_folder
from rematch.errors import RematchError
from rematch.units import format_bytes

Say = Callable[[str], None]
_REQUIRED = ("torch", "numpy", "numba", "highspy", "ortools")
_OPTIONAL = {"matplotlib": "pictures", "gurobipy": "Gurobi in checkmate and hiremate", "transformers": "its models"}
_SOLVE_SECONDS = 10.0


def run_doctor(say: Say, *, self_test: bool = True) -> bool:
    """Print what there is and, unless told otherwise, try it; whether everything is well."""
    say(f"rematch      {__version__} in {Path(__file__).parent}")
    say(f"python       {platform.python_version()} on {platform.platform()}")
    fine = _packages(say)
    _solvers(say)
    _devices(say)
    _folders(say)
    if self_test and fine:
        fine = _tried(say, "planning", _plan_a_graph) and fine
        fine = _tried(say, "training", _train_a_module) and fine
    return fine


def _packages(say: Say) -> bool:
    fine = True
    for name in _REQUIRED:
        found = _version(name)
        fine = fine and found is not None
        say(f"{name:<12} {found or 'FAILED: not installed, and rematch needs it'}")
    for name, use in _OPTIONAL.items():
        say(f"{name:<12} {_version(name) or f'not installed; only needed for {use}'}")
    return fine


def _version(name: str) -> str | None:
    try:
        return version(name) if find_spec(name) is not None else None
    except (PackageNotFoundError, ValueError):  # a package without metadata
        return "of unknown version"


def _solvers(say: Say) -> None:
    from rematch.solvers import DEFAULT_SOLVER, solver_names

    names = solver_names()
    say(f"solvers      {len(names)}, {DEFAULT_SOLVER} by default: {', '.join(names)}")


def _devices(say: Say) -> None:
    say(f"cpu          {os.cpu_count()} cores, {format_bytes(psutil.virtual_memory().total)} of memory")
    if find_spec("torch") is None:
        return
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type != "cuda":
        say(f"{accelerator.type:<12} is here, but rematch trains on CPU, CUDA and ROCm only")
    if not torch.cuda.is_available():
        say("cuda         none; plans for a GPU that is not here take device=, such as device='h100'")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        say(f"cuda:{index}       {name}, {format_bytes(free)} of {format_bytes(total)} free")


def _folders(say: Say) -> None:
    """Where measured costs and compiled code are kept."""
    say(f"compiled     {os.environ.get('NUMBA_CACHE_DIR') or 'beside the sources or in the cache folder of the user'}")
    say(f"costs        {cache_folder()}")


def _tried(say: Say, what: str, attempt: Callable[[], str]) -> bool:
    started = time.monotonic()
    try:
        said = attempt()
    except (RematchError, RuntimeError, ImportError, OSError, AssertionError) as error:
        say(f"{what:<12} FAILED: {type(error).__name__}: {error}")
        return False
    say(f"{what:<12} ok: {said}, {time.monotonic() - started:.0f} s")
    return True


def _plan_a_graph() -> str:
    from rematch.graph import baseline, simulate
    from rematch.graph.generators import gpt
    from rematch.solvers import Problem, solve

    graph = gpt(layers=2)
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    found = solve(Problem(graph, peak_bytes * 6 // 10), time_limit=_SOLVE_SECONDS)
    if found.schedule is None:
        raise RematchError("no schedule for a small GPT in 60 % of its memory")
    return f"a GPT of {len(graph.ops)} operators in 60 % of its memory ({found.status.value})"


def _train_a_module() -> str:
    """A step of a small module, plainly and in less memory: the same bits, and the budget kept."""
    import torch
    from torch import nn

    from rematch.api import plans_of, remat
    from rematch.trial import Trial, same_outcome

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    model, batch = nn.Sequential(*layers).to(device), torch.randn(512, 64, device=device)
    plain = Trial(model, lambda y: y.square().mean())
    less = remat(model, batch, budget="80%", loss=plain.loss, time_limit=_SOLVE_SECONDS, progress=False, cache=False)
    ours, (plan,) = Trial(less, plain.loss), plans_of(less)
    if not same_outcome(ours, plain, batch):
        raise RematchError("training in less memory gave other gradients")
    peak_bytes, budget_bytes = ours.peak_bytes(batch), plan.figures.budget_bytes
    if peak_bytes > budget_bytes:
        raise RematchError(f"training took {format_bytes(peak_bytes)}, over a budget of {format_bytes(budget_bytes)}")
    return f"equal gradients on {device} in {format_bytes(peak_bytes)}, within {format_bytes(budget_bytes)}"
