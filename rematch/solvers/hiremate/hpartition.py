"""H-Partition: cut the forward pass from the bottom up, where little memory crosses the border.

`HPartition(most_top=30, most_lower=20).partition(graph)`

J. Gusak et al., "HiRemate: hierarchical approach for efficient re-materialization of neural networks", ICML 2025,
section 3.1 and appendix A (algorithm 2). While the top level has more than M^t nodes, one more level is made. Nodes
between each node x and a(x), the closest ancestor that all paths to x pass, make up to four candidate groups, with and
without x and a(x), of at most M^l nodes. The candidate of least score (1) becomes a group; candidates that meet it
take in all of it, or are dropped when that makes them larger than M^l; and so on, until no candidate is left. The
groups are the nodes of the next level. Score (1) is the memory of the values that cross a candidate's border, times
(operators / nodes)^alpha; the nodes of a candidate are those of its level, and the operators all those below them.

A candidate is *headed* (property 1): it has one head h, in it or not, with h before all of it and every predecessor of
any other member inside the candidate or h. With u != h in (3), which the proofs need where h is inside, headed sets are
convex, and the union of two that meet is headed. So the groups of a level contract to an acyclic graph. If several
nodes have no predecessor, their common ancestor is an artificial node; no group holds it.

What we changed:
- Also the mirror image: groups between x and the closest node that all paths from x pass. Each level is made both ways,
  and the way that leaves fewer nodes counts. Decoder layers that all read the encoder's result have no head of their
  own but a last operator: 100 layers of each make 13 levels with heads alone and 3 both ways.
- Where a level leaves more than 9 in 10 nodes (random graphs, stars), the topological order is cut into stretches
  of at most M^l nodes instead, where the fewest bytes cross. Every level therefore shrinks the graph by a constant
  factor, there are logarithmically many, and the time grows nearly linearly with the graph.
- a(x) comes from the dominator tree, built in topological order with jump pointers (Myers, 1983): O(log n) for each
  edge. The search from x towards a(x) ends once it has met more than M^l nodes. A merged group is one member of the
  candidates that hold it, with one list of values, so that scores are never summed over what is inside.
- Operators tied to no other, such as the counters of batch norms, join the node before them in the default order
  first of all. Otherwise no candidate has them, and they fill the top level.
- Ties are broken by position in the default order: the same graph always gives the same hierarchy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise

from rematch.errors import SolverError
from rematch.graph import Graph
from rematch.graph.model import Ints
from rematch.solvers.hiremate.partition import Part, Partitioner, dependencies, forward_order, joined

_LARGEST_SHARE_LEFT = 0.9  # of a level's nodes; beyond, the level is cut into stretches

Members = frozenset[int]


@dataclass(frozen=True)
class HPartition(Partitioner):
    """HiRemate's own partitioner; the module says how.

    most_top: M^t, nodes of the top level
    most_lower: M^l, nodes of any part below
    alpha: weight of a candidate's operators against the memory at its border
    most_levels: stop at so many levels, the top among them, even if the top is then larger than `most_top`
    mirrored: also form groups in front of common descendants; False is the paper's algorithm
    """

    most_top: int = 30
    most_lower: int = 20
    alpha: float = 0.5
    most_levels: int | None = None
    mirrored: bool = True

    name = "hpartition"

    def __post_init__(self) -> None:
        for option, least in (("most_lower", 2), ("most_levels", 1)):
            given = getattr(self, option)
            if given is not None and given < least:
                raise SolverError(f"{option}={given} is too small for partitioner {self.name!r}; at least {least}")
        if self.most_top < self.most_lower:
            raise SolverError(
                f"most_top={self.most_top} is less than most_lower={self.most_lower}; "
                "the top level is solved once, so give it the larger limit"
            )
        if not math.isfinite(self.alpha):
            raise SolverError(f"alpha={self.alpha} is not finite; the paper takes 0.5")

    def partition(self, graph: Graph) -> Part:
        position = graph.arrays.position.tolist()
        level, values = _bottom(graph)
        levels = 1
        while len(level.parts) > self.most_top and levels != self.most_levels:
            level = level.contracted(self._groups(level, values), position)
            levels += 1
        return joined(level.parts, position) if level.parts else Part(())

    def _groups(self, level: _Level, values: _Values) -> _Groups:
        """The nodes of the next level."""
        ways = [self._grown(level, values, _candidates(level.before, self.most_lower))]
        if self.mirrored:
            ways.append(self._grown(level, values, _mirrored_candidates(level.after, self.most_lower)))
        groups = min(ways, key=lambda way: way.count)
        if groups.count > _LARGEST_SHARE_LEFT * len(level.parts):
            groups = _Groups(level, values)
            for stretch in _stretches(level, values, self._longest_stretch(len(level.parts))):
                groups.merge(frozenset(stretch))
        return groups

    def _longest_stretch(self, nodes: int) -> int:
        """Any two neighbouring stretches have more nodes than this, so the top is reached without overshooting it."""
        return max(2, min(self.most_lower, -(-2 * nodes // self.most_top)))

    def _grown(self, level: _Level, values: _Values, candidates: Iterator[Members]) -> _Groups:
        """Make groups of the best candidates until none is left or the top is small enough."""
        groups = _Groups(level, values)
        for members in _with_loners(level, self.most_lower):
            groups.merge(members)
        pool = _Pool(groups, map(groups.holding, candidates), self.most_lower, self.alpha)
        while groups.count > self.most_top and (best := pool.pop_best()) is not None:
            pool.replace(best, groups.merge(best))
        return groups


@dataclass(frozen=True)
class _Values:
    """What partitioning needs to know of values, by their numbers in the graph."""

    sizes: list[int]
    leaves_forward: list[bool]  # needed beyond the forward pass whoever made it: by the loss, or because it is kept


@dataclass(frozen=True)
class _Level:
    """A graph whose nodes are parts, numbered in topological order. Values inside a part are forgotten."""

    parts: list[Part]
    before: list[list[int]]  # direct predecessors, through data or order alone
    after: list[list[int]]
    reads: list[set[int]]  # values from other parts
    makes: list[set[int]]  # values for other parts, the loss or the user

    def contracted(self, groups: _Groups, position: Sequence[int]) -> _Level:
        """The next level: its nodes are the groups, single nodes among them."""
        needs = {
            group: {groups.of_node[other] for node in nodes for other in self.before[node]} - {group}
            for group, nodes in groups.nodes.items()
        }
        order = _topological(needs, groups.nodes)
        number = {group: index for index, group in enumerate(order)}
        before = [sorted(number[other] for other in needs[group]) for group in order]
        return _Level(
            parts=[joined([self.parts[node] for node in groups.nodes[group]], position) for group in order],
            before=before,
            after=_reversed_edges(before),
            reads=[groups.reads[group] for group in order],
            makes=[groups.makes[group] for group in order],
        )


def _bottom(graph: Graph) -> tuple[_Level, _Values]:
    """The level of single forward operators."""
    a = graph.arrays
    ops = forward_order(graph)
    number = {op: index for index, op in enumerate(ops)}
    makers = dependencies(graph)
    before = [[number[maker] for maker in makers[op]] for op in ops]
    forward_readers = [0] * len(graph.values)
    for op in ops:
        for value in _row(a.inputs_ptr, a.inputs, op):
            forward_readers[value] += 1
    leaves = (a.target | a.held).tolist()
    if a.loss >= 0:
        for value in _row(a.inputs_ptr, a.inputs, a.loss):
            leaves[value] = True
    level = _Level(
        parts=[Part((op,)) for op in ops],
        before=before,
        after=_reversed_edges(before),
        reads=[{value for value in _row(a.inputs_ptr, a.inputs, op) if int(a.producer[value]) in number} for op in ops],
        makes=[
            {value for value in _row(a.outputs_ptr, a.outputs, op) if forward_readers[value] or leaves[value]}
            for op in ops
        ],
    )
    return level, _Values(a.size.tolist(), leaves)


def _row(starts: Ints, entries: Ints, index: int) -> list[int]:
    row: list[int] = entries[starts[index] : starts[index + 1]].tolist()
    return row


def _reversed_edges(before: list[list[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in before]
    for node, others in enumerate(before):
        for other in others:
            after[other].append(node)
    return after


def _topological(needs: dict[int, set[int]], nodes: dict[int, list[int]]) -> list[int]:
    """Groups so that each comes after those it needs, otherwise by their nodes."""
    needed_by: dict[int, list[int]] = {group: [] for group in needs}
    for group, others in needs.items():
        for other in others:
            needed_by[other].append(group)
    missing = {group: len(others) for group, others in needs.items()}
    ready = [(nodes[group], group) for group, count in missing.items() if count == 0]
    heapify(ready)
    order: list[int] = []
    while ready:
        group = heappop(ready)[1]
        order.append(group)
        for other in needed_by[group]:
            missing[other] -= 1
            if missing[other] == 0:
                heappush(ready, (nodes[other], other))
    return order


# --- candidates -------------------------------------------------------------------------------------------------------


def _candidates(before: list[list[int]], most: int) -> Iterator[Members]:
    """Per node x, the nodes on paths from a(x) to x, with and without either end, if at least 2 and at most `most`."""
    closest = _common_ancestors(before)
    for node, ancestor in enumerate(closest):
        between = _between(before, ancestor, node, most)
        if between is None:
            continue
        ends = [node] if ancestor is None else [node, ancestor]
        for chosen in ([], *([end] for end in ends), ends):
            if 2 <= len(between) + len(chosen) <= most:
                yield between.union(chosen)


def _mirrored_candidates(after: list[list[int]], most: int) -> Iterator[Members]:
    """The candidates of the graph with all edges turned round, whose topological order is the reverse."""
    last = len(after) - 1
    turned = [[last - other for other in others] for others in reversed(after)]
    for members in _candidates(turned, most):
        yield frozenset(last - node for node in members)


def _between(before: list[list[int]], ancestor: int | None, node: int, most: int) -> Members | None:
    """What lies strictly between the two, or None as soon as it is more than `most`. The ancestor None is the root."""
    found: set[int] = set()
    waiting = [node]
    while waiting:
        for other in before[waiting.pop()]:
            if other != ancestor and other not in found:
                found.add(other)
                if len(found) > most:
                    return None
                waiting.append(other)
    return frozenset(found)


def _common_ancestors(before: list[list[int]]) -> list[int | None]:
    """a(x) of each node: the last node before x that all paths to x pass; None for the root added before all.

    It is x's parent in the dominator tree, the lowest common ancestor in that tree of x's predecessors.
    """
    root = len(before)
    tree = _GrowingTree(root)
    for node, others in enumerate(before):
        parent = others[0] if others else root
        for other in others[1:]:
            parent = tree.lowest_common_ancestor(parent, other)
        tree.add(node, parent)
    return [None if parent == root else parent for parent in tree.parent[:root]]


class _GrowingTree:
    """A tree that grows at its leaves; jump pointers find the lowest common ancestor in logarithmic time."""

    def __init__(self, root: int) -> None:
        self.parent = [root] * (root + 1)
        self._jump = [root] * (root + 1)
        self._depth = [0] * (root + 1)

    def add(self, node: int, parent: int) -> None:
        depth, jump = self._depth, self._jump
        self.parent[node] = parent
        depth[node] = depth[parent] + 1
        far = jump[parent]
        # Two jumps of equal length from the parent make one jump from here, as carries do in a counter.
        doubles = depth[parent] - depth[far] == depth[far] - depth[jump[far]]
        jump[node] = jump[far] if doubles else parent

    def lowest_common_ancestor(self, one: int, other: int) -> int:
        depth, jump, parent = self._depth, self._jump, self.parent
        if depth[one] < depth[other]:
            one, other = other, one
        while depth[one] > depth[other]:
            one = jump[one] if depth[jump[one]] >= depth[other] else parent[one]
        while one != other:  # nodes of one depth jump equally far
            if jump[one] != jump[other]:
                one, other = jump[one], jump[other]
            else:
                one, other = parent[one], parent[other]
        return one


def _with_loners(level: _Level, most: int) -> Iterator[Members]:
    """Loners, nodes without predecessors or successors, each set with the node they follow or, if first, precede.

    A set stays convex whatever loners join it. No more join than leave half of `most` for others.
    """
    hosts = [node for node in range(len(level.parts)) if level.before[node] or level.after[node]]
    for host, following in pairwise([*hosts, len(level.parts)]):
        first = 0 if host == hosts[0] else host
        members = [host, *(node for node in range(first, following) if node != host)]
        if len(members) > 1:
            yield frozenset(members[: max(2, most // 2)])


# --- groups -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Joining:
    """What changes at the border of the group with the longest lists of values when others join it.

    Only the others' lists are gone through, so that a group that reads or feeds thousands costs no more than any.
    """

    largest: int
    others_read: Counter[int]  # values, by how many of the others
    enters: set[int]  # values that come from outside because of the others
    enters_no_more: set[int]  # values that one of the others makes for the largest
    leaves: set[int]  # values the others make that are used outside
    leaves_no_more: set[int]  # values the largest makes for none but the others


class _Groups:
    """The nodes of a level as they are merged. Every node starts as a group of its own number."""

    def __init__(self, level: _Level, values: _Values) -> None:
        count = len(level.parts)
        self.of_node = list(range(count))
        self.nodes = {group: [group] for group in range(count)}
        self.reads = {group: set(read) for group, read in enumerate(level.reads)}
        self.makes = {group: set(made) for group, made in enumerate(level.makes)}
        self._operators = {group: len(part.forward) for group, part in enumerate(level.parts)}
        self._values = values
        self._border_bytes = {
            group: self._bytes(self.reads[group]) + self._bytes(self.makes[group]) for group in range(count)
        }
        self._readers = Counter(value for read in level.reads for value in read)
        self._next = count

    @property
    def count(self) -> int:
        return len(self.nodes)

    def holding(self, nodes: Members) -> Members:
        """The groups that these nodes are in."""
        return frozenset(self.of_node[node] for node in nodes)

    def size(self, members: Members) -> int:
        """Nodes of the level in these groups."""
        return sum(len(self.nodes[group]) for group in members)

    def score(self, members: Members, alpha: float) -> float:
        """Formula (1)."""
        operators = sum(self._operators[group] for group in members)
        border_bytes = self._joined_border_bytes(self._joining(members))
        return float(border_bytes * (operators / self.size(members)) ** alpha)

    def merge(self, members: Members) -> int:
        """Make one group of these; its number is a new one, so that old candidates are not taken for new ones."""
        joining = self._joining(members)
        merged, self._next = self._next, self._next + 1
        self._border_bytes[merged] = self._joined_border_bytes(joining)
        self._readers.subtract(joining.others_read)
        self._readers.update(joining.enters)
        self._readers.subtract(joining.enters_no_more)
        reads, makes = self.reads[joining.largest], self.makes[joining.largest]
        reads |= joining.enters
        reads -= joining.enters_no_more
        makes |= joining.leaves
        makes -= joining.leaves_no_more
        self._operators[merged] = sum(self._operators.pop(group) for group in members)
        self.nodes[merged] = sorted(node for group in members for node in self.nodes.pop(group))
        for node in self.nodes[merged]:
            self.of_node[node] = merged
        for group in members:
            del self.reads[group], self.makes[group], self._border_bytes[group]
        self.reads[merged], self.makes[merged] = reads, makes
        return merged

    def _joining(self, members: Members) -> _Joining:
        largest = max(members, key=lambda group: len(self.reads[group]) + len(self.makes[group]))
        read: Counter[int] = Counter()
        made: set[int] = set()
        for group in members:
            if group != largest:
                read.update(self.reads[group])
                made |= self.makes[group]
        reads, makes, beyond = self.reads[largest], self.makes[largest], self._values.leaves_forward
        readers = self._readers
        return _Joining(
            largest,
            read,
            enters={value for value in read if value not in made and value not in makes and value not in reads},
            enters_no_more=reads & made,
            leaves={value for value in made if beyond[value] or readers[value] > read[value] + (value in reads)},
            leaves_no_more={
                value for value in read if value in makes and not beyond[value] and readers[value] == read[value]
            },
        )

    def _joined_border_bytes(self, joining: _Joining) -> int:
        more = self._bytes(joining.enters) + self._bytes(joining.leaves)
        less = self._bytes(joining.enters_no_more) + self._bytes(joining.leaves_no_more)
        return self._border_bytes[joining.largest] + more - less

    def _bytes(self, values: set[int]) -> int:
        return sum(self._values.sizes[value] for value in values)


class _Pool:
    """The candidates, by score."""

    def __init__(self, groups: _Groups, candidates: Iterable[Members], most: int, alpha: float) -> None:
        self._groups = groups
        self._most = most
        self._alpha = alpha
        self._alive: set[Members] = set()
        self._holding: dict[int, set[Members]] = {}  # per group, candidates that have it, dead ones perhaps among them
        self._queue: list[tuple[float, list[int], Members]] = []
        for members in candidates:
            self._add(members)

    def pop_best(self) -> Members | None:
        while self._queue:
            best = heappop(self._queue)[-1]
            if best in self._alive:
                self._alive.remove(best)
                return best
        return None

    def replace(self, merged: Members, group: int) -> None:
        """In every candidate that meets `merged`, put the group that it has become."""
        meeting = set().union(*(self._holding.pop(member, ()) for member in merged)) & self._alive
        self._alive -= meeting
        for members in meeting:
            self._add((members - merged) | {group})

    def _add(self, members: Members) -> None:
        if len(members) < 2 or members in self._alive or self._groups.size(members) > self._most:
            return
        self._alive.add(members)
        for group in members:
            self._holding.setdefault(group, set()).add(members)
        score = self._groups.score(members, self._alpha)
        nodes = sorted(node for group in members for node in self._groups.nodes[group])
        heappush(self._queue, (score, nodes, members))  # nodes decide between equal scores


# --- stretches --------------------------------------------------------------------------------------------------------


def _stretches(level: _Level, values: _Values, most: int) -> Iterator[range]:
    """The topological order in stretches of at most `most` nodes; few bytes cross the cuts, and few cuts are made."""
    count = len(level.parts)
    crossing = _crossing_bytes(level, values)
    best: list[tuple[int, int]] = [(0, 0)]  # per end of a stretch: bytes and number of all cuts up to there
    start_of: list[int] = [0]
    for end in range(1, count + 1):
        cost, start = min((best[start], -start) for start in range(max(0, end - most), end))
        best.append((cost[0] + crossing[end], cost[1] + 1))
        start_of.append(-start)
    cuts = [count]
    while cuts[-1]:
        cuts.append(start_of[cuts[-1]])
    for start, end in pairwise(reversed(cuts)):
        yield range(start, end)


def _crossing_bytes(level: _Level, values: _Values) -> list[int]:
    """Per place between nodes, the bytes of values made before it and read behind it."""
    last_reader = {value: node for node, read in enumerate(level.reads) for value in read}
    change = [0] * (len(level.parts) + 1)
    for node, made in enumerate(level.makes):
        for value in made:
            last = last_reader.get(value, node)
            change[node + 1] += values.sizes[value]
            change[last + 1] -= values.sizes[value]
    return list(accumulate(change))
