"""A plan: the schedule that was chosen for a graph, what it is predicted to cost, and what is known about better ones.

`Plan.from_solution(problem, solve(problem)).save("plan.json")`

A plan is data, kept as versioned JSON. It carries the fingerprint of its graph, so that a plan can be checked against a
graph on another machine before anyone relies on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import numpy as np

from rematch.errors import FormatError, ScheduleError
from rematch.files import read_json, write_text
from rematch.graph import Compute, Fetch, Graph, Offload, Phase, Schedule, Simulation, baseline, simulate
from rematch.graph.schedule import step_of
from rematch.graph.simulate import alive_during, computation_edges
from rematch.graph.traffic import busy_shares, total_seconds, traffic
from rematch.records import from_json, show_json, to_json
from rematch.solvers.base import BoundScope, Problem, Progress, Solution, Status
from rematch.units import count_of, extra_pct, format_bytes, format_extra, format_seconds, printable

FORMAT = "rematch-plan"
VERSION = 1

_LARGEST_BYTES = 2**61  # a peak: all values of a graph, and a workspace
_STRETCHES = 60  # of a schedule, for which a plan says how busy the link is


@dataclass(frozen=True)
class Figures:
    """How a search ended, in numbers; None where nothing was found or proved."""

    solver: str
    status: Status
    budget_bytes: int
    baseline_peak_bytes: int  # without recomputation
    baseline_seconds: float
    peak_bytes: int | None
    seconds: float | None
    computes: int | None  # how many computations the schedule makes
    lower_bound_seconds: float | None
    bound_scope: BoundScope
    solve_seconds: float
    infeasible_up_to_bytes: int | None = None
    feasible_from_bytes: int | None = None

    @staticmethod
    def of(problem: Problem, solution: Solution) -> Figures:
        graph = problem.graph
        seen = None if solution.schedule is None else simulate(graph, solution.schedule).checked()
        return Figures(
            solver=solution.solver,
            status=solution.status,
            budget_bytes=problem.budget_bytes,
            baseline_peak_bytes=simulate(graph, baseline(graph)).peak_bytes,
            baseline_seconds=graph.baseline_seconds,
            peak_bytes=None if seen is None else seen.peak_bytes,
            seconds=None if seen is None else seen.seconds,
            computes=None if seen is None else int(seen.counts.sum()),
            lower_bound_seconds=solution.lower_bound_seconds,
            bound_scope=solution.bound_scope,
            solve_seconds=solution.solve_seconds,
            infeasible_up_to_bytes=solution.infeasible_up_to_bytes,
            feasible_from_bytes=solution.feasible_from_bytes,
        )

    @property
    def overhead_pct(self) -> float | None:
        """Extra time of the schedule, in per cent of the time without recomputation."""
        return extra_pct(self.seconds, self.baseline_seconds)

    @property
    def lower_bound_pct(self) -> float | None:
        """The least extra time any schedule of the bound's scope needs."""
        return extra_pct(self.lower_bound_seconds, self.baseline_seconds)

    @property
    def gap_pct(self) -> float | None:
        """How many points of extra time a better schedule could save at most."""
        if self.overhead_pct is None or self.lower_bound_pct is None:
            return None
        return max(0.0, self.overhead_pct - self.lower_bound_pct)


def is_plan(data: Any) -> bool:
    """Whether a file's JSON says that it is a plan, of whatever version."""
    return isinstance(data, dict) and data.get("format") == FORMAT


@dataclass(frozen=True)
class Recomputed:
    """An operator that the schedule runs more than once."""

    name: str
    module_path: str
    phase: Phase
    extra_runs: int
    extra_seconds: float


@dataclass(frozen=True)
class PeakShare:
    """How much of the peak values of one role hold."""

    role: str
    size_bytes: int


@dataclass(frozen=True)
class Moved:
    """What a schedule moves between device and host memory, and how busy that keeps the link.

    The last three have percentages of the time in stretches of the schedule with as many computations each. They are
    empty in plans of older versions.
    """

    values: int
    out_bytes: int
    in_bytes: int
    host_bytes: int
    stall_seconds: float
    out_seconds: float = 0.0  # in which a copy runs
    in_seconds: float = 0.0
    out_busy: tuple[int, ...] = ()
    in_busy: tuple[int, ...] = ()
    stalled: tuple[int, ...] = ()

    @staticmethod
    def by(graph: Graph, schedule: Schedule, seen: Simulation) -> Moved | None:
        """What a valid schedule moves; None if it moves nothing."""
        if not schedule.moves:
            return None
        out = [graph.values[step.value].size_bytes for step in schedule if isinstance(step, Offload)]
        back = [graph.values[step.value].size_bytes for step in schedule if isinstance(step, Fetch)]
        link = traffic(graph, schedule)
        edges = computation_edges(graph, schedule)
        edges = edges[np.linspace(0, len(edges) - 1, min(_STRETCHES, len(edges) - 1) + 1).astype(int)]
        out_busy, in_busy, stalled = (
            tuple(int(share) for share in np.rint(100 * busy_shares(spans, edges)))
            for spans in (link.out, link.back, link.waits)
        )
        return Moved(
            values=len(out),
            out_bytes=sum(out),
            in_bytes=sum(back),
            host_bytes=seen.host_bytes,
            stall_seconds=total_seconds(link.waits),
            out_seconds=total_seconds(link.out),
            in_seconds=total_seconds(link.back),
            out_busy=out_busy,
            in_busy=in_busy,
            stalled=stalled,
        )

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.out_bytes)} of {count_of(self.values, 'value')} to host memory and "
            f"{format_bytes(self.in_bytes)} back, {format_seconds(self.stall_seconds)} of waiting"
        )


@dataclass(frozen=True, repr=False)
class Plan:
    """A schedule for one graph, with what the oracle said of it when it was made.

    `graph` is what reports and pictures are drawn from. It is not saved; give it to a loaded plan by `with_graph`.
    """

    graph_name: str
    graph_fingerprint: str
    graph_ops: int
    graph_values: int
    schedule: Schedule
    figures: Figures
    recomputed: tuple[Recomputed, ...]  # in the graph's default order
    timeline_bytes: tuple[int, ...]  # memory during each computation
    log: tuple[Progress, ...] = ()
    parts: tuple[PeakShare, ...] = ()  # of the peak, where the graph tells the roles of its values
    notes: tuple[str, ...] = ()  # what was assumed or mapped
    engine: str = ""  # who runs it; none for a plan of a graph alone
    moved: Moved | None = None  # None if nothing is
    graph: Graph | None = field(default=None, init=False, compare=False)

    @staticmethod
    def from_solution(problem: Problem, solution: Solution, notes: tuple[str, ...] = (), engine: str = "") -> Plan:
        """The plan of a solution that has a schedule; `ScheduleError` for one that has none."""
        if solution.schedule is None:
            raise ScheduleError(
                f"solver {solution.solver!r} has no schedule for {problem.graph.name!r} within "
                f"{problem.budget_bytes} bytes ({solution.status.value}); there is nothing to plan with"
            )
        graph, schedule = problem.graph, solution.schedule
        seen = simulate(graph, schedule).checked()
        plan = Plan(
            graph_name=graph.name,
            graph_fingerprint=graph.fingerprint,
            graph_ops=len(graph.ops),
            graph_values=len(graph.values),
            schedule=schedule,
            figures=Figures.of(problem, solution),
            recomputed=_recomputed(graph, seen),
            timeline_bytes=tuple(seen.timeline_bytes[schedule.steps >= 0].tolist()),
            log=solution.log,
            parts=_parts_of_peak(graph, schedule, seen),
            notes=notes,
            engine=engine,
            moved=Moved.by(graph, schedule, seen),
        )
        return plan.drawn_from(graph)

    def with_graph(self, graph: Graph) -> Plan:
        """The plan with its graph, which reports and pictures need; `ScheduleError` if it is another graph."""
        self.check(graph)
        return replace(self).drawn_from(graph)

    def drawn_from(self, graph: Graph) -> Plan:
        """The plan itself, once it knows its graph; for whoever has just made it and checked it."""
        object.__setattr__(self, "graph", graph)
        return self

    def report(self, path: str | PathLike[str], *, trade_off: Iterable[Figures] = ()) -> None:
        """Write one HTML page that needs nothing else: memory, schedule, where the extra time goes, and the proof.

        trade_off: figures at several budgets, such as `rematch.pareto(...).points`, to draw as a curve too.
        """
        from rematch.report.page import write_page

        write_page(self, path, trade_off)

    def plot_memory(self, path: str | PathLike[str]) -> None:
        """Draw memory over time, with and without recomputation, to a .png, .svg or .pdf file."""
        from rematch.report.plot import plot_memory

        plot_memory(self._drawn_graph(), self.schedule, path, budget_bytes=self.figures.budget_bytes)

    def plot_schedule(self, path: str | PathLike[str]) -> None:
        """Draw memory over time and what is computed and kept in each stage to a .png, .svg or .pdf file."""
        from rematch.report.plot import plot_schedule

        plot_schedule(self._drawn_graph(), self.schedule, path, budget_bytes=self.figures.budget_bytes)

    def _drawn_graph(self) -> Graph:
        if self.graph is None:
            raise ScheduleError(
                "a plan that was loaded has no graph to draw; give it one: plan.with_graph(graph), such as "
                "rematch.trace(model, sample) returns"
            )
        return self.graph

    def check(self, graph: Graph) -> Simulation:
        """The oracle's view of the plan on `graph`; raises if it is another graph or the plan does not hold there.

        Times and workspace are not part of the fingerprint: the result has those of `graph`.
        """
        if graph.fingerprint != self.graph_fingerprint:
            raise ScheduleError(f"the plan was made for another graph: {self._difference(graph)}")
        seen = simulate(graph, self.schedule).checked()
        if seen.peak_bytes > self.figures.budget_bytes:
            raise ScheduleError(
                f"the plan does not keep its budget: its peak is {seen.peak_bytes} bytes, "
                f"the budget {self.figures.budget_bytes}"
            )
        return seen

    def _difference(self, graph: Graph) -> str:
        for what, ours, theirs in (
            ("operators", self.graph_ops, len(graph.ops)),
            ("values", self.graph_values, len(graph.values)),
        ):
            if ours != theirs:
                return f"{self.graph_name!r} had {ours} {what}, {graph.name!r} has {theirs}"
        return (
            f"{self.graph_name!r} and {graph.name!r} have as many operators and values, "
            "but differ in names, sizes, dependencies or order"
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_text(path, json.dumps(self.to_data(), separators=(",", ":"), allow_nan=False) + "\n")

    def to_data(self) -> dict[str, Any]:
        """The plan as what JSON can say; `from_json` reads it."""
        return {"format": FORMAT, "version": VERSION, **to_json(self)}

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """Read what `save` wrote; `FormatError` names what is wrong with the file."""
        return Plan.from_json(read_json(path), str(path))

    @staticmethod
    def from_json(data: Any, where: str) -> Plan:
        """The plan that a file's JSON `data` holds; errors call the file `where`."""
        if not is_plan(data):
            raise FormatError(f'{where} is not a plan: it has no "format": "{FORMAT}"; `rematch solve -o` writes plans')
        if data.get("version") != VERSION:
            raise FormatError(
                f"{where} is a plan of version {show_json(data.get('version'))}, this rematch reads version {VERSION}; "
                "update rematch or solve again"
            )
        try:
            plan = from_json(Plan, data)
            plan._require_possible_numbers()
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from error
        return plan

    def _require_possible_numbers(self) -> None:
        """Refuse what no search can have found, so that whoever prints or draws a plan need not expect it."""
        f = self.figures
        if f.peak_bytes is None or f.seconds is None or f.computes is None:
            raise FormatError("figures has no peak, seconds or computes of the schedule; solve again")
        sizes = [f.budget_bytes, f.peak_bytes, f.baseline_peak_bytes, *(part.size_bytes for part in self.parts)]
        if not all(0 <= size <= _LARGEST_BYTES for size in (*sizes, *self.timeline_bytes)):
            raise FormatError("a number of bytes is negative or beyond 2**61")
        times = [f.seconds, f.baseline_seconds, f.solve_seconds, *(entry.extra_seconds for entry in self.recomputed)]
        if self.moved is not None:
            m = self.moved
            times.append(min(m.values, m.out_bytes, m.in_bytes, m.host_bytes, m.stall_seconds))
            times.append(min(m.out_seconds, m.in_seconds, *m.out_busy, *m.in_busy, *m.stalled))
        counts = [self.graph_ops, self.graph_values, f.computes, *(entry.extra_runs for entry in self.recomputed)]
        if min(*times, *counts) < 0:
            raise FormatError("a time or a count is negative")

    def __str__(self) -> str:
        from rematch.report.text import describe_plan

        return describe_plan(self)

    def __repr__(self) -> str:
        f = self.figures
        return (
            f"<Plan for {printable(self.graph_name, 100)!r} ({self.graph_fingerprint[:8]}): "
            f"{format_bytes(f.peak_bytes or 0)} of {format_bytes(f.budget_bytes)}, "
            f"{format_extra(f.overhead_pct)} time, {f.status.value}, by {printable(f.solver, 100)}>"
        )

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from rematch.report.page import notebook_html

        return notebook_html(self)


def _recomputed(graph: Graph, seen: Simulation) -> tuple[Recomputed, ...]:
    return tuple(
        Recomputed(
            name=graph.ops[index].name,
            module_path=graph.ops[index].module_path,
            phase=graph.ops[index].phase,
            extra_runs=int(seen.counts[index]) - 1,
            extra_seconds=(int(seen.counts[index]) - 1) * graph.ops[index].seconds,
        )
        for index in graph.order
        if seen.counts[index] > 1
    )


_ACTIVATIONS, _WORKSPACE = "activations", "workspace"


def _parts_of_peak(graph: Graph, schedule: Schedule, seen: Simulation) -> tuple[PeakShare, ...]:
    """The peak by roles: residents first, then what is alive while the hungriest operator runs, then its workspace."""
    if seen.peak_step is None or not any(value.role for value in graph.values):
        return ()
    alive = alive_during(graph, schedule, seen.peak_step)
    at_peak = step_of(int(schedule.steps[seen.peak_step]))
    sizes: dict[str, int] = {}
    for index, value in enumerate(graph.values):
        copies = 1 if value.resident else alive.get(index, 0)
        if copies:
            role = value.role or _ACTIVATIONS
            sizes[role] = sizes.get(role, 0) + copies * value.size_bytes
    if isinstance(at_peak, Compute):
        sizes[_WORKSPACE] = graph.ops[at_peak.op].workspace_bytes
    return tuple(PeakShare(role, size) for role, size in sizes.items() if size)
