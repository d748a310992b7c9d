"""Graphs that may be changed without changing the one they were copied from.

`copied, counterpart = copy_module(module)`; `traced_name(copy)` of one that `mark_copy` has marked
"""

from __future__ import annotations

from torch.fx import Graph as FxGraph, GraphModule, Node

_TRACED = "rematch_traced"  # in a node's meta


def copy_module(module: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A module with nodes of its own, and for each old node the new one. Values of nodes are shared."""
    graph = FxGraph()
    counterpart: dict[Node, Node] = {}
    for node in module.graph.nodes:
        counterpart[node] = graph.node_copy(node, counterpart.__getitem__)
    copied = GraphModule(module, graph)
    copied.meta = dict(module.meta)
    return copied, counterpart


def mark_copy(copied: Node, traced: Node) -> None:
    """Note on a node which one of the joint graph it computes, perhaps again."""
    copied.meta[_TRACED] = traced.name


def traced_name(node: Node) -> str:
    """The name in the joint graph of what a node computes."""
    return str(node.meta.get(_TRACED, node.name))
