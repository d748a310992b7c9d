"""Chen's checkpointing on any graph, with the articulation points of the forward pass as candidates.

P. Jain et al., "Checkmate" (MLSys 2020), appendix B.1: AP sqrt(n) and AP greedy. An articulation point of the
undirected forward graph is an operator without which the graph falls apart; what follows it does not depend on what
precedes it. The network's input counts as a vertex before the first operator and the loss as one behind those that it
reads, so that on a linear graph every operator is a candidate and both equal `chen`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rematch.graph import Graph
from rematch.graph.model import Ints
from rematch.solvers.checkpoints.checkpointing import GreedySolver, SqrtSolver
from rematch.solvers.common.forward_pass import forward_ops

_PAPER = "Jain et al., Checkmate, MLSys 2020 (appendix B.1), after Chen et al., 2016"


@dataclass(frozen=True)
class ApSqrt(SqrtSolver):
    """Keep every sqrt(n)-th articulation point."""

    name = "ap_sqrt"
    paper = _PAPER

    def candidates(self, graph: Graph) -> Ints:
        return articulation_points(graph)


@dataclass(frozen=True)
class ApGreedy(GreedySolver):
    """Keep an articulation point after every b bytes."""

    name = "ap_greedy"
    paper = _PAPER

    def candidates(self, graph: Graph) -> Ints:
        return articulation_points(graph)


def articulation_points(graph: Graph) -> Ints:
    """Forward operators, in default order, that disconnect the forward pass."""
    ops = forward_ops(graph)
    cut = _cut_vertices(_neighbours(graph, ops))
    return ops[np.array([vertex in cut for vertex in range(1, len(ops) + 1)], dtype=np.bool_)]


def _neighbours(graph: Graph, ops: Ints) -> list[list[int]]:
    """The undirected forward graph: vertex 0 is the input, 1 to n the forward operators in order, n + 1 the loss."""
    a = graph.arrays
    end = len(ops) + 1
    vertex = {int(op): index for index, op in enumerate(ops, start=1)}
    edges = {(0, 1), (len(ops), end)} if len(ops) else set()
    for op in [*ops.tolist(), *([a.loss] if a.loss >= 0 else [])]:
        for value in a.inputs_of(op).tolist():
            maker = int(a.producer[value])
            if maker in vertex:
                edges.add((vertex[maker], vertex.get(op, end)))
    neighbours: list[list[int]] = [[] for _ in range(end + 1)]
    for one, other in sorted(edges):
        neighbours[one].append(other)
        neighbours[other].append(one)
    return neighbours


def _cut_vertices(neighbours: list[list[int]]) -> set[int]:
    """Tarjan: a vertex is cut if a child of it in a depth-first tree reaches nothing above it."""
    found_at: dict[int, int] = {}
    reaches: dict[int, int] = {}
    cut: set[int] = set()
    for root in range(len(neighbours)):
        if root in found_at:
            continue
        found_at[root] = reaches[root] = len(found_at)
        path = [(root, -1, iter(neighbours[root]))]
        root_children = 0
        while path:
            vertex, parent, remaining = path[-1]
            following = next(remaining, None)
            if following is None:
                path.pop()
                if parent < 0:
                    continue
                reaches[parent] = min(reaches[parent], reaches[vertex])
                if parent == root:
                    root_children += 1
                elif reaches[vertex] >= found_at[parent]:
                    cut.add(parent)
            elif following not in found_at:
                found_at[following] = reaches[following] = len(found_at)
                path.append((following, vertex, iter(neighbours[following])))
            elif following != parent:
                reaches[vertex] = min(reaches[vertex], found_at[following])
        if root_children > 1:
            cut.add(root)
    return cut
