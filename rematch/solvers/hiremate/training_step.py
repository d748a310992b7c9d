"""A training step as forward, loss and backward, whatever its graph marks.

`TrainingStep.of(graph).graph.loss`

H-ILP has a loss node between the passes. Graphs in files often mark which operators are backward and no loss: they get
a loss that reads nothing, makes nothing and takes no time. Where the default order mixes the passes, as a graph may
that has several losses, forward operators go first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rematch.errors import GraphError
from rematch.graph import Graph, Op, Phase
from rematch.graph.model import Ints

_PHASES = list(Phase)


@dataclass(frozen=True)
class TrainingStep:
    """A graph with a loss between its passes; `inserted` is that loss where the given graph has none."""

    graph: Graph
    inserted: int | None = None

    @staticmethod
    def of(graph: Graph) -> TrainingStep:
        """`GraphError` if the operators cannot run in the order of the phases."""
        inserted = None
        if graph.loss is None:
            inserted = len(graph.ops)
            graph = replace(
                graph,
                ops=(*graph.ops, Op("loss", 0.0, (), (), phase=Phase.LOSS, once=True)),
                order=(*graph.order, inserted),
            )
        order = sorted(graph.order, key=lambda op: _PHASES.index(graph.ops[op].phase))
        return TrainingStep(replace(graph, order=tuple(order)), inserted)

    def without_loss(self, ops: Ints) -> Ints:
        """Operators of this graph as those of the given one."""
        return ops if self.inserted is None else ops[ops != self.inserted]


def has_two_passes(graph: Graph) -> bool:
    """Whether the graph has forward and backward operators, and forward ones can all run first."""
    if not {Phase.FORWARD, Phase.BACKWARD} <= {op.phase for op in graph.ops}:
        return False
    try:
        TrainingStep.of(graph)
    except GraphError:
        return False
    return True
