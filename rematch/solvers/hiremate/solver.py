"""HiRemate: cut the graph into a hierarchy, solve its pieces in many ways, and combine the ways level by level.

`solve(Problem(graph, budget_bytes), "hiremate")`

J. Gusak, X. Zhao, T. Le Hellard, Z. Li, L. Eyraud-Dubois, O. Beaumont, "HiRemate: Hierarchical Approach for Efficient
Re-materialization of Neural Networks" (ICML 2025).

1. A partitioner cuts the forward pass into parts within parts (`partition`); backward operators follow (`pieces`).
2. From the bottom up, each piece is solved under several limits by every solver that applies (`options`): any solver of
   the registry on the piece as a small graph, and H-ILP (`hilp`) on its children with their options. Pieces that are
   equal up to renaming are solved once. Pieces of a level are independent and run in parallel, in any executor.
3. H-ILP combines the options of the top level within the budget.
4. The result is written out as operators, without recomputations that the budget has room to do without, and values
   are freed as early as possible. Local search improves it while the epoch relaxation bounds it, as in `auto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from rematch.errors import SolverError
from rematch.graph import Graph, Phase, baseline
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver, ignore_progress, make_solver
from rematch.solvers.common.blocks import gap_graph
from rematch.solvers.common.pruning import offer_in_default_order
from rematch.solvers.default.anneal import Anneal
from rematch.solvers.default.auto import Auto
from rematch.solvers.default.greedy import Greedy, greedy_schedule
from rematch.solvers.hiremate.canonical import equal_blocks
from rematch.solvers.hiremate.combine import Gap, Solved, combined, operators_of
from rematch.solvers.hiremate.hpartition import HPartition
from rematch.solvers.hiremate.partition import Part, Partitioner, check_partition, make_partitioner
from rematch.solvers.hiremate.pieces import Piece, Pieces, pieces_of
from rematch.solvers.hiremate.tasks import Task, solve_task
from rematch.solvers.hiremate.workers import process_pool
from rematch.solvers.incumbent import Incumbent

HILP = "hilp"  # among the names of solvers: combine the options of the children

_NARROW = HPartition(most_top=20, most_lower=20)  # levels that H-ILP can solve within seconds
_GREEDY_SHARE = 0.05  # of the time, to have something early
_PIECES_SHARE = 0.4  # of the time, for all levels below the top
_TOP_SHARE = 0.5  # of the time that is left then
_WHOLE_SHARE = 0.15  # of the time that is left, for each solver on the whole graph
_WORTH_PROCESSES = 2_000  # operators in the pieces of a level; below, processes cost more than they save
_HEADROOM = (
    1.3,
    1.2,
    1.12,
    1.06,
    1.0,
    0.96,
    0.9,
    0.8,
)  # of the budget, given to the top level in turn until the oracle agrees


@dataclass(frozen=True)
class HiRemate(Solver):
    """The options of the paper's framework.

    partitioner: a name or an instance; `partitioners_at` has others for parts of a level (the top is level 1)
    solvers: who contributes options, by name or as instances, "hilp" among them; `solvers_at` has others for a level
    options: O, most options that a piece passes on
    most_options: N_o, most options of all children of one level together
    workers, executor: where pieces are solved; any `concurrent.futures.Executor` will do
    polish: whether local search and the relaxation follow
    """

    partitioner: str | Partitioner = _NARROW
    partitioners_at: Mapping[int, str | Partitioner] | None = None
    solvers: tuple[str | Solver, ...] = (HILP, "anneal", "rotor", "twremat")
    solvers_at: Mapping[int, tuple[str | Solver, ...]] | None = None
    options: int = 6
    most_options: int = 60
    workers: int = 2
    executor: Executor | None = None
    polish: bool = True
    threads: int = 2
    iterations: int = 200_000
    seed: int = 0

    name = "hiremate"
    paper = "Gusak et al., HiRemate: Hierarchical Approach for Efficient Re-materialization, ICML 2025"

    def __post_init__(self) -> None:
        if self.options < 1 or self.most_options < 1 or self.workers < 1:
            raise SolverError(
                "solver 'hiremate' needs at least 1 option, 1 option a level and 1 worker; got "
                f"options={self.options}, most_options={self.most_options}, workers={self.workers}"
            )

    def prepare(self) -> None:
        Greedy().prepare()
        for solver in (*self.solvers, *chain.from_iterable((self.solvers_at or {}).values())):
            if solver != HILP:
                _made(solver).prepare()

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        incumbent = Incumbent(problem, deadline, on_progress)
        incumbent.offer(baseline(problem.graph), "noremat")
        if not incumbent.over:
            quick = deadline.within(_GREEDY_SHARE * deadline.remaining)
            incumbent.offer(greedy_schedule(problem, quick), "greedy")
        if not incumbent.over and _has_two_passes(problem.graph):
            self._solve_hierarchy(incumbent)
            self._solve_whole(incumbent)
        if not incumbent.over and (self.polish or incumbent.schedule is None):
            Auto(seed=self.seed, threads=self.threads, iterations=self.iterations).improve(incumbent)
        return incumbent.solution(self.name)

    def _solve_whole(self, incumbent: Incumbent) -> None:
        """Solvers that take the top level as one graph; local search comes to it with the polish."""
        for solver in _without_hilp(self._solvers_at(1)):
            if isinstance(solver, Anneal) or incumbent.over or not solver.applicable(incumbent.problem):
                continue
            deadline = incumbent.deadline.within(_WHOLE_SHARE * incumbent.deadline.remaining)
            found = solver.solve(incumbent.problem, deadline=deadline, on_progress=ignore_progress)
            if found.schedule is not None:
                offer_in_default_order(incumbent, found.schedule.ops, solver.name)

    def _solvers_at(self, level: int) -> tuple[str | Solver, ...]:
        """Who contributes to a level."""
        return (self.solvers_at or {}).get(level, self.solvers)

    def hierarchy(self, graph: Graph) -> Pieces:
        """The graph as the pieces that are solved; at least the operators of the forward pass, each a piece."""
        root = _instance(self.partitioner).partition(graph)
        if not root.children:
            root = Part(root.forward, tuple(Part((op,)) for op in root.forward))
        for level, partitioner in sorted((self.partitioners_at or {}).items()):
            root = _recut(graph, root, level, _instance(partitioner))
        check_partition(graph, root)
        return pieces_of(graph, root)

    def _solve_hierarchy(self, incumbent: Incumbent) -> None:
        pieces = self.hierarchy(incumbent.problem.graph)
        levels = _levels(pieces.root)
        incumbent.tell(self.name, f"{sum(map(len, levels)) - 1} pieces on {len(levels)} levels")
        with self._executor(levels[1:]) as executor:
            children = self._solve_below(incumbent, pieces, levels, executor)
        if HILP in self._solvers_at(1):
            self._combine_top(incumbent, pieces, children)

    @contextmanager
    def _executor(self, levels: Sequence[Sequence[Piece]]) -> Iterator[Executor | None]:
        """Where to solve: as given, in processes if there is enough to do, or here."""
        work = max((sum(len(piece.ops) for piece in level) for level in levels if len(level) > 1), default=0)
        if self.executor is not None:
            yield self.executor
        elif self.workers > 1 and work >= _WORTH_PROCESSES:
            with process_pool(self.workers) as pool:
                yield pool
        else:
            yield None

    def _solve_below(
        self, incumbent: Incumbent, pieces: Pieces, levels: Sequence[Sequence[Piece]], executor: Executor | None
    ) -> list[Solved]:
        """The children of the root, solved, after all that is below them."""
        graph = pieces.graph
        solved: dict[int, Solved] = {}
        deadline = incumbent.deadline.within(_PIECES_SHARE * incumbent.deadline.remaining)
        for number in range(len(levels), 1, -1):
            level = levels[number - 1]
            by_ops = {piece.ops: piece for piece in level}
            classes = equal_blocks(graph, by_ops)
            parallel = self.workers if executor is not None else 1
            seconds = deadline.remaining / (number - 1) * parallel / max(parallel, len(classes))
            tasks = [self._task(graph, by_ops[same.representative], number, solved, seconds) for same in classes]
            found = list(executor.map(solve_task, tasks) if executor is not None else map(solve_task, tasks))
            for same, options in zip(classes, found, strict=True):
                for member in same.members:
                    piece = by_ops[member]
                    solved[id(piece)] = Solved(piece.block, gap_graph(graph, piece.block), options)
            incumbent.tell(self.name, f"level {number}: {len(level)} pieces, {len(classes)} of them unique")
        return [solved[id(child)] for child in pieces.root.children]

    def _task(self, graph: Graph, piece: Piece, level: int, solved: dict[int, Solved], seconds: float) -> Task:
        by_children = HILP in self._solvers_at(level)
        return Task(
            block=piece.block,
            part=gap_graph(graph, piece.block),
            children=tuple(solved[id(child)] for child in piece.children) if by_children else (),
            solvers=_without_hilp(self._solvers_at(level)),
            options=self.options,
            most_options=self.most_options,
            seconds=seconds,
        )

    def _combine_top(self, incumbent: Incumbent, pieces: Pieces, children: Sequence[Solved]) -> None:
        """Ask for less and less until the result, written out, keeps the budget.

        Levels see values freed later than they are, so that more than the budget often keeps it.
        """
        graph = pieces.graph
        free_bytes = incumbent.problem.budget_bytes - pieces.base_bytes
        deadline = incumbent.deadline.within(_TOP_SHARE * incumbent.deadline.remaining)
        for share in _HEADROOM:
            if deadline.expired:
                return
            steps = combined(
                children,
                Gap.loss_of(graph),
                int(share * free_bytes),
                most_options=self.most_options,
                deadline=deadline.within(deadline.remaining / 4),
            )
            if steps is None:
                continue
            if offer_in_default_order(
                incumbent, np.array(operators_of(graph, children, steps), dtype=np.int32), self.name
            ):
                return


def _has_two_passes(graph: Graph) -> bool:
    """Whether all of forward comes before the loss and all of backward behind it, and there is something of both."""
    phases = [graph.ops[op].phase for op in graph.order]
    return graph.loss is not None and set(phases) == set(Phase) and phases == sorted(phases, key=list(Phase).index)


def _without_hilp(solvers: Iterable[str | Solver]) -> tuple[Solver, ...]:
    return tuple(_made(solver) for solver in solvers if solver != HILP)


def _made(solver: str | Solver) -> Solver:
    return make_solver(solver) if isinstance(solver, str) else solver


def _instance(partitioner: str | Partitioner) -> Partitioner:
    return make_partitioner(partitioner) if isinstance(partitioner, str) else partitioner


def _levels(root: Piece) -> list[list[Piece]]:
    """Pieces by level, from the top."""
    levels = [[root]]
    while below := [child for piece in levels[-1] for child in piece.children]:
        levels.append(below)
    return levels


def _recut(graph: Graph, root: Part, level: int, partitioner: Partitioner) -> Part:
    """The hierarchy with each part of a level (the top is level 1) cut anew by another partitioner."""
    if root.is_layer:
        return root
    if level == 1:
        small = _restricted(graph, root.forward)
        return _renumbered(partitioner.partition(small), root.forward)
    return Part(root.forward, tuple(_recut(graph, child, level - 1, partitioner) for child in root.children))


def _restricted(graph: Graph, ops: Sequence[int]) -> Graph:
    """Only these operators; what they read of others is resident."""
    made = {value for op in ops for value in graph.ops[op].outputs}
    values = tuple(
        value if number in made else replace(value, resident=True) for number, value in enumerate(graph.values)
    )
    return Graph(tuple(replace(graph.ops[op], mutates=()) for op in ops), values, name=graph.name)


def _renumbered(part: Part, ops: Sequence[int]) -> Part:
    """A part of a restricted graph in the numbers of the whole."""
    return Part(tuple(ops[op] for op in part.forward), tuple(_renumbered(child, ops) for child in part.children))
