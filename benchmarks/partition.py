"""Cutting graphs of 10^3 to 10^5 forward operators into hierarchies: levels, parts, unique parts, and time.

    python benchmarks/partition.py [--most 100000] [--only REGEX] [--results DIR]

Times are of one core (CPU seconds), the making of the graph not counted: `cut` is H-Partition with its default limits,
`equal` the search for equal parts. The growth at the end is the exponent e of seconds = c * operators^e, fitted to all
sizes of a family. The second table sets shapes beside those of HiRemate's Table 4 (b); its graphs were captured, ours
are generated, so sizes differ. A picture shows two hierarchies (the paper's figure 7).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import rematch
from rematch.files import write_text
from rematch.graph import Graph, Op, Value, generators
from rematch.report.hierarchy import draw_hierarchy
from rematch.solvers.hiremate import Part, check_partition, make_partitioner
from rematch.solvers.hiremate.canonical import equal_blocks

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
FAMILIES: dict[str, Callable[[int], Graph]] = {
    "feed-forward": lambda size: generators.feed_forward(size // 2),
    "gpt": lambda size: generators.gpt(size // 15),
    "encoder-decoder": lambda size: generators.encoder_decoder(size // 40, size // 40),
    "unet": lambda size: generators.unet(5, size // 33),
    "random": lambda size: random_reads(size),
}
# Levels, sub-graphs, unique ones and the largest, from Table 4 (b).
PUBLISHED: dict[str, tuple[Callable[[], Graph], tuple[int, int, int, int]]] = {
    "GPT 24": (lambda: generators.gpt(24), (3, 28, 8, 15)),
    "GPT 96": (lambda: generators.gpt(96), (4, 61, 21, 10)),
    "UNet": (lambda: generators.unet(4, 2), (2, 9, 9, 15)),
    "Transformer 6-6": (lambda: generators.encoder_decoder(6, 6), (3, 23, 20, 17)),
    "Transformer 36-36": (lambda: generators.encoder_decoder(36, 36), (16, 128, 67, 19)),
}


def random_reads(size: int) -> Graph:
    """Every operator reads one to three of the sixty made before it; no module of it repeats."""
    rng = random.Random(0)
    ops = [
        Op(f"o{i}", 1.0, tuple({rng.randrange(max(0, i - 60), i) for _ in range(rng.randint(1, 3))} if i else ()), (i,))
        for i in range(size)
    ]
    return Graph(tuple(ops), tuple(Value(f"v{i}", rng.randint(1, 1000)) for i in range(size)), name=f"random {size}")


@dataclass(frozen=True)
class Row:
    name: str
    operators: int
    levels: int
    parts: int
    unique: int
    largest: int
    cut_seconds: float
    equal_seconds: float


def measured(name: str, graph: Graph) -> Row:
    started = time.process_time()
    root = make_partitioner("hpartition").partition(graph)
    cut = time.process_time()
    parts = [part for part in root.walk() if not part.is_layer]
    classes = equal_blocks(graph, [part.forward for part in parts])
    found = time.process_time()
    check_partition(graph, root)
    return Row(
        name=name,
        operators=len(root.forward),
        levels=root.depth,
        parts=len(parts),
        unique=len(classes),
        largest=max(part.width for part in parts),
        cut_seconds=cut - started,
        equal_seconds=found - cut,
    )


HEADER = (
    f"{'graph':20} {'operators':>9} {'levels':>7} {'parts':>7} {'unique':>7} {'largest':>8} {'cut s':>8} {'equal s':>8}"
)


def line(row: Row) -> str:
    return (
        f"{row.name:20} {row.operators:>9,} {row.levels:>7} {row.parts:>7,} {row.unique:>7,} {row.largest:>8} "
        f"{row.cut_seconds:>8.2f} {row.equal_seconds:>8.2f}"
    )


def growth(rows: list[Row]) -> float:
    """Slope of the line through the logarithms of operators and seconds."""
    points = [(math.log(row.operators), math.log(row.cut_seconds)) for row in rows]
    middle_x, middle_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    rise = sum((x - middle_x) * (y - middle_y) for x, y in points)
    return rise / sum((x - middle_x) ** 2 for x, _ in points)


def print_scaling(most: int, only: str) -> list[Row]:
    print(HEADER)
    rows = []
    for name, make in FAMILIES.items():
        for size in SIZES:
            if size <= most and re.search(only, name):
                rows.append(measured(name, make(size)))
                print(line(rows[-1]), flush=True)
    return rows


def print_growth(rows: list[Row]) -> dict[str, float]:
    exponents = {}
    for name in dict.fromkeys(row.name for row in rows):
        family = [row for row in rows if row.name == name]
        if len(family) > 1:
            exponents[name] = growth(family)
            print(f"{name:20} grows with operators^{exponents[name]:.2f}")
    return exponents


def print_shapes() -> list[Row]:
    print(f"\n{HEADER}   published: levels, parts, unique, largest")
    rows = []
    for name, (make, theirs) in PUBLISHED.items():
        rows.append(measured(name, make()))
        print(f"{line(rows[-1])}   {', '.join(map(str, theirs))}")
    return rows


def cut(graph: Graph) -> tuple[Graph, Part]:
    return graph, make_partitioner("hpartition").partition(graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=max(SIZES), help="forward operators of the largest graphs")
    parser.add_argument("--only", default="", help="regular expression on the family of graphs")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    scaling = print_scaling(arguments.most, arguments.only)
    exponents = print_growth(scaling)
    shapes = print_shapes()
    kept = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {"rematch": rematch.__version__, "numpy": version("numpy")},
        "scaling": [asdict(row) for row in scaling],
        "growth": exponents,
        "shapes": [asdict(row) for row in shapes],
    }
    write_text(arguments.results / "partition.json", json.dumps(kept, indent=1))
    draw_hierarchy(*cut(generators.encoder_decoder(6, 6)), arguments.results / "partition-hierarchy.png")


if __name__ == "__main__":
    main()
