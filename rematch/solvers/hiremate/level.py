"""One level of a hierarchy as H-ILP sees it: layers with options, and the data that pass between them.

`Level(layers, data_bytes, ...)`

Gusak et al., HiRemate, ICML 2025, appendix B.1. A *layer* is a part of the forward pass and the part of the backward
pass that belongs to it. Each of its *options* is one way to run both: the forward with an option leaves a *phantom*,
memory that only the backward with the same option reads. *Data* pass between layers; where several nodes make one,
they contribute to it (gradients that are added up), and whoever reads it needs all contributions.

Compute nodes are numbered in topological order: the forward passes of the layers, the loss (at a lower level: all that
happens in between), then the backward passes in `backward_order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Pass(Enum):
    """What a node of a level computes."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Moment:
    """A stretch within a node's run: memory beyond data that others see, and which of these need not be there.

    `overhead_bytes` counts what the run itself holds, phantom of its own option excluded. `finished` data are not read
    by the run from here on, `unmade` ones are not made yet: if they are not wanted after (before) the node, they take
    no memory in this moment (the paper's correction terms).
    """

    overhead_bytes: int
    finished: frozenset[int] = frozenset()
    unmade: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LayerOption:
    """One way to run a layer. Overheads are those of the worst moment without corrections."""

    forward_seconds: float
    backward_seconds: float  # inf: to run the forward for its data alone
    phantom_bytes: int
    forward_moments: tuple[Moment, ...] = ()
    backward_moments: tuple[Moment, ...] = ()
    backward_reads: frozenset[int] = frozenset()  # data that the backward reads with this option only

    @property
    def forward_overhead_bytes(self) -> int:
        return max((moment.overhead_bytes for moment in self.forward_moments), default=0)

    @property
    def backward_overhead_bytes(self) -> int:
        return max((moment.overhead_bytes for moment in self.backward_moments), default=0)


@dataclass(frozen=True)
class Layer:
    """Data are named by their index in `Level.data_bytes`. A layer without a backward pass has `has_backward=False`."""

    options: tuple[LayerOption, ...]
    forward_reads: frozenset[int] = frozenset()
    forward_makes: frozenset[int] = frozenset()
    backward_reads: frozenset[int] = frozenset()  # whatever the option
    backward_makes: frozenset[int] = frozenset()
    has_backward: bool = True


@dataclass(frozen=True)
class Level:
    """What H-ILP solves: run everything, with the least time, within a budget for data, phantoms and overheads."""

    layers: tuple[Layer, ...]  # in topological order of the forward pass
    data_bytes: tuple[int, ...]  # data that no node makes are given: there from beginning to end
    backward_order: tuple[int, ...]  # layers with a backward pass, in topological order of the backward pass
    loss_reads: frozenset[int] = frozenset()
    loss_makes: frozenset[int] = frozenset()
    loss_seconds: float = 0.0
    loss_overhead_bytes: int = 0
    final: frozenset[int] = frozenset()  # data that must be there at the end


@dataclass(frozen=True)
class Run:
    """A step of a level's schedule; the loss has no layer and no option."""

    of: Pass
    layer: int = -1
    option: int = -1


@dataclass(frozen=True)
class LevelSolution:
    """Runs in turn. `proved` if no schedule of H-ILP's class is faster."""

    runs: tuple[Run, ...]
    seconds: float
    peak_bytes: int
    proved: bool = False
