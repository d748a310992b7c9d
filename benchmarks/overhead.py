"""What running through rematch costs when nothing is recomputed, against eager PyTorch.

    python benchmarks/overhead.py [--rounds 300] [--only REGEX] [--results DIR]

A tiny GPT, whose step is all overhead, and a larger one. Steps are taken in turns on one thread, in CPU time. Then
where the time of our step goes: the generated code, AOTAutograd's wrapper around it, Dynamo's (mostly guards), and
ours.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from models import Case
from models.cases import gpt

import rematch
from rematch.execute import runner
from rematch.execute.module import runner_of
from rematch.files import write_text
from rematch.trial import Trial, alternate

CASES = (
    # per case: share of the rounds, since a step of the larger one takes hundreds of times as long
    (gpt("tiny", depth=2, width=64, heads=4, batch=2, length=32, vocabulary=1000, fused=True), 1.0),
    (gpt("large", depth=4, width=512, heads=8, batch=4, length=128, vocabulary=8000, fused=True), 0.04),
)
CLOCK = time.thread_time


@dataclass(frozen=True)
class Row:
    name: str
    eager_seconds: float
    seconds: float
    ratio: float  # of medians
    ratio_of_minima: float
    parts_seconds: dict[str, float]  # where a step of ours spends its time


def run(case: Case, rounds: int) -> Row:
    torch.manual_seed(0)
    model, sample = case.build(), case.sample()
    with _watched() as spent:
        kept = rematch.remat(
            model, sample, budget="100%", loss=case.loss, solver="noremat", progress=False, cache=False
        )
        eager, ours = Trial(model, case.loss), Trial(kept, case.loss)
        alternate([eager, ours], sample, rounds=5)
    before, after = alternate([eager, ours], sample, rounds, CLOCK)
    return Row(
        name=case.name,
        eager_seconds=statistics.median(before),
        seconds=statistics.median(after),
        ratio=statistics.median(after) / statistics.median(before),
        ratio_of_minima=min(after) / min(before),
        parts_seconds=_parts(ours, sample, rounds, spent),
    )


Spent = dict[str, list[float]]  # label -> CPU seconds of each call


@contextmanager
def _watched() -> Iterator[Spent]:
    """What is compiled inside notes how long each of its calls takes."""
    spent: Spent = {}
    compile_module, backend = runner.compile_module, runner.Runner._backend

    def compile_watched(module: Any, label: str) -> Any:
        return _timed(compile_module(module, label), spent, label)

    def backend_watched(self: Any, *args: Any) -> Any:
        return _timed(backend(self, *args), spent, "graph")

    with (
        patch.object(runner, "compile_module", compile_watched),
        patch.object(runner.Runner, "_backend", backend_watched),
    ):
        yield spent


def _timed(function: Callable[..., Any], spent: Spent, label: str) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        started = CLOCK()
        try:
            return function(*args, **kwargs)
        finally:
            spent.setdefault(label, []).append(CLOCK() - started)

    return call


def _parts(ours: Trial, sample: Any, rounds: int, spent: Spent) -> dict[str, float]:
    """Each layer's own time: what it takes less what the layer below takes."""
    forward = runner_of(ours.model)
    assert forward is not None and forward._compiled is not None
    plain, forward._compiled = forward._compiled, _timed(forward._compiled, spent, "dynamo")
    spent.clear()
    args, kwargs = sample
    for _ in range(rounds):
        ours.model.zero_grad(set_to_none=True)
        output = _timed(ours.model, spent, "module")(*args, **kwargs)
        loss = _timed(ours.loss, spent, "loss")(output)
        del output
        _timed(loss.backward, spent, "engine")()
    forward._compiled = plain
    took = {label: statistics.median(times) for label, times in spent.items()}
    return {
        "generated forward": took["forward"],
        "generated backward": took["backward"],
        "AOTAutograd forward": took["graph"] - took["forward"],
        "Dynamo": took["dynamo"] - took["graph"],
        "rematch": took["module"] - took["dynamo"],
        "autograd's engine": took["engine"] - took["backward"],
        "loss": took["loss"],
    }


def show(row: Row) -> None:
    print(
        f"{row.name:8} eager {row.eager_seconds * 1e3:8.2f} ms   rematch {row.seconds * 1e3:8.2f} ms   "
        f"ratio {row.ratio:.3f}   of minima {row.ratio_of_minima:.3f}"
    )
    for label, seconds in row.parts_seconds.items():
        print(f"    {label:20} {seconds * 1e6:10.0f} us   {seconds / row.seconds:6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="steps of the tiny model to time; fewer of the larger")
    parser.add_argument("--only", default="", help="regular expression on the model's name")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = []
    for case, share in CASES:
        if re.search(arguments.only, case.name):
            rows.append(run(case, max(5, round(arguments.rounds * share))))
            show(rows[-1])
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}",
        "rows": [asdict(row) for row in rows],
    }
    write_text(arguments.results / "overhead.json", json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
