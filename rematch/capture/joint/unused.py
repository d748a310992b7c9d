"""Outputs that the loss does not use, taken out of the backward graph.

`drop_zero_tangents(joint, unused={1})`

A model that returns its loss and its logits is differentiated through the loss alone. AOTAutograd traces a gradient for
the logits all the same, and autograd hands over a tensor of zeros for it, which is added to the real one: the largest
tensor of a language model twice, for nothing. Eager does neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from rematch.capture.aten import aten
from rematch.capture.joint.traced import is_tangent


def output_of_tangent(tangent: Node) -> int | None:
    """Which of the module's outputs a tangent belongs to; None if it is that of something behind an output."""
    output = getattr(tangent.meta.get("desc"), "output", None)
    return getattr(output, "idx", None) if type(output).__name__ == "PlainAOTOutput" else None


def drop_zero_tangents(joint: GraphModule, unused: frozenset[int]) -> frozenset[Node]:
    """Simplify `joint` for tangents of `unused` outputs being zero; returns those that nothing reads any more."""
    tangents = [node for node in joint.graph.nodes if is_tangent(node)]
    dropped = set()
    for tangent in tangents:
        if output_of_tangent(tangent) in unused and _drop(joint, tangent, set(tangents)):
            dropped.add(tangent)
    return frozenset(dropped)


def _drop(joint: GraphModule, tangent: Node, tangents: set[Node]) -> bool:
    """Whether all that follows from `tangent` could be taken out; the graph is changed only then."""
    zero = {tangent}
    depends = set(tangents)
    replaced: dict[Node, Node] = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            continue
        inputs = [arg for arg in node.all_input_nodes if arg in depends]
        if not inputs:
            continue
        depends.add(node)
        if not any(arg in zero for arg in inputs):
            continue
        if node.op == "output":
            continue
        if all(arg in zero for arg in inputs):
            zero.add(node)  # backward operators are linear in their tangents
        elif (other := _other_summand(node, zero)) is not None:
            replaced[node] = other
        else:
            return False
    output = next(node for node in joint.graph.nodes if node.op == "output")
    output.args = (tuple(None if entry in zero else entry for entry in output.args[0]),)  # as eager leaves `.grad`
    for node, other in replaced.items():
        node.replace_all_uses_with(other)
    for node in reversed([*joint.graph.nodes]):
        if node is not tangent and (node in zero or node in replaced) and not node.users:
            joint.graph.erase_node(node)
    return not tangent.users


def _other_summand(node: Node, zero: set[Node]) -> Node | None:
    """What a sum with zero is, if that needs no conversion."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    one, two = node.args
    if not isinstance(one, Node) or not isinstance(two, Node):
        return None
    other = two if one in zero else one
    return other if _same_kind(other.meta.get("val"), node.meta.get("val")) else None


def _same_kind(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    return one.dtype == two.dtype and one.shape == two.shape
