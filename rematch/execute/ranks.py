"""Training in several processes: all of them follow the plan of rank 0.

`with plan_of_rank_0(runner): runner.prepare(args, kwargs)`
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rematch.errors import CaptureError
from rematch.planning.plan import Plan

if TYPE_CHECKING:
    from rematch.execute.runner import Runner


def require_order(module: nn.Module) -> None:
    """Refuse a module that another wrapper drives already: rematch belongs inside of it."""
    name = type(module).__name__
    if isinstance(module, DistributedDataParallel | DataParallel):
        raise CaptureError(
            f"the module is wrapped in {name} already: rematch first, then {name}, as in "
            f"{name}(rematch.remat(model, ...)). To change what is wrapped now, use "
            "rematch.remat(wrapped.module, ..., in_place=True)"
        )
    if dist.is_available() and any(isinstance(each, _sharded_kind()) for each in module.modules()):
        raise CaptureError(
            "the module is sharded by fully_shard already: rematch first, then fully_shard. Call "
            "rematch.remat(unit, ..., in_place=True) for each module that you shard, and shard it afterwards"
        )


def _sharded_kind() -> type:
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


@contextmanager
def plan_of_rank_0(runner: Runner) -> Iterator[None]:
    """What is planned inside is planned by rank 0, while the other ranks wait for its plans and follow them.

    Another rank plans for itself if its graph is another one or the plan does not fit its budget.
    """
    if not in_a_group():
        yield
    elif dist.get_rank() == 0:
        try:
            yield
        finally:  # also after a failure: the others wait
            data = [plan.to_data() for plan in runner.planner.plans]
            dist.broadcast_object_list([json.dumps(data)], src=0)
    else:
        received = [""]
        dist.broadcast_object_list(received, src=0)
        plans = [Plan.from_json(data, "the plan of rank 0") for data in json.loads(received[0])]
        earlier = runner.earlier_plans
        cache, earlier.cache = earlier.cache, None  # which may hold another plan
        runner.planner.plans = plans
        try:
            yield
        finally:
            earlier.cache = cache
            unused = {id(plan) for plan in plans if plan.graph is None}
            runner.planner.plans = [plan for plan in runner.planner.plans if id(plan) not in unused]


def in_a_group() -> bool:
    """Whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
