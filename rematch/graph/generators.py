"""Graphs to plan, test and measure with: chains, random layered graphs, and training steps of common architectures.

`gpt(layers=12)` is a training step of 365 operators; `FAMILIES["gpt"]` is the same function, found by name.

Every family takes whole numbers with defaults and is deterministic. A `TrainingGraphBuilder` gives the architectures
their sizes, times and backward pass. `jitter_percent` spreads these times at random, as measured times would be, so
that equal layers are no longer exactly equal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rematch.errors import GraphError
from rematch.graph.builder import TrainingGraphBuilder
from rematch.graph.model import Graph, Op, Phase, Value


def chain(layers: int = 50, vary_percent: int = 75, seed: int = 0) -> Graph:
    """Training step of a linear chain: 2 layers + 1 operators of about 1 ms and 1 MiB (backward 2 ms).

    layers: operators of the forward pass
    vary_percent: times and sizes are uniform within this many percent of their mean; 0 makes all layers equal
    seed: of the random times and sizes
    """
    _at_least(1, layers=layers)
    _at_least(0, vary_percent=vary_percent)
    rng = random.Random(seed)
    spread = min(vary_percent, 100) / 100

    def varied(mean: float) -> float:
        return mean * (1 + spread * (2 * rng.random() - 1))

    ops, values = [], []
    for i in range(layers):
        ops.append(Op(f"layer{i}", varied(1e-3), (i - 1,) if i else (), (i,)))
        values.append(Value(f"layer{i}", round(varied(2**20))))
    return training_graph(Graph(tuple(ops), tuple(values), name=f"chain {layers}"))


def training_graph(forward: Graph, backward_ratio: float = 2.0) -> Graph:
    """Checkmate's training graph: `forward`, a loss on its last operator, and a backward operator for each forward one.

    The backward of u reads what u made, what each reader v of u made, and the backward of each v. It makes one
    gradient, as large as what u made, in `backward_ratio` times the time of u. The loss makes a single number.
    For L operators and E edges that gives 2L+1 operators and 3E+L+2 edges (Jain et al., MLSys 2020, and its data).
    """
    if not forward.ops:
        raise GraphError(f"graph {forward.name!r} has no operators; a training graph needs at least one")
    for op in forward.ops:
        if op.phase is not Phase.FORWARD:
            raise GraphError(
                f"operator {op.name!r} is {op.phase.value}; a training graph is made from a forward graph only"
            )
    a = forward.arrays
    order = forward.order
    loss_value = len(forward.values)
    gradient = {op: loss_value + 1 + rank for rank, op in enumerate(reversed(order))}
    made = [sum(forward.values[v].size_bytes for v in op.outputs) for op in forward.ops]
    readers = [dict.fromkeys(int(user) for v in op.outputs for user in a.users_of(v)) for op in forward.ops]
    last = order[-1]
    ops = [*forward.ops, Op("loss", 0.0, forward.ops[last].outputs, (loss_value,), phase=Phase.LOSS)]
    values = [*forward.values, Value("loss", 4)]
    for u in reversed(order):
        op = forward.ops[u]
        reads = [
            *op.outputs,
            *(v for r in readers[u] for v in forward.ops[r].outputs),
            *(gradient[r] for r in readers[u]),
        ]
        if u == last:
            reads.append(loss_value)
        name = f"{op.name}.backward"
        ops.append(
            replace(
                op, name=name, seconds=backward_ratio * op.seconds, inputs=tuple(reads), outputs=(gradient[u],),
                phase=Phase.BACKWARD, once=False, mutates=(), class_key=op.class_key and f"{op.class_key}.backward",
                flops=None if op.flops is None else backward_ratio * op.flops,
            )
        )  # fmt: skip
        values.append(Value(name, made[u]))
    return Graph(
        ops=tuple(ops),
        values=tuple(values),
        targets=forward.targets,
        order=(*order, *range(len(forward.ops), len(ops))),
        name=f"{forward.name} training",
    )


def random_layered(nodes: int = 100, width_percent: int = 30, seed: int = 0) -> Graph:
    """Random layered graph in the manner of the Moccasin paper's G1-G4 (Bartan et al., 2023); no training step.

    nodes: operators, the source and the sink among them
    width_percent: the larger, the fewer and wider the layers (G1-G4: 27, 43, 36, 31)
    seed: of edges, times and sizes
    """
    _at_least(3, nodes=nodes)
    if not 0 < width_percent < 100:
        raise GraphError(f"width_percent={width_percent} is not between 1 and 99")
    rng = random.Random(seed)
    layers = _random_layers(rng, nodes, width_percent / 100)
    edges = {(0, node) for node in layers[0]} | {(node, 1) for node in layers[-1]}
    for above, below in pairwise(layers):
        edges |= _adjacent_edges(above, below)
    edges |= _skip_edges(rng, layers, len(edges))
    inputs: list[list[int]] = [[] for _ in range(nodes)]
    for source, sink in sorted(edges):
        inputs[sink].append(source)
    ops = tuple(
        Op(f"n{i}", float(rng.randint(1, 1000)) if i > 1 else 0.0, tuple(inputs[i]), (i,)) for i in range(nodes)
    )
    values = tuple(Value(f"n{i}", _mixture_size(rng)) for i in range(nodes))
    order = (0, *range(2, nodes), 1)
    return Graph(ops, values, order=order, name=f"random layered {nodes} w{width_percent} s{seed}")


def _random_layers(rng: random.Random, nodes: int, width: float) -> list[range]:
    count = math.ceil(math.sqrt(nodes * (1 / width - 1)))
    mean = nodes / count
    narrowest, widest = max(1, math.ceil(mean * 0.25)), max(1, math.floor(mean * 1.75))
    layers = []
    start = 2  # 0 and 1 are the source and the sink
    while start < nodes:
        end = min(nodes, start + rng.randint(narrowest, widest))
        layers.append(range(start, end))
        start = end
    return layers


def _adjacent_edges(above: range, below: range) -> set[tuple[int, int]]:
    """Edges between neighbouring layers: each node of the wider one is tied to a window of the other."""
    wide, narrow = (above, below) if len(above) >= len(below) else (below, above)
    count = round(0.2 * len(wide) * len(narrow) + 0.8 * len(wide))
    pairs = set()
    for i, node in enumerate(wide):
        window = (i + 1) * count // len(wide) - i * count // len(wide)
        centre = (i + 0.5) * len(narrow) / len(wide)
        first = min(max(0, round(centre - window / 2)), len(narrow) - window)
        pairs |= {(node, other) for other in narrow[first : first + window]}
    return pairs if wide is above else {(other, node) for node, other in pairs}


def _skip_edges(rng: random.Random, layers: Sequence[range], adjacent: int) -> set[tuple[int, int]]:
    """Edges over two layers or more that end at most a fifth of the width away from where they start."""
    candidates = []
    for i, above in enumerate(layers):
        for below in layers[i + 2 :]:
            for rank, source in enumerate(above):
                for other, sink in enumerate(below):
                    if abs((rank + 0.5) / len(above) - (other + 0.5) / len(below)) <= 0.2:
                        candidates.append((source, sink))
    return set(rng.sample(candidates, min(len(candidates), round(adjacent * 0.14 / 0.86))))


def _mixture_size(rng: random.Random) -> int:
    mean, deviation = rng.choices(((0.5, 0.5), (1.0, 1.0), (3.0, 1.0), (5.0, 1.0)), weights=(0.3, 0.3, 0.3, 0.1))[0]
    return max(0, round(100 * rng.gauss(mean, deviation))) * 10


@dataclass(frozen=True)
class _Transformer:
    """Blocks of a transformer, recorded in `builder`."""

    builder: TrainingGraphBuilder
    batch: int
    sequence: int
    width: int
    heads: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise GraphError(
                f"width={self.width} cannot be split over heads={self.heads}; take a multiple of {self.heads}"
            )

    def embedding(self, name: str, vocabulary: int) -> int:
        return self.builder.embedding(name, rows=self._rows, vocabulary=vocabulary, width=self.width)

    def head(self, x: int, vocabulary: int) -> int:
        return self._linear("head", x, self.width, vocabulary)

    def self_attention(self, name: str, x: int) -> int:
        """9 operators."""
        normed = self.builder.norm(f"{name}.norm", x, groups=self._rows)
        query, key, value = self._projections(f"{name}.qkv", normed, ("query", "key", "value"))
        return self._attend(name, x, query, key, value)

    def cross_attention(self, name: str, x: int, encoded: int) -> int:
        """10 operators."""
        normed = self.builder.norm(f"{name}.norm", x, groups=self._rows)
        query = self._linear(f"{name}.query", normed, self.width, self.width)
        key, value = self._projections(f"{name}.kv", encoded, ("key", "value"))
        return self._attend(name, x, query, key, value)

    def feed_forward(self, name: str, x: int) -> int:
        """6 operators."""
        normed = self.builder.norm(f"{name}.norm", x, groups=self._rows)
        hidden = self._linear(f"{name}.up", normed, self.width, 4 * self.width)
        active = self.builder.gelu(f"{name}.gelu", hidden)
        return self._residual(name, x, self._linear(f"{name}.down", active, 4 * self.width, self.width))

    def _attend(self, name: str, x: int, query: int, key: int, value: int) -> int:
        pairs = self.batch * self.heads * self.sequence * self.sequence
        scores = self.builder.product(f"{name}.scores", query, key, elements=pairs, inner=self.width // self.heads)
        weights = self.builder.dropout(f"{name}.weights", self.builder.softmax(f"{name}.softmax", scores))
        context = self.builder.product(
            f"{name}.context", weights, value, elements=self._rows * self.width, inner=self.sequence
        )
        return self._residual(name, x, self._linear(f"{name}.projection", context, self.width, self.width))

    def _residual(self, name: str, x: int, branch: int) -> int:
        return self.builder.add(f"{name}.add", x, self.builder.dropout(f"{name}.dropout", branch))

    def _linear(self, name: str, x: int, fan_in: int, fan_out: int) -> int:
        return self.builder.linear(name, x, rows=self._rows, fan_in=fan_in, fan_out=fan_out)

    def _projections(self, name: str, x: int, parts: tuple[str, ...]) -> tuple[int, ...]:
        return self.builder.projections(name, x, parts, rows=self._rows, fan_in=self.width, fan_out=self.width)

    @property
    def _rows(self) -> int:
        return self.batch * self.sequence


def gpt(
    layers: int = 12,
    batch: int = 32,
    sequence: int = 1024,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 8192,
    jitter_percent: int = 0,
    seed: int = 0,
) -> Graph:
    """Training step of a GPT with unfused attention and dropout: 30 layers + 5 operators.

    layers: transformer blocks
    batch: sequences in a step
    sequence: tokens in a sequence
    width: of the residual stream; divisible by heads
    heads: of the attention
    vocabulary: size of the logits
    jitter_percent: spread of the times
    seed: of the jitter
    """
    _at_least(1, layers=layers, batch=batch, sequence=sequence, width=width, heads=heads, vocabulary=vocabulary)
    blocks = _Transformer(TrainingGraphBuilder(), batch, sequence, width, heads)
    x = blocks.embedding("embedding", vocabulary)
    for i in range(layers):
        x = blocks.self_attention(f"h.{i}.attention", x)
        x = blocks.feed_forward(f"h.{i}.mlp", x)
    graph = blocks.builder.build(blocks.head(x, vocabulary), f"gpt {layers}")
    return jittered(graph, jitter_percent, seed)


def encoder_decoder(
    encoder_layers: int = 6,
    decoder_layers: int = 6,
    batch: int = 32,
    sequence: int = 512,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 8192,
    jitter_percent: int = 0,
    seed: int = 0,
) -> Graph:
    """Training step of a transformer with encoder and decoder: 30 encoder layers + 50 decoder layers + 7 operators.

    Every decoder layer reads the encoder's last output through cross attention.

    encoder_layers: transformer blocks of the encoder
    decoder_layers: transformer blocks of the decoder
    batch: pairs of sequences in a step
    sequence: tokens in a sequence, source and target alike
    width: of the residual stream; divisible by heads
    heads: of the attention
    vocabulary: size of the logits
    jitter_percent: spread of the times
    seed: of the jitter
    """
    _at_least(1, encoder_layers=encoder_layers, decoder_layers=decoder_layers, batch=batch)
    _at_least(1, sequence=sequence, width=width, heads=heads, vocabulary=vocabulary)
    blocks = _Transformer(TrainingGraphBuilder(), batch, sequence, width, heads)
    encoded = blocks.embedding("source", vocabulary)
    for i in range(encoder_layers):
        encoded = blocks.self_attention(f"encoder.{i}.attention", encoded)
        encoded = blocks.feed_forward(f"encoder.{i}.mlp", encoded)
    x = blocks.embedding("target", vocabulary)
    for i in range(decoder_layers):
        x = blocks.self_attention(f"decoder.{i}.attention", x)
        x = blocks.cross_attention(f"decoder.{i}.cross", x, encoded)
        x = blocks.feed_forward(f"decoder.{i}.mlp", x)
    name = f"encoder-decoder {encoder_layers}+{decoder_layers}"
    return jittered(blocks.builder.build(blocks.head(x, vocabulary), name), jitter_percent, seed)


def unet(
    depth: int = 5,
    convolutions: int = 2,
    batch: int = 32,
    size: int = 256,
    channels: int = 32,
    classes: int = 8,
    jitter_percent: int = 0,
    seed: int = 0,
) -> Graph:
    """Training step of a U-Net with a long skip at every level: 6 (2 depth + 1) convolutions + 6 depth + 5 operators.

    depth: how often the image is halved
    convolutions: convolution, norm and relu, so many times at each level on the way down and up
    batch: images in a step
    size: side of the image; divisible by 2**depth
    channels: at the first level, doubled at each halving
    classes: channels of the result
    jitter_percent: spread of the times
    seed: of the jitter
    """
    _at_least(1, depth=depth, convolutions=convolutions, batch=batch, size=size, channels=channels, classes=classes)
    if size % 2**depth:
        raise GraphError(f"size={size} cannot be halved {depth} times; take a multiple of {2**depth}")
    builder = TrainingGraphBuilder()
    pixels = [batch * (size >> level) ** 2 for level in range(depth + 1)]
    wide = [channels << level for level in range(depth + 1)]

    def convolve(name: str, x: int, level: int, channels_in: int, window: int = 9) -> int:
        return builder.convolution(
            name, x, pixels=pixels[level], channels_in=channels_in, channels_out=wide[level], window=window
        )

    def stage(name: str, x: int, level: int, channels_in: int) -> int:
        for i in range(convolutions):
            x = convolve(f"{name}.{i}.convolution", x, level, channels_in if i == 0 else wide[level])
            x = builder.relu(f"{name}.{i}.relu", builder.norm(f"{name}.{i}.norm", x, groups=batch))
        return x

    x = convolve("stem", builder.resident("image", pixels[0] * 3 * 2), 0, channels_in=3)
    skips = []
    for level in range(depth):
        skips.append(stage(f"down.{level}", x, level, wide[max(0, level - 1)]))
        x = builder.max_pool(f"down.{level}.pool", skips[-1])
    x = stage("bottom", x, depth, wide[depth - 1])
    for level in reversed(range(depth)):
        x = convolve(f"up.{level}.upsample", x, level, wide[level + 1], window=1)
        x = builder.concatenate(f"up.{level}.concatenate", x, skips[level])
        x = stage(f"up.{level}", x, level, 2 * wide[level])
    logits = builder.convolution("head", x, pixels=pixels[0], channels_in=channels, channels_out=classes, window=1)
    return jittered(builder.build(logits, f"unet {depth}x{convolutions}"), jitter_percent, seed)


def feed_forward(
    layers: int = 16, batch: int = 16384, width: int = 1024, jitter_percent: int = 0, seed: int = 0
) -> Graph:
    """Training step of a feed-forward network of equal layers: 4 layers + 1 operators.

    layers: products with a weight, each followed by a relu
    batch: rows in a step
    width: of every layer
    jitter_percent: spread of the times
    seed: of the jitter
    """
    _at_least(1, layers=layers, batch=batch, width=width)
    builder = TrainingGraphBuilder()
    x = builder.resident("input", batch * width * 2)
    for i in range(layers):
        x = builder.relu(f"{i}.relu", builder.linear(f"{i}.linear", x, rows=batch, fan_in=width, fan_out=width))
    return jittered(builder.build(x, f"feed-forward {layers}"), jitter_percent, seed)


def jittered(graph: Graph, percent: int, seed: int = 0) -> Graph:
    """The same graph with every time changed by a random factor within `percent` percent of 1."""
    if not 0 <= percent <= 100:
        raise GraphError(f"jitter_percent={percent} is not between 0 and 100")
    if percent == 0:
        return graph
    rng = random.Random(seed)
    ops = [replace(op, seconds=op.seconds * (1 + percent / 100 * (2 * rng.random() - 1))) for op in graph.ops]
    return replace(graph, ops=tuple(ops), name=f"{graph.name} jittered {percent}% s{seed}")


def _at_least(least: int, **given: int) -> None:
    for name, number in given.items():
        if number < least:
            raise GraphError(f"{name}={number} is too small; at least {least}")


FAMILIES: dict[str, Callable[..., Graph]] = {
    "chain": chain,
    "feed_forward": feed_forward,
    "gpt": gpt,
    "encoder_decoder": encoder_decoder,
    "unet": unet,
    "random_layered": random_layered,
}
