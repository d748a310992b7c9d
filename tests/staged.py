"""The truth about Checkmate's schedules: the fastest one made of stages that run operators in default order, each once.

`fewest_staged_seconds(problem)`. The search is that of the `exhaustive` solver; what may run next is restricted.
"""

from __future__ import annotations

from heapq import heappop, heappush

from rematch.solvers import Problem, Solution, Status, verify
from rematch.solvers.exhaustive import _Search
from tests.problems import fewest_seconds


class _StagedSearch(_Search):
    """States also know the stage and the position in the default order that it has come to."""

    def __init__(self, problem: Problem, partitioned: bool) -> None:
        super().__init__(problem.graph, problem.budget_bytes, "any")
        self.partitioned = partitioned
        self.count = len(self.graph.ops)
        self.last_stage = self.count if self.graph.targets - self._residents() else self.count - 1

    def _residents(self) -> set[int]:
        return {index for index, value in enumerate(self.graph.values) if value.resident}

    def fewest_seconds(self) -> float | None:
        settled: dict[tuple[int, int, int], list[int]] = {}
        queue = [(0.0, 0, 0, 0, 0, 0)]
        pushed = 0
        while queue:
            extra, _, stage, position, run, alive = heappop(queue)
            if run == self.all_run and not self.wanted & ~alive:
                return self.graph.baseline_seconds + extra
            better = settled.setdefault((stage, position, run), [])
            if any(not alive & ~other for other in better):
                continue
            better.append(alive)
            for following in self._moves(stage, position, run, alive):
                pushed += 1
                heappush(queue, (extra + following[0], pushed, *following[1:]))
        return None

    def _moves(self, stage: int, position: int, run: int, alive: int) -> list[tuple[float, int, int, int, int]]:
        moves = []
        if not self.partitioned and stage < self.last_stage and position:
            moves.append((0.0, stage + 1, 0, run, alive))
        last = min(stage, self.count - 1) if self.partitioned else self.count - 1
        runnable = set(self._runnable(run, alive))
        for index in range(position, last + 1):
            op = self.graph.order[index]
            again = run >> op & 1
            if op not in runnable or (self.partitioned and not again and index != stage):
                continue
            ends = self.partitioned and index == stage
            at = (stage + 1, 0) if ends else (stage, index + 1)
            cost = self.seconds[op] if again else 0.0
            moves += [(cost, *at, run | 1 << op, after) for after in self._alive_after(op, run, alive)]
        return moves


def fewest_staged_seconds(problem: Problem, *, partitioned: bool = True) -> float | None:
    """The time of the fastest schedule of stages; None if there is none within the budget."""
    return _StagedSearch(problem, partitioned).fewest_seconds()


def check_against_staged_truth(problem: Problem, solution: Solution, truth: float | None) -> None:
    """What every solution that claims something about stages must satisfy, however good or bad its solver is."""
    seen = verify(problem, solution)
    close = 1e-7 * problem.graph.baseline_seconds
    if seen is None:
        assert solution.status in (Status.INFEASIBLE, Status.NOT_FOUND)
        assert solution.status is Status.NOT_FOUND or truth is None
    else:
        assert truth is not None
        assert seen.seconds >= truth - close
        assert solution.status is Status.FEASIBLE or seen.seconds <= truth + close
        in_any_order_within_stages = fewest_seconds(problem)
        assert in_any_order_within_stages is not None
        assert truth >= in_any_order_within_stages - close
    if solution.lower_bound_seconds is not None and truth is not None:
        assert solution.lower_bound_seconds <= truth + close
