"""The largest batch that a module can be trained with inside a budget.

`rematch.max_batch(model, lambda batch: torch.randn(batch, 3, 224, 224), budget="24GiB").batch`

Two small batches are recorded. Sizes and times at others lie on a straight line through them, so a solver can be asked
about any batch without recording it. A line that is drawn too far may miss: small kernels take as long as tinier ones,
and libraries choose other algorithms, with other workspace, for larger ones. So the answer is recorded too, and asked
for again between it and half of it, until it is near to what was recorded and fits, on a card also into the places that
CUDA's allocator has for its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from rematch.api import Loss, make_settings, record_step, with_checkpoints, with_chunks, with_offload
from rematch.capture.memory import use_expandable_segments
from rematch.errors import BudgetError, BudgetInfeasible, GraphError
from rematch.foresight.answer import Answer
from rematch.graph import Graph, Simulation, baseline, simulate
from rematch.graph.transforms import between
from rematch.planning.host import host_bytes, linked
from rematch.planning.settings import RESPECT
from rematch.report.charts import Panel, draw_curves
from rematch.report.text import table
from rematch.solvers.base import DEFAULT_SOLVER, Solver, make_solver
from rematch.solvers.max_batch import MaxBatch, search_batches
from rematch.units import BYTES_UNITS, extra_pct, format_bytes, format_extra, unit_for

_RECORDED = (2, 4)  # one sample alone often runs other operators
_TRUSTED = 1.5  # times the larger batch that was recorded: up to there a line through both is believed
_SEARCHES = 5
_BATCHES_DRAWN = 12


@dataclass(frozen=True, repr=False)
class BatchSize(Answer):
    """See the module."""

    name: str
    budget_bytes: int
    batch: int
    without_recomputation: int  # the largest batch that fits without
    impossible_from: int | None  # the smallest batch proved to be too large
    peak_bytes: int  # by the schedule that was found for the largest batch
    extra_pct: float | None  # its extra time
    plain_peaks: tuple[tuple[int, int], ...]  # batch, and the peak of plain training

    def to_data(self) -> dict[str, Any]:
        return {**vars(self), "plain_peaks": [list(pair) for pair in self.plain_peaks]}

    def __str__(self) -> str:
        unproved = "nothing is proved about larger ones"
        proof = unproved if self.impossible_from is None else f"{self.impossible_from} is proved to be too large"
        rows = [
            ("batch", f"{self.batch:,}", f"{self.without_recomputation:,} without recomputation; {proof}"),
            ("peak", format_bytes(self.peak_bytes), f"within {format_bytes(self.budget_bytes)}"),
            ("time", format_extra(self.extra_pct), "of a step without recomputation, by the schedule that was found"),
        ]
        return table(f"{self.name}: the largest batch", rows)

    def plot(self, path: str | PathLike[str]) -> None:
        scale, unit = unit_for(BYTES_UNITS, max(size for _, size in self.plain_peaks))
        plain = [(float(batch), size / scale) for batch, size in self.plain_peaks]
        ends = [(plain[0][0], self.budget_bytes / scale), (plain[-1][0], self.budget_bytes / scale)]
        largest = [(float(self.batch), self.peak_bytes / scale)]
        series = {"plain training": plain, "budget": ends, "largest batch, with recomputation": largest}
        draw_curves([Panel(self.name, series)], path, x="batch", y=f"peak ({unit})")


def max_batch(
    model: nn.Module,
    make_sample: Callable[[int], Any],
    *,
    budget: str | int,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool = False,
    checkpoints: str = RESPECT,
    chunk_loss: int = 1,
    offload: bool | str | int = False,
    device: str | None = None,
    extra_forward_passes: float | None = 1.0,
    close_enough: float = 0.01,
    solver: str | Solver = DEFAULT_SOLVER,
    time_limit: float = 10.0,
    progress: bool | None = None,
    **options: Any,
) -> BatchSize:
    """Return the largest batch that `model` can be trained with inside `budget`.

    make_sample: from the size of a batch to a sample of that size, as `rematch.remat` takes them. Tensors on the
        "meta" device will do if you name a `device`.
    budget: bytes, "8GiB", or "auto" for what the device has.
    extra_forward_passes: how much longer than plain training a step may take; None leaves it open.
    close_enough: the search ends when the batch is known up to this share.
    time_limit: seconds for each batch that is tried. The other arguments are those of `rematch.plan`.
    """
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise BudgetError(f"a budget of {budget} is of a peak that depends on the batch; give bytes, such as '24GiB'")
    settings = replace(make_settings(budget, solver, time_limit, 0, progress, options, device), accumulate=accumulate)
    settings = with_chunks(with_checkpoints(settings, checkpoints), chunk_loss)
    host_limit_bytes = host_bytes(with_offload(settings, offload).offload)

    def recorded(batch: int) -> Graph:
        return record_step(model, make_sample(batch), settings, loss=loss, optimizer=optimizer)[1].graph

    def with_host(graph: Graph) -> Graph:
        """With the link to host memory, if there is to be one: what is worth moving depends on the batch."""
        return linked(graph, small.device, device, host_limit_bytes)

    runner, small = record_step(model, make_sample(_RECORDED[0]), settings, loss=loss, optimizer=optimizer)
    if device is None:
        use_expandable_segments(small.device)  # as training will: else more of the card is taken to be lost in pieces
    batches, graphs = _RECORDED, (small.graph, recorded(_RECORDED[1]))
    budget_bytes = runner.planner.budget_bytes(small.graph, small.device)

    def at(batch: int) -> Graph:
        return with_host(between(*graphs, batches=batches, batch=batch))

    made = make_solver(solver, **options) if isinstance(solver, str) else solver
    usable_bytes = budget_bytes
    best: tuple[MaxBatch, Graph, Simulation] | None = None
    for _ in range(_SEARCHES):
        found = search_batches(
            at,
            usable_bytes,
            solver=made,
            extra_forward_passes=extra_forward_passes,
            close_enough=close_enough,
            time_limit=time_limit,
        )
        if found.schedule is None:
            raise BudgetInfeasible(
                f"not even one sample of {small.graph.name} can be trained in {format_bytes(budget_bytes)}; "
                "rematch.min_budget tells how little memory it can do with"
            )
        at_found = recorded(found.batch)
        graph = with_host(at_found)
        seen = simulate(graph, found.schedule)
        excess_bytes = runner.planner.exceeded_by(graph, found.schedule, small.device) if seen.valid else 0
        fits = seen.valid and not excess_bytes
        if fits and (best is None or found.batch > best[0].batch):
            best = found, graph, seen
        if found.batch > _TRUSTED * batches[1]:
            nearer = (max(1, found.batch // 2), found.batch)
            with suppress(GraphError):  # other operators run there: the line that there is must do
                near = recorded(nearer[0]), at_found
                between(*near, batches=nearer, batch=found.batch)
                batches, graphs = nearer, near
                continue
        if fits:
            break
        usable_bytes -= max(excess_bytes, usable_bytes // 100)
    if best is None:
        raise BudgetInfeasible(
            f"the memory of {small.graph.name} does not grow in proportion to the batch, and no batch was found that "
            f"fits in {format_bytes(budget_bytes)}"
        )
    found, graph, seen = best
    drawn = [max(1, math.ceil(1.5 * found.batch * step / _BATCHES_DRAWN)) for step in range(_BATCHES_DRAWN + 1)]
    return BatchSize(
        name=graph.name,
        budget_bytes=budget_bytes,
        batch=found.batch,
        without_recomputation=found.without_recomputation,
        impossible_from=found.impossible_from if usable_bytes == budget_bytes else None,
        peak_bytes=seen.peak_bytes,
        extra_pct=extra_pct(seen.seconds, graph.baseline_seconds),
        plain_peaks=tuple((batch, _plain_peak(at(batch))) for batch in dict.fromkeys(drawn)),
    )


def _plain_peak(graph: Graph) -> int:
    return simulate(graph, baseline(graph)).peak_bytes
