"""Which values may go to host memory."""

from __future__ import annotations

import torch

from rematch.graph import Graph, Op, Value
from rematch.planning.host import linked


def test_copies_that_end_before_the_next_could_start_are_not_made() -> None:
    sizes = (2**10, 2**20, 2**21)
    values = (*(Value(f"v{size}", size) for size in sizes), Value("weight", 8, resident=True))
    graph = Graph(tuple(Op(f"op{size}", 1.0, (), (index,)) for index, size in enumerate(sizes)), values)

    on_card = linked(graph, torch.device("cpu"), "h200", 2**30)
    assert [value.movable for value in on_card.values] == [False, False, True, True]  # 55 GB/s for 25 us
    assert on_card.link is not None and on_card.link.host_bytes == 2**30
    here = linked(graph, torch.device("cpu"), None, 2**30)
    assert [value.movable for value in here.values] == [False, True, True, True]  # nothing is started on a CPU
    assert linked(graph, torch.device("cpu"), "h200", 0) is graph
