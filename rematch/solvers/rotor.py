"""Optimal checkpointing of a chain of blocks, each block with several options found by local search.

`solve(Problem(graph, budget_bytes), "rotor")`

O. Beaumont et al., "Optimal Checkpointing for Heterogeneous Chains" (2019; ACM TOMS 2024), and RK-rotor of X. Zhao et
al., "Rockmate: an Efficient, Fast, Automatic and Generic Tool for Re-materialization in PyTorch" (ICML 2023).

1. `rotor_blocks` cuts the training step into a sequence of blocks.
2. Each block gets options: to save everything, and what local search finds when it may save less or must do with a
   lower peak. It works on the block as a small graph in which the arrival of gradients stands for all that happens
   between forward and backward; that the arrival has a workspace is what limits the memory saved. Equal blocks, up to
   renaming, are searched once.
3. `rotor_chain` finds the fastest memory-persistent sequence of block operations, in slots of memory.
4. The sequence is written out as operators, without recomputations that nothing reads or that the budget has room to
   do without, and values are freed as early as possible.

Rounding up to slots and freeing early leave memory unused, so the table is made for more memory than there is, and its
solutions are offered to the oracle from the fastest on, until one keeps the budget. First computations are in default
order. For a chain of single operators, with enough slots, nothing memory-persistent is faster; there is no bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TypeVar

import numpy as np

from rematch.errors import SolverError
from rematch.graph import Graph, Phase, Schedule, baseline, simulate
from rematch.graph.generators import chain as chain_graph
from rematch.graph.model import Ints
from rematch.solvers.anneal import LocalSearch
from rematch.solvers.base import Deadline, OnProgress, Problem, Progress, Solution, Solver
from rematch.solvers.checkpointing import is_linear
from rematch.solvers.decomposition.pruning import pruned
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.rotor_blocks import (
    GRADIENTS,
    Block,
    BlockChain,
    Part,
    cut_into_blocks,
    part_alone,
    part_forward,
    part_with_gap,
    total_bytes,
)
from rematch.solvers.rotor_chain import Action, Alone, ChainBlock, ChainTable, Option, Step

_SAVED_SHARES = tuple(share / 8 for share in range(8))  # of what is saved without recomputation
_LOWER_PEAKS = (0.75, 0.5, 0.25, 0.0)  # between the least an operator needs and the peak without recomputation
_SAVED_SHARES_AT_LOWER_PEAKS = (0.6, 0.3, 0.0)
_MOVES_PER_OP = 600  # of local search for an option
_SEARCH_SHARE = 0.6  # of the time, at most; the rest is for the table
_HEADROOM = 1.3  # of the budget that the table is made for


@dataclass(frozen=True)
class Rotor(Solver):
    """`slots` is the number of steps that the budget is divided into; `most_blocks` bounds the length of the chain."""

    slots: int = 500
    most_blocks: int = 128
    seed: int = 0

    name = "rotor"
    paper = "Beaumont et al., Optimal Checkpointing for Heterogeneous Chains, 2019; Zhao et al., Rockmate, ICML 2023"
    requires = "a training step whose forward pass is a sequence of two or more blocks, each reading the one before it"

    def __post_init__(self) -> None:
        if self.slots < 1 or self.most_blocks < 2 or self.seed < 0:
            raise SolverError(
                "solver 'rotor' needs at least 1 slot, 2 blocks and a seed of 0; got "
                f"slots={self.slots}, most_blocks={self.most_blocks}, seed={self.seed}"
            )

    def prepare(self) -> None:
        graph = chain_graph(layers=3)
        problem = Problem(graph, simulate(graph, baseline(graph)).peak_bytes - 1)
        Rotor(slots=50).solve(problem, deadline=Deadline(), on_progress=_ignore)

    def applicable(self, problem: Problem) -> bool:
        chain = cut_into_blocks(problem.graph, self.most_blocks)
        return (chain is not None and len(chain.blocks) > 1) or _is_linear_without_backward(problem.graph)

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        incumbent = Incumbent(problem, deadline, on_progress)
        incumbent.offer(baseline(problem.graph), "noremat")
        chain = cut_into_blocks(problem.graph, self.most_blocks)
        if chain is not None and not incumbent.over:
            incumbent.tell(self.name, f"{len(chain.blocks)} blocks")
            searched = Searched(self.seed, deadline.within(_SEARCH_SHARE * deadline.remaining))
            for find in (saving_all, searched):
                if not incumbent.over:
                    self._offer_best(incumbent, chain, [solved(chain.graph, block, find) for block in chain.blocks])
        return incumbent.solution(self.name)

    def _offer_best(self, incumbent: Incumbent, chain: BlockChain, parts: Sequence[SolvedBlock]) -> None:
        """The fastest of the table's solutions that the oracle lets pass."""
        free_bytes = incumbent.problem.budget_bytes - chain.base_bytes
        if free_bytes <= 0:
            return
        slot_bytes = -(-free_bytes // self.slots)
        blocks = [*(part.for_chain for part in parts), loss_block(chain)]
        table = ChainTable.of(blocks, int(self.slots * _HEADROOM), slot_bytes)
        for slots in slots_worth_trying(table):
            if table.seconds[slots] >= incumbent.seconds or incumbent.over:
                return
            ops = written_out(chain, parts, table.steps(slots))
            if incumbent.offer(Schedule.from_ops(chain.graph, ops), self.name):
                fewer = pruned(chain.graph, ops, incumbent.problem.budget_bytes, keep_first=True)
                incumbent.offer(Schedule.from_ops(chain.graph, fewer), self.name)
                return


def _ignore(progress: Progress) -> None:
    pass


def _is_linear_without_backward(graph: Graph) -> bool:
    """Nothing to recompute, and nothing to gain from it."""
    return is_linear(graph) and all(op.phase is Phase.FORWARD for op in graph.ops)


def slots_worth_trying(table: ChainTable) -> Iterator[int]:
    """Numbers of slots from the fastest solution on, each the smallest with its time."""
    seconds = table.seconds.tolist()
    for slots in reversed(range(len(seconds))):
        if seconds[slots] < (seconds[slots - 1] if slots else np.inf):
            yield slots


# Blocks and their options


@dataclass(frozen=True)
class SolvedBlock:
    """A block for the dynamic programme, and the operators that its options stand for."""

    for_chain: ChainBlock
    again: tuple[int, ...]  # to make the output once more
    forward: tuple[tuple[int, ...], ...]  # per option
    backward: tuple[tuple[int, ...], ...]
    alone: tuple[tuple[int, ...], ...]
    beside: tuple[tuple[int, ...], ...]


Find = Callable[[Part], Sequence[Schedule]]


def saving_all(part: Part) -> Sequence[Schedule]:
    """The one schedule that recomputes nothing."""
    return [baseline(part.graph)]


class Searched:
    """What local search finds for a part, with ever less memory; equal parts are searched once."""

    def __init__(self, seed: int, deadline: Deadline) -> None:
        self._seed, self._deadline = seed, deadline
        self._known: dict[tuple[object, ...], Sequence[Schedule]] = {}

    def __call__(self, part: Part) -> Sequence[Schedule]:
        key = _form(part.graph)
        if key not in self._known:
            self._known[key] = [baseline(part.graph), *self._search(part)]
        return self._known[key]

    def _search(self, part: Part) -> Iterator[Schedule]:
        for graph, budget_bytes in _limits(part):
            if self._deadline.expired:
                return
            search = LocalSearch(Problem(graph, budget_bytes), seed=self._seed)
            search.run(_MOVES_PER_OP * len(graph.ops))
            search.tidy()
            if search.best is not None:
                yield search.best


def _form(graph: Graph) -> tuple[object, ...]:
    """What parts have in common whose schedules can be exchanged."""
    a = graph.arrays
    return graph.fingerprint, a.seconds.tobytes(), a.workspace.tobytes()


def _limits(part: Part) -> Iterator[tuple[Graph, int]]:
    """The part with lower and lower peaks, and less and less memory over the gap, as graphs with budgets."""
    arrival = part.ops.index(GRADIENTS)
    everything = baseline(part.graph)
    saved = _option(part, everything).saved_bytes
    highest, least = simulate(part.graph, everything).peak_bytes, part.graph.largest_op_bytes
    for peak_share in (1.0, *_LOWER_PEAKS):
        peak = least + int(peak_share * (highest - least))
        if saved == 0:
            yield part.graph, peak
            continue
        for share in _SAVED_SHARES if peak_share == 1.0 else _SAVED_SHARES_AT_LOWER_PEAKS:
            gap_bytes = peak - _passing_bytes(part) - int(share * saved)
            if gap_bytes >= 0:
                ops = list(part.graph.ops)
                ops[arrival] = replace(ops[arrival], workspace_bytes=gap_bytes)
                yield replace(part.graph, ops=tuple(ops)), peak


def solved(graph: Graph, block: Block, find: Find) -> SolvedBlock:
    """Price the schedules that `find` has for the parts of a block; those that another beats in all respects go."""
    gap, alone = part_with_gap(graph, block), part_alone(graph, block)
    beside = part_alone(graph, block, has_output=True)
    options = _undominated((_option(gap, schedule), schedule) for schedule in find(gap))
    in_one_go = _undominated((_alone(alone, schedule), schedule) for schedule in find(alone))
    with_output = _undominated((_alone(beside, schedule), schedule) for schedule in find(beside))
    if beside.ops == alone.ops:
        with_output = []
    plain, passing = part_forward(graph, block, has_input=False), part_forward(graph, block, has_input=True)
    plain_option = _option(plain, baseline(plain.graph))
    return SolvedBlock(
        for_chain=ChainBlock(
            output_bytes=total_bytes(graph, block.output),
            gradient_bytes=total_bytes(graph, block.gradients),
            kept_bytes=total_bytes(graph, block.kept),
            plain_seconds=plain_option.forward_seconds,
            plain_peak_bytes=plain_option.forward_peak_bytes,
            passing_peak_bytes=_option(passing, baseline(passing.graph)).forward_peak_bytes,
            options=tuple(option for option, _ in options),
            alone=tuple(one for one, _ in in_one_go),
            beside=tuple(one for one, _ in with_output),
        ),
        again=_around_gradients(plain, baseline(plain.graph))[0],
        forward=tuple(_around_gradients(gap, schedule)[0] for _, schedule in options),
        backward=tuple(_around_gradients(gap, schedule)[1] for _, schedule in options),
        alone=tuple(_around_gradients(alone, schedule)[1] for _, schedule in in_one_go),
        beside=tuple(_around_gradients(beside, schedule)[1] for _, schedule in with_output),
    )


def _option(part: Part, schedule: Schedule) -> Option:
    """What a schedule of a part costs before and after the arrival of gradients."""
    arrival = part.ops.index(GRADIENTS)
    seen = simulate(part.graph, schedule).checked()
    steps = schedule.steps
    seconds = np.where(steps >= 0, part.graph.arrays.seconds[np.maximum(steps, 0)], 0.0)  # frees take none
    at = int(np.flatnonzero(steps == arrival)[0])
    return Option(
        saved_bytes=int(seen.timeline_bytes[at]) - _passing_bytes(part) - part.graph.ops[arrival].workspace_bytes,
        forward_seconds=float(seconds[:at].sum()),
        forward_peak_bytes=int(seen.timeline_bytes[:at].max(initial=0)),
        backward_seconds=float(seconds[at + 1 :].sum()),
        backward_peak_bytes=int(seen.timeline_bytes[at + 1 :].max(initial=0)),
    )


def _passing_bytes(part: Part) -> int:
    """The block's output, and the gradients that arrive for it."""
    arrival = part.graph.ops[part.ops.index(GRADIENTS)]
    return total_bytes(part.graph, {*arrival.inputs, *arrival.outputs})


def _alone(part: Part, schedule: Schedule) -> Alone:
    seen = simulate(part.graph, schedule).checked()
    return Alone(seen.seconds, seen.peak_bytes)


def _around_gradients(part: Part, schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The graph's operators that a schedule of a part runs before and after the arrival of gradients."""
    ops = [part.ops[op] for op in schedule.ops.tolist()]
    at = ops.index(GRADIENTS)
    return tuple(ops[:at]), tuple(ops[at + 1 :])


_Priced = TypeVar("_Priced", Option, Alone)


def _undominated(priced: Iterable[tuple[_Priced, Schedule]]) -> list[tuple[_Priced, Schedule]]:
    """Those that no other equals or beats in every figure, the first of equals."""
    kept: list[tuple[_Priced, Schedule]] = []
    for price, schedule in priced:
        figures = np.array(astuple(price))
        if not any((np.array(astuple(other)) <= figures).all() for other, _ in kept):
            kept = [known for known in kept if not (figures <= np.array(astuple(known[0]))).all()]
            kept.append((price, schedule))
    return kept


def loss_block(chain: BlockChain) -> ChainBlock:
    """The loss as the end of the chain: what it makes, and its workspace, beside what the last block made."""
    graph = chain.graph
    assert graph.loss is not None
    loss = graph.ops[graph.loss]
    kept = [value for value in loss.outputs if graph.arrays.target[value]]
    peak = loss.workspace_bytes + total_bytes(graph, loss.outputs)
    return ChainBlock(0, 0, total_bytes(graph, kept), 0.0, 0, 0, (), (Alone(loss.seconds, peak),))


# From steps to operators


def written_out(chain: BlockChain, parts: Sequence[SolvedBlock], steps: Sequence[Step]) -> Ints:
    """The operators that the steps stand for, without recomputations that are of no use even to memory."""
    graph = chain.graph
    ops: list[int] = []
    seen: set[int] = set()
    for step in steps:
        if step.block == len(parts):
            ops.append(graph.arrays.loss)
            continue
        block, of_block = chain.blocks[step.block], parts[step.block]
        if step.action is Action.BACKWARD:
            ops += of_block.backward[step.option]
        elif step.action is Action.ALONE:
            ops += of_block.alone[step.option]
        elif step.action is Action.BESIDE:
            ops += of_block.beside[step.option]
        elif step.block in seen:
            ops += of_block.forward[step.option] if step.action is Action.SAVE else of_block.again
        else:
            seen.add(step.block)
            part = of_block.forward[step.option] if step.action is Action.SAVE else block.forward
            ops += _merged(graph, part, block.once)
    return pruned(graph, np.array(ops, dtype=np.int32), limit_bytes=0, keep_first=True)


def _merged(graph: Graph, ops: Sequence[int], once: Sequence[int]) -> list[int]:
    """`ops` with each of `once` before the first computation that follows it in default order."""
    position = graph.arrays.position
    waiting = deque(once)
    merged: list[int] = []
    for op in ops:
        while waiting and position[waiting[0]] < position[op]:
            merged.append(waiting.popleft())
        merged.append(op)
    return [*merged, *waiting]
