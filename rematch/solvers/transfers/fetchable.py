"""Moving values as recomputation: a graph in which some values come back at a price instead of being computed again.

`fetchable = Fetchable.of(graph, {3: 1e-3, 7: 2e-3}); fetchable.steps_of(schedule)`

Each moved value v of an operator p gets an operator `fetch v` right after p, and p makes a token of no bytes in its
place. `fetch v` reads the token alone and makes v. Its first run stands for p's own output, so the memory of v counts
as workspace of p. Every other run fetches v from host memory. Tokens weigh nothing, so they can always stay, and a
method that knows only recomputation then plans fetches and recomputations together. The copies' times are not in this
graph: `placing` finds places for the copies, and the oracle times them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rematch.graph import Compute, Fetch, Free, Graph, Offload, Op, Schedule, Value, simulate
from rematch.graph.schedule import Step
from rematch.solvers.common.local_search import schedule_of
from rematch.solvers.default.epochs import first_uses


@dataclass(frozen=True, eq=False)
class Fetchable:
    """A graph with operators that fetch, and the way back to schedules of the graph it was made of."""

    graph: Graph
    reduced: Graph  # operators and values of `graph` have the same numbers in it
    moved: tuple[int, ...]  # the value that operator len(graph.ops) + i fetches

    @staticmethod
    def of(graph: Graph, prices: Mapping[int, float]) -> Fetchable:
        """The graph in which values come back for a price in seconds. They must be of operators other than the loss."""
        values = sorted(prices)
        token = {value: len(graph.values) + index for index, value in enumerate(values)}
        fetcher = {value: len(graph.ops) + index for index, value in enumerate(values)}
        fetches = tuple(
            Op(
                f"fetch {graph.values[value].name}",
                prices[value],
                (token[value],),
                (value,),
                phase=graph.ops[graph.arrays.producer[value]].phase,
            )
            for value in values
        )
        reduced = replace(
            graph,
            ops=(*(_with_tokens(graph, op, token) for op in graph.ops), *fetches),
            values=(*graph.values, *(Value(f"token of {graph.values[value].name}", 0) for value in values)),
            order=tuple(
                number
                for op in graph.order
                for number in (op, *(fetcher[value] for value in graph.ops[op].outputs if value in fetcher))
            ),
            link=None,
        )
        return Fetchable(graph, reduced, tuple(values))

    def start_from(self, runs: list[int]) -> Schedule | None:
        """The schedule of `reduced` that does the same as `runs`: operators of `graph`, and `~value` for a fetch.

        What cannot be fetched here is computed again. None if that is not allowed where it would be, or if first
        computations leave the default order, from which local search cannot start.
        """
        if tuple(dict.fromkeys(run for run in runs if run >= 0)) != tuple(self.graph.order):
            return None
        fetcher = {value: len(self.graph.ops) + index for index, value in enumerate(self.moved)}
        producer = self.graph.arrays.producer
        sequence: list[int] = []
        for run in runs:
            if run < 0 and ~run in fetcher:
                sequence.append(fetcher[~run])
                continue
            op = run if run >= 0 else int(producer[~run])
            sequence += [op, *(fetcher[value] for value in self.graph.ops[op].outputs if value in fetcher)]
        schedule = Schedule.from_ops(self.reduced, sequence)
        return schedule if simulate(self.reduced, schedule).valid else None

    def lifted(self, again: Sequence[int], moment: int) -> Schedule:
        """The schedule of `reduced` that runs these operators again, and fetches all that is moved, after `moment`.

        Each comes just before its first use there, `moment` being a position in `graph`. It may break a budget.
        """
        a = self.reduced.arrays
        chosen = [*again, *range(len(self.graph.ops), len(self.reduced.ops))]
        after = int(a.position[self.graph.arrays.order[moment]])
        uses = first_uses(self.reduced, chosen, after, len(self.reduced.ops))
        rows = [(stage, int(a.position[op])) for op, stage in uses.items()]
        return schedule_of(self.reduced, np.array(rows, dtype=np.int32).reshape(-1, 2))

    def runs_of(self, schedule: Schedule) -> list[int]:
        """What a schedule of `reduced` runs, in the form that `start_from` takes."""
        count, seen, runs = len(self.graph.ops), set[int](), []
        for op in schedule.ops.tolist():
            if op < count:
                runs.append(op)
            elif op in seen:
                runs.append(~self.moved[op - count])
            seen.add(op)
        return runs

    def steps_of(self, schedule: Schedule) -> list[Step]:
        """The steps of `graph` that a schedule of `reduced` stands for, copies right where values are made and read."""
        count = len(self.graph.ops)
        run, seen, alive = set[int](), set[int](), set[int]()  # operators; moved values, ever and now on the device
        again = [int(op) for op, runs in zip(*_counted(schedule), strict=True) if op >= count and runs > 1]
        leaving = {self.moved[op - count] for op in again}
        steps: list[Step] = []
        for step in schedule:
            if isinstance(step, Compute) and step.op < count:
                steps.append(step)
                if step.op in run:  # it makes anew what it need not, which is gone at once
                    made = [value for value in self.graph.ops[step.op].outputs if value in seen]
                    steps += [Free(value) for value in made if value not in alive]
                run.add(step.op)
            elif isinstance(step, Compute):
                value = self.moved[step.op - count]
                if step.op in run and value not in alive:
                    steps.append(Fetch(value))
                elif step.op not in run and value in leaving:
                    steps.append(Offload(value))
                run.add(step.op)
                seen.add(value)
                alive.add(value)
            elif isinstance(step, Free) and step.value < len(self.graph.values):
                steps.append(step)
                alive.discard(step.value)
        return steps


def _with_tokens(graph: Graph, op: Op, token: dict[int, int]) -> Op:
    """The operator with tokens in the place of those of its outputs that can be fetched."""
    hidden = [value for value in op.outputs if value in token]
    return replace(
        op,
        outputs=tuple(token.get(value, value) for value in op.outputs),
        workspace_bytes=op.workspace_bytes + sum(graph.values[value].size_bytes for value in hidden),
    )


def _counted(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Operators, and how often each runs."""
    runs: dict[int, int] = {}
    for op in schedule.ops.tolist():
        runs[op] = runs.get(op, 0) + 1
    return list(runs), list(runs.values())
