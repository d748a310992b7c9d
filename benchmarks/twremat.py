"""Kumar et al.'s Tables 1 and 2 and figures 2 to 4: TWRemat, plain and pruned, beside greedy and the default solver.

    python benchmarks/twremat.py [--limit 20] [--only REGEX] [--results DIR]

The graphs are generated here: feed-forward networks, ResNets of bottleneck blocks, Transformers with encoder and
decoder, and a ResNet of at least the 17,705 operators that the paper's ResNet200 has. The paper's graphs are those of
TensorFlow, with optimizer and finer operators, so their widths need not be ours.

Table 2 has the memory and the time (1 is no recomputation) of each method. GreedyRemat gets the smallest limit that it
keeps, found by halving. TWRemat is the paper's, with k = 1; pruned is the same with all recomputations taken out that
its own peak leaves room for. `twremat` and the default solver then get two budgets: the peak of TWRemat, and half of
the peak without recomputation; both stop after `--limit` seconds. Figures 2 and 3 show how peak and time grow with
depth; parameters, inputs and the gradients of parameters, which every schedule has in the end, are drawn as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rematch
from rematch.files import write_text
from rematch.graph import Graph, Schedule, baseline, generators, simulate
from rematch.graph.builder import TrainingGraphBuilder
from rematch.solvers import Deadline, Problem, solve
from rematch.solvers.common.pruning import pruned
from rematch.solvers.default.greedy import greedy_schedule
from rematch.solvers.treewidth.elimination import Heuristic, decompose
from rematch.solvers.treewidth.tree_decomposition import operator_neighbours
from rematch.solvers.treewidth.twremat import Recursion, trade_off
from rematch.units import format_bytes

PAPER_OPERATORS = 17_705
MOST_GREEDY_OPERATORS = 3_000  # beyond, halving to its smallest limit takes minutes
HALVINGS = 10
HEADER = f"\n{{:18}} {'method':20} {'peak':>11} {'time':>8} {'runs':>8} {'cpu s':>8}"
# Table 1 of the paper: n, m, width.
PUBLISHED = {
    "ResNet200": (17_705, 27_312, 11),
    "FFN 100": (3_217, 4_447, 6),
    "Transformer Base": (15_842, 21_771, 18),
}
# Table 2 of the paper: GiB and relative length, in units of one operator, of TensorFlow's graphs.
PUBLISHED_OUTCOMES = {
    "Transformer Base": {"NoRemat": (3.97, 1.21), "GreedyRemat": (2.92, 1.21), "TWRemat": (1.14, 10.61)},
    "Transformer Big": {"NoRemat": (13.25, 1.27), "GreedyRemat": (10.12, 1.27), "TWRemat": (2.89, 10.64)},
}


def resnet(*stages: int, batch: int = 32, name: str = "") -> Graph:
    """Training step of a ResNet of bottleneck blocks on images of 224 pixels a side, so many blocks in each stage."""
    builder = TrainingGraphBuilder()

    def convolve(label: str, x: int, side: int, channels_in: int, channels_out: int, window: int) -> int:
        x = builder.convolution(
            label, x, pixels=batch * side**2, channels_in=channels_in, channels_out=channels_out, window=window
        )
        return builder.norm(f"{label}.norm", x, groups=channels_out)

    side, channels = 56, 64
    x = convolve("stem", builder.resident("image", batch * 224**2 * 3 * 2), 112, 3, channels, 49)
    x = builder.max_pool("stem.pool", builder.relu("stem.relu", x))
    for stage, blocks in enumerate(stages):
        width = 64 << stage
        for i in range(blocks):
            label = f"{stage}.{i}"
            if stage > 0 and i == 0:
                side //= 2
            inner = builder.relu(f"{label}.a.relu", convolve(f"{label}.a", x, side, channels, width, 1))
            inner = builder.relu(f"{label}.b.relu", convolve(f"{label}.b", inner, side, width, width, 9))
            inner = convolve(f"{label}.c", inner, side, width, 4 * width, 1)
            skip = convolve(f"{label}.skip", x, side, channels, 4 * width, 1) if i == 0 else x
            x, channels = builder.relu(f"{label}.relu", builder.add(f"{label}.add", inner, skip)), 4 * width
    logits = builder.linear("head", x, rows=batch, fan_in=channels, fan_out=1000)
    return builder.build(logits, name or f"ResNet{2 + 3 * sum(stages)}")


def resnet_of_paper_size() -> Graph:
    third = 0
    while True:
        third += 50
        graph = resnet(3, 24, third, 3, name="ResNet, 17,705 operators or more")
        if len(graph.ops) >= PAPER_OPERATORS:
            return graph


def transformer(layers: int, width: int = 512, heads: int = 8) -> Graph:
    return generators.encoder_decoder(encoder_layers=layers, decoder_layers=layers, width=width, heads=heads)


TABLES: dict[str, Callable[[], Graph]] = {
    "FFN 100": lambda: generators.feed_forward(100),
    "ResNet50": lambda: resnet(3, 4, 6, 3),
    "ResNet200": lambda: resnet(3, 24, 36, 3),
    "Transformer Base": lambda: transformer(6),
    "Transformer Big": lambda: transformer(6, width=1024, heads=16),
    "ResNet 17,705": resnet_of_paper_size,
}
DEPTHS: dict[str, dict[int, Callable[[], Graph]]] = {
    "feed-forward": {n: (lambda n=n: generators.feed_forward(n)) for n in (25, 50, 100, 200, 300, 400)},
    "ResNet": {
        2 + 3 * sum(stages): (lambda stages=stages: resnet(*stages))
        for stages in ((3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3), (3, 24, 36, 3), (3, 48, 72, 3), (3, 96, 144, 3))
    },
    "Transformer": {n: (lambda n=n: transformer(n)) for n in (3, 6, 12, 24, 36)},
}


@dataclass(frozen=True)
class Width:
    """A row of Table 1."""

    name: str
    operators: int
    edges: int
    width: int
    bags: int
    seconds: float
    min_degree_width: int
    min_degree_seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a method did: 1 is the time, and the number of runs, without recomputation."""

    method: str
    peak_bytes: int | None
    fixed_bytes: int
    time: float | None
    runs: float | None
    cpu_seconds: float


def measure_width(name: str, graph: Graph) -> Width:
    neighbours = operator_neighbours(graph)

    def timed(heuristic: Heuristic) -> tuple[Any, float]:
        started = time.process_time()
        return decompose(neighbours, heuristic), time.process_time() - started

    fill, fill_seconds = timed("min-fill")
    degree, degree_seconds = timed("min-degree")
    edges = sum(map(len, neighbours)) // 2
    return Width(
        name, len(graph.ops), edges, fill.width, len(fill.bags), fill_seconds, degree.width, degree_seconds
    )  # fmt: skip


def outcome(graph: Graph, method: str, schedule: Schedule | None, started: float) -> Outcome:
    """`started` is in seconds of this process's own time."""
    cpu_seconds = time.process_time() - started
    a = graph.arrays
    fixed = a.resident_bytes + int(a.size[a.target].sum())
    if schedule is None:
        return Outcome(method, None, fixed, None, None, cpu_seconds)
    seen = simulate(graph, schedule).checked()
    runs = float(seen.counts.sum()) / len(graph.ops)
    return Outcome(method, seen.peak_bytes, fixed, seen.seconds / graph.baseline_seconds, runs, cpu_seconds)


def without(graph: Graph) -> Outcome:
    return outcome(graph, "NoRemat", baseline(graph), time.process_time())


def greedy(graph: Graph) -> Outcome:
    """GreedyRemat with the smallest limit it keeps, as near as halving finds it."""
    started = time.process_time()
    best = baseline(graph)
    low, high = graph.largest_op_bytes, simulate(graph, best).peak_bytes
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        schedule = greedy_schedule(Problem(graph, middle), Deadline())
        peak = simulate(graph, schedule).peak_bytes
        if peak <= middle:
            best, high = schedule, peak
        else:
            low = middle
    return outcome(graph, "GreedyRemat", best, started)


def tree_width(graph: Graph) -> tuple[Outcome, Outcome]:
    """TWRemat, and the same pruned without a higher peak."""
    started = time.process_time()
    sequence = Recursion.of(graph).sequence(1)
    plain = outcome(graph, "TWRemat", Schedule.from_ops(graph, sequence), started)
    started = time.process_time()
    shorter = pruned(graph, sequence, 0)
    return plain, outcome(graph, "pruned", Schedule.from_ops(graph, shorter), started)


def within(graph: Graph, budget_bytes: int, label: str, solver: str, limit: float) -> Outcome:
    started = time.process_time()
    to_the_proof = {"gap": 0.0} if solver == "auto" else {}
    solution = solve(Problem(graph, budget_bytes), solver, time_limit=limit, **to_the_proof)
    return outcome(graph, f"{solver} at {label}", solution.schedule, started)


def row_of_table_2(graph: Graph, limit: float) -> list[Outcome]:
    plain, shorter = tree_width(graph)
    found = [without(graph), plain, shorter]
    if len(graph.ops) <= MOST_GREEDY_OPERATORS:
        found.insert(1, greedy(graph))
    assert found[0].peak_bytes is not None and plain.peak_bytes is not None
    for budget, label in ((plain.peak_bytes, "its peak"), (found[0].peak_bytes // 2, "half")):
        for solver in ("twremat", "auto"):
            found.append(within(graph, budget, label, solver, limit))
    return found


def print_width(row: Width) -> None:
    paper = PUBLISHED.get(row.name)
    reported = "" if paper is None else f"   paper: n {paper[0]:,}, m {paper[1]:,}, width {paper[2]}"
    print(
        f"{row.name:18} {row.operators:>8,} {row.edges:>8,} {row.width:>9} {row.bags:>8,} {row.seconds:>8.2f} "
        f"{row.min_degree_width:>11} {row.min_degree_seconds:>8.2f}{reported}",
        flush=True,
    )


def print_outcome(name: str, found: Outcome) -> None:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    peak = "-" if found.peak_bytes is None else format_bytes(found.peak_bytes)
    theirs = PUBLISHED_OUTCOMES.get(name, {}).get(found.method)
    reported = "" if theirs is None else f"   paper: {theirs[0]} GiB, length {theirs[1]}"
    print(
        f"{name:18} {found.method:20} {peak:>11} {number(found.time):>8} {number(found.runs):>8} "
        f"{found.cpu_seconds:>8.1f}{reported}",
        flush=True,
    )


def draw(depths: dict[str, dict[int, list[Outcome]]], curve: dict[str, list[tuple[float, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    for axis, (family, measured) in zip(axes[0], depths.items(), strict=False):
        draw_depths(axis, measured, lambda found: (found.peak_bytes or 0) / 2**30)
        fixed = [(depth, outcomes[0].fixed_bytes / 2**30) for depth, outcomes in measured.items()]
        axis.plot(*zip(*fixed, strict=True), ":", color="grey", label="parameters, inputs, gradients")
        axis.set(title=f"{family}: peak against depth (figure 2)", xlabel="layers", ylabel="GiB", ylim=(0, None))
    for axis, family in zip(axes[1], ("feed-forward", "ResNet"), strict=False):
        draw_depths(axis, depths.get(family, {}), lambda found: found.time or 0.0)
        axis.set(title=f"{family}: time against depth (figure 3)", xlabel="layers")
        axis.set(ylabel="time, 1 without recomputation", ylim=(0.9, None))
    for label, points in curve.items():
        axes[1, 2].plot(*zip(*sorted(points), strict=True), ".-", ms=4, lw=0.8, label=label)
    axes[1, 2].set(title="ResNet200: TWRemat(k), all k (figure 4)", xlabel="time, 1 without recomputation")
    axes[1, 2].set(ylabel="GiB", ylim=(0, None))
    for axis in axes.flat:
        if axis.lines:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def draw_depths(axis: Any, measured: dict[int, list[Outcome]], height: Callable[[Outcome], float]) -> None:
    methods = dict.fromkeys(found.method for outcomes in measured.values() for found in outcomes)
    styles = {"NoRemat": "k-", "GreedyRemat": "g--", "TWRemat": "b-", "pruned": "r:"}
    for method in methods:
        points = [(depth, height(f)) for depth, outcomes in measured.items() for f in outcomes if f.method == method]
        axis.plot(*zip(*points, strict=True), styles[method], marker="o", ms=3, label=method)


def trade_off_of(graph: Graph) -> dict[str, list[tuple[float, float]]]:
    """Figure 4: time and GiB of TWRemat(k) for all k; and of the solver, which prunes to budgets of the same peaks."""

    def point(seconds: float, peak_bytes: int) -> tuple[float, float]:
        return seconds / graph.baseline_seconds, peak_bytes / 2**30

    points = trade_off(graph)
    peaks = sorted({p.peak_bytes for p in points})
    found = [solve(Problem(graph, budget), "twremat").schedule for budget in peaks]
    seen = [simulate(graph, schedule) for schedule in found if schedule is not None]
    return {
        "TWRemat(k)": [point(p.seconds, p.peak_bytes) for p in points],
        "the fastest k, pruned": [point(s.seconds, s.peak_bytes) for s in seen],
    }


def keep(results: dict[str, Any], path: Path) -> None:
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"rematch": rematch.__version__, **{name: version(name) for name in ("numba", "numpy", "highspy")}},
        **results,
    }
    write_text(path, json.dumps(kept))


def measure_depths(family: str) -> dict[int, list[Outcome]]:
    measured = {}
    for depth, make in DEPTHS[family].items():
        graph = make()
        found = [without(graph), *tree_width(graph)]
        if len(graph.ops) <= MOST_GREEDY_OPERATORS:
            found.insert(1, greedy(graph))
        for entry in found:
            print_outcome(f"{family} {depth}", entry)
        measured[depth] = found
    return measured


def measure_widths(graphs: dict[str, Graph]) -> list[Width]:
    print(f"{'Table 1':18} {'n':>8} {'m':>8} {'min-fill':>9} {'bags':>8} {'cpu s':>8} {'min-degree':>11} {'cpu s':>8}")
    rows = []
    for name, graph in graphs.items():
        rows.append(measure_width(name, graph))
        print_width(rows[-1])
    return rows


def measure_methods(graphs: dict[str, Graph], limit: float) -> dict[str, list[Outcome]]:
    print(HEADER.format("Table 2"))
    rows = {}
    for name, graph in graphs.items():
        rows[name] = row_of_table_2(graph, limit)
        for found in rows[name]:
            print_outcome(name, found)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each solver and budget of table 2")
    parser.add_argument("--only", default="", help="regular expression on the names of graphs and families")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    graphs = {name: make() for name, make in TABLES.items() if re.search(arguments.only, name)}
    families = [family for family in DEPTHS if re.search(arguments.only, family)]
    if not graphs and not families:
        parser.error(f"no graph or family matches {arguments.only!r}")
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "twremat.json"
    widths = measure_widths(graphs)
    methods = measure_methods(graphs, arguments.limit)
    print(HEADER.format("Figures 2 and 3"))
    depths = {family: measure_depths(family) for family in families}
    curve = trade_off_of(graphs["ResNet200"]) if "ResNet200" in graphs else {}
    keep(
        {
            "limit_seconds": arguments.limit,
            "table 1": [asdict(row) for row in widths],
            "table 2": as_plain(methods),
            "depths": {family: as_plain(measured) for family, measured in depths.items()},
            "figure 4": curve,
        },
        path,
    )
    draw(depths, curve, path.with_suffix(".png"))


def as_plain(rows: Mapping[Any, list[Outcome]]) -> dict[str, list[dict[str, Any]]]:
    return {str(key): [asdict(found) for found in row] for key, row in rows.items()}


if __name__ == "__main__":
    main()
