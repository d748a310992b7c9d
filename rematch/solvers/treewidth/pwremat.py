"""PWRemat: recursion along a path decomposition.

`solve(problem, "pwremat")`

R. Kumar, M. Purohit, Z. Svitkina, E. Vee, J. Wang, "Efficient Rematerialization for Deep Networks" (NeurIPS 2019),
section 5 and supplement A: algorithm 2 (`path_decomposition`) and algorithm 3, as printed (`algorithm3`) and with our
changes (`interleaved`), theorem 7. `solve(problem, "pwremat", recursion="printed", order="any", pruned=False)` is the
paper's one schedule; the rest of this page is ours.

The paper asks for the least memory. For a budget, our recursion is stopped early at several depths, as TWRemat(k) stops
that of algorithm 1: where what is left to compute makes at most so many bytes, it is computed once. Each of the
resulting sequences is pruned to the budget, and the fastest wins. Algorithm 3 as printed is not stopped. It repeats far
more, which costs less memory on chains and more on graphs with long skips, and leaves more for pruning to choose from;
as neither is always better, both are tried. A sequence of more than 300,000 steps is given up.

The paper lets algorithm 2 choose the order of first computations (`order="any"`), for which theorem 8 bounds the bags.
The default order as a spine has no such bound; on training graphs it is often as good, since neighbours in it are close
together along the depth of the network. Neither is always better, so both are tried. Operators that run once or draw
random numbers do so in turn, and windows are kept, in either case (`pruning.in_turn`): what may not run again stays in
memory. The paper's bounds (theorem 7: memory and repeats polylogarithmic in the number of operators) speak of graphs
without such operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from rematch.errors import SolverError
from rematch.graph import Graph, Op, Schedule, Value, baseline
from rematch.graph.model import Ints
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.common.order import Order
from rematch.solvers.common.pruning import in_turn, pruned
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.treewidth.algorithm3 import AsPrinted
from rematch.solvers.treewidth.interleaved import PathRecursion, TooLong
from rematch.solvers.treewidth.path_decomposition import (
    Readers,
    Spine,
    path_decomposition,
    spine_along,
    tied_along,
    with_spine,
)
from rematch.solvers.treewidth.tree_decomposition import Edge

_SPINES: dict[str, tuple[Order, ...]] = {"default": ("default",), "any": ("any",), "both": ("default", "any")}
_RECURSIONS: dict[str, tuple[str, ...]] = {"ours": ("ours",), "printed": ("printed",), "both": ("ours", "printed")}
_STOP_RATIO = 0.7  # between the bytes at which the recursion stops, from one depth to the next
_DEPTHS = 24  # the last one stops at 0.03 % of the bytes; then at none
_ENTRIES_PER_SECOND = 500_000  # of bags: a path with more than there is time for is not searched
_MOST_STEPS = 300_000  # of one sequence; pruning that many takes about a second and cannot be interrupted


@dataclass(frozen=True)
class PWRemat(Solver):
    """Stop the recursion at several depths, hold what the budget has room for; the fastest wins.

    recursion: algorithm 3 as "printed", "ours" at several depths, or "both" in turn
    order: the spine, and so the order of first computations: the "default" order, "any" that algorithm 2 finds, as in
        the paper, or "both" in turn
    pruned: whether recomputations go that the budget has room to do without; False is the recursion's own schedule
    """

    recursion: str = "both"
    order: str = "both"
    pruned: bool = True

    name = "pwremat"
    paper = "Kumar et al., Efficient Rematerialization for Deep Networks, NeurIPS 2019 (supplement A)"

    def __post_init__(self) -> None:
        for option, given, known in (("order", self.order, _SPINES), ("recursion", self.recursion, _RECURSIONS)):
            if given not in known:
                raise SolverError(f"solver 'pwremat' has no {option} {given!r}; it has: {', '.join(known)}")

    def prepare(self) -> None:
        tiny = Graph((Op("make", 0.0, (), (0,)), Op("use", 0.0, (0,), ())), (Value("made", 1),))
        pruned(tiny, in_turn(tiny, tiny.arrays.order.copy()), 0)

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        incumbent = Incumbent(problem, deadline, on_progress)
        incumbent.offer(baseline(problem.graph), self.name)
        for order in _SPINES[self.order]:
            if not incumbent.over:
                self._search(incumbent, order)
        return incumbent.solution(self.name)

    def _search(self, incumbent: Incumbent, order: Order) -> None:
        graph, deadline = incumbent.problem.graph, incumbent.deadline
        try:
            schedules = PathSchedules.of(graph, order, deadline)
        except TooLong as reason:
            incumbent.tell(self.name, f"{order} spine: {reason}")
            return
        path = schedules.recursion
        widest = max(map(len, path.bags))
        incumbent.tell(self.name, f"{order} spine: a path of {len(path.bags)} bags with up to {widest} operators")
        for recursion in _RECURSIONS[self.recursion]:
            for sequence in schedules.sequences(recursion, deadline):
                if self.pruned:
                    sequence = pruned(graph, sequence, incumbent.problem.budget_bytes, keep_first=order == "default")
                incumbent.offer(Schedule.from_ops(graph, sequence), f"{self.name}, {order} spine, {recursion}")
                if incumbent.over:
                    return


def _stops(total_bytes: int) -> Iterator[int]:
    """Bytes at which to stop the recursion: from few levels of it to all."""
    yield from dict.fromkeys(int(total_bytes * _STOP_RATIO**depth) for depth in range(1, _DEPTHS))
    yield 0


@dataclass(frozen=True)
class PathSchedules:
    """What PWRemat runs on a graph, for any depth of its recursion."""

    graph: Graph
    recursion: PathRecursion
    ops: Ints  # at each place of the spine

    @staticmethod
    def of(graph: Graph, order: Order, deadline: Deadline | None = None) -> PathSchedules:
        """`TooLong` if the bags of the path have more entries than there is time for."""
        edges = _reads(graph)
        spine = _spine(_readers(len(graph.ops), edges), order, deadline)
        entries = spine.decomposition.entries
        if deadline is not None and entries > _ENTRIES_PER_SECOND * deadline.remaining:
            raise TooLong(f"no time for a path whose bags have {entries:,} entries")
        inputs = _readers(len(graph.ops), {(reader, maker) for maker, reader in edges})
        ops = graph.arrays.order
        made_bytes = [sum(graph.values[value].size_bytes for value in graph.ops[op].outputs) for op in ops.tolist()]
        return PathSchedules(graph, PathRecursion.along(spine, inputs, made_bytes), ops[list(spine.order)])

    def sequences(self, recursion: str, deadline: Deadline) -> Iterator[Ints]:
        """What one recursion gives: ours from few levels of it to all, or the one as printed."""
        if recursion == "printed":
            found: Iterable[Ints | None] = (self.as_printed(deadline),)
        else:
            found = (self.sequence(stop_bytes, deadline) for stop_bytes in _stops(sum(self.recursion.sizes)))
        yield from (sequence for sequence in found if sequence is not None)

    def sequence(self, stop_bytes: int, deadline: Deadline) -> Ints | None:
        """Operators to compute one after the other; None if they are too many, or there is no time."""
        return self._within(deadline, partial(self.recursion.schedule, stop_bytes))

    def as_printed(self, deadline: Deadline) -> Ints | None:
        """The same by algorithm 3 as printed."""
        return self._within(deadline, lambda spend: AsPrinted(self.recursion, spend).schedule())

    def _within(self, deadline: Deadline, schedule: Callable[[Callable[[int], None]], list[int]]) -> Ints | None:
        if deadline.expired:
            return None
        steps_left = _MOST_STEPS

        def spend(steps: int) -> None:
            nonlocal steps_left
            steps_left -= steps
            if steps_left < 0 or deadline.expired:
                raise TooLong

        try:
            places = schedule(spend)
        except TooLong:
            return None
        return in_turn(self.graph, self.ops[places])


def _spine(readers: Readers, order: Order, deadline: Deadline | None) -> Spine:
    if order == "any":
        return with_spine(readers, path_decomposition(readers, deadline))
    default = range(len(readers))
    return spine_along(default, path_decomposition(tied_along(default, readers), deadline))


def _reads(graph: Graph) -> set[Edge]:
    """Edges from makers to readers, both by their place in the default order. The loss reads what it holds."""
    a = graph.arrays
    position = a.position.tolist()
    edges = {
        (position[maker], position[reader])
        for value, maker in enumerate(a.producer.tolist())
        for reader in a.users_of(value).tolist()
    }
    if a.loss >= 0:
        makers = a.producer[a.held]
        edges |= {(position[maker], position[a.loss]) for maker in makers[makers >= 0].tolist()}
    return edges


def _readers(count: int, edges: set[Edge]) -> list[list[int]]:
    """Per vertex, where its edges lead, in ascending order."""
    readers: list[list[int]] = [[] for _ in range(count)]
    for source, reader in sorted(edges):
        readers[source].append(reader)
    return readers
