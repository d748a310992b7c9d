"""Optimal checkpointing of a chain of blocks, each block with several options found by local search.

`solve(Problem(graph, budget_bytes), "rotor")`

O. Beaumont et al., "Optimal Checkpointing for Heterogeneous Chains" (2019; ACM TOMS 2024), and RK-rotor of X. Zhao et
al., "Rockmate: an Efficient, Fast, Automatic and Generic Tool for Re-materialization in PyTorch" (ICML 2023).

1. `common.blocks` cuts the training step into a sequence of blocks.
2. Each block gets options: to save everything, and what local search finds when it may save less or must do with a
   lower peak. It works on the block as a small graph in which the arrival of gradients stands for all that happens
   between forward and backward; that the arrival has a workspace is what limits the memory saved. Equal blocks, up to
   renaming, are searched once.
3. `chain` finds the fastest memory-persistent sequence of block operations, in slots of memory.
4. The sequence is written out as operators, without recomputations that nothing reads or that the budget has room to
   do without, and values are freed as early as possible.

Rounding up to slots and freeing early leave memory unused, so the table is made for more memory than there is, and the
oracle is asked about its solutions from the fastest on, until a few have kept the budget. First computations are in
default order. For a chain of single operators, with enough slots, nothing memory-persistent is faster; no bound comes
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rematch.errors import SolverError
from rematch.graph import Graph, Phase, Schedule, baseline, simulate
from rematch.graph.generators import chain as chain_graph
from rematch.graph.model import Ints
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver, ignore_progress
from rematch.solvers.common.blocks import (
    Block,
    BlockChain,
    BlockGraph,
    backward_graph,
    cut_into_blocks,
    forward_graph,
    gap_graph,
    total_bytes,
)
from rematch.solvers.common.forward_pass import is_linear
from rematch.solvers.common.local_search import LocalSearch
from rematch.solvers.common.options import MOVES_PER_OP, Flattening, option_of, undominated, with_saving_limit
from rematch.solvers.common.pruning import in_turn, pruned
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.rotor.chain import Action, Alone, ChainBlock, ChainStep, ChainTable

# Peaks to try, as shares of the way from what the hungriest operator needs to the peak without recomputation; and, at
# each, how much less the next option may save: a share of all that can be saved, or of the last limit if that is less.
_COARSE = tuple((share, (0.3, 0.6)) for share in (1.0, 0.75, 0.5, 0.25, 0.0))
_FINE = ((1.0, (1 / 32, 0.15)),)
_LEAST_SAVED = 0.015  # of what is saved without recomputation: less than that is nothing
_OPS_PER_SECOND = 10_000  # at the least: to make a block's small graphs, which cannot be interrupted
_SEARCH_SHARE = 0.6  # of the time, at most; the rest is for the table
_PRUNED_SOLUTIONS = 10  # of a table: the one that is fastest before need not be after
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
        Rotor(slots=50).solve(problem, deadline=Deadline(), on_progress=ignore_progress)

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
            for find in (saving_all, searched.coarse, searched.fine):
                parts = _solved_in_time(incumbent, chain, find)
                if len(parts) == len(chain.blocks):
                    self._offer_best(incumbent, chain, parts)
        return incumbent.solution(self.name)

    def _offer_best(self, incumbent: Incumbent, chain: BlockChain, parts: Sequence[SolvedBlock]) -> None:
        """The fastest schedules that the dynamic programme finds for these options."""
        free_bytes = incumbent.problem.budget_bytes - chain.base_bytes
        if free_bytes <= 0:
            return
        slot_bytes = -(-free_bytes // self.slots)
        slots = int(self.slots * _HEADROOM)
        blocks = [*(part.for_chain for part in parts), loss_block(chain)]
        for dithered in (False, True):  # either may be the better one
            if incumbent.over:
                return
            table = ChainTable.of(blocks, slots, slot_bytes, dithered=dithered, deadline=incumbent.deadline)
            self._offer_solutions(incumbent, chain, parts, table)

    def _offer_solutions(
        self, incumbent: Incumbent, chain: BlockChain, parts: Sequence[SolvedBlock], table: ChainTable
    ) -> None:
        """The fastest of the table's solutions that the oracle lets pass, without what the budget has room for."""
        graph, budget_bytes = chain.graph, incumbent.problem.budget_bytes
        passed = 0
        for slots in slots_worth_trying(table):
            if passed == _PRUNED_SOLUTIONS or incumbent.over:
                return
            ops = in_turn(graph, operators_of(chain, parts, table.steps(slots)))
            if simulate(graph, Schedule.from_ops(graph, ops)).peak_bytes <= budget_bytes:
                passed += 1
                fewer = pruned(graph, ops, budget_bytes, keep_first=True)
                incumbent.offer(Schedule.from_ops(graph, fewer), self.name)


def _solved_in_time(incumbent: Incumbent, chain: BlockChain, find: Find) -> list[SolvedBlock]:
    """The blocks with their options, as many as are solved before the search is over."""
    parts: list[SolvedBlock] = []
    for block in chain.blocks:
        size = len(block.forward) + len(block.backward)
        if incumbent.over or size > _OPS_PER_SECOND * incumbent.deadline.remaining:
            break
        parts.append(solved(chain.graph, block, find))
    return parts


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
    """A block for the dynamic programme, and what it takes to write its steps as operators."""

    for_chain: ChainBlock
    gap_graph: BlockGraph  # of the options
    again: tuple[int, ...]  # operators that make the output once more


Find = Callable[[BlockGraph], Sequence[Schedule]]


def saving_all(part: BlockGraph) -> Sequence[Schedule]:
    """The one schedule that recomputes nothing."""
    return [baseline(part.graph)]


class Searched:
    """What local search finds for a block's small graph, with ever less memory; equal ones are searched once."""

    def __init__(self, seed: int, deadline: Deadline) -> None:
        self._seed, self._deadline = seed, deadline
        self._known: dict[tuple[object, ...], Sequence[Schedule]] = {}

    def coarse(self, part: BlockGraph) -> Sequence[Schedule]:
        """A few options, from those that save nearly all to those that save nothing, at several peaks."""
        return self._once("coarse", part, lambda: [baseline(part.graph), *self._search(part, _COARSE)])

    def fine(self, part: BlockGraph) -> Sequence[Schedule]:
        """These, and more that lie between them."""
        return self._once("fine", part, lambda: [*self.coarse(part), *self._search(part, _FINE)])

    def _once(self, what: str, part: BlockGraph, find: Callable[[], Sequence[Schedule]]) -> Sequence[Schedule]:
        key = (what, *_form(part.graph))
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def _search(self, part: BlockGraph, peaks: Iterable[tuple[float, tuple[float, float]]]) -> Iterator[Schedule]:
        everything = baseline(part.graph)
        all_saved = option_of(part, everything).saved_bytes
        highest, least = simulate(part.graph, everything).peak_bytes, part.graph.largest_op_bytes
        for share, (of_all, of_limit) in peaks:
            peak = least + int(share * (highest - least))
            limit = all_saved if peak < highest else all_saved - 1
            while limit >= 0 and not self._deadline.expired:
                found = self._fastest(with_saving_limit(part, peak, limit), peak)
                if found is None:
                    break
                yield found
                lower = limit - int(min(of_all * all_saved, of_limit * limit))
                limit = min(lower, option_of(part, found).saved_bytes - 1)
                if 0 < limit < _LEAST_SAVED * all_saved:
                    limit = 0

    def _fastest(self, graph: Graph, budget_bytes: int) -> Schedule | None:
        search = LocalSearch(Problem(graph, budget_bytes), seed=self._seed)
        search.run(MOVES_PER_OP * len(graph.ops), self._deadline)
        search.tidy()
        return search.best


def _form(graph: Graph) -> tuple[object, ...]:
    """What small graphs have in common whose schedules can be exchanged."""
    a = graph.arrays
    return graph.fingerprint, a.seconds.tobytes(), a.workspace.tobytes()


def solved(graph: Graph, block: Block, find: Find) -> SolvedBlock:
    """Price the schedules that `find` has for a block; those that another beats in all respects go."""
    gap = gap_graph(graph, block)
    options = undominated((option_of(gap, schedule) for schedule in find(gap)), lambda option: option.figures)
    in_one_go, beside = backward_graph(graph, block), backward_graph(graph, block, has_output=True)
    plain, passing = forward_graph(graph, block, has_input=False), forward_graph(graph, block, has_input=True)
    plain_option = option_of(plain, baseline(plain.graph))
    return SolvedBlock(
        for_chain=ChainBlock(
            output_bytes=total_bytes(graph, block.output),
            gradient_bytes=total_bytes(graph, block.gradients),
            kept_bytes=total_bytes(graph, block.kept),
            plain_seconds=plain_option.forward_seconds,
            plain_peak_bytes=plain_option.forward_peak_bytes,
            passing_peak_bytes=option_of(passing, baseline(passing.graph)).forward_peak_bytes,
            options=tuple(options),
            alone=_alone(in_one_go, find),
            beside=() if beside.ops == in_one_go.ops else _alone(beside, find),
        ),
        gap_graph=gap,
        again=plain_option.ops_of(plain)[0],
    )


def _alone(part: BlockGraph, find: Find) -> tuple[Alone, ...]:
    """Ways to run a block forward and backward in one go."""
    found = []
    for schedule in find(part):
        seen = simulate(part.graph, schedule).checked()
        ops = tuple(part.ops[op] for op in schedule.ops.tolist() if op != part.gap)
        found.append(Alone(seen.seconds, seen.peak_bytes, ops))
    return tuple(undominated(found, lambda alone: alone.figures))


def loss_block(chain: BlockChain) -> ChainBlock:
    """The loss as the end of the chain: what it makes, and its workspace, beside what the last block made."""
    graph = chain.graph
    assert graph.loss is not None
    loss = graph.ops[graph.loss]
    kept = [value for value in loss.outputs if graph.arrays.target[value]]
    peak = loss.workspace_bytes + total_bytes(graph, loss.outputs)
    return ChainBlock(0, 0, total_bytes(graph, kept), 0.0, 0, 0, (), (Alone(loss.seconds, peak),))


# From steps to operators


def operators_of(chain: BlockChain, parts: Sequence[SolvedBlock], steps: Sequence[ChainStep]) -> Ints:
    """The operators that the steps stand for."""
    written = Flattening(chain.graph)
    for step in steps:
        if step.block == len(parts):
            written.loss()
            continue
        block, part = chain.blocks[step.block], parts[step.block]
        if step.action is Action.BACKWARD:
            written.backward(part.for_chain.options[step.option].ops_of(part.gap_graph)[1])
        elif step.action is Action.ALONE:
            written.backward(part.for_chain.alone[step.option].ops)
        elif step.action is Action.BESIDE:
            written.backward(part.for_chain.beside[step.option].ops)
        elif step.action is Action.SAVE:
            saving = part.for_chain.options[step.option].ops_of(part.gap_graph)[0]
            written.forward(step.block, saving, block.once)
        else:
            first = written.is_first(step.block)
            written.forward(step.block, block.forward if first else part.again, block.once)
    return np.array(written.ops, dtype=np.int32)
