"""Chen's checkpointing of linear networks: sqrt(n) segments, or greedy segments of b bytes.

T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016), sections 4.1 and 4.2, as
Table 1 of P. Jain et al., "Checkmate" (MLSys 2020) has them: every forward operator may be a checkpoint. `chen_sqrt`
has nothing to choose and may miss a budget that others keep; `chen_greedy` searches over b. Both take the optimal R for
their S. `articulation` and `linearized` are the generalizations to any graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematch.solvers.base import Problem
from rematch.solvers.checkpoints.checkpointing import GreedySolver, SqrtSolver
from rematch.solvers.common.forward_pass import is_linear

_PAPER = "Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016"
_REQUIRES = "a linear forward pass, in which each operator reads only the one before it"


@dataclass(frozen=True)
class ChenSqrt(SqrtSolver):
    """Keep the ends of sqrt(n) segments of a linear network."""

    name = "chen_sqrt"
    paper = _PAPER
    requires = _REQUIRES

    def applicable(self, problem: Problem) -> bool:
        return is_linear(problem.graph)


@dataclass(frozen=True)
class ChenGreedy(GreedySolver):
    """Keep the ends of segments of b bytes of a linear network."""

    name = "chen_greedy"
    paper = _PAPER
    requires = _REQUIRES

    def applicable(self, problem: Problem) -> bool:
        return is_linear(problem.graph)
