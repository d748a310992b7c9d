"""Build a training graph: record the forward pass operator by operator, then add loss and backward as autograd would.

`builder = TrainingGraphBuilder(); y = builder.embedding("e", rows=8, vocabulary=4, width=2); builder.build(y, "tiny")`

The backward of an operator reads the gradients of its outputs and only what its formula needs: a product its inputs, a
softmax its output, a dropout its mask, a sum nothing. The gradient of a sum or a concatenation is shared by its inputs,
not copied; a value read more than once has its gradients accumulated. Weights are resident and their gradients are
targets; gains and biases of norms are left out, they weigh nothing. The logits are held. Times follow a roofline: the
larger of arithmetic over the device's rate and bytes moved over its bandwidth, plus the cost of a launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rematch.graph.model import Graph, Op, Phase, Value

ELEMENT_BYTES = 2  # activations, weights and gradients are 16-bit floats
MASK_BYTES = 1
INDEX_BYTES = 8
STATISTICS_BYTES = 8  # mean and deviation as 32-bit floats
_NOTHING: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a roofline needs to know of a device."""

    flops_per_second: float = 150e12
    bytes_per_second: float = 1.5e12
    launch_seconds: float = 5e-6

    def seconds(self, flops: float, moved_bytes: int) -> float:
        return self.launch_seconds + max(flops / self.flops_per_second, moved_bytes / self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A forward operator, as its backward sees it."""

    op: Op
    kind: str
    wanted: tuple[int, ...]  # inputs that get a gradient
    differentiable: tuple[int, ...]  # outputs whose gradient comes back; masks and statistics have none
    saved: tuple[int, ...]  # what the formula reads beside the gradients
    weight: int | None
    shares_gradient: bool
    fuses_accumulation: bool  # adds to a gradient that is there already, as addmm does


@dataclass
class TrainingGraphBuilder:
    """Records operators; every method that adds one returns the index of the value (or values) it yields."""

    rates: DeviceRates = field(default_factory=DeviceRates)
    _values: list[Value] = field(default_factory=list)
    _ops: list[Op] = field(default_factory=list)
    _records: list[_Recorded] = field(default_factory=list)
    _gradients: dict[int, int] = field(default_factory=dict)
    _targets: list[int] = field(default_factory=list)

    # Operators of the forward pass

    def resident(self, name: str, size_bytes: int) -> int:
        return self._value(name, size_bytes, resident=True)

    def embedding(self, name: str, *, rows: int, vocabulary: int, width: int) -> int:
        tokens = self.resident(f"{name}.tokens", rows * INDEX_BYTES)
        weight = self.resident(f"{name}.weight", vocabulary * width * ELEMENT_BYTES)
        output = {"": rows * width * ELEMENT_BYTES}
        return self._record(name, "embedding", (tokens,), output, saves_inputs=True, weight=weight)[0]

    def linear(self, name: str, x: int, *, rows: int, fan_in: int, fan_out: int) -> int:
        return self.projections(name, x, ("",), rows=rows, fan_in=fan_in, fan_out=fan_out)[0]

    def projections(
        self, name: str, x: int, parts: Sequence[str], *, rows: int, fan_in: int, fan_out: int
    ) -> tuple[int, ...]:
        """One product with a weight whose result is laid out as several values, such as query, key and value."""
        return self._record(
            name, "linear", (x,), dict.fromkeys(parts, rows * fan_out * ELEMENT_BYTES),
            saves_inputs=True, flops=2.0 * rows * fan_in * fan_out * len(parts), fuses_accumulation=True,
            weight=self.resident(f"{name}.weight", len(parts) * fan_in * fan_out * ELEMENT_BYTES),
        )  # fmt: skip

    def product(self, name: str, a: int, b: int, *, elements: int, inner: int) -> int:
        """A batched matrix product of two values: `elements` sums of `inner` terms."""
        output = {"": elements * ELEMENT_BYTES}
        return self._record(name, "product", (a, b), output, saves_inputs=True, flops=2.0 * elements * inner)[0]

    def convolution(
        self, name: str, x: int, *, pixels: int, channels_in: int, channels_out: int, window: int
    ) -> int:  # fmt: skip
        """`pixels` of the output, each from `window` pixels of the input."""
        size = pixels * channels_out * ELEMENT_BYTES
        taps = channels_in * channels_out * window
        return self._record(
            name, "convolution", (x,), {"": size},
            saves_inputs=True, flops=2.0 * pixels * taps, workspace_bytes=size // 4,
            weight=self.resident(f"{name}.weight", taps * ELEMENT_BYTES),
        )[0]  # fmt: skip

    def norm(self, name: str, x: int, *, groups: int) -> int:
        extra = {"statistics": groups * STATISTICS_BYTES}
        return self._record(name, "norm", (x,), {"": self._size(x)}, saves_inputs=True, extra=extra)[0]

    def softmax(self, name: str, x: int) -> int:
        return self._record(name, "softmax", (x,), {"": self._size(x)}, saves_outputs=True)[0]

    def relu(self, name: str, x: int) -> int:
        return self._record(name, "relu", (x,), {"": self._size(x)}, saves_outputs=True)[0]

    def gelu(self, name: str, x: int) -> int:
        return self._record(name, "gelu", (x,), {"": self._size(x)}, saves_inputs=True)[0]

    def dropout(self, name: str, x: int) -> int:
        extra = {"mask": self._size(x) // ELEMENT_BYTES * MASK_BYTES}
        return self._record(name, "dropout", (x,), {"": self._size(x)}, extra=extra)[0]

    def max_pool(self, name: str, x: int) -> int:
        """Halve both sides of an image."""
        size = self._size(x) // 4
        extra = {"indices": size // ELEMENT_BYTES * INDEX_BYTES}
        return self._record(name, "max_pool", (x,), {"": size}, extra=extra)[0]

    def add(self, name: str, a: int, b: int) -> int:
        return self._record(name, "add", (a, b), {"": self._size(a)}, shares_gradient=True)[0]

    def concatenate(self, name: str, a: int, b: int) -> int:
        output = {"": self._size(a) + self._size(b)}
        return self._record(name, "concatenate", (a, b), output, shares_gradient=True)[0]

    # The rest of the training step

    def build(self, logits: int, name: str) -> Graph:
        """The recorded forward pass, the loss on `logits`, and the backward pass."""
        self._loss(logits)
        for record in reversed(self._records):
            self._backward(record)
        return Graph(
            ops=tuple(self._ops),
            values=tuple(self._values),
            targets=frozenset(self._targets),
            held=frozenset({logits}),
            name=name,
        )

    def _loss(self, logits: int) -> None:
        size = self._size(logits)
        self._gradients[logits] = self._value("loss.gradient", size)
        in_full_precision = 2 * size  # the logarithms of the probabilities
        self._op("loss", "loss", (logits,), (self._gradients[logits],), Phase.LOSS, workspace_bytes=in_full_precision)

    def _backward(self, record: _Recorded) -> None:
        incoming = [self._gradients[value] for value in record.differentiable]
        if record.shares_gradient:
            for value in record.wanted:
                self._contribute(value, incoming[0])
            return
        running = [self._gradients[v] for v in record.wanted if record.fuses_accumulation and v in self._gradients]
        fresh = {value: self._gradient_of(value) for value in record.wanted}
        weights = () if record.weight is None else (record.weight,)
        of_weights = [self._gradient_of(weight) for weight in weights]
        self._targets += of_weights
        outputs = [*fresh.values(), *of_weights]
        self._op(
            f"{record.op.name}.backward", f"{record.kind}.backward",
            (*incoming, *running, *record.saved, *weights), outputs, Phase.BACKWARD,
            flops=(record.op.flops or 0.0) * len(outputs), workspace_bytes=record.op.workspace_bytes,
        )  # fmt: skip
        for value, gradient in fresh.items():
            if running:
                self._gradients[value] = gradient
            else:
                self._contribute(value, gradient)

    def _contribute(self, value: int, gradient: int) -> None:
        """Add to the gradient of `value`, by an operator of its own if there is one already."""
        if value not in self._gradients:
            self._gradients[value] = gradient
            return
        name = self._values[value].name
        total = self._value(f"{name}.gradient.total", self._size(value))
        self._op(f"{name}.accumulate", "accumulate", (self._gradients[value], gradient), (total,), Phase.BACKWARD)
        self._gradients[value] = total

    # Building blocks

    def _record(
        self, name: str, kind: str, inputs: tuple[int, ...], outputs: Mapping[str, int], *,
        extra: Mapping[str, int] = _NOTHING, saves_inputs: bool = False, saves_outputs: bool = False,
        weight: int | None = None, flops: float = 0.0, workspace_bytes: int = 0,
        shares_gradient: bool = False, fuses_accumulation: bool = False,
    ) -> tuple[int, ...]:  # fmt: skip
        """Add a forward operator; `extra` outputs have no gradient and are there for the backward to read."""
        made = self._outputs(name, outputs)
        aside = self._outputs(name, extra)
        reads = inputs if weight is None else (*inputs, weight)
        self._op(name, kind, reads, (*made, *aside), Phase.FORWARD, flops=flops, workspace_bytes=workspace_bytes)
        self._records.append(
            _Recorded(
                op=self._ops[-1],
                kind=kind,
                wanted=tuple(value for value in dict.fromkeys(inputs) if not self._values[value].resident),
                differentiable=made,
                saved=(*(inputs if saves_inputs else ()), *(made if saves_outputs else ()), *aside),
                weight=weight,
                shares_gradient=shares_gradient,
                fuses_accumulation=fuses_accumulation,
            )
        )
        return made

    def _outputs(self, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(self._value(f"{name}.{part}" if part else name, size) for part, size in sizes.items())

    def _op(
        self, name: str, kind: str, inputs: Iterable[int], outputs: Iterable[int], phase: Phase, *,
        flops: float = 0.0, workspace_bytes: int = 0,
    ) -> None:  # fmt: skip
        reads, makes = tuple(inputs), tuple(outputs)
        sizes_in, sizes_out = [self._size(v) for v in reads], [self._size(v) for v in makes]
        self._ops.append(
            Op(
                name=name,
                seconds=self.rates.seconds(flops, sum(sizes_in) + sum(sizes_out)),
                inputs=reads,
                outputs=makes,
                workspace_bytes=workspace_bytes,
                phase=phase,
                module_path=name.removesuffix(".backward").removesuffix(".accumulate").rpartition(".")[0],
                class_key=f"{kind} {sizes_in} -> {sizes_out}",
                flops=flops,
            )
        )

    def _gradient_of(self, value: int) -> int:
        return self._value(f"{self._values[value].name}.gradient", self._size(value))

    def _value(self, name: str, size_bytes: int, *, resident: bool = False) -> int:
        self._values.append(Value(name, size_bytes, resident))
        return len(self._values) - 1

    def _size(self, value: int) -> int:
        return self._values[value].size_bytes
