"""Interleaved schedules, and the recursion along a path decomposition that makes them.

`PathRecursion.along(spine, inputs, sizes).schedule()` is PWRemat: the vertices to compute, one after the other.

R. Kumar, M. Purohit, Z. Svitkina, E. Vee, J. Wang, "Efficient Rematerialization for Deep Networks" (NeurIPS 2019),
sections A.3 and A.4. Vertices are named by their place in the spine, so that "before" is "smaller". A schedule is a
list of vertices to compute. It is valid for a known set if every input of every vertex in it is known or comes earlier.
An *interleaved schedule* on vertices x_1 < x_2 < ... is a list of pieces (sigma, x) such that sigma and then x are
valid once the smaller x are known; several pieces may have the same x.

PWRemat computes one vertex u: it takes a bag with u, and between the vertices of that bag interleaves what lies to its
left with what lies to its right. InterleavedSchedule does one of these sides: it computes the vertices of the middle
bag of that side by PWRemat on the inner half, where bags have lost their last vertex (lemma 11), interleaves them with
the outer half, and then, knowing the middle bag, goes on in the inner half.

Where we differ from algorithm 3 as printed (`algorithm3`). Schedules get shorter by it; the memory that they take may
grow or shrink:
- The i-th piece of the inner half repeats all that was computed for the i - 1 before, since u_i may read some of it.
  Here it repeats the part of it that leads to what u_i reads.
- Vertices that the caller has in memory are taken as known in the inner half too, and known vertices are not computed.
- As TWRemat(k) does for tree decompositions, the recursion stops where what is to be computed makes few bytes, and
  computes it once, in order. With `stop_bytes` of everything, nothing is computed twice.

Slips of the printed text: the loop over u_1 ... u_j runs to k; a side without bags needs a base case; and property 18,
that Condense keeps each piece valid by itself, holds for the pieces one after the other only, as one may read a vertex
of an earlier piece that is not an x any more. That is all that is needed, for they are never used otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from rematch.solvers.treewidth.path_decomposition import Spine

Prelude = tuple[list[int], int]  # what to compute before a vertex, and that vertex
Known = frozenset[int]


class TooLong(Exception):
    """The schedule would have more steps than allowed."""


def no_limit(steps: int) -> None:
    """Let any number of steps be made."""


def merge(pieces: Iterable[Prelude]) -> list[Prelude]:
    """One piece for each x, in ascending order; what comes before the same x is put end to end."""
    merged: dict[int, list[int]] = {}
    for before, x in pieces:
        merged.setdefault(x, []).extend(before)
    return [(merged[x], x) for x in sorted(merged)]


def flatten(pieces: Iterable[Prelude]) -> list[int]:
    """The schedule that an interleaved schedule stands for."""
    return [vertex for before, x in merge(pieces) for vertex in (*before, x)]


def condense(kept: Collection[int], pieces: Iterable[Prelude]) -> list[Prelude]:
    """The same schedule up to the last of `kept`, as an interleaved schedule on `kept` alone."""
    condensed: list[Prelude] = []
    waiting: list[int] = []
    for before, x in merge(pieces):
        waiting += before
        if x in kept:
            condensed.append((waiting, x))
            waiting = []
        else:
            waiting.append(x)
    return condensed


@dataclass(frozen=True)
class PathRecursion:
    """Algorithm 3 on one graph. `bags`, `inputs` and `sizes` name vertices by their place in the spine.

    A side of the path decomposition is a `range` of bags, from the inner end outwards. Vertices in no bag of it count
    as known there: whoever asks for it provides them.
    """

    bags: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]  # per vertex
    last: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    @staticmethod
    def along(spine: Spine, inputs: Sequence[Collection[int]], sizes: Sequence[int]) -> PathRecursion:
        """`inputs` and `sizes` are of the vertices as the spine's graph names them."""
        place = {vertex: index for index, vertex in enumerate(spine.order)}
        path = spine.decomposition
        return PathRecursion(
            bags=tuple(tuple(sorted(place[vertex] for vertex in bag)) for bag in path.bags),
            first=tuple(path.first[vertex] for vertex in spine.order),
            last=tuple(path.last[vertex] for vertex in spine.order),
            inputs=tuple(tuple(sorted(place[read] for read in inputs[vertex])) for vertex in spine.order),
            sizes=tuple(sizes[vertex] for vertex in spine.order),
        )

    @cached_property
    def reach(self) -> tuple[tuple[int, int], ...]:
        """Per vertex, the first and the last bag with a vertex up to it; no bag in between is without."""
        return tuple(zip(accumulate(self.first, min), accumulate(self.last, max), strict=True))

    def bags_up_to(self, side: range, vertex: int) -> range:
        """The bags of `side` with a vertex up to this one."""
        return _between(side, *self.reach[vertex])

    def bag_with(self, vertex: int, bags: range) -> int:
        """Of the bags with this vertex, the one closest to the middle of `bags`."""
        return _closest(bags, self.first[vertex], self.last[vertex])

    def up_to(self, bag: int, limit: int) -> list[int]:
        """The vertices of a bag up to `limit`."""
        return [vertex for vertex in self.bags[bag] if vertex <= limit]

    def is_on(self, side: range, vertex: int) -> bool:
        """Whether a bag of `side` has the vertex."""
        if not side:
            return False
        low, high = (side[0], side[-1]) if side.step > 0 else (side[-1], side[0])
        return self.first[vertex] <= high and low <= self.last[vertex]

    def schedule(self, stop_bytes: int = 0, spend: Callable[[int], None] = no_limit) -> list[int]:
        """PWRemat for the last vertex of the spine. `spend` hears of steps as they are made, and may raise."""
        if not self.inputs:
            return []
        run = _Run(self, stop_bytes, spend)
        whole = range(len(self.bags))
        return run.pwremat(whole, run.vertices(whole), len(self.inputs) - 1, frozenset())


@dataclass(frozen=True)
class _Run:
    """One schedule being made."""

    path: PathRecursion
    stop_bytes: int
    spend: Callable[[int], None]

    def vertices(self, side: range) -> list[int]:
        return sorted({vertex for bag in side for vertex in self.path.bags[bag]})

    def pwremat(self, side: range, vertices: list[int], u: int, known: Known) -> list[int]:
        """A schedule for `u`, one of the `vertices` of `side`, that also has all of them after the last known one."""
        missing = self._missing(side, vertices, u, known)
        bags = self.path.bags_up_to(side if side.step > 0 else side[::-1], u)
        if self._is_small(missing) or all(bisect_left(self.path.bags[bag], u + 1) <= 2 for bag in bags):
            self.spend(len(missing) + 1)
            return [*missing, u]
        centre = self.path.bag_with(u, bags)
        bag = self.path.up_to(centre, u)
        left = self.interleaved(bag, range(centre - 1, bags[0] - 1, -1), known)
        right = self.interleaved(bag, range(centre + 1, bags[-1] + 1), known)
        return flatten([*left, *right])

    def interleaved(self, xs: list[int], side: range, known: Known) -> list[Prelude]:
        """InterleavedSchedule: what to compute on `side` before each of `xs`, which lie at its inner end."""
        wanted = [x for x in xs if x not in known]
        if not wanted:
            return []
        side = self.path.bags_up_to(side, xs[-1])
        once = self._computed_once(wanted, side, known)
        if self._is_small([vertex for before, _ in once for vertex in before]):
            self.spend(sum(len(before) for before, _ in once))
            return once
        inner, middle, outer = _halves(side)
        separator = self.path.up_to(middle, xs[-1])
        low = [x for x in xs if x < separator[-1]]
        pieces = [
            *self._inner(low, separator, inner, known),
            *self.interleaved(separator, outer, known),
            *self.interleaved(xs[len(low) :], inner, known.union(low, separator)),
        ]
        return condense(set(wanted), pieces)

    def _inner(self, low: list[int], separator: list[int], side: range, known: Known) -> list[Prelude]:
        """Each of `low` and `separator` with what it takes from `side`, computed by PWRemat from stop to stop."""
        vertices = self.vertices(side)
        had = (vertex for vertex in known if vertex < separator[-1] and self.path.is_on(side, vertex))
        stops = sorted({*low, *separator, *had})
        pieces: list[Prelude] = []
        so_far: list[int] = []
        for index, stop in enumerate(stops):
            behind = frozenset(stops[:index])
            part: list[int] = []
            at = bisect_left(vertices, stop) - 1  # of the vertex before the stop, in the spine that `side` has
            if at >= 0 and (index == 0 or vertices[at] > stops[index - 1]):
                part = self.pwremat(side, vertices, vertices[at], behind)
            if stop not in known:
                repeated = self._leading_to(stop, so_far, side, behind.union(part))
                self.spend(len(repeated))
                pieces.append(([*repeated, *part], stop))
            so_far += part
        return pieces

    def _leading_to(self, x: int, schedule: list[int], side: range, known: Known) -> list[int]:
        """The part of a schedule that ends in what `x` reads, given what is known."""

        def reads(vertex: int) -> Iterator[int]:
            return (read for read in self.path.inputs[vertex] if read not in known and self.path.is_on(side, read))

        wanted = set(reads(x))
        part: list[int] = []
        for vertex in reversed(schedule):
            if not wanted:
                break
            if vertex in wanted:
                wanted.remove(vertex)
                wanted.update(reads(vertex))
                part.append(vertex)
        return part[::-1]

    def _computed_once(self, xs: list[int], side: range, known: Known) -> list[Prelude]:
        """An interleaved schedule in which nothing is computed twice: each x with what `side` lacks for it."""
        vertices = self.vertices(side)
        pieces: list[Prelude] = []
        for x in xs:
            missing = self._missing(side, vertices, x, known)
            pieces.append((missing, x))
            known = known.union(missing, (x,))
        return pieces

    def _missing(self, side: range, vertices: list[int], x: int, known: Known) -> list[int]:
        """Vertices of `side` to compute once, in order, before `x`: what it takes, and all after the last known vertex.

        The latter so that first computations follow the spine: where a vertex is known, all before it have run.
        """
        floor = max((vertex for vertex in known if vertex < x), default=-1)
        missing = set(vertices[bisect_left(vertices, floor + 1) : bisect_left(vertices, x)])
        leads = [x, *missing]
        while leads:
            for read in self.path.inputs[leads.pop()]:
                if read not in missing and read not in known and self.path.is_on(side, read):
                    missing.add(read)
                    leads.append(read)
        return sorted(missing)

    def _is_small(self, vertices: list[int]) -> bool:
        return not vertices or sum(self.path.sizes[vertex] for vertex in vertices) <= self.stop_bytes


def _between(side: range, low: int, high: int) -> range:
    """The bags of `side` from `low` to `high`, in its direction."""
    if side.step > 0:
        return range(max(side.start, low), min(side.stop, high + 1))
    return range(min(side.start, high), max(side.stop, low - 1), -1)


def _halves(side: range) -> tuple[range, int, range]:
    middle = len(side) // 2
    return side[:middle], side[middle], side[middle + 1 :]


def _closest(bags: range, low: int, high: int) -> int:
    """Of the bags from `low` to `high`, the one closest to the middle."""
    return min(max(bags[len(bags) // 2], low), high)
