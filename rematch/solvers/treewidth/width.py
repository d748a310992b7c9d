"""An upper bound on the treewidth of a graph's operators, in a second or two whatever the graph is.

`width, heuristic = quick_width(gpt(layers=2))`
"""

from __future__ import annotations

from rematch.graph import Graph
from rematch.solvers.treewidth.elimination import Heuristic, decompose
from rematch.solvers.treewidth.tree_decomposition import operator_neighbours

_MIN_FILL_OPERATORS = 20_000  # larger graphs take min-degree, which is quicker and looser
_MOST_READS = 500_000  # of values by operators: a denser graph is given up, its width is of no use to anyone
_MOST_WORK = 20_000_000  # steps of set intersections: about a second


def quick_width(graph: Graph) -> tuple[int, Heuristic] | None:
    """The width of a tree decomposition found in bounded time and the heuristic that found it; None if too dense."""
    if len(graph.arrays.inputs) > _MOST_READS:
        return None
    neighbours = operator_neighbours(graph)
    # Before its first elimination, min-fill intersects the neighbours of all neighbours.
    preparation = sum(len(neighbours[other]) for near in neighbours for other in near)
    small = len(neighbours) <= _MIN_FILL_OPERATORS and preparation <= _MOST_WORK
    heuristic: Heuristic = "min-fill" if small else "min-degree"
    return decompose(neighbours, heuristic, _MOST_WORK).width, heuristic
