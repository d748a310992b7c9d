"""The `forward` of a module that trains inside a budget.

`module.forward = Runner(module, planner)`

Each kind of call (shapes, types, modes) is recorded and planned when it first comes, and has a *route* from then on:
plainly, where everything can be kept, or by an engine that follows its plan. Calls without gradients run plainly.
Everything that must survive copying and pickling is data; routes are made again when needed.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rematch.capture.checkpoints import without_checkpoints
from rematch.capture.devices import require_supported
from rematch.capture.memory import allocated_bytes, use_expandable_segments
from rematch.capture.record import record
from rematch.capture.recorded_graph import RecordedGraph, StepGraph, recorded_graph, with_outside
from rematch.capture.recorder import CannotRecord, Recorder
from rematch.errors import BudgetInfeasible, CaptureError
from rematch.execute.as_forward import AsForward
from rematch.execute.choice import costs_the_host, reasons_for_tape
from rematch.execute.chunked_loss import head_of, with_chunked_loss
from rematch.execute.compaction import Compaction
from rematch.execute.earlier_plans import EarlierPlans
from rematch.execute.first_step import before_first_step, watch_first_step
from rematch.execute.loss_meter import give_up_measuring
from rematch.execute.optimizers import StepWatch, forecast_state_bytes
from rematch.execute.ranks import plan_of_rank_0
from rematch.execute.referee import differences
from rematch.execute.refusals import explained, smaller
from rematch.execute.replay.engine import Replay, Retraced, is_tracing, loss_cost
from rematch.execute.routes import Gradients, Kind, Route, kind_of
from rematch.execute.split_products import with_split_products
from rematch.execute.tape import Blocks, Budget, Parting, run
from rematch.execute.tape.from_schedule import at_unpackings, tape_plan
from rematch.execute.transfers import HostMemory
from rematch.graph import Graph, simulate
from rematch.planning.budget import parse_budget
from rematch.planning.host import about_link, linked
from rematch.planning.joint import JointPlanner, profiling
from rematch.planning.planner import Planner, available_bytes
from rematch.planning.settings import ASSUMED_LOSS, AUTO, REPLACE, REPLAY, TAPE
from rematch.report.progress import measuring_progress
from rematch.units import format_bytes

Loss = Callable[[Any], torch.Tensor]
log = logging.getLogger("rematch")

_MOST_PATHS = 4  # plans for one kind of call, before what its Python does counts as unpredictable
_MOST_CORRECTIONS = 2  # of a plan whose measured peak was above the budget
_MOST_RETRACES = 2  # of one kind of call, before it counts as one that no guard can follow
_SPLIT_NOTE = "products: the gradients of two factors are computed one by one, for both at once do not fit"


_NOT_DATA = (
    "_routes",
    "_replays",
    "_unreplayable",
    "_replay_refused",
    "_watch",
    "_gradients",
    "_lock",
    "host",
    "earlier_plans",
)


class Runner(AsForward):
    """Callable like the `forward` it replaces; see the module."""

    def __init__(self, module: nn.Module, planner: Planner, loss: Loss | None = None) -> None:
        super().__init__(module)
        self.planner = planner
        self.loss = loss
        self.holds_outputs = False
        self.taken: frozenset[str] = frozenset()  # parameters whose gradients hooks use up while backward runs
        self.loss_ratios: tuple[float, float] | None = None  # workspace and retained bytes, per byte of the roots
        self.state_bytes = 0  # of optimizers
        self.captures_blocks = True  # until one of them turns out to be another program than eager's
        self.corrections = 0  # of the plan, by measured peaks
        self.warned = False  # that a call does not fit the budget
        self.shares_first_call = False  # whether all ranks make that call, so that rank 0 can plan it for them
        self.compaction = Compaction()
        self._reset()

    def _reset(self) -> None:
        self._routes: dict[Kind, Route] = {}
        self._replays: dict[int, Replay] = {}  # by how many gradients are there already: these take memory of the plan
        self._replay_refused: str | None = None  # once, for whatever shape; a trace is dear
        self._unreplayable: set[Kind] = set()  # kinds of calls that are traced anew too often
        self._watch: StepWatch | None = None
        self._gradients = Gradients(self.module)
        self.earlier_plans = EarlierPlans(self.planner)
        self.host: HostMemory | None = None  # once values move there
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_DATA}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _planned_forward(self, splits_products: bool = False) -> Callable[..., Any]:
        """The module's own forward, with its head and loss in slices if the user asked for that."""
        chunks = self.planner.settings.chunk_loss
        forward = self.plain if chunks == 1 else with_chunked_loss(self.plain, head_of(self.module), chunks)
        return with_split_products(forward) if splits_products else forward

    @property
    def has_trained(self) -> bool:
        """Whether a call with gradients has come."""
        return bool(self._routes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside another capture, which takes this module as part of itself
            _warn_of_bypass(type(self.module).__name__)
            if self.inner is not None:
                return self.inner(*args, **kwargs)
            # Not `self.plain`: Dynamo does not trace a method that is bound while it looks on.
            return type(self.module).forward(self.module, *args, **kwargs)
        give_up_measuring()  # a forward of ours is no part of a loss
        if (
            not torch.is_grad_enabled()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack())  # of a module around us
        ):
            return self.plain(*args, **kwargs)
        key = self._kind(args, kwargs)
        route = self._routes.get(key)
        if route is None or route.stale:
            shared = self.shares_first_call and not self._routes
            with plan_of_rank_0(self) if shared else nullcontext():
                route = self._new_route(key, args, kwargs)
        return self._follow(key, route, args, kwargs)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Route:
        """Record, plan and compile for these arguments without running anything on them."""
        with torch.enable_grad():
            return self._new_route(self._kind(args, kwargs), args, kwargs, ahead=True)

    def expect(self, optimizer: torch.optim.Optimizer) -> None:
        """Count what the optimizer will keep once it has made its first step."""
        device = _device(self.module, (), {})
        with profiling(self.planner.settings.device, device, lambda _: None) as profiler:
            self.state_bytes = forecast_state_bytes(optimizer, profiler.profile)

    def _owns(self, parameter: torch.Tensor) -> bool:
        return any(parameter is own for own in self.module.parameters())

    def recorded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, splits_products: bool = False
    ) -> RecordedGraph:
        """The graph of a training step with these arguments, with its costs and what lies outside of it."""
        settings = self.planner.settings
        device = _device(self.module, args, kwargs)
        require_supported(device, settings.device)
        give_up_measuring()
        with (
            measuring_progress(settings.progress) as shown,
            profiling(settings.device, device, shown) as profiler,
        ):
            recording = record(
                self.module,
                self._planned_forward(splits_products),
                args,
                kwargs,
                loss=self.loss,
                profile=profiler.profile,
                holds_outputs=self.holds_outputs,
                accumulate=settings.accumulate,
                taken=self.taken,
                replace_checkpoints=settings.checkpoints == REPLACE,
            )
            notes = (*profiler.notes, *settings.about_checkpoints(recording.checkpoints), *settings.about_chunks)
            made = recorded_graph(recording, name=type(self.module).__name__, notes=notes)
        return replace(made, graph=self._with_outside(made.step), splits_products=splits_products)

    def leaner(self, recorded: RecordedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedGraph | None:
        """The same step with the gradients of factors computed one by one; None if it has no products to split."""
        if recorded.splits_products:
            return None
        split = self.recorded(args, kwargs, splits_products=True)
        return None if split.graph.fingerprint == recorded.graph.fingerprint else split

    def _with_outside(self, step: StepGraph, allocated: int | None = None) -> Graph:
        """The graph with the user's own loss, where that is not recorded, and with what is allocated already.

        That is what is allocated now, unless said: in the middle of a step it would hold the step's own values.
        """
        workspace_bytes = retained_bytes = 0
        if not step.has_loss:
            scalar = step.root_bytes <= 16 * max(1, step.roots)
            workspace, retained = self.loss_ratios or (0.0 if scalar else ASSUMED_LOSS, 0.0)
            workspace_bytes = int(workspace * step.root_bytes)
            retained_bytes = max(int(retained * step.root_bytes), 4 * allocated_bytes(16, step.device))
        if allocated is None:
            outside_bytes = self.planner.outside_bytes(step.graph, step.device, self.state_bytes)
            allocated = outside_bytes + step.unseen_bytes
        graph = with_outside(
            step.graph,
            loss_workspace_bytes=workspace_bytes,
            loss_retained_bytes=retained_bytes,
            allocated_bytes=allocated,
        )
        return linked(graph, step.device, self.planner.settings.device, self.planner.host_bytes)

    # Routes

    def _kind(self, args: Any, kwargs: Any) -> Kind:
        return kind_of(args, kwargs, training=self.module.training, gradients=self._gradients.count())

    def _new_route(self, key: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], *, ahead: bool = False) -> Route:
        """Find the route for a kind of call; `ahead` of the first such call, what only that needs can wait."""
        with self._lock:
            known = self._routes.get(key)
            if known is not None and not known.stale:
                return known
            device = _device(self.module, args, kwargs)
            if self.planner.settings.device is None:
                use_expandable_segments(device)  # for cached plans too: they count on it
            if self._watch is None:
                self._watch = StepWatch(self._owns, self.optimizer_grew)
            paths = 1 if known is None else known.paths
            name = self._name_of_plan(args, kwargs, device)
            disproved = known is not None and known.disproved
            route = None
            if name is not None and not disproved:
                route = self.earlier_plans.route(name, device, self._with_outside, ahead=ahead)
            if route is None:
                route = self._from_recording(key, args, kwargs)
                self.earlier_plans.keep(name, route)
            route.name, route.paths = name, paths
            self._routes[key] = route
            return route

    def _from_recording(self, key: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Route:
        try:
            recorded = self.recorded(args, kwargs)
        except CannotRecord as refused:
            log.info("%s: %s; values are dropped as memory runs short", type(self.module).__name__, refused)
            return Route(None)
        required = self.planner.required
        if required is not None and required.graph_fingerprint != recorded.graph.fingerprint:
            recorded = self.leaner(recorded, args, kwargs) or recorded
        return self._planned(key, recorded, args, kwargs)

    def _name_of_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> str | None:
        """What the plan for such a call depends on, as a key; None if earlier plans do not matter."""
        outside = (self.loss_ratios, self.state_bytes, self.planner.withheld_bytes)
        measured = (self.holds_outputs, sorted(self.taken), *outside)
        call = (self.module, self.plain, args, kwargs, self.loss)
        return self.earlier_plans.name_of(*call, measured=measured, device=device)

    def _planned(
        self,
        key: Kind,
        recorded: RecordedGraph,
        args: Any,
        kwargs: Any,
        refused: BudgetInfeasible | None = None,
    ) -> Route:
        """The route for a recorded step. `refused` is why there is none for the same step without products split."""
        if not recorded.recording.roots:
            return Route(None, recorded.step, plain=True)
        engine, notes = self._engine(key, recorded, args, kwargs)
        notes = (*recorded.notes, *about_link(recorded.graph, recorded.device), *notes)
        if engine == REPLAY:
            return Route(self.planner.plans[-1], recorded.step)
        try:
            runnable = partial(at_unpackings, recorded)
            plan = self.planner.plan(recorded.graph, recorded.device, engine=TAPE, notes=notes, adapted=runnable)
        except BudgetInfeasible as infeasible:
            leaner = self.leaner(recorded, args, kwargs)
            if leaner is not None:
                return self._planned(key, leaner, args, kwargs, refused=infeasible)
            if not self.planner.plans:
                raise explained(smaller(infeasible, refused), recorded, self.planner.settings) from None
            plan = self.planner.least_memory_plan(recorded.graph, recorded.device, engine=TAPE, notes=notes)
            peak_bytes = plan.figures.peak_bytes or 0
            if peak_bytes > recorded.graph.resident_bytes + available_bytes(
                recorded.device, self.planner.settings.device
            ):
                raise
            self._warn_of_excess(
                f"{recorded.graph.name}: this call does not fit the budget; it runs with the least memory that was "
                f"found, {format_bytes(peak_bytes)}. {str(infeasible).splitlines()[0]}"
            )
        # What forward reads of the data may decide for a longer path next time.
        followed = plan.recomputed or plan.moved or recorded.recording.reads
        tape = tape_plan(recorded, plan.schedule) if followed else None
        return Route(plan, recorded.step, tape, allocated_bytes=recorded.graph.already_allocated_bytes)

    def _warn_of_excess(self, message: str) -> None:
        """Once; the log has them all."""
        log.info(message)
        if not self.warned:
            self.warned = True
            warnings.warn(message, stacklevel=6)

    def _engine(self, key: Kind, recorded: RecordedGraph, args: Any, kwargs: Any) -> tuple[str, tuple[str, ...]]:
        """Which engine runs this graph, and why if the user did not choose."""
        if recorded.splits_products:
            return TAPE, (_SPLIT_NOTE,)
        asked = self.planner.settings.engine
        required = self.planner.required
        if required is not None and asked == AUTO:
            asked = required.engine
        if asked == TAPE:
            return TAPE, ()
        if key in self._unreplayable:
            return TAPE, ("engine: tape, because what forward reads changes from call to call",)
        if self.planner.settings.chunk_loss != 1:
            return TAPE, ("engine: tape, because chunk_loss cuts what the module's own Python runs",)
        if asked == AUTO:
            budget_bytes = self.planner.budget_bytes(recorded.graph, recorded.device)
            reasons = reasons_for_tape(recorded, self.planner.settings, budget_bytes, self.loss is not None)
            if reasons is not None:
                return TAPE, reasons
            if self._replay_refused is not None:
                return TAPE, (self._replay_refused,)
        return self._try_replay(key, recorded, args, kwargs, chosen=asked == REPLAY)

    def _try_replay(
        self, key: Kind, recorded: RecordedGraph, args: Any, kwargs: Any, *, chosen: bool
    ) -> tuple[str, tuple[str, ...]]:
        """Replay, if the whole forward can be traced and the trace is what eager runs."""
        if not chosen and torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return TAPE, ("engine: tape, because a profiler runs, and replay measures the loss by one",)
        self.planner.budget_bytes(recorded.graph, recorded.device)  # a percentage is of eager's peak, for both engines
        try:
            replay = self._replays.get(key.gradients) or self._new_replay(recorded, args, kwargs)
            replay.prepare(args, kwargs, referee=lambda joint: differences(joint, recorded.recording))
        except CaptureError as refused:
            if chosen:
                raise
            self._replay_refused = f"engine: tape, because replay refused: {str(refused).splitlines()[0]}"
            return TAPE, (self._replay_refused,)
        except BudgetInfeasible:
            if chosen:
                raise
            return TAPE, ()
        self._replays[key.gradients] = replay
        return REPLAY, ()

    def _new_replay(self, recorded: RecordedGraph, args: Any, kwargs: Any) -> Replay:
        planner = JointPlanner(self.module, self.planner)
        planner.state_bytes = self.state_bytes
        planner.taken = self.taken
        planner.notes = self.planner.settings.about_checkpoints(recorded.recording.checkpoints)
        planner.loss_ratios = self.loss_ratios or planner.loss_ratios
        replay = Replay(self.module, self.plain, planner, self._host_memory() if self.planner.host_bytes else None)
        if self.loss is not None:
            planner.loss = replay.measure_loss(self.loss, args, kwargs)
        return replay

    # Running

    def _follow(self, key: Kind, route: Route, args: Any, kwargs: Any) -> Any:
        if route.step is not None:
            self.compaction.before_step(route.step.device)
        replay = self._replays.get(key.gradients) if route.replays else None
        if replay is not None and not torch._C._len_torch_dispatch_stack():  # Dynamo leaves calls under a mode alone
            if not route.watched:
                before_first_step(route)
            try:
                outputs = replay(*args, **kwargs)
                self._look_at_host()
            except Retraced:  # a guard failed: what forward reads has changed
                route = self._after_retrace(key, route, args, kwargs)
                return self._follow(key, route, args, kwargs)
            if not route.watched:
                watch_first_step(self, route, outputs)
            return outputs
        if not route.watched:
            before_first_step(route)
        replaced = self.planner.settings.checkpoints == REPLACE
        forward = self._planned_forward(route.tape is not None and route.tape.splits_products)
        forward = without_checkpoints(forward) if replaced else forward
        if route.runs_plainly:
            outputs = forward(*args, **kwargs)
        else:
            parted = weakref.WeakMethod(self._parted)
            outputs = run(
                forward,
                args,
                kwargs,
                plan=route.tape,
                budget=Budget(self._bytes_for_saved(route)),
                parted=lambda parting: _call(parted, key, parting),
                blocks=self._blocks(route),
                host=self._host_memory() if route.tape is not None and route.tape.moved else None,
            )
            self._look_at_host()
        if not route.watched:
            watch_first_step(self, route, outputs)
        return outputs

    def _blocks(self, route: Route) -> Blocks | None:
        """Blocks that run as captured, from the second step on, where following them would keep a card waiting.

        Where the tape only watches, it stops at one of them.
        """
        if route.blocks is None and self.captures_blocks and route.watched:
            captured = self._keeps_card_waiting(route)
            if captured or (route.tape is not None and route.tape.only_watches):
                route.blocks = Blocks.of(self.module, captured=captured)
        return route.blocks

    def _host_memory(self) -> HostMemory:
        if self.host is None:
            self.host = HostMemory(self.planner.host_bytes)
        return self.host

    def _look_at_host(self) -> None:
        """If a value found no room in host memory, and stayed, say so."""
        host = self.host
        if host is None or host.shortage is None:
            return
        if host.exhausted:
            host.limit_bytes = self.planner.host_bytes = host.taken_bytes
            self._plan_again("the machine has less host memory than was asked for")
        self._warn_of_excess(
            f"{type(self.module).__name__}: host memory ran out: {host.shortage}. What found no room stays on the "
            "device, so that this step may take more than the budget"
            + ("; the next ones recompute more instead" if host.exhausted else "")
        )
        host.shortage, host.exhausted = None, False

    def _keeps_card_waiting(self, route: Route) -> bool:
        if route.tape is None or route.step is None or route.step.device.type != "cuda":
            return False
        if route.tape.splits_products:  # by Python, which captured blocks have none of
            return False
        return costs_the_host(len(route.tape.calls), route.step.graph, route.step.device)

    def _after_retrace(self, key: Kind, route: Route, args: Any, kwargs: Any) -> Route:
        route.stale = route.disproved = True
        route.retraces += 1
        if route.retraces > _MOST_RETRACES:
            self._unreplayable.add(key)
        retraces = route.retraces
        route = self._new_route(key, args, kwargs)
        route.retraces = retraces
        return route

    def _parted(self, key: Kind, parting: Parting) -> None:
        """A call left its plan: plan its path for the next one, or give up after many."""
        route = self._routes.get(key)
        if route is None or route.tape is None:
            return
        if route.blocks is not None and route.blocks.misled:
            self.captures_blocks, route.blocks = False, None
            return
        self.earlier_plans.forget(route.name)
        if route.paths >= _MOST_PATHS:
            log.warning(
                "%s takes other paths than its plans; values are dropped as memory runs short",
                type(self.module).__name__,
            )
            self._routes[key] = Route(None, route.step, watched=True)
        else:
            route.paths += 1
            route.stale = route.disproved = True

    def _bytes_for_saved(self, route: Route) -> int:
        """What saved values may take where no plan tells: the budget less what is resident and one operator's needs."""
        if route.step is not None:
            graph = route.step.graph
            budget_bytes = self.planner.budget_bytes(graph, route.step.device)
            return max(0, budget_bytes - 2 * graph.largest_op_bytes + graph.resident_bytes)
        resident_bytes = 2 * sum(parameter.nbytes for parameter in self.module.parameters())
        return max(0, (self._unplanned_budget() - resident_bytes) // 2)

    def _unplanned_budget(self) -> int:
        """The budget where nothing was recorded: a percentage is then of nothing known, and drops all that it can."""
        budget = self.planner.settings.budget
        if budget == AUTO:
            return available_bytes(_device(self.module, (), {}), None)
        if self.planner.whole_bytes is None and isinstance(budget, str) and budget.strip().endswith("%"):
            return 0
        return parse_budget(budget, self.planner.whole_bytes or 1)

    # The first step

    def loss_measured(self, route: Route, peak_bytes: int, end_bytes: int) -> None:
        """Take note of what the loss really takes, and plan again if the plan no longer keeps the budget."""
        root_bytes = 0 if route.step is None else route.step.root_bytes
        if not root_bytes:
            return
        cost = loss_cost(peak_bytes, end_bytes, root_bytes)
        self.loss_ratios = (cost.workspace_bytes / root_bytes, cost.retained_bytes / root_bytes)
        self._check_again("the loss takes more memory than was assumed")

    def outputs_held(self) -> None:
        """The user holds what forward returned while backward runs: that counts from the next step on."""
        if not self.holds_outputs:
            self.holds_outputs = True
            self._plan_again("the outputs are held while backward runs")

    def backward_ended(self) -> None:
        """A first backward has: gradients that hooks have used up by then need no memory from the next step on."""
        taken = frozenset(name for name, parameter in self.module.named_parameters() if _is_used_up(parameter))
        if taken != self.taken:
            self.taken = taken
            self._plan_again("hooks use gradients up while backward runs")

    def peak_measured(self, peak_bytes: int) -> None:
        """A first step has ended: where it took more than the budget, plan for as much less."""
        excess_bytes = self.planner.excess_bytes(peak_bytes)
        if excess_bytes and self.corrections < _MOST_CORRECTIONS:
            self.corrections += 1
            self.planner.withheld_bytes += excess_bytes
            self._plan_again(f"its measured peak was {format_bytes(excess_bytes)} above the budget")

    def optimizer_grew(self, state_bytes: int) -> None:
        """An optimizer made its state."""
        if state_bytes > self.state_bytes:
            more_bytes, self.state_bytes = state_bytes - self.state_bytes, state_bytes
            self._check_again("the optimizer has made its state", more_bytes)

    def _check_again(self, why: str, more_bytes: int = 0) -> None:
        """Plan again what no longer keeps the budget; `more_bytes` are there than plans know of."""
        for route in list(self._routes.values()):
            if route.step is not None and route.plan is not None and self._is_over(route, more_bytes):
                self._plan_again(why)
                return

    def _is_over(self, route: Route, more_bytes: int) -> bool:
        """Whether the route's plan breaks the budget by what is known now."""
        assert route.step is not None and route.plan is not None
        if route.replays:
            return (route.plan.figures.peak_bytes or 0) + more_bytes > route.plan.figures.budget_bytes
        graph = self._with_outside(route.step, route.allocated_bytes + more_bytes)
        peak_bytes = simulate(graph, route.plan.schedule).peak_bytes
        return peak_bytes > self.planner.budget_bytes(graph, route.step.device)

    def _plan_again(self, why: str) -> None:
        log.info("%s is planned again: %s", type(self.module).__name__, why)
        for route in list(self._routes.values()):
            route.stale = True
        self._replays.clear()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_of_bypass(name: str) -> None:
    """Called while another capture traces the module, and so once for each trace; ours counts what is inside."""
    if is_tracing():
        return
    warnings.warn(
        f"{name} was given a budget by rematch and is now captured by torch.compile: the budget is not kept. "
        "Apply rematch to the modules that are not compiled",
        stacklevel=2,
    )


def _is_used_up(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.grad is None and bool(parameter._post_accumulate_grad_hooks)


def _call(method: weakref.WeakMethod[Any], *args: Any) -> None:
    bound = method()
    if bound is not None:
        bound(*args)


def _device(module: nn.Module, args: Any, kwargs: Any) -> torch.device:
    """Where the step runs: CUDA if any tensor of it is there."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    devices = [tensor.device for tensor in (*module.parameters(), *module.buffers(), *leaves)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
