"""Graphs that may be changed without changing the one they were copied from.

`copied, counterpart = copy_module(module)`
"""

from __future__ import annotations

from torch.fx import Graph as FxGraph, GraphModule, Node


def copy_module(module: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A module with nodes of its own, and for each old node the new one. Values of nodes are shared."""
    graph = FxGraph()
    counterpart: dict[Node, Node] = {}
    for node in module.graph.nodes:
        counterpart[node] = graph.node_copy(node, counterpart.__getitem__)
    copied = GraphModule(module, graph)
    copied.meta = dict(module.meta)
    return copied, counterpart
