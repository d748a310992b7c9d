"""Checkmate: the fastest schedule of frontier-advancing stages, by mixed-integer programming.

P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. E. Gonzalez, "Checkmate: Breaking the
Memory Wall with Optimal Tensor Rematerialization" (MLSys 2020), program (9); `model` writes it down for our
graphs, and `rounding` is the paper's approximation. `form="unpartitioned"` is (1d-e) in place of (8a-c): more
schedules, a far weaker relaxation, for small graphs only.

What the paper's stages cannot say: within a stage operators run in default order, each at most once. A schedule that
recomputes in another order, or the same operator twice between two first computations, can take less memory, so bounds
and proofs of infeasibility are about schedules of such stages. A schedule given as `start` need not be one of them: it
is where the search begins, and is returned if nothing faster is found.

`backend` names who solves the program: HiGHS, or SCIP (through OR-Tools) or Gurobi (gurobipy) where they are installed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rematch.errors import SolverError, unknown_name
from rematch.graph import Graph, Schedule, baseline
from rematch.graph.model import Op, Value
from rematch.solvers.base import BoundScope, Deadline, OnProgress, Problem, Solution, Solver
from rematch.solvers.checkmate.model import MOST_OPERATORS, CheckmateModel
from rematch.solvers.common.backends import BACKENDS, require_backend
from rematch.solvers.common.highs import minimise
from rematch.solvers.incumbent import Incumbent
from rematch.solvers.minimum import surely_needed_bytes

Form = Literal["partitioned", "unpartitioned"]
FORMS = ("partitioned", "unpartitioned")
MOST_UNPARTITIONED = 40  # operators: in the paper, 17 of them already take Gurobi 9.4 hours (section 4.2)

_TOLERANCE = 1e-6  # percent of the baseline time: the program's own accuracy
_MARGIN = 1e-5  # of the budget, left free where a point breaks it by no more than the backend's accuracy


@dataclass(frozen=True)
class Checkmate(Solver):
    """Exact among schedules of stages in default order; slow beyond a hundred operators or so."""

    name = "checkmate"
    paper = "Jain et al., Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020"
    requires = f"at most {MOST_OPERATORS:,} operators, or {MOST_UNPARTITIONED} for the unpartitioned form"

    form: Form = "partitioned"
    backend: str = "highs"
    start: Schedule | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise SolverError(unknown_name("form of solver 'checkmate'", self.form, FORMS))
        if self.backend not in BACKENDS:
            raise SolverError(unknown_name("backend", self.backend, list(BACKENDS)))

    def applicable(self, problem: Problem) -> bool:
        return len(problem.graph.ops) <= (MOST_OPERATORS if self.form == "partitioned" else MOST_UNPARTITIONED)

    def prepare(self) -> None:
        require_backend(self.backend)

    def solve(self, problem: Problem, *, deadline: Deadline, on_progress: OnProgress) -> Solution:
        incumbent = Incumbent(problem, deadline, on_progress, scope=BoundScope.STAGES)
        if problem.budget_bytes < surely_needed_bytes(problem.graph):
            incumbent.prove_infeasible(self.name, BoundScope.ANY_ORDER)
            return incumbent.solution(self.name)
        incumbent.offer(baseline(problem.graph), "noremat")
        if self.start is not None:
            incumbent.offer(self.start, "start")
        for margin in (0.0, _MARGIN):
            if not incumbent.over and self._search(incumbent, margin):
                break
        return incumbent.solution(self.name)

    def _search(self, incumbent: Incumbent, margin: float) -> bool:
        """Solve the program once; whether there is nothing to gain from solving it with a margin."""
        problem = incumbent.problem
        budget_bytes = problem.budget_bytes - int(margin * problem.budget_bytes)
        model = CheckmateModel(problem.graph, budget_bytes, partitioned=self.form == "partitioned")
        incumbent.tell(self.name, f"{model.program.column_count} columns, {model.program.row_count} rows")
        if incumbent.over:
            return True
        found = BACKENDS[self.backend](
            model.program,
            deadline=incumbent.deadline,
            cutoff=100.0 + incumbent.overhead_percent - _TOLERANCE,
            interrupt=lambda: incumbent.over,
            on_bound=lambda bound: None if margin else incumbent.raise_bound(bound - 100.0, self.name),
            absolute_gap=_TOLERANCE,
            start=model.start(incumbent.schedule) if incumbent.schedule is not None else None,
        )
        kept_budget = found.point is None or incumbent.offer(model.schedule(found.point), self.name)
        if margin == 0.0:
            if found.infeasible:
                incumbent.prove_infeasible(self.name)
            else:
                incumbent.raise_bound(found.bound - 100.0, self.name)
        return kept_budget


@dataclass(frozen=True)
class IntegralityGap:
    """Appendix A: the optimum of a program against that of its linear relaxation, both in units of cost."""

    form: Form
    optimum: float
    relaxation: float

    @property
    def ratio(self) -> float:
        return self.optimum / self.relaxation


def integrality_gap(graph: Graph, budget_bytes: int, form: Form, *, deadline: Deadline) -> IntegralityGap:
    """The gap in the paper's own form (7b-c).

    The optimum is that of the partitioned program, which the unpartitioned one shares on the paper's example (4.6) and
    takes hours to find.
    """
    whole = minimise(CheckmateModel(graph, budget_bytes).program, deadline=deadline)
    relaxed = CheckmateModel(graph, budget_bytes, partitioned=form == "partitioned", split=False)
    bound = minimise(relaxed.program, deadline=deadline, relaxed=True)
    scale = graph.baseline_seconds / 100.0
    return IntegralityGap(form, whole.objective * scale, bound.objective * scale)


def unit_chain(layers: int = 8) -> Graph:
    """The paper's linear network (4.6): 2 layers + 1 operators of unit cost and size.

    The backward of a layer reads the gradient behind it and what the layer made. The text does not say which values it
    reads; of the usual choices this is the one with the paper's gaps.
    """
    count = 2 * layers + 1
    reads = [
        (i - 1,) if 0 < i <= layers else (2 * layers - i, i - 1) if i else ()
        for i in range(count)
    ]  # fmt: skip
    ops = tuple(Op(f"op{i}", 1.0, reads[i], (i,)) for i in range(count))
    return Graph(ops, tuple(Value(f"value{i}", 1) for i in range(count)), name=f"unit chain {layers}")
