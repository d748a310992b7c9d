"""A schedule as the forward and the backward graph that inductor compiles.

`forward, backward = split(capture, schedule)`

The nodes of the joint graph are laid out anew in the order of the schedule, those that run again as copies; then
torch's own function cuts the result in two, so that what AOTAutograd expects of the two halves is its business. What
backward reads of forward's buffers is saved. Nodes that are inlined are computed from buffers wherever they are read:
forward has each of them once, as the joint graph does, while in backward every reader of a forward node has a copy of
its own, for inductor would keep in memory what is read far apart.

Inductor makes one kernel of a product and a sum that it goes into, which then waits for the other summand. The gradient
of a tied embedding would keep the gradient of the logits until the end of backward. Where the schedule has the product
first, the sum is written as a difference, which inductor leaves alone and which has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch.fx import Graph as FxGraph, GraphModule, Node

from rematch.capture.inductor.copies import mark_copy
from rematch.capture.inductor.nodes import Kind, constant_of
from rematch.capture.inductor.read import FusedCapture
from rematch.capture.joint.traced import is_tangent
from rematch.errors import ScheduleError
from rematch.graph import Phase, Schedule

aten = torch.ops.aten


def split(capture: FusedCapture, schedule: Schedule) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward module."""
    layout = _Layout(capture)
    layout.lay_out(schedule.ops.tolist())
    joint = GraphModule(capture.joint, layout.graph)
    saved, symbols = layout.saved()
    forward, backward = _extract_fwd_bwd_modules(
        joint, saved, saved_sym_nodes=symbols, num_fwd_outputs=capture.found.forward_outputs
    )
    return forward, backward


class _Layout:
    """The joint graph while it is written in the order of a schedule."""

    def __init__(self, capture: FusedCapture) -> None:
        self.capture = capture
        self.found = capture.found
        self.position = {node: place for place, node in enumerate(capture.joint.graph.nodes)}
        self.graph = FxGraph()
        self.backward = False
        self.latest: dict[Node, Node] = {}  # traced node of a buffer, input or symbol -> where it was last computed
        self.shared: dict[Node, Node] = {}  # inlined nodes that several readers have in common
        self.in_forward: set[Node] = set()  # new nodes
        self.readers_in_backward: list[Node] = []  # new nodes
        self.step: dict[Node, int] = {}  # traced node of a buffer -> when it last ran

    def lay_out(self, ops: list[int]) -> None:
        traced = self.capture.joint.graph
        for node in traced.find_nodes(op="placeholder"):
            self.latest[node] = self._copy(node, {})
        output = traced.output_node()
        count = self.found.forward_outputs
        returned: list[Any] = []
        for step, op in enumerate(ops):
            self.step.update(dict.fromkeys(self.capture.made[op], step))
            if self.capture.graph.ops[op].phase is Phase.LOSS:
                returned = [self._argument(node, {}) for node in self.found.outputs[:count]]
                self._start_backward()
            else:
                self._run(op)
        gradients = [self._argument(node, {}) for node in self.found.outputs[count:]]
        made = self.graph.output((*returned, *gradients))
        made.meta = dict(output.meta)
        self.readers_in_backward += [node for node in gradients if isinstance(node, Node)]

    def _start_backward(self) -> None:
        self.in_forward = set(self.graph.nodes)
        self.backward = True
        self.shared.clear()

    def _run(self, op: int) -> None:
        node, *entries = self.capture.made[op]
        inlined: dict[Node, Node] = {}
        made = self._copy(node, inlined)
        self._replace(node, made)
        for entry in entries:
            if constant_of(entry) is None:
                self._replace(entry, self._copy(entry, inlined))

    def _replace(self, node: Node, made: Node) -> None:
        """`made` is the latest run of `node`: what was inlined from an earlier run is out of date."""
        if node in self.latest:
            self.shared = {
                inlined: copy for inlined, copy in self.shared.items() if node not in self.found.leaves[inlined]
            }
        self.latest[node] = made

    def _argument(self, node: Any, inlined: dict[Node, Node]) -> Any:
        """What stands here for a traced node. Inlined nodes are computed in place, in the order of the joint graph."""
        if not isinstance(node, Node):
            return node
        missing: set[Node] = set()
        waiting = [node]
        while waiting:
            wanted = waiting.pop()
            if wanted not in missing and not self._is_there(wanted, inlined):
                missing.add(wanted)
                waiting += wanted.all_input_nodes
        for wanted in sorted(missing, key=self.position.__getitem__):
            self._home(wanted, inlined)[wanted] = self._copy(wanted, inlined)
        return self._look_up(node, inlined)

    def _is_there(self, node: Node, inlined: dict[Node, Node]) -> bool:
        return constant_of(node) is not None or node in self._home(node, inlined)

    def _look_up(self, node: Node, inlined: dict[Node, Node]) -> Any:
        constant = constant_of(node)
        return self._home(node, inlined)[node] if constant is None else constant[0]

    def _home(self, node: Node, inlined: dict[Node, Node]) -> dict[Node, Node]:
        """Where the node that stands for `node` is kept: with the buffers, shared, or by its one reader."""
        if node in self.latest or self.found.kinds[node] in (Kind.INPUT, Kind.SYMBOL):
            return self.latest
        if node not in self.found.leaves:
            raise ScheduleError(f"the schedule reads {node.name!r} where it has not been computed")
        return inlined if self.backward and node not in self.found.needs_tangent else self.shared

    def _copy(self, node: Node, inlined: dict[Node, Node]) -> Node:
        # The arguments come first in the graph, so they are laid out before the node is made.
        arguments: Callable[[Node], Any] = lambda argument: self._argument(argument, inlined)  # noqa: E731
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), arguments)
        if self.backward and (product := self._early_product(node)) is not None:
            return self._difference(node, args, product)
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name, type_expr=node.type)
        made.meta = dict(node.meta)
        mark_copy(made, node)
        made.meta.pop("recompute", None)  # a mark of torch.utils.checkpoint, whose place the schedule takes
        if self.backward:
            made.meta["partitioner_tag"] = "is_backward"
            self.readers_in_backward.append(made)
        return made

    def _early_product(self, node: Node) -> int | None:
        """The place of the summand that is a product, run before the other summand was there."""
        if node.target is not aten.add.Tensor or node.kwargs:
            return None
        for place, summand in enumerate(node.args):
            other = node.args[1 - place]
            if not isinstance(summand, Node) or not isinstance(other, Node) or summand.target is not aten.mm.default:
                continue
            waits_for = [self.step.get(leaf, -1) for leaf in self.found.leaves_of([other])]
            if len(summand.users) == 1 and self.step.get(summand, -1) < max(waits_for, default=-1):
                return place
        return None

    def _difference(self, node: Node, args: tuple[Any, ...], product: int) -> Node:
        """`product - (-other)` for `product + other`."""
        negative = self.graph.call_function(aten.neg.default, (args[1 - product],))
        made = self.graph.call_function(aten.sub.Tensor, (args[product], negative))
        negative.meta["val"] = args[1 - product].meta["val"]
        made.meta = dict(node.meta)
        mark_copy(made, node)
        for new in (negative, made):
            new.meta["partitioner_tag"] = "is_backward"
            self.readers_in_backward.append(new)
        return made

    def saved(self) -> tuple[list[Node], list[Node]]:
        """Tensors and numbers of forward that backward reads, as new nodes."""
        read: dict[Node, None] = {}
        for reader in self.readers_in_backward:
            read.update(dict.fromkeys(reader.all_input_nodes))
            read.update({reader: None} if reader in self.in_forward else {})
        kept = [node for node in self.graph.nodes if node in read and node in self.in_forward]
        kept = [node for node in kept if not is_tangent(node) and node.op != "get_attr"]
        tensors = [node for node in kept if isinstance(node.meta.get("val"), torch.Tensor)]
        return tensors, [node for node in kept if node not in set(tensors)]
