"""Directed acyclic graphs of small pathwidth, and what a schedule of them takes by the paper's definition.

`narrow(200, width=2, rng)` has no spine, `folded(passes=3, places=40)` has one: 0, 1, 2, ...
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence


def narrow(count: int, width: int, rng: random.Random) -> list[list[int]]:
    """Readers of each vertex in a random graph of at most this pathwidth: edges tie the `width` vertices of a window.

    The window slides over the vertices; the edges' directions follow another, random order.
    """
    name = list(range(count))
    rng.shuffle(name)
    readers: list[list[int]] = [[] for _ in range(count)]
    window: list[int] = []
    for vertex in range(count):
        for other in window:
            if rng.random() < 0.7:
                source, reader = sorted((name[vertex], name[other]))
                readers[source].append(reader)
        window.append(vertex)
        if len(window) > width:
            window.pop(rng.randrange(len(window)))
    return [sorted(row) for row in readers]


def folded(passes: int, places: int, rungs: float = 1.0, rng: random.Random | None = None) -> list[set[int]]:
    """Inputs of each vertex: a path that goes along a line of places, back and forth, and reads what it passes again.

    With two passes these are the forward and the backward operators of a chain of layers. `rungs` is the share of
    earlier vertices at the same place that are read.
    """
    draw = rng or random.Random(0)
    inputs: list[set[int]] = []
    at_place: list[list[int]] = [[] for _ in range(places)]
    for turn in range(passes):
        for place in range(places) if turn % 2 == 0 else reversed(range(places)):
            reads = {vertex for vertex in at_place[place] if draw.random() < rungs}
            at_place[place].append(len(inputs))
            inputs.append(reads | {len(inputs) - 1} if inputs else reads)
    return inputs


def readers_of(inputs: Sequence[Collection[int]]) -> list[list[int]]:
    """Per vertex those that read it, or the other way round."""
    readers: list[list[int]] = [[] for _ in inputs]
    for vertex, reads in enumerate(inputs):
        for read in reads:
            readers[read].append(vertex)
    return readers


def is_valid(steps: Sequence[int], inputs: Sequence[Collection[int]], known: Collection[int] = ()) -> bool:
    """Definition 12: every input of a vertex that is not known is known or comes earlier."""
    there = set(known)
    for vertex in steps:
        if vertex not in known and not there.issuperset(inputs[vertex]):
            return False
        there.add(vertex)
    return True


def memory(
    steps: Sequence[int], inputs: Sequence[Collection[int]], sizes: Sequence[int], known: Collection[int] = ()
) -> int:
    """M_W: the largest sum of sizes alive at a step; known vertices are there from the start, if they are read."""
    whole = [*sorted(known), *steps]
    last_use = list(range(len(whole)))
    made_at: dict[int, int] = {}
    for step, vertex in enumerate(whole):
        if step >= len(known):
            for read in inputs[vertex]:
                if read in made_at:
                    last_use[made_at[read]] = step
        made_at[vertex] = step
    alive = [0] * len(whole)
    for step, vertex in enumerate(whole):
        for index in range(step, last_use[step] + 1):
            alive[index] += sizes[vertex]
    return max((alive[step] for step in range(len(known), len(whole)) if whole[step] not in known), default=0)
