"""The partitioner that inductor calls: it cuts a joint graph as a plan says.

`torch._inductor.config.patch(custom_partitioner_fn=Partitioner(planner))`

Torch's own partition is made in any case, for it runs where it keeps the budget as it is. It also runs, with a warning,
where a graph cannot be planned or a plan cannot be followed: gradients are never at stake. Any other error is raised.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from rematch.capture.inductor.copies import copy_module
from rematch.capture.inductor.nodes import is_mutation, is_seed_input
from rematch.errors import CaptureError, ScheduleError
from rematch.execute.compiled.split import split
from rematch.planning.compiled import Decision, GraphPlanner, OtherGraph

log = logging.getLogger("rematch")


class Unrepeatable(Exception):
    """Forward changes its arguments, so it cannot run again for the gradient of an output that should have none."""


class Unchanged(Exception):
    """The plan is the one that is compiled already."""


class Partitioner(CustomPartitionerFn):  # type: ignore[misc]
    """See the module; `called` once inductor has asked, which it does for training graphs that no cache has.

    The graph that Dynamo traced has so many `results`, as far as is known. What is `compiled` is not made again.
    """

    def __init__(
        self,
        planner: GraphPlanner,
        identity: tuple[object, ...],
        results: int = 0,
        compiled: Decision | None = None,
    ) -> None:
        self.planner = planner
        self.results = results
        self.compiled = compiled
        self.called = False
        self._identity = identity

    def __deepcopy__(self, _: Any) -> Partitioner:
        """Torch copies its settings, which we are part of while a graph is compiled."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For inductor's caches, which pickle all settings to tell compilations apart."""
        return {"identity": self._identity}

    def uuid(self) -> Any:
        """What inductor's caches tell partitions apart by."""
        return ("rematch", *self._identity)

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        self.called = True
        halves = self._halves(gm, joint_inputs, **kwargs)
        _keep_first_run_of_buckets_fake()
        return halves

    def _halves(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)
        gm.recompile()
        if self.planner.around.unused and self._changes_arguments(gm, **kwargs):
            raise Unrepeatable
        own = min_cut_rematerialization_partition(copy_module(gm)[0], joint_inputs, **kwargs)
        try:
            return self._planned(gm, own, **kwargs)
        except OtherGraph:
            raise
        except (CaptureError, ScheduleError) as error:
            _warn_once(
                "rematch cannot plan a graph of torch.compile, which runs as PyTorch partitions it, without a budget: "
                f"{type(error).__name__}: {error}"
            )
            log.info("no plan for a graph of torch.compile", exc_info=True)
            return own

    def _changes_arguments(self, joint: GraphModule, *, num_fwd_outputs: int, **_: Any) -> bool:
        """Whether forward may: by operators that write, or by results that AOTAutograd copies into arguments."""
        return num_fwd_outputs > self.results or any(is_mutation(node) for node in joint.graph.nodes)

    def _planned(
        self,
        joint: GraphModule,
        own: tuple[GraphModule, GraphModule],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[GraphModule, GraphModule]:
        if any(is_seed_input(node) for node in joint.graph.find_nodes(op="placeholder")):
            raise CaptureError("random numbers come from functionalized generators (functionalize_rng_ops)")
        static = frozenset(static_lifetime_input_indices or ())
        decision = self.planner.decide(joint, own, split, forward_outputs=num_fwd_outputs, static=static)
        assert decision.capture is not None and decision.halves is not None
        if self.compiled is not None and decision.cuts_like(self.compiled):
            raise Unchanged
        if decision.capture.symbolic:
            _warn_once(
                "torch.compile traced a graph with symbolic shapes: rematch plans it for the shapes it is called with "
                "now, and larger ones take more than the budget. dynamic=False plans every shape by itself"
            )
        return decision.halves


def _keep_first_run_of_buckets_fake() -> None:
    """Torch runs each of DDP's buckets once with fake tensors, for which AOTAutograd gets ready when we have returned.

    A flag says so until a guard dies, and planning takes long enough for that of an earlier bucket to be collected.
    """
    context = TracingContext.try_get()
    if context is not None and context.ddp_optimizer_ctx is not None:
        context.fakify_first_call = True


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)
