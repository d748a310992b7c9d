"""HiRemate: cut the graph into a hierarchy, solve its pieces in many ways, and combine the ways level by level.

`solve(Problem(graph, budget_bytes), "hiremate")`

J. Gusak, X. Zhao, T. Le Hellard, Z. Li, L. Eyraud-Dubois, O. Beaumont, "HiRemate: Hierarchical Approach for Efficient
Re-materialization of Neural Networks" (ICML 2025).

1. A partitioner cuts the forward pass into parts within parts (`partition`); backward operators follow (`pieces`).
2. From the bottom up, each part is solved under several limits by every solver that applies (`tasks`): any solver of
   the registry on the part as a small graph, and H-ILP (`hilp`) on its children with their options, which at the bottom
   are its operators. Parts that are equal up to renaming are solved once. Parts of a level are independent and are
   solved in parallel, in any executor.
3. H-ILP combines the options of the top level. The other solvers also take the whole graph as one part, and first,
   because they are quick.
4. The result is written out as operators. Recomputations that the budget has room to do without go (`common.pruning`),
   and values are freed as early as possible.

What we changed:
- The paper runs H-ILP on the top level once, with the budget. Here it also gets less than the budget, several times,
  and step 4 makes use of the rest; and two partitions are tried, of large graphs one.
- Options are groups of recomputations, which leave memory unused. At the end a program chooses among the recomputations
  of all results and of the top pieces' options one by one, each also as late as it may run and wherever it is wanted
  (`unite`); it recomputes nothing that no result and no option does. With `unite=False` the fastest result counts.
- Local search (`anneal`) is among the solvers of parts, not of the whole graph; `solvers=("hilp",)` is H-ILP alone and
  `solvers=("hilp", "rotor", "twremat")` the paper's framework.
- A part keeps its fastest option before all others (`options.spread`), and an option runs all of the part's forward.
- `polish=True` adds what the paper does not have: `auto`'s local search and relaxation on the whole graph.
- A graph that marks no loss gets one between its passes (`training_step`).

If the hierarchy finds no schedule, none is returned: no other method steps in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, product

import numpy as np

from rematch.errors import SolverError
from rematch.graph import Graph, baseline, simulate
from rematch.graph.model import Ints
from rematch.solvers.base import Deadline, OnProgress, Problem, Solution, Solver, ignore_progress, make_solver
from rematch.solvers.common.blocks import gap_graph
from rematch.solvers.common.pruning import (
    offer_in_default_order,
    offer_pruned,
)
from rematch.solvers.default.anneal import Anneal
from rematch.solvers.default.auto import Auto
from rematch.solvers.hiremate.canonical import equal_blocks
from rematch.solvers.hiremate.combine import Gap, Solved, combined, operators_of
from rematch.solvers.hiremate.hpartition import HPartition
from rematch.solvers.hiremate.partition import Part, Partitioner, check_partition, make_partitioner
from rematch.solvers.hiremate.pieces import Piece, Pieces, pieces_of
from rematch.solvers.hiremate.tasks import Task, solve_task
from rematch.solvers.hiremate.training_step import TrainingStep, has_two_passes
from rematch.solvers.hiremate.unite import unite
from rematch.solvers.hiremate.workers import process_pool
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.minimum import surely_needed_bytes

HILP = "hilp"  # among the names of solvers: combine the options of the children

# Levels that HiGHS solves within seconds, of two kinds: many small pieces on top, or fewer with levels inside them.
# Which of them is better depends on the graph.
_PARTITIONERS = (HPartition(most_top=12, most_lower=6), HPartition(most_top=20, most_lower=20))
_PIECES_SHARE = 0.6  # of a hierarchy's time, for all levels below the top
_WHOLE_SHARE = 0.15  # of the time that is left, for each solver on the whole graph
_WHOLE_SHARE_OF_LARGE = 0.4  # the same for graphs too large to unite, of which these solvers need more
_MORE_WHOLE_BUDGETS = (0.93, 0.86)  # shares: with less than the budget, more is recomputed that can be united
_MORE_WHOLE_SHARE = 0.05  # of the time that is left, for each solver within each of these
_UNION_SHARE = 0.6  # of the time, to unite what hierarchies propose, with these
_MOST_TO_UNITE = 1_000  # operators: of more, the program is seldom small enough; all time is for one hierarchy
_CUT_PER_SECOND = 4_000  # operators: to cut a graph into pieces and compare them, which cannot be interrupted
_WORTH_PROCESSES = 2_000  # operators in the pieces of a level; below, processes cost more than they save


@dataclass(frozen=True)
class HiRemate(Solver):
    """The options of the paper's framework.

    partitioner: a name or an instance; None tries two H-Partitions in turn, for large graphs one. `partitioners_at`
        has others for parts of a level (the top is level 1)
    solvers: who contributes options, by name or as instances, "hilp" among them; `solvers_at` has others for a level
    options: O, most options that a piece passes on
    most_options: N_o, most options of all children of one level together
    budget_shares: of the way from what is surely needed to the budget, given to the top level in turn; the best result
        counts. An option is chosen for a piece as a whole, so that the best sum of options rarely uses all of the
        budget: to ask for less and keep what there is room for is often faster
    workers, executor: where pieces are solved; any `concurrent.futures.Executor` will do
    unite: whether a program takes the recomputations of all results apart and chooses among them anew, with `threads`
        (see `unite`); without, the fastest of them is the answer, as in the paper
    polish: whether `auto`'s local search and relaxation follow, with `threads`, `iterations` and `seed`; the paper has
        nothing like it
    """

    partitioner: str | Partitioner | None = None
    partitioners_at: Mapping[int, str | Partitioner] | None = None
    solvers: tuple[str | Solver, ...] = (HILP, "anneal", "rotor", "twremat")
    solvers_at: Mapping[int, tuple[str | Solver, ...]] | None = None
    options: int = 12
    most_options: int = 60
    budget_shares: tuple[float, ...] = (
        1.0,
        0.5,
        0.75,
        0.3,
        0.6,
        0.4,
        0.9,
        0.2,
        0.7,
        0.8,
        0.1,
        0.95,
        0.65,
        0.85,
        0.55,
        0.0,
    )  # the first are far apart
    workers: int = 2
    executor: Executor | None = None
    unite: bool = True
    polish: bool = False
    threads: int = 2
    iterations: int = 200_000
    seed: int = 0

    name = "hiremate"
    paper = "Gusak et al., HiRemate: Hierarchical Approach for Efficient Re-materialization, ICML 2025"
    requires = "forward and backward operators, of which all forward ones can run first"

    def __post_init__(self) -> None:
        if self.options < 1 or self.most_options < 1 or self.workers < 1:
            raise SolverError(
                "solver 'hiremate' needs at least 1 option, 1 option a level and 1 worker; got "
                f"options={self.options}, most_options={self.most_options}, workers={self.workers}"
            )
        if not all(0.0 <= share <= 1.0 for share in self.budget_shares):
            raise SolverError(f"solver 'hiremate' needs budget_shares from 0 to 1; got {self.budget_shares}")

    def prepare(self) -> None:
        for solver in (*self.solvers, *chain.from_iterable((self.solvers_at or {}).values())):
            if solver != HILP:
                _made(solver).prepare()
        if self.polish:
            Auto().prepare()

    def applicable(self, problem: Problem) -> bool:
        graph = problem.graph
        return has_two_passes(graph) or simulate(graph, baseline(graph)).peak_bytes <= problem.budget_bytes

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        incumbent = Incumbent(problem, deadline, on_progress)
        incumbent.offer(baseline(problem.graph), "noremat")
        if not incumbent.over:
            in_options: set[int] = set()
            of_time = _WHOLE_SHARE if self._may_unite(problem.graph) else _WHOLE_SHARE_OF_LARGE
            proposals = [*self._solve_whole(incumbent, (1.0,), of_time)]
            proposals += self._solve_hierarchies(incumbent, in_options)
            if self.unite:
                proposals += self._solve_whole(incumbent, _MORE_WHOLE_BUDGETS, _MORE_WHOLE_SHARE)
                unite(incumbent, proposals, anywhere=in_options, by=self.name, threads=self.threads)
            if incumbent.schedule is None:
                incumbent.tell(self.name, "the hierarchy has no schedule within the budget")
        if self.polish and not incumbent.over:
            incumbent.tell(self.name, "polish: local search and relaxation, as in auto")
            Auto(seed=self.seed, threads=self.threads, iterations=self.iterations).improve(incumbent)
        return incumbent.solution(self.name)

    def _solve_whole(self, incumbent: Incumbent, shares: Sequence[float], of_time: float) -> Iterator[Ints]:
        """Solvers that take the top level as one graph, with shares of the budget and a part of the time left for each.

        Local search on the whole graph is left to the polish.
        """
        for share, solver in product(shares, _without_hilp(self._solvers_at(1))):
            problem = replace(incumbent.problem, budget_bytes=int(share * incumbent.problem.budget_bytes))
            if isinstance(solver, Anneal) or incumbent.over or not solver.applicable(problem):
                continue
            deadline = incumbent.deadline.within(of_time * incumbent.deadline.remaining)
            found = solver.solve(problem, deadline=deadline, on_progress=ignore_progress)
            if found.schedule is not None:
                offer_in_default_order(incumbent, found.schedule.ops, solver.name)
                yield found.schedule.ops

    def _solvers_at(self, level: int) -> tuple[str | Solver, ...]:
        """Who contributes to a level."""
        return (self.solvers_at or {}).get(level, self.solvers)

    def hierarchies(self, graph: Graph) -> Iterator[Pieces]:
        """The graph, which has a loss, as the pieces that are solved, in one or several ways."""
        known: set[Part] = set()
        for partitioner in self._partitioners(graph):
            root = self._root(graph, partitioner)
            if root not in known:
                known.add(root)
                yield pieces_of(graph, root)

    def _partitioners(self, graph: Graph) -> tuple[Partitioner, ...]:
        """The one asked for, or two; of these only the first where pieces are so many that they need all time."""
        if self.partitioner is not None:
            return (_instance(self.partitioner),)
        return _PARTITIONERS if self._may_unite(graph) else _PARTITIONERS[:1]

    @staticmethod
    def _may_unite(graph: Graph) -> bool:
        return len(graph.ops) <= _MOST_TO_UNITE

    def _root(self, graph: Graph, partitioner: Partitioner) -> Part:
        """A partition, down to operators where H-ILP is to solve parts at the bottom."""
        root = partitioner.partition(graph)
        if not root.children:
            root = Part(root.forward, tuple(Part((op,)) for op in root.forward))
        for level, other in sorted((self.partitioners_at or {}).items()):
            root = _recut(graph, root, level, _instance(other))
        check_partition(graph, root)
        return self._with_layers(root)

    def _with_layers(self, root: Part, level: int = 1) -> Part:
        """Parts at the bottom with their operators as children, where H-ILP is to solve them."""
        if root.children:
            return Part(root.forward, tuple(self._with_layers(child, level + 1) for child in root.children))
        if root.is_layer or HILP not in self._solvers_at(level):
            return root
        return Part(root.forward, tuple(Part((op,)) for op in root.forward))

    def _solve_hierarchies(self, incumbent: Incumbent, in_options: set[int]) -> Iterator[Ints]:
        """What one hierarchy after the other gives; the rest of their time is shared among those that are left.

        Operators that an option of a top piece computes again are added to `in_options`.
        """
        step = TrainingStep.of(incumbent.problem.graph)
        hierarchies, left = self.hierarchies(step.graph), len(self._partitioners(step.graph))
        for_the_rest = 0.0
        if self.unite and self._may_unite(step.graph):
            for_the_rest = _UNION_SHARE * incumbent.deadline.remaining
        while left and not incumbent.over:
            if len(step.graph.ops) > _CUT_PER_SECOND * incumbent.deadline.remaining:
                incumbent.tell(self.name, f"no time to cut {len(step.graph.ops):,} operators into a hierarchy")
                return
            share = (incumbent.deadline.remaining - for_the_rest) / left
            deadline = incumbent.deadline.within(share)
            pieces = next(hierarchies, None)
            if pieces is None:
                return
            yield from self._solve_hierarchy(incumbent, step, pieces, in_options, deadline)
            left -= 1

    def _solve_hierarchy(
        self,
        incumbent: Incumbent,
        step: TrainingStep,
        pieces: Pieces,
        in_options: set[int],
        deadline: Deadline,
    ) -> Iterator[Ints]:
        levels = _levels(pieces.root)
        parts = sum(not piece.part.is_layer for level in levels for piece in level)
        incumbent.tell(self.name, f"{parts} parts on {pieces.root.part.depth} levels")
        with self._executor(levels[1:]) as executor:
            for_pieces = deadline.within(_PIECES_SHARE * deadline.remaining)
            children = self._solve_below(incumbent, pieces, levels, executor, for_pieces)
        in_options.update(op for child in children for op in child.recomputed)
        if HILP in self._solvers_at(1):
            yield from self._combine_top(incumbent, step, pieces, children, deadline)

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
        self,
        incumbent: Incumbent,
        pieces: Pieces,
        levels: Sequence[Sequence[Piece]],
        executor: Executor | None,
        deadline: Deadline,
    ) -> list[Solved]:
        """The children of the root, solved, after all that is below them; none when the time is over."""
        graph = pieces.graph
        solved: dict[int, Solved] = {}
        for number in range(len(levels), 1, -1):
            if incumbent.over:
                return []
            level = levels[number - 1]
            by_ops = {piece.ops: piece for piece in level}
            classes = equal_blocks(graph, by_ops)
            parallel = self.workers if executor is not None else 1
            seconds = deadline.remaining / (number - 1) * parallel / max(parallel, len(classes))
            tasks = [self._task(graph, by_ops[same.representative], number, solved, seconds) for same in classes]
            found = list(executor.map(solve_task, tasks) if executor is not None else map(solve_task, tasks))
            for same, task, options in zip(classes, tasks, found, strict=True):
                for piece in (by_ops[member] for member in same.members):
                    part = gap_graph(graph, piece.block, like=task.part)
                    solved[id(piece)] = Solved(piece.block, part, options)
            incumbent.tell(self.name, f"level {number}: {len(level)} pieces, {len(classes)} of them unique")
        return [solved[id(child)] for child in pieces.root.children]

    def _task(self, graph: Graph, piece: Piece, level: int, solved: dict[int, Solved], seconds: float) -> Task:
        by_children = HILP in self._solvers_at(level)
        return Task(
            block=piece.block,
            part=gap_graph(graph, piece.block),
            children=tuple(solved[id(child)] for child in piece.children) if by_children else (),
            solvers=() if piece.part.is_layer else _without_hilp(self._solvers_at(level)),
            options=self.options,
            most_options=self.most_options,
            seconds=seconds,
        )

    def _combine_top(
        self,
        incumbent: Incumbent,
        step: TrainingStep,
        pieces: Pieces,
        children: Sequence[Solved],
        deadline: Deadline,
    ) -> Iterator[Ints]:
        """Let H-ILP have several shares of the budget; the oracle keeps the best result, written out and pruned.

        The first share, all of it, gets a third of the time: it is the paper's program, and often the best.
        """
        free_bytes = incumbent.problem.budget_bytes - pieces.base_bytes
        least_bytes = min(free_bytes, max(0, surely_needed_bytes(pieces.graph) - pieces.base_bytes))
        for number, share in enumerate(self.budget_shares):
            if deadline.expired or incumbent.over:
                return
            runs = combined(
                children,
                Gap.loss_of(pieces.graph),
                least_bytes + int(share * (free_bytes - least_bytes)),
                most_options=self.most_options,
                deadline=deadline.within(deadline.remaining / (len(self.budget_shares) - number if number else 3)),
            )
            if runs is not None:
                ops = step.without_loss(np.array(operators_of(pieces.graph, children, runs), dtype=np.int32))
                offer_pruned(incumbent, ops, f"{self.name} at {share:.0%}")
                yield ops


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
