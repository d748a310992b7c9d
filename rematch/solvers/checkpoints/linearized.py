"""Chen's checkpointing on any graph, taken as if it were linear in default order.

P. Jain et al., "Checkmate" (MLSys 2020), appendix B.2: Linearized sqrt(n) and Linearized greedy. Checkpoints are chosen
among all forward operators as if each read only the one before it; the optimal R for their S, found with the true
dependencies, makes up for what that got wrong. On linear graphs both equal `chen`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rematch.solvers.checkpoints.checkpointing import GreedySolver, SqrtSolver

_PAPER = "Jain et al., Checkmate, MLSys 2020 (appendix B.2), after Chen et al., 2016"


@dataclass(frozen=True)
class LinearizedSqrt(SqrtSolver):
    """Keep every sqrt(n)-th forward operator."""

    name = "linearized_sqrt"
    paper = _PAPER


@dataclass(frozen=True)
class LinearizedGreedy(GreedySolver):
    """Keep a forward operator after every b bytes."""

    name = "linearized_greedy"
    paper = _PAPER
