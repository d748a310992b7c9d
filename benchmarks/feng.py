"""Feng & Huang's Table 1: time to find checkpoints on the networks that it names, the memory they save, and pictures.

    python benchmarks/feng.py [--only REGEX] [--again] [--limit 30] [--traced DIR] [--results DIR]

Each network is there twice. *Captured* ones are PyTorch modules of `models/papers.py`, traced with fake tensors for a
V100 and kept in `--traced`; vertices are operators between input and output, so that their numbers are not the paper's.
*Counted* ones are built here vertex by vertex as the paper counts them, activations done in place: AlexNet, VGG,
ResNet, DenseNet and Inception v3 have exactly the published numbers of vertices; NASNet, AmoebaNet and DARTS are
stand-ins of random cells, each of which reads the two cells before it, filled up to the published numbers. Sizes are
those of 32-bit activations for one image of 224 x 224 (about 300 x 300 for Inception).

Times are processor seconds for building the division tree and solving for every max term, compiled code being warm;
the paper's are of a desktop. Objective (1) is that of the paper: the sum of all checkpoints and the largest segment
between them. Chen's sqrt(n) and greedy choose among the articulation points; of greedy's sets the best by objective (1)
is taken. Peaks are the oracle's for a training step in which the segments of each set are computed again one by one;
those of captured networks have parameters, gradients and workspace in them. What the results already have is not
measured again, unless `--again` is given. `--only` is searched for in 'captured AlexNet', 'counted AlexNet' and so on.

A second table is ours: the extra time of `feng_huang` within budgets of bytes beside Chen's sqrt(n) and greedy, at
articulation points and on the linearized graph, on generated training steps, with `--limit` seconds for each
('budget chain 30' and so on for `--only`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

from hiremate_figures.graphs import Library

import rematch
from rematch.errors import GraphError
from rematch.files import write_text
from rematch.graph import Graph, Op, Value, baseline, simulate
from rematch.graph.generators import chain, gpt, training_graph, unet
from rematch.report.checkpoints import draw_checkpoints
from rematch.solvers import Problem, solve
from rematch.solvers.checkpoints.articulation import articulation_points
from rematch.solvers.checkpoints.checkpointing import every_sqrt, greedy_segments
from rematch.solvers.feng_huang.checkpoints import best_checkpoints
from rematch.solvers.feng_huang.division_tree import divide
from rematch.solvers.feng_huang.forward import Reading, readings
from rematch.solvers.feng_huang.reforward import Reforward
from rematch.solvers.feng_huang.segments import Dag, loss_bytes

REPEATS = 5
DRAWN = ("AlexNet", "VGG11", "VGG13", "VGG16", "VGG19", "ResNet18", "Inception v3")
ELEMENT_BYTES = 4
STAND_IN = "-like"  # at the end of names of networks that are counted in place of others


@dataclass
class Network:
    """A forward pass, written vertex by vertex; each has a name, a number of elements, and vertices that it reads."""

    name: str
    sizes: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, name: str, channels: int, side: int, *reads: int) -> int:
        self.names.append(name)
        self.sizes.append(channels * side * side * ELEMENT_BYTES)
        self.reads.append(reads)
        return len(self.names) - 1

    def line(self, parts: Sequence[str], channels: int, side: int, x: int) -> int:
        """Vertices of the same size one after the other."""
        for part in parts:
            x = self.add(part, channels, side, x)
        return x

    def dag(self) -> Dag:
        return Dag.of(self.sizes, [(read, vertex) for vertex, row in enumerate(self.reads) for read in row])

    def graph(self) -> Graph:
        """The training step: vertex v is operator v, and each takes the same time."""
        ops = tuple(
            Op(name, 1e-3, reads, (vertex,))
            for vertex, (name, reads) in enumerate(zip(self.names, self.reads, strict=True))
        )
        values = tuple(Value(name, size) for name, size in zip(self.names, self.sizes, strict=True))
        return training_graph(Graph(ops, values, name=self.name))


def alexnet() -> Network:
    net = Network("AlexNet")
    x = net.add("input", 3, 224)
    for name, channels, side in (
        ("conv1", 64, 55), ("pool1", 64, 27), ("conv2", 192, 27), ("pool2", 192, 13), ("conv3", 384, 13),
        ("conv4", 256, 13), ("conv5", 256, 13), ("pool5", 256, 6), ("fc6", 4096, 1), ("fc7", 4096, 1), ("fc8", 1000, 1),
    ):  # fmt: skip
        x = net.add(name, channels, side, x)
    return net


def vgg(depth: int) -> Network:
    per_stage = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}[depth]
    net = Network(f"VGG{depth}")
    x, side = net.add("input", 3, 224), 224
    for stage, (layers, channels) in enumerate(zip(per_stage, (64, 128, 256, 512, 512), strict=True), start=1):
        x = net.line([f"conv{stage}.{layer}" for layer in range(1, layers + 1)], channels, side, x)
        side //= 2
        x = net.add(f"pool{stage}", channels, side, x)
    for name, width in (("fc1", 4096), ("fc2", 4096), ("fc3", 1000)):
        x = net.add(name, width, 1, x)
    return net


def resnet(depth: int) -> Network:
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]
    bottleneck = depth >= 50
    net = Network(f"ResNet{depth}")
    x = net.line(("conv", "norm"), 64, 112, net.add("input", 3, 224))
    x = net.add("pool", 64, 56, x)
    for stage, count in enumerate(blocks):
        width, side = 64 << stage, 56 >> stage
        out = 4 * width if bottleneck else width
        for block in range(count):
            y = net.line(("conv", "norm"), width, side << (bottleneck and stage > 0 and block == 0), x)
            if bottleneck:
                y = net.line(("conv", "norm"), width, side, y)
            y = net.line(("conv", "norm"), out, side, y)
            changes = block == 0 and (bottleneck or stage > 0)
            shortcut = net.line(("conv", "norm"), out, side, x) if changes else x
            x = net.add("add", out, side, y, shortcut)
    net.add("fc", 1000, 1, x)
    return net


def densenet(depth: int) -> Network:
    growth, start, blocks = {
        121: (32, 64, (6, 12, 24, 16)),
        161: (48, 96, (6, 12, 36, 24)),
        169: (32, 64, (6, 12, 32, 32)),
        201: (32, 64, (6, 12, 48, 32)),
    }[depth]
    net = Network(f"DenseNet{depth}")
    x = net.line(("conv", "norm"), start, 112, net.add("input", 3, 224))
    x, channels, side = net.add("pool", start, 56, x), start, 56
    for stage, layers in enumerate(blocks):
        if stage:
            x = net.add("norm", channels, side, x)
            channels //= 2
            x = net.add("conv", channels, side, x)
            side //= 2
            x = net.add("pool", channels, side, x)
        for _ in range(layers):
            y = net.add("norm", channels, side, x)
            y = net.line(("conv", "norm"), 4 * growth, side, y)
            y = net.add("conv", growth, side, y)
            channels += growth
            x = net.add("cat", channels, side, x, y)
    x = net.add("norm", channels, side, x)
    net.add("fc", 1000, 1, net.add("pool", channels, 1, x))
    return net


class Inception(Network):
    """Inception v3: blocks of branches, each branch a sequence of channels at a side; 0 stands for a pooling."""

    def branch(self, channels: Sequence[int], side: int, x: int, pooled: int) -> int:
        for width in channels:
            x = self.line(("conv", "norm"), width, side, x) if width else self.add("pool", pooled, side, x)
        return x

    def block(self, branches: Sequence[Sequence[int]], side: int, x: int, channels: int) -> tuple[int, int]:
        """The vertex and the channels of what the branches are concatenated to."""
        ends = [self.branch(branch, side, x, channels) for branch in branches]
        out = sum(branch[-1] or channels for branch in branches)
        return self.add("cat", out, side, *ends), out

    def wide_block(self, pool_width: int, x: int, channels: int) -> tuple[int, int]:
        """The last blocks, in which two branches fork once more."""
        ends = [self.branch((320,), 8, x, channels)]
        for stem in ((384,), (448, 384)):
            fork = self.branch(stem, 8, x, channels)
            ends.append(self.add("cat", 768, 8, *(self.branch((384,), 8, fork, 0) for _ in range(2))))
        ends.append(self.branch((0, pool_width), 8, x, channels))
        return self.add("cat", 2048, 8, *ends), 2048


def inception() -> Network:
    net = Inception("Inception v3")
    x = net.add("input", 3, 299)
    for width, side in ((32, 149), (32, 147), (64, 147)):
        x = net.line(("conv", "norm"), width, side, x)
    x = net.line(("conv", "norm"), 80, 73, net.add("pool", 64, 73, x))
    x = net.line(("conv", "norm"), 192, 71, x)
    x, channels = net.add("pool", 192, 35, x), 192
    for pool in (32, 64, 64):
        x, channels = net.block(((64,), (48, 64), (64, 96, 96), (0, pool)), 35, x, channels)
    x, channels = net.block(((384,), (64, 96, 96), (0,)), 17, x, channels)
    for width in (128, 160, 160, 192):
        branches = ((192,), (width, width, 192), (width, width, width, width, 192), (0, 192))
        x, channels = net.block(branches, 17, x, channels)
    x, channels = net.block(((192, 320), (192, 192, 192, 192), (0,)), 8, x, channels)
    for _ in range(2):
        x, channels = net.wide_block(192, x, channels)
    net.add("fc", 1000, 1, net.add("pool", channels, 1, x))
    return net


def cells(name: str, vertices: int, blocks: int, seed: int) -> Network:
    """A network of random cells. A cell reads the two cells before it; its blocks each add two ways through it."""
    rng = random.Random(seed)
    net = Network(name)
    channels, side = 32, 56
    first = net.line(("conv", "norm"), channels, 112, net.add("input", 3, 224))
    before, last = first, net.line(("conv", "norm"), channels, side, first)
    largest_cell = 4 + blocks * 13 + 1
    while vertices - len(net.names) > largest_cell + 1:
        before, last = last, cell(net, rng, blocks, channels, side, (before, last))
        channels, side = (2 * channels, side // 2) if rng.random() < 0.15 and side > 7 else (channels, side)
    x = net.add("cat", channels * blocks, side, before, last)
    net.line([*["step"] * (vertices - len(net.names) - 1), "fc"], channels, side, x)
    return net


def cell(net: Network, rng: random.Random, blocks: int, channels: int, side: int, reads: tuple[int, int]) -> int:
    """What no block reads is concatenated in the end."""
    states = [net.line(("conv", "norm"), channels, side, read) for read in reads]
    unread = set(states)
    for _ in range(blocks):
        ways = []
        for state in rng.sample(states, 2):
            unread.discard(state)
            steps = rng.choice((0, 1, 6))  # the identity, a pooling, a separable convolution
            ways.append(net.line(["step"] * steps, channels, side, state))
        states.append(net.add("add", channels, side, *ways))
        unread.add(states[-1])
    return net.add("cat", channels * len(unread), side, *sorted(unread))


# Vertices and preprocess seconds of the supplement's Table 1.
NETWORKS: dict[str, tuple[Callable[[], Network], int, float]] = {
    "AlexNet": (alexnet, 12, 0.097),
    **{
        f"VGG{depth}": (lambda depth=depth: vgg(depth), vertices, seconds)
        for depth, vertices, seconds in ((11, 17, 0.198), (13, 19, 0.274), (16, 22, 0.416), (19, 25, 0.531))
    },
    **{
        f"ResNet{depth}": (lambda depth=depth: resnet(depth), vertices, seconds)
        for depth, vertices, seconds in (
            (18, 51, 0.200), (34, 91, 0.502), (50, 125, 0.910), (101, 244, 2.690), (152, 363, 6.576),
        )
    },
    **{
        f"DenseNet{depth}": (lambda depth=depth: densenet(depth), vertices, seconds)
        for depth, vertices, seconds in (
            (121, 306, 35.024), (161, 406, 79.754), (169, 426, 87.111), (201, 506, 160.808),
        )
    },
    "Inception v3": (inception, 219, 4.344),
    "NASNet-like": (lambda: cells("NASNet-like", 1149, 5, seed=1), 1149, 39.098),
    "AmoebaNet-like": (lambda: cells("AmoebaNet-like", 1015, 5, seed=2), 1015, 30.250),
    "DARTS-like": (lambda: cells("DARTS-like", 1073, 4, seed=3), 1073, 28.483),
}  # fmt: skip


CHENS = ("ap_sqrt", "ap_greedy", "linearized_sqrt", "linearized_greedy")
WITHIN_BUDGETS: dict[str, Callable[[], Graph]] = {
    "chain 8": lambda: chain(layers=8),
    "chain 30": lambda: chain(layers=30),
    "U-Net 2": lambda: unet(depth=2),
    "U-Net 4": lambda: unet(depth=4),
    "GPT 4": lambda: gpt(layers=4),
    "GPT 12": lambda: gpt(layers=12),
}
PERCENTS = (90, 75, 60, 45)  # of the peak without recomputation


@dataclass(frozen=True)
class Row:
    kind: str  # "captured" or "counted"
    name: str
    vertices: int
    edges: int
    kinds: dict[str, int]  # nodes of the division tree
    published_vertices: int
    published_seconds: float
    seconds: float  # of the processor, the median of several runs
    checkpoints: int
    forward_bytes: int
    loss_bytes: int  # objective (1)
    sqrt_loss_bytes: int
    greedy_loss_bytes: int
    baseline_peak_bytes: int
    peak_bytes: int
    sqrt_peak_bytes: int
    greedy_peak_bytes: int


@dataclass(frozen=True)
class Subject:
    """A network to measure: its training step, and how its forward pass is read."""

    kind: str
    name: str
    graph: Graph
    reading: Reading


def counted(name: str) -> Subject:
    build, vertices, _ = NETWORKS[name]
    network = build()
    dag = network.dag()
    if len(dag) != vertices:
        raise GraphError(f"{name} has {len(dag)} vertices, and {vertices} in the paper")
    return Subject("counted", name, network.graph(), Reading(dag, tuple((vertex,) for vertex in range(len(dag)))))


def captured(name: str, library: Library) -> Subject:
    """The module's graph, read as the operators between its input and its output."""
    from models.papers import feng_networks

    graph = library.graph_of(feng_networks()[name])
    return Subject("captured", name, graph, list(readings(graph))[-1])


def published(name: str) -> tuple[Callable[[], Network], int, float]:
    """What `NETWORKS` has of a network, or of the stand-in for it."""
    return NETWORKS.get(name) or NETWORKS[name + STAND_IN]


def measure(subject: Subject) -> tuple[Row, dict[str, list[int]]]:
    """The row of a network, and the operators that each method keeps."""
    graph, reading = subject.graph, subject.reading
    dag = reading.dag
    _, published_vertices, published_seconds = published(subject.name)
    best_checkpoints(divide(dag))  # compiles what is compiled
    took = []
    for _ in range(REPEATS):
        started = time.process_time()
        tree = divide(dag)
        best = best_checkpoints(tree)
        took.append(time.process_time() - started)
    points = cut_points(subject)
    sqrt = vertices_of(reading, every_sqrt(points))
    greedy = min(
        (vertices_of(reading, chosen) for chosen in greedy_segments(graph, points)), key=lambda s: loss_bytes(dag, s)
    )
    row = Row(
        kind=subject.kind,
        name=subject.name,
        vertices=len(dag),
        edges=sum(map(len, dag.readers)),
        kinds=dict(Counter(node.kind.value for node in tree.nodes)),
        published_vertices=published_vertices,
        published_seconds=published_seconds,
        seconds=sorted(took)[REPEATS // 2],
        checkpoints=len(best.vertices),
        forward_bytes=int(dag.size_bytes.sum()),
        loss_bytes=best.loss_bytes,
        sqrt_loss_bytes=loss_bytes(dag, sqrt),
        greedy_loss_bytes=loss_bytes(dag, greedy),
        baseline_peak_bytes=simulate(graph, baseline(graph)).peak_bytes,
        peak_bytes=peak_bytes(subject, best.vertices),
        sqrt_peak_bytes=peak_bytes(subject, sqrt),
        greedy_peak_bytes=peak_bytes(subject, greedy),
    )
    return row, {"Feng & Huang": list(best.vertices), "Chen's greedy": greedy, "Chen's sqrt(n)": sqrt}


def cut_points(subject: Subject) -> list[int]:
    """Articulation points of the step that every way through the forward pass leads over: no edge jumps over them."""
    dag = subject.reading.dag
    farthest, cuts = 0, set()
    for vertex, readers in enumerate(dag.readers):
        if farthest <= vertex:
            cuts.update(subject.reading.members[vertex])
        farthest = max(farthest, *readers) if readers else farthest
    return [op for op in articulation_points(subject.graph) if op in cuts]


def vertices_of(reading: Reading, ops: Collection[int]) -> list[int]:
    """The vertices that stand for operators, with both ends of the graph."""
    vertex_of = {op: vertex for vertex, members in enumerate(reading.members) for op in members}
    return sorted({0, len(reading.dag) - 1, *(vertex_of[op] for op in ops if op in vertex_of)})


def peak_bytes(subject: Subject, checkpoints: Collection[int]) -> int:
    segments = subject.reading.segment_of_ops(subject.graph, checkpoints)
    return simulate(subject.graph, Reforward(subject.graph).schedule(segments)).checked().peak_bytes


HEADER = (
    "Table 1; F&H: the best checkpoints by the paper's algorithms; sqrt, greedy: Chen's among articulation points\n"
    "captured: PyTorch modules; counted: built as the paper counts, -like: stand-ins of random cells\n"
    f"{'':24} {'vertices':>15} {'':>6} {'seconds':>26} {'':>5} {'objective (1), MB':>32} {'peak of a step, MB':>32}\n"
    f"{'network':24} {'published':>9} {'n':>5} {'m':>6} {'published':>10} {'ours':>8} {'ratio':>6} {'kept':>5} "
    f"{'all':>8} {'sqrt':>7} {'greedy':>7} {'F&H':>7} {'all':>8} {'sqrt':>7} {'greedy':>7} {'F&H':>7}"
)


def line(row: Row) -> str:
    def mb(*sizes: int) -> str:
        return " ".join(f"{size / 1e6:>{8 if rank == 0 else 7}.1f}" for rank, size in enumerate(sizes))

    return (
        f"{row.kind:8} {row.name:15} {row.published_vertices:>9} {row.vertices:>5} {row.edges:>6} "
        f"{row.published_seconds:>10.3f} {row.seconds:>8.4f} "
        f"{row.published_seconds / row.seconds:>5.0f}x {row.checkpoints:>5} "
        f"{mb(row.forward_bytes, row.sqrt_loss_bytes, row.greedy_loss_bytes, row.loss_bytes)} "
        f"{mb(row.baseline_peak_bytes, row.sqrt_peak_bytes, row.greedy_peak_bytes, row.peak_bytes)}"
    )


# Within a budget


@dataclass(frozen=True)
class Within:
    """Extra time in percent of each solver on one graph at one budget; None where it found nothing."""

    name: str
    percent: int
    limit_seconds: float
    load_average: float
    extra_percent: dict[str, float | None]


def within(name: str, graph: Graph, percent: int, limit: float) -> Within:
    problem = Problem(graph, simulate(graph, baseline(graph)).peak_bytes * percent // 100)

    def extra(solver: str) -> float | None:
        found = solve(problem, solver, time_limit=limit).schedule
        return None if found is None else (simulate(graph, found).seconds / graph.baseline_seconds - 1) * 100

    extras = {solver: extra(solver) for solver in ("feng_huang", *CHENS)}
    return Within(name, percent, limit, os.getloadavg()[0], extras)


def within_line(row: Within) -> str:
    found = [extra for solver in CHENS if (extra := row.extra_percent[solver]) is not None]
    ours, chens = row.extra_percent["feng_huang"], min(found, default=None)
    slower = chens is not None and (ours is None or ours > chens + 1e-6)
    numbers = " ".join(f"{'-' if extra is None else f'{extra:.2f}':>18}" for extra in row.extra_percent.values())
    return f"{row.name:12} {row.percent:>4} % {numbers}{'  SLOWER' if slower else ''}"


def print_within_budgets(chosen: Sequence[str], kept: Kept, again: bool, limit: float) -> None:
    print(f"\nExtra time in percent within a budget, {limit:g} s each; feng_huang: with our searches for a budget")
    print(f"{'graph':12} {'budget':>6} " + " ".join(f"{solver:>18}" for solver in ("feng_huang", *CHENS)))
    for name in chosen:
        graph = WITHIN_BUDGETS[name]()
        for percent in PERCENTS:
            known = kept.within.get((name, percent))
            if again or known is None or known.limit_seconds < limit:
                kept.within[name, percent] = within(name, graph, percent, limit)
                kept.write()
            print(within_line(kept.within[name, percent]), flush=True)


# What is kept


@dataclass(frozen=True)
class Kept:
    """All rows so far, written as JSON after each, so that a run that is stopped loses nothing."""

    path: Path
    rows: dict[tuple[str, str], Row]
    within: dict[tuple[str, int], Within]

    @staticmethod
    def at(path: Path) -> Kept:
        stored = json.loads(path.read_text()) if path.exists() else {}
        rows = [Row(**row) for row in stored.get("rows", [])]
        within = [Within(**row) for row in stored.get("within budgets", [])]
        return Kept(path, {(r.kind, r.name): r for r in rows}, {(w.name, w.percent): w for w in within})

    def write(self) -> None:
        libraries = ("numba", "numpy", "torch")
        kept = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "versions": {"rematch": rematch.__version__, **{name: version(name) for name in libraries}},
            "rows": [asdict(row) for row in self.rows.values()],
            "within budgets": [asdict(row) for row in self.within.values()],
        }
        write_text(self.path, json.dumps(kept, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on kind and name")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for each solver within a budget")
    parser.add_argument("--again", action="store_true", help="measure again what the results have already")
    parser.add_argument("--traced", type=Path, default=Path(__file__).parent / ".graphs", help="where graphs are kept")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    library = Library(arguments.traced / "feng", "V100")
    makers: dict[str, Callable[[str], Subject]] = {
        "captured": lambda name: captured(name, library),
        "counted": counted,
    }
    subjects = [("captured", name.removesuffix(STAND_IN)) for name in NETWORKS] + [("counted", n) for n in NETWORKS]
    chosen = [(kind, name) for kind, name in subjects if re.search(arguments.only, f"{kind} {name}")]
    budgets = [name for name in WITHIN_BUDGETS if re.search(arguments.only, f"budget {name}")]
    if not chosen and not budgets:
        parser.error(f"no network matches {arguments.only!r}; there are: {', '.join((*NETWORKS, *WITHIN_BUDGETS))}")
    arguments.results.mkdir(parents=True, exist_ok=True)
    kept = Kept.at(arguments.results / "feng.json")
    print(HEADER)
    for kind, name in chosen:
        if arguments.again or (kind, name) not in kept.rows:
            subject = makers[kind](name)
            kept.rows[kind, name], choices = measure(subject)
            kept.write()
            if kind == "counted" and name in DRAWN:
                file_name = f"feng-{name.lower().replace(' ', '-')}.png"
                named = replace(subject.graph, name=f"{name}, counted as in the paper")
                draw_checkpoints(named, choices, arguments.results / file_name)
        print(line(kept.rows[kind, name]), flush=True)
    if budgets:
        print_within_budgets(budgets, kept, arguments.again, arguments.limit)


if __name__ == "__main__":
    main()
