"""Plans that earlier starts of the same training have left, and the routes that they give.

`name = earlier.name_of(module, args, kwargs, ...)`, then `earlier.route(name, ...)`, or `earlier.keep(name, route)`
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from rematch.capture.recorded_graph import StepGraph
from rematch.errors import FormatError
from rematch.execute.routes import Route
from rematch.execute.tape.stored import from_data, to_data
from rematch.graph import Graph
from rematch.planning.fingerprint import fingerprint
from rematch.planning.plan_cache import NOTE as CACHE_NOTE, PlanCache, StoredPlan
from rematch.planning.planner import Planner
from rematch.planning.settings import REPLAY
from rematch.solvers.base import solver_class, was_interrupted

log = logging.getLogger("rematch")

_NO_MATTER = ("cache", "progress")  # settings that plans do not depend on


class EarlierPlans:
    """The cache of plans, as one module uses it."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.cache = PlanCache.of(planner.settings)  # None if plans are not to be cached

    def name_of(self, *call: Any, measured: tuple[Any, ...], device: torch.device) -> str | None:
        """What the plan for such a call depends on, as a key; None if there is no cache, or the plan is given."""
        if self.cache is None or self.planner.required is not None:
            return None
        settings = {name: value for name, value in vars(self.planner.settings).items() if name not in _NO_MATTER}
        solver = solver_class(str(self.planner.settings.solver)).solve
        return fingerprint(*call, settings, solver, measured, device=device)

    def route(
        self, name: str, device: torch.device, with_outside: Callable[[StepGraph], Graph], *, ahead: bool
    ) -> Route | None:
        """The route of an earlier start. For replay that is the plan alone, which waits for a trace."""
        assert self.cache is not None
        stored = self.cache.get(name)
        if stored is None:
            return None
        plan = replace(stored.plan, notes=(*stored.plan.notes, CACHE_NOTE))
        step = replace(stored.step, device=device)
        if plan.engine == REPLAY:
            self.planner.remember(plan)
            return Route(plan, step, stale=True, disproved=True) if ahead else None
        try:
            tape = from_data(stored.tape) if plan.recomputed or plan.moved else None
        except FormatError:
            return None
        graph = with_outside(step)
        if not self.planner.adopt(plan, graph, device):
            return None
        log.info("%s runs by a plan of an earlier start", graph.name)
        return Route(plan, step, tape, allocated_bytes=graph.already_allocated_bytes)

    def keep(self, name: str | None, route: Route) -> None:
        """Keep a plan for later starts if it is within its budget and its search was not cut short."""
        plan, step = route.plan, route.step
        if name is None or plan is None or step is None or self.cache is None:
            return
        if was_interrupted(plan.log):
            return
        if (plan.figures.peak_bytes or 0) > self.planner.budget_bytes(step.graph, step.device) and not route.replays:
            return
        with suppress(FormatError):  # an operator that has no name
            tape = None if route.tape is None else to_data(route.tape)
            plan = replace(plan, notes=tuple(note for note in plan.notes if note != CACHE_NOTE))
            self.cache.put(name, StoredPlan(plan, step, tape))

    def forget(self, name: str | None) -> None:
        """A plan that turned out to be wrong."""
        if name is not None and self.cache is not None:
            self.cache.forget(name)
