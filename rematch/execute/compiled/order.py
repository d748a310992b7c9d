"""The order in which inductor runs the kernels of a graph: that of the graph, as far as fusion leaves it.

`torch._inductor.config.patch(_post_fusion_custom_pass=PlannedOrder())`

A kernel that several operators are fused into could run where the first of them was, or where the last one was.
Inductor takes the first place, so all that the others need runs ahead of what lay between. Where sums of two halves of
a block are fused, everything but the gradients of parameters comes first, and what these are computed from stays in
memory. We take the last place, where all that the kernel needs is there anyway.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch._inductor.virtualized import V

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass as SchedulerPass
else:
    try:
        from torch._inductor.custom_graph_pass import CustomSchedulerPass as SchedulerPass
    except ImportError:  # before torch 2.13 any callable will do
        SchedulerPass = object


class PlannedOrder(SchedulerPass):  # type: ignore[misc]
    """See the module. What has no gradients stays as it is."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return in_order_of_last(nodes) if _trains(V.graph) else nodes

    def uuid(self) -> Any:
        """What inductor's caches tell passes apart by."""
        return ("rematch's order", 1)


def _trains(graph: Any) -> bool:
    return not graph.is_inference


def in_order_of_last(nodes: Sequence[Any]) -> list[Any]:
    """Nodes of inductor's scheduler, each after those it waits for and where its last operator was."""
    maker = {buffer: place for place, node in enumerate(nodes) for buffer in node.get_buffer_names()}
    waits_for = [{maker[read.name] for read in node.unmet_dependencies if read.name in maker} for node in nodes]
    waited_for: list[list[int]] = [[] for _ in nodes]
    for place, earlier in enumerate(waits_for):
        earlier.discard(place)
        for other in earlier:
            waited_for[other].append(place)
    missing = [len(earlier) for earlier in waits_for]
    ready = [(node.max_order, place) for place, node in enumerate(nodes) if not missing[place]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, place = heapq.heappop(ready)
        ordered.append(nodes[place])
        for later in waited_for[place]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (nodes[later].max_order, later))
    return ordered
