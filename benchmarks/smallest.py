"""The smallest budget that a schedule is found for, and the largest one proved impossible.

    python benchmarks/smallest.py [--graphs DIR] [--limit 120] [--only REGEX] [--results DIR]

Training steps of up to about 300 operators: generated ones and nested skips (one of them with the held-out seed of
`solvers.py`), each as it is, where every operator may run again, and "tape": as an engine has it that leaves forward to
the user and backward to autograd, and runs only operators of forward again, after the loss. From DIR, Checkmate's.
Then, for comparison, wide random graphs, which are no training steps. Both budgets are percentages of the peak without
recomputation, and the gap is that of the first over the second in percent. Rows are kept as JSON; cases that are solved
again replace theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

from solvers import CHECKMATE, HELD_OUT_SEED, nested_skips

from rematch.files import write_text
from rematch.graph import Graph, Phase, baseline, generators, simulate
from rematch.graph.formats import load_graph
from rematch.solvers import Deadline
from rematch.solvers.minimum import smallest_budget


@dataclass(frozen=True)
class Row:
    name: str
    operators: int
    impossible_percent: float
    possible_percent: float
    gap_percent: float
    runs: float  # computations per operator in the schedule that was found
    seconds: float
    date: str
    load: float


def graphs(folder: Path | None) -> Iterator[tuple[str, Callable[[], Graph]]]:
    for name, make in training_steps():
        yield name, make
        yield f"{name}, tape", lambda make=make: as_the_tape_runs_it(make())
    if folder is not None:
        for name in CHECKMATE:
            yield f"checkmate {name}", lambda name=name: load_graph(folder / f"cm_{name}_train.json", plain=True).graph
    for nodes in (200, 400):
        yield f"random layered {nodes}", partial(generators.random_layered, nodes, seed=0)


def training_steps() -> Iterator[tuple[str, Callable[[], Graph]]]:
    yield "chain 120", partial(generators.chain, 120)
    yield "feed-forward 60", partial(generators.feed_forward, 60)
    yield "GPT 8", partial(generators.gpt, 8)
    yield "U-Net 4", partial(generators.unet, 4, 4)
    yield "encoder-decoder 3+3", partial(generators.encoder_decoder, 3, 3)
    for depth, convolutions in ((3, 2), (4, 1), (4, 2)):
        yield f"nested skips {depth}x{convolutions}", partial(nested_skips, depth, convolutions, 0)
    yield "nested skips 4x1, held out", partial(nested_skips, 4, 1, HELD_OUT_SEED)


def as_the_tape_runs_it(graph: Graph) -> Graph:
    """Forward is the user's own and backward is autograd's: only operators of forward run again, after the loss."""
    ops = tuple(replace(op, once=op.once or op.phase is not Phase.FORWARD) for op in graph.ops)
    return replace(graph, ops=ops, recompute_after_loss=True)


def run(name: str, graph: Graph, limit: float) -> Row:
    whole = simulate(graph, baseline(graph)).peak_bytes
    started = time.perf_counter()
    found = smallest_budget(graph, Deadline(limit))
    seconds = time.perf_counter() - started
    peak = simulate(graph, found.schedule).checked().peak_bytes
    assert peak == found.feasible_from_bytes
    return Row(
        name,
        len(graph.ops),
        100.0 * found.infeasible_up_to_bytes / whole,
        100.0 * peak / whole,
        100.0 * (peak / (found.infeasible_up_to_bytes + 1) - 1.0),
        len(found.schedule.ops) / len(graph.ops),
        seconds,
        date.today().isoformat(),
        os.getloadavg()[0],
    )


HEADER = f"{'graph':34} {'ops':>5} {'impossible':>11} {'possible':>9} {'gap %':>7} {'runs':>6} {'s':>6} {'load':>5}"


def line(row: Row) -> str:
    return (
        f"{row.name:34} {row.operators:>5} {row.impossible_percent:11.2f} {row.possible_percent:9.2f} "
        f"{row.gap_percent:7.2f} {row.runs:6.1f} {row.seconds:6.1f} {row.load:5.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, help="folder of benchmark graphs; without it, generated ones alone")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each graph")
    parser.add_argument("--only", default="", help="regular expression on the graph's name")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    path = arguments.results / "smallest.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = {row["name"]: Row(**row) for row in kept.get("rows", []) if kept["limit_seconds"] == arguments.limit}
    print(HEADER)
    for name, make in graphs(arguments.graphs):
        if not re.search(arguments.only, name):
            continue
        rows[name] = run(name, make(), arguments.limit)
        print(line(rows[name]), flush=True)
        known = {"limit_seconds": arguments.limit, "rows": [asdict(row) for row in rows.values()]}
        write_text(path, json.dumps(known, indent=1))


if __name__ == "__main__":
    main()
