"""What a link to host memory saves: `auto` with and without it, at a half, a third and a quarter of the peak.

    python benchmarks/host_memory.py [--only REGEX] [--speed 55e9] [--limit 60] [--results DIR]

Generated GPTs, and Llama 1B (8 x 2048 tokens) and ViT-L (64 images), both transformers' and in bf16, recorded on the
meta device with the times of an H200's data sheet. The link has the same speed in both directions and as much host
memory as it takes. `alone` is what `auto` found by recomputation in its share of the time, `joint` what it found with
the link, both as extra time in percent of the time without recomputation; `bound` holds for schedules that keep,
recompute and move. Rows are kept as JSON; cases that are solved again replace theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

import gpu_settings
import torch
from torch import nn

import rematch
from rematch.files import write_text
from rematch.graph import Graph, Link, baseline, simulate
from rematch.graph.generators import gpt
from rematch.solvers import Problem, make_solver, solve

BUDGETS = (0.5, 0.35, 0.25)
HOST_BYTES = 2**50


@dataclass(frozen=True)
class Row:
    name: str
    operators: int
    budget_share: float
    alone_percent: float | None
    joint_percent: float | None
    bound_percent: float | None
    moved_bytes: int
    stall_percent: float
    wall_seconds: float
    load: float  # of the machine, the mean of a minute


def graphs() -> Iterator[tuple[str, Callable[[], Graph]]]:
    for layers in (12, 24, 48, 96):
        yield f"GPT {layers}", partial(gpt, layers=layers)
    yield "Llama 1B", llama
    yield "ViT-L", vit


def llama() -> Graph:
    from transformers import masking_utils

    # It looks at the data, which the meta device has not, for sequences that were packed together.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    setting = gpu_settings.llama()
    with torch.device("meta"):
        model = setting.build()
    return recorded(model, {name: tensor.to("meta") for name, tensor in setting.sample().items()})


def vit() -> Graph:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_labels=1000
    )
    with torch.device("meta"):
        model = ViTForImageClassification(config).to(torch.bfloat16)
        images, labels = torch.zeros(64, 3, 224, 224, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.long)
    return recorded(model, {"pixel_values": images, "labels": labels})


def recorded(model: nn.Module, sample: dict[str, torch.Tensor]) -> Graph:
    return rematch.trace(model, sample, loss=lambda output: output.loss, device="h200", progress=False)


def measured(name: str, graph: Graph, share: float, speed: float, limit: float) -> Row:
    graph = replace(graph, link=Link(speed, speed, HOST_BYTES))
    problem = Problem(graph, int(share * simulate(graph, baseline(graph)).peak_bytes))
    started = time.perf_counter()
    solution = solve(problem, "auto", time_limit=limit)
    wall = time.perf_counter() - started

    def extra(seconds: float | None) -> float | None:
        return None if seconds is None else (seconds / graph.baseline_seconds - 1.0) * 100.0

    alone = next((entry.best_seconds for entry in solution.log if entry.solver == "recomputation alone"), None)
    seen = None if solution.schedule is None else simulate(graph, solution.schedule)
    return Row(
        name=name,
        operators=len(graph.ops),
        budget_share=share,
        alone_percent=extra(alone),
        joint_percent=extra(None if seen is None else seen.seconds),
        bound_percent=extra(solution.lower_bound_seconds),
        moved_bytes=0 if seen is None else seen.host_bytes,
        stall_percent=0.0 if seen is None else seen.stall_seconds / graph.baseline_seconds * 100.0,
        wall_seconds=wall,
        load=os.getloadavg()[0],
    )


def line(row: Row) -> str:
    figures = (row.alone_percent, row.joint_percent, row.bound_percent)
    shown = " ".join(f"{'-':>8}" if figure is None else f"{figure:>8.2f}" for figure in figures)
    case = f"{row.name:<9} {row.operators:>9,} {row.budget_share:>6.0%}"
    return f"{case} {shown} {row.wall_seconds:>7.1f} {row.load:>5.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on the name")
    parser.add_argument("--speed", type=float, default=55e9, help="bytes in a second, each way")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each case")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    make_solver("auto").prepare()
    path = arguments.results / "host-memory.json"
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = {(row["name"], row["budget_share"]): Row(**row) for row in known}
    print(f"{'graph':9} operators budget {'alone %':>8} {'joint %':>8} {'bound %':>8} {'wall s':>7}  load")
    for name, make in graphs():
        if not re.search(arguments.only, name):
            continue
        graph = make()
        for share in BUDGETS:
            rows[name, share] = measured(name, graph, share, arguments.speed, arguments.limit)
            print(line(rows[name, share]), flush=True)
            kept = {
                "date": date.today().isoformat(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
                "versions": {"rematch": rematch.__version__, **{n: version(n) for n in ("highspy", "numba", "numpy")}},
                "limit_seconds": arguments.limit,
                "bytes_per_second": arguments.speed,
                "rows": [asdict(row) for row in rows.values()],
            }
            write_text(path, json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
