"""Algorithm 3 as it is printed: the recursion of PWRemat without our changes.

`AsPrinted(path).schedule()` are the vertices to compute, one after the other.

R. Kumar, M. Purohit, Z. Svitkina, E. Vee, J. Wang, "Efficient Rematerialization for Deep Networks" (NeurIPS 2019),
algorithm 3 of section A.4. What `interleaved` leaves out to make schedules shorter is here: the i-th piece of the inner
half repeats all that was computed for the pieces before, and the inner half knows nothing of what its caller has in
memory. So values are made again shortly before they are read, which often takes less memory, and seldom less time.

Where the print cannot be followed to the letter:
- The loop over u_1 ... u_j runs to k there; it has to run to j. A side without bags has nothing to compute.
- The vertex before u_i in the spine may be known, or in no bag of the inner half. The print computes it again, although
  whoever asks for this half provides it. Here nothing is computed then.
- The spine is a path of edges, so each vertex reads the one before it. The edges that algorithm 2 adds order
  computations only: nothing is kept in memory for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rematch.solvers.treewidth.interleaved import Known, PathRecursion, Prelude, condense, flatten, no_limit


@dataclass(frozen=True)
class AsPrinted:
    """Algorithm 3 on one path. `spend` hears of steps as they are made, and may raise."""

    path: PathRecursion
    spend: Callable[[int], None] = no_limit

    def schedule(self) -> list[int]:
        """PWRemat for the last vertex of the spine."""
        count = len(self.path.inputs)
        return self.pwremat(range(len(self.path.bags)), count - 1, frozenset()) if count else []

    def pwremat(self, side: range, u: int, known: Known) -> list[int]:
        """PWRemat: a schedule for `u`, a vertex of `side`, given what is known and all that no bag of `side` has."""
        if all(read in known or not self.path.is_on(side, read) for read in self._reads(u)):
            self.spend(1)
            return [u]
        bags = self.path.bags_up_to(side if side.step > 0 else side[::-1], u)
        if all(len(self.path.up_to(bag, u)) <= 2 for bag in bags):
            return self._without_repeats(side, u, known)
        centre = self.path.bag_with(u, bags)
        bag = self.path.up_to(centre, u)
        left = self.interleaved(bag, range(centre - 1, bags[0] - 1, -1), known)
        right = self.interleaved(bag, range(centre + 1, bags[-1] + 1), known)
        return flatten([*left, *right])

    def interleaved(self, xs: list[int], side: range, known: Known) -> list[Prelude]:
        """InterleavedSchedule: what to compute on `side` before each of `xs`, which lie at its inner end."""
        side = self.path.bags_up_to(side, xs[-1]) if xs else side[:0]
        if not side or known.issuperset(xs):
            return [([], x) for x in xs]
        middle = len(side) // 2
        inner, outer = side[:middle], side[middle + 1 :]
        separator = self.path.up_to(side[middle], xs[-1])
        low = [x for x in xs if x < separator[-1]]
        pieces = [
            *self._inner(sorted({*low, *separator}), inner),
            *self.interleaved(separator, outer, known),
            *self.interleaved(xs[len(low) :], inner, known.union(low, separator)),
        ]
        return condense(set(xs), pieces)

    def _inner(self, stops: list[int], side: range) -> list[Prelude]:
        """The loop over u_1 ... u_j: each with all that was computed on `side` for it and for those before it."""
        pieces: list[Prelude] = []
        so_far: list[int] = []
        for index, stop in enumerate(stops):
            known = frozenset(stops[:index])
            before = stop - 1
            if before >= 0 and before not in known and self.path.is_on(side, before):
                so_far += self.pwremat(side, before, known)
            self.spend(len(so_far))
            pieces.append((so_far.copy(), stop))
            so_far.append(stop)
        return pieces

    def _without_repeats(self, side: range, u: int, known: Known) -> list[int]:
        """What `u` takes from `side`, each vertex once, and then `u`."""
        taken, leads = {u}, [u]
        while leads:
            for read in self._reads(leads.pop()):
                if read not in taken and read not in known and self.path.is_on(side, read):
                    taken.add(read)
                    leads.append(read)
        self.spend(len(taken))
        return sorted(taken)

    def _reads(self, vertex: int) -> tuple[int, ...]:
        """The inputs of a vertex with the spine's edges."""
        return (*self.path.inputs[vertex], vertex - 1) if vertex else self.path.inputs[vertex]
