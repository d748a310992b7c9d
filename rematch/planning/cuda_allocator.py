"""CUDA's caching allocator, modelled: does a step fit into a process that may reserve no more than its budget?

`least_cap(requests_of(graph, schedule))`: bytes that the process must be allowed to reserve

Tensors need addresses in one piece, so a process may run out while enough memory is free in pieces. The oracle counts
bytes; this model gives them places as the allocator does: multiples of 512 bytes, small and large blocks apart, the
smallest free block that is large enough, split, and joined with its free neighbours once it is free again. With
expandable segments a pool is one range of addresses in which pages are mapped and unmapped; without them every piece
that was asked of the driver is a segment of its own, which goes back only as a whole. Memory goes back when a request
would exceed the cap, and not before. Segments that are there already, partly full, have free blocks that serve requests
and never go back.

What steps of three compiled models asked of an H200's allocator needs, by this model, 6.0 and 0.8 % more and 0.6 % less
than a budget. They trained with 6 but not with 4 % more, with 0.5 but not with 0, and with 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from rematch.capture.requests import Request, most_bytes
from rematch.graph import Compute, Fetch, Free, Graph, Schedule

_MIB = 2**20
_ROUNDED = 512
_SMALL_BYTES = _MIB  # the largest request that is served from the pool of small blocks
_SMALL_SEGMENT = 2 * _MIB
LARGE_SEGMENT = 20 * _MIB  # unless it is set: what a request below `_OWN_SEGMENT` asks of the driver, or a page
_OWN_SEGMENT = 10 * _MIB
_SEGMENT_UNIT = 2 * _MIB  # larger requests ask for a multiple of this
_STEPS = 5  # each begins with what the one before left mapped; engines give that back after so many, if need be
_PRECISION = 0.002  # of the least cap


@dataclass(frozen=True)
class Requests:
    """What a step asks of the allocator, in this order, and the sizes of what is there all the time."""

    resident: tuple[int, ...]
    step: tuple[Request, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that is asked for at once."""
        return sum(self.resident) + most_bytes(self.step, {})


@dataclass(frozen=True)
class Conditions:
    """How the allocator works, and what it has already.

    `segment` is the size of a page of expandable segments, and of the segments that serve small requests otherwise;
    `idle` are free blocks between used ones.
    """

    expandable: bool = True
    segment: int = LARGE_SEGMENT
    idle: tuple[int, ...] = ()


class OutOfMemory(Exception):
    """A request does not fit under the cap, even after all that is free was given back."""


class Block:
    """A stretch of addresses between its neighbours in the same segment."""

    __slots__ = ("address", "fixed", "mapped", "next", "pool", "previous", "size", "used")

    def __init__(self, pool: _Pool, address: int, size: int, mapped: bool, fixed: bool = False) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        self.fixed = fixed  # in a segment that others have a part of, so that it cannot go back to the driver
        self.used = False
        self.previous: Block | None = None
        self.next: Block | None = None


class Allocator:
    """The pools of one device, under one cap on what is mapped."""

    def __init__(self, cap_bytes: int, *, expandable: bool = True, segment: int = LARGE_SEGMENT) -> None:
        self.cap_bytes = cap_bytes
        self.mapped_bytes = 0
        kind = _ExpandablePool if expandable else _SegmentedPool
        self._small, self._large = kind(self, _SMALL_SEGMENT), kind(self, segment)

    def allocate(self, size_bytes: int) -> Block:
        """A block for a tensor; raises `OutOfMemory`."""
        size = max(_ROUNDED, -(-size_bytes // _ROUNDED) * _ROUNDED)
        pool = self._small if size <= _SMALL_BYTES else self._large
        return pool.allocate(size)

    def free(self, block: Block) -> None:
        """Take a tensor's block back."""
        block.pool.free(block)

    def share(self, idle: Sequence[int]) -> None:
        """Take over free blocks of these sizes, which lie between blocks of others."""
        for number, size in enumerate(idle):
            pool = self._small if size <= _SMALL_BYTES else self._large
            pool.free(Block(pool, 2**62 + number * 2**50, size, mapped=True, fixed=True))
            self.mapped_bytes += size

    def make_room(self, size: int) -> None:
        """See to it that so many bytes may be mapped."""
        if self.mapped_bytes + size > self.cap_bytes:
            self._small.give_back()
            self._large.give_back()
        if self.mapped_bytes + size > self.cap_bytes:
            raise OutOfMemory


class _Pool(ABC):
    """Blocks of one kind; how they come from the driver is a matter of the subclasses."""

    def __init__(self, allocator: Allocator, segment: int) -> None:
        self.allocator = allocator
        self.segment = segment
        self.available: list[tuple[int, int, Block]] = []  # free and mapped: size, address, block

    def allocate(self, size: int) -> Block:
        block = self._best(size)
        if block is None:
            self.allocator.make_room(self._asked(size))
            block = self._extend(size)
        else:
            self._take(block)
        if self._worth_splitting(block.size - size):
            self._put(self._split(block, size))
        block.used = True
        return block

    def free(self, block: Block) -> None:
        block.used = False
        for other in (block.previous, block.next):
            if other is not None and other.mapped and not other.used:
                self._take(other)
                block = self._join(other, block) if other is block.previous else self._join(block, other)
        self._put(block)

    @abstractmethod
    def give_back(self) -> None:
        """Let the driver have what is free."""

    @abstractmethod
    def _extend(self, size: int) -> Block:
        """A block of at least `size` with memory from the driver."""

    def _worth_splitting(self, rest: int) -> bool:
        return rest >= _ROUNDED

    def _asked(self, size: int) -> int:
        """What a request asks of the driver."""
        if size < _OWN_SEGMENT:
            return self.segment
        return -(-size // _SEGMENT_UNIT) * _SEGMENT_UNIT

    def _best(self, size: int) -> Block | None:
        place = bisect_left(self.available, (size, 0))
        return self.available[place][2] if place < len(self.available) else None

    def _put(self, block: Block) -> None:
        insort(self.available, (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        del self.available[bisect_left(self.available, (block.size, block.address))]

    def _split(self, block: Block, size: int) -> Block:
        """Cut the block after `size`; returns the rest."""
        rest = Block(self, block.address + size, block.size - size, block.mapped, block.fixed)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        return rest

    def _join(self, first: Block, second: Block) -> Block:
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.previous = first
        return first


class _SegmentedPool(_Pool):
    """Each piece from the driver is a segment of its own."""

    def __init__(self, allocator: Allocator, segment: int) -> None:
        super().__init__(allocator, segment)
        self._end = 0

    def _worth_splitting(self, rest: int) -> bool:
        return rest >= _ROUNDED if self.segment == _SMALL_SEGMENT else rest > _SMALL_BYTES

    def _extend(self, size: int) -> Block:
        asked = self._asked(size)
        block = Block(self, self._end, asked, mapped=True)
        self._end += asked
        self.allocator.mapped_bytes += asked
        return block

    def give_back(self) -> None:
        whole = [block for _, _, block in self.available if block.previous is None and block.next is None]
        for block in whole:
            if block.fixed:
                continue
            self._take(block)
            self.allocator.mapped_bytes -= block.size


class _ExpandablePool(_Pool):
    """One range of addresses, without end, whose pages come and go."""

    def __init__(self, allocator: Allocator, segment: int) -> None:
        super().__init__(allocator, segment)
        self._first = Block(self, 0, 2**62, mapped=False)

    def _asked(self, size: int) -> int:
        """At most so many pages are mapped for a request, whatever is mapped beside it."""
        return -(-size // self.segment) * self.segment

    def _best(self, size: int) -> Block | None:
        """The smallest that fits; one that could grow counts as large as it could become."""
        place = bisect_left(self.available, (size, 0))
        growing: Block | None = None
        for _, _, block in self.available[place:]:
            if block.next is None or block.next.mapped:
                return block
            growing = growing or block
        return growing

    def _extend(self, size: int) -> Block:
        block = self._first_run(size)
        if block.mapped:
            self._take(block)
        else:
            self._map(block, size)
        while block.size < size:
            other = block.next
            assert other is not None and not other.used
            if other.mapped:
                self._take(other)
            else:
                self._map(other, size - block.size)
            self._join(block, other)
        return block

    def _first_run(self, size: int) -> Block:
        """Where the first stretch of free addresses begins, mapped or not, that is long enough."""
        begin: Block | None = None
        found = 0
        block: Block | None = self._first
        while block is not None:
            if block.used:
                begin, found = None, 0
            else:
                begin, found = begin or block, found + block.size
                if found >= size:
                    return begin
            block = block.next
        raise OutOfMemory

    def _map(self, block: Block, size: int) -> None:
        """Map pages from the start of an unmapped block, enough for `size` if it is that large."""
        needed = min(block.size, -(-size // self.segment) * self.segment)
        if needed < block.size:
            self._split(block, needed)
        block.mapped = True
        self.allocator.mapped_bytes += needed

    def give_back(self) -> None:
        for _, _, block in list(self.available):
            begin = -(-block.address // self.segment) * self.segment
            end = (block.address + block.size) // self.segment * self.segment
            if begin < end and not block.fixed:
                self._take(block)
                self._unmap(block, begin, end)

    def _unmap(self, block: Block, begin: int, end: int) -> None:
        """Unmap the pages between two addresses inside a free block."""
        if end < block.address + block.size:
            self._put(self._split(block, end - block.address))
        if begin > block.address:
            head, block = block, self._split(block, begin - block.address)
            self._put(head)
        block.mapped = False
        self.allocator.mapped_bytes -= block.size
        after = block.next
        if after is not None and not after.mapped:
            self._join(block, after)
        before = block.previous
        if before is not None and not before.mapped:
            self._join(before, block)


def fits(requests: Requests, cap_bytes: int, conditions: Conditions = Conditions()) -> bool:  # noqa: B008 - frozen
    """Whether a process trains by such steps that may reserve `cap_bytes`."""
    allocator = Allocator(cap_bytes, expandable=conditions.expandable, segment=conditions.segment)
    try:
        for size in requests.resident:
            allocator.allocate(size)
        allocator.share(conditions.idle)
        if allocator.mapped_bytes > cap_bytes:
            return False
        for _ in range(_STEPS):
            _run(requests, allocator)
    except OutOfMemory:
        return False
    return True


def _run(requests: Requests, allocator: Allocator) -> None:
    """One step; what it leaves is freed before the next."""
    blocks: dict[Hashable, Block] = {}
    for tensor, size in requests.step:
        if size is not None:
            blocks[tensor] = allocator.allocate(size)
        elif tensor in blocks:
            allocator.free(blocks.pop(tensor))
    for block in blocks.values():
        allocator.free(block)


def least_cap(requests: Requests, conditions: Conditions = Conditions()) -> int:  # noqa: B008 - frozen
    """The smallest number of bytes that a process must be allowed to reserve to train by such steps."""
    low = high = requests.peak_bytes
    while not fits(requests, high, conditions):
        low, high = high, high + max(LARGE_SEGMENT, high // 50)
    while high - low > max(_SEGMENT_UNIT, _PRECISION * high):
        middle = (low + high) // 2
        if fits(requests, middle, conditions):
            high = middle
        else:
            low = middle
    return high


def requests_of(graph: Graph, schedule: Schedule) -> Requests:
    """What an engine asks for that runs the schedule."""
    resident = tuple(value.size_bytes for value in graph.values if value.resident and value.size_bytes)
    return Requests(resident, tuple(_requested(graph, schedule)))


def _requested(graph: Graph, schedule: Schedule) -> Iterator[Request]:
    alive: set[int] = set()

    def made(value: int) -> Iterator[Request]:
        size_bytes = graph.values[value].size_bytes
        if size_bytes and value not in alive and not graph.values[value].resident:
            alive.add(value)
            yield value, size_bytes

    for step in schedule:
        match step:
            case Free(value) if value in alive:
                alive.remove(value)
                yield value, None
            case Fetch(value):
                yield from made(value)
            case Compute(op):
                for value in graph.ops[op].outputs:
                    yield from made(value)
                if graph.ops[op].workspace_bytes:
                    yield "workspace", graph.ops[op].workspace_bytes
                    yield "workspace", None
