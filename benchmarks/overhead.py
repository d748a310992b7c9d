"""What running through each engine costs when nothing is recomputed, against eager PyTorch.

    python benchmarks/overhead.py [--rounds 300] [--only REGEX] [--results DIR]

A tiny GPT, whose step is all overhead, and a larger one, by replay and by the tape. Steps are taken in turns on one
thread, in CPU time, eager's and the two engines'.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from models import Case
from models.cases import gpt

import rematch
from rematch.files import write_text
from rematch.trial import Trial, alternate

CASES = (
    # per case: share of the rounds, since a step of the larger one takes hundreds of times as long
    (gpt("tiny", depth=2, width=64, heads=4, batch=2, length=32, vocabulary=1000, fused=True), 1.0),
    (gpt("large", depth=4, width=512, heads=8, batch=4, length=128, vocabulary=8000, fused=True), 0.04),
)
ENGINES = ("replay", "tape")
CLOCK = time.thread_time


@dataclass(frozen=True)
class Row:
    name: str
    engine: str
    eager_seconds: float
    seconds: float
    ratio: float  # of medians
    ratio_of_minima: float


def run(case: Case, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    model, sample = case.build(), case.sample()
    trials = [Trial(model, case.loss)]
    for engine in ENGINES:
        kept = rematch.remat(
            model, sample, budget="100%", loss=case.loss, engine=engine, solver="noremat", progress=False, cache=False
        )
        trials.append(Trial(kept, case.loss))
    alternate(trials, sample, rounds=5)
    eager, *ours = alternate(trials, sample, rounds, CLOCK)
    return [
        Row(
            name=case.name,
            engine=engine,
            eager_seconds=statistics.median(eager),
            seconds=statistics.median(taken),
            ratio=statistics.median(taken) / statistics.median(eager),
            ratio_of_minima=min(taken) / min(eager),
        )
        for engine, taken in zip(ENGINES, ours, strict=True)
    ]


def show(row: Row) -> None:
    print(
        f"{row.name:8} {row.engine:8} eager {row.eager_seconds * 1e3:8.2f} ms   rematch {row.seconds * 1e3:8.2f} ms   "
        f"ratio {row.ratio:.3f}   of minima {row.ratio_of_minima:.3f}"
    )


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
            rows += run(case, max(5, round(arguments.rounds * share)))
    for row in rows:
        show(row)
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}",
        "rows": [asdict(row) for row in rows],
    }
    write_text(arguments.results / "overhead.json", json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
