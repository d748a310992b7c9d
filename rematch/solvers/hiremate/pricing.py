"""The judge of a level: whether runs in turn are valid, how long they take, and how much memory they need.

`Judge(level).price(runs)`

It knows nothing of H-ILP's program. A run reads what the last runs of the makers left, and everything is freed as early
as later runs allow: a datum once nobody reads it before it is made anew, a phantom once the layer's next run is not its
backward. So dropping data is no step of its own; it shows in the runs that make them again. Contributions count once: a
maker that runs again while its earlier contribution is there adds nothing.

Data without a maker are given: they are there from beginning to end. An option with `backward_seconds=inf` runs forward
only, for the sake of the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rematch.errors import ScheduleError, SolverError
from rematch.solvers.hiremate.level import Layer, LayerOption, Level, LevelSolution, Moment, Pass, Run

Data = frozenset[int]


@dataclass(frozen=True)
class Way:
    """A node with one option. `moments` are those that can be the worst, at least one."""

    seconds: float
    reads: Data
    moments: tuple[Moment, ...]
    left_bytes: int = 0  # the phantom it makes

    @property
    def overhead_bytes(self) -> int:
        return max(moment.overhead_bytes for moment in self.moments)

    @property
    def possible(self) -> bool:
        return math.isfinite(self.seconds)


@dataclass(frozen=True)
class LevelNode:
    """A compute node of a level; the loss has the layer -1 and one way."""

    of: Pass
    layer: int
    makes: Data
    ways: tuple[Way, ...]

    @property
    def reads(self) -> Data:
        """What it reads with any option."""
        return frozenset().union(*(way.reads for way in self.ways))


class Judge:
    """Nodes of a level in topological order, and the price of any sequence of runs of them."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.nodes = _nodes(level)
        self.number = {(node.of, node.layer): number for number, node in enumerate(self.nodes)}
        self.sizes = np.array(level.data_bytes, dtype=np.int64)
        self.makers: list[list[int]] = [[] for _ in level.data_bytes]
        for number, node in enumerate(self.nodes):
            for datum in node.makes:
                self.makers[datum].append(number)
        self._check_order()

    def node_of(self, run: Run) -> int:
        """Its number; `ScheduleError` if the level has no such node or option."""
        number = self.number.get((run.of, run.layer))
        if number is None:
            raise ScheduleError(f"the level has no {_in_words(run)}")
        ways = self.nodes[number].ways
        if run.of is not Pass.LOSS and not (0 <= run.option < len(ways) and ways[run.option].possible):
            raise ScheduleError(f"{_in_words(run)} cannot be run; the layer has {len(ways)} options")
        return number

    def way_of(self, run: Run) -> Way:
        return self.nodes[self.number[run.of, run.layer]].ways[max(run.option, 0)]

    def price(self, runs: Sequence[Run]) -> LevelSolution:
        """What the runs cost; `ScheduleError` if they are not a schedule of the level."""
        numbers = self._checked(runs)
        seconds = math.fsum(self.way_of(run).seconds for run in runs)
        return LevelSolution(tuple(runs), seconds, int(self._memory(runs, numbers).max(initial=self.given_bytes)))

    def memory(self, runs: Sequence[Run]) -> NDArray[np.int64]:
        """The most bytes in use during each run and right after it."""
        return self._memory(runs, self._checked(runs))

    @property
    def least_seconds(self) -> float:
        """Every node once, each layer with its fastest option, whatever the memory."""
        return self.level.loss_seconds + math.fsum(
            min(o.forward_seconds + (o.backward_seconds if layer.has_backward else 0.0) for o in layer.options)
            for layer in self.level.layers
        )

    @property
    def given_bytes(self) -> int:
        """Of data that are there from beginning to end."""
        return sum(size for size, makers in zip(self.level.data_bytes, self.makers, strict=True) if not makers)

    # Validity

    def _check_order(self) -> None:
        for number, node in enumerate(self.nodes):
            for datum in node.reads:
                if any(maker >= number for maker in self.makers[datum]):
                    raise SolverError(
                        f"node {number} ({node.of.value} of layer {node.layer}) reads datum {datum} before or while it "
                        "is made; a level's nodes must be in topological order"
                    )

    def _checked(self, runs: Sequence[Run]) -> list[int]:
        """The runs' nodes, if they are a schedule."""
        numbers = [self.node_of(run) for run in runs]
        done = 0  # nodes run so far, always the first ones
        phantom: dict[int, int] = {}
        for run, number in zip(runs, numbers, strict=True):
            if number > done:
                raise ScheduleError(f"{_in_words(run)} runs before node {done}; first runs are in topological order")
            if run.of is Pass.LOSS and number < done:
                raise ScheduleError("the loss runs twice; it must run exactly once")
            if run.of is Pass.BACKWARD and phantom[run.layer] != run.option:
                raise ScheduleError(f"{_in_words(run)} finds the phantom of option {phantom[run.layer]}")
            if run.of is Pass.FORWARD:
                phantom[run.layer] = run.option
            done = max(done, number + 1)
        if done < len(self.nodes):
            raise ScheduleError(f"node {done} of {len(self.nodes)} never runs; each must run at least once")
        return numbers

    # Memory

    def _memory(self, runs: Sequence[Run], numbers: Sequence[int]) -> NDArray[np.int64]:
        there = self._there_after(runs, numbers)
        phantoms = self._phantoms_after(runs)
        after = there @ self.sizes + phantoms
        most = after.copy()
        nothing = np.array([not makers for makers in self.makers], dtype=np.bool_)
        for index, (run, number) in enumerate(zip(runs, numbers, strict=True)):
            before = there[index - 1] if index else nothing
            at_first = int(after[index - 1]) if index else self.given_bytes
            fresh = self._bytes_of(self.nodes[number].makes, before)
            way = self.way_of(run)
            held = at_first + fresh + way.left_bytes
            for moment in way.moments:
                spared = self._bytes_of(moment.finished, there[index]) + self._bytes_of(moment.unmade, before)
                most[index] = max(most[index], held + moment.overhead_bytes - spared)
        return most

    def _bytes_of(self, data: Data, there: NDArray[np.bool_]) -> int:
        """Of those among `data` that are not `there`."""
        return sum(self.level.data_bytes[datum] for datum in data if not there[datum])

    def _there_after(self, runs: Sequence[Run], numbers: Sequence[int]) -> NDArray[np.bool_]:
        """[run, datum]: whether it is in memory between this run and the next."""
        there = np.zeros((len(runs), len(self.makers)), dtype=np.bool_)
        latest = [-1] * len(self.nodes)
        for index, (run, number) in enumerate(zip(runs, numbers, strict=True)):
            for datum in self.way_of(run).reads:
                self._keep(there, latest, datum, index)
            latest[number] = index
        for datum in self.level.final:
            self._keep(there, latest, datum, len(runs))
        for datum, makers in enumerate(self.makers):
            if not makers:
                there[:, datum] = True
        return there

    def _keep(self, there: NDArray[np.bool_], latest: Sequence[int], datum: int, until: int) -> None:
        """From its oldest contribution on, each the latest of its maker."""
        there[min((latest[maker] for maker in self.makers[datum]), default=0) : until, datum] = True

    def _phantoms_after(self, runs: Sequence[Run]) -> NDArray[np.int64]:
        """Bytes of phantoms between each run and the next."""
        change = np.zeros(len(runs) + 1, dtype=np.int64)
        made_at: dict[int, int] = {}  # per layer: where its phantom began, or was last used
        for index, run in enumerate(runs):
            if run.of is Pass.BACKWARD:
                size = self.level.layers[run.layer].options[run.option].phantom_bytes
                change[made_at[run.layer]] += size
                change[index] -= size
            if run.of is not Pass.LOSS:
                made_at[run.layer] = index
        return np.cumsum(change[:-1])


def price(level: Level, runs: Sequence[Run]) -> LevelSolution:
    """What the runs cost; `ScheduleError` if they are not a schedule of the level."""
    return Judge(level).price(runs)


def _in_words(run: Run) -> str:
    return "loss" if run.of is Pass.LOSS else f"{run.of.value} of layer {run.layer} with option {run.option}"


# --- nodes ------------------------------------------------------------------------------------------------------------


def _nodes(level: Level) -> tuple[LevelNode, ...]:
    expected = [number for number, layer in enumerate(level.layers) if layer.has_backward]
    if sorted(level.backward_order) != expected:
        raise SolverError(f"backward_order {level.backward_order} must name the layers {expected} once each")
    forward = [_forward(number, layer) for number, layer in enumerate(level.layers)]
    loss = Way(level.loss_seconds, level.loss_reads, (Moment(level.loss_overhead_bytes),))
    backward = [_backward(number, level.layers[number]) for number in level.backward_order]
    return (*forward, LevelNode(Pass.LOSS, -1, level.loss_makes, (loss,)), *backward)


def _forward(number: int, layer: Layer) -> LevelNode:
    reads, makes = layer.forward_reads, layer.forward_makes
    ways = (
        Way(o.forward_seconds, reads, _moments(o.forward_moments, reads, makes), o.phantom_bytes) for o in layer.options
    )
    return LevelNode(Pass.FORWARD, number, makes, tuple(ways))


def _backward(number: int, layer: Layer) -> LevelNode:
    return LevelNode(Pass.BACKWARD, number, layer.backward_makes, tuple(_way_back(layer, o) for o in layer.options))


def _way_back(layer: Layer, option: LayerOption) -> Way:
    reads = layer.backward_reads | option.backward_reads
    return Way(option.backward_seconds, reads, _moments(option.backward_moments, reads, layer.backward_makes))


def _moments(given: Iterable[Moment], reads: Data, makes: Data) -> tuple[Moment, ...]:
    """Those that no other one surpasses whatever the surroundings want."""
    exact = [
        Moment(m.overhead_bytes, (m.finished & (reads | makes)) - (m.unmade & makes), m.unmade & makes) for m in given
    ] or [Moment(0)]
    kept: list[Moment] = []
    for moment in sorted(exact, key=lambda m: (-m.overhead_bytes, len(m.finished) + len(m.unmade))):
        if not any(k.finished <= moment.finished and k.unmade <= moment.unmade for k in kept):
            kept.append(moment)
    return tuple(kept)


def lift_bytes(moment: Moment, other: Way, data_bytes: Sequence[int]) -> int:
    """How far memory in a moment, its overhead aside, may exceed the limit when another way is taken instead.

    A program's row for a moment of one way must hold whichever way is taken, and the limit on another way's own moments
    does not imply it where these spare more.
    """
    return min(
        sum(data_bytes[d] for d in (m.finished - moment.finished) | (m.unmade - moment.unmade))
        + max(0, -m.overhead_bytes)
        for m in other.moments
    )
