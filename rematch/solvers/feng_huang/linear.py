"""Lines: the positions between which a max term C makes the edges of an accessibility graph.

`Line.of([8, 9, 6, 7], [1.0] * 4).max_terms()`

Feng & Huang (CVPR 2021), algorithm 1: on a linear graph, vertex j is accessible from i if the bytes between them are at
most C. The cheapest checkpoints with no segment above C are the shortest path from the first to the last vertex, where
a vertex costs its size. The best C is among the bytes between two vertices, so that all of these are tried.

The paper keeps the accessibility graph as a table and finds the path in O(|V| log |V| + |E|) for each C. As bytes are
not negative, what a vertex is accessible from is a range that moves on with the vertex: `kernels.accessible_from` keeps
its start only, and `kernels.shortest_path` takes O(|V|). In a linear segment there may be more than an edge between two
splitting vertices; what is in such a gap counts as lying between them, and may be divided by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rematch.graph.model import Floats, Longs

_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True, eq=False)
class Line:
    """Positions, of which the first and last are the ends: sums over all that lies before each, and up to its own end.

    Between positions i < j lie `before[j] - behind[i]`, of bytes or of seconds.
    """

    bytes_before: Longs
    bytes_behind: Longs
    seconds_before: Floats
    seconds_behind: Floats

    @staticmethod
    def of(
        point_bytes: Sequence[int] | Longs,
        point_seconds: Sequence[float] | Floats,
        gap_bytes: Sequence[int] = (),
        gap_seconds: Sequence[float] = (),
    ) -> Line:
        """From the points between the ends, and what is in the gaps between all of them; nothing, if not given."""
        gaps = len(point_bytes) + 1
        return Line(
            *_sums(np.asarray(point_bytes, np.int64), np.asarray(gap_bytes or [0] * gaps, np.int64)),
            *_sums(np.asarray(point_seconds, np.float64), np.asarray(gap_seconds or [0.0] * gaps, np.float64)),
        )

    def __len__(self) -> int:
        return len(self.bytes_before)

    def max_terms(self) -> Longs:
        """The bytes between each two positions."""
        between = self.bytes_before[None, :] - self.bytes_behind[:, None]
        return np.asarray(between[np.triu_indices(len(self), k=1)])


def _sums(points: NDArray[_Number], gaps: NDArray[_Number]) -> tuple[NDArray[_Number], NDArray[_Number]]:
    """What lies before each position, and that with its own weight; the ends weigh nothing."""
    own = np.concatenate((np.zeros(1, points.dtype), points, np.zeros(1, points.dtype)))
    before = np.cumsum(own) - own
    before[1:] += np.cumsum(gaps)
    return before, before + own
