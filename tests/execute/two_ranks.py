"""What two processes with gloo between them do; `test_two_ranks.py` starts both and reads what they write.

`python -m tests.execute.two_ranks FOLDER`, in an environment as torchrun sets it
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rematch
from rematch.capture.memory import PeakMemory
from rematch.errors import CaptureError
from rematch.execute.compiled.backend import CompiledBackend
from rematch.planning import planner
from rematch.planning.planner import Planner
from rematch.planning.settings import COMPILED, Settings
from tests.inductor_graphs import use_eager_kernels
from tests.modules import Net, mean_square
from tests.training import same_bits

OPTIONS: dict[str, Any] = {"budget": "80%", "engine": "tape", "solver": "anneal", "time_limit": 0.5, "cache": False}


def net() -> Net:
    torch.manual_seed(0)
    return Net(depth=6, norm=False)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(rank))


def gradients(module: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Of the second of two steps."""
    for _ in range(2):
        torch.manual_seed(3)
        module.zero_grad()
        mean_square(module(inputs)).backward()
    found = [parameter.grad for parameter in module.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in found]


def are_equal(one: nn.Module, other: nn.Module, inputs: torch.Tensor) -> bool:
    pairs = zip(gradients(one, inputs), gradients(other, inputs), strict=True)
    return all(same_bits(mine, plain) for mine, plain in pairs)


def gradients_before_buckets(module: nn.Module, inputs: torch.Tensor) -> list[int]:
    """How many gradients have come when each bucket of them leaves, in the third step: the first makes the buckets."""
    left: list[int] = []
    came = 0

    def count(_: torch.Tensor) -> None:
        nonlocal came
        came += 1

    def leave(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        left.append(came)
        return allreduce_hook(None, bucket)

    wrapped = DistributedDataParallel(module, bucket_cap_mb=0.02)
    wrapped.register_comm_hook(None, leave)
    for parameter in module.parameters():
        parameter.register_hook(count)
    for _ in range(3):
        came = 0
        left.clear()
        mean_square(wrapped(inputs)).backward()
        wrapped.zero_grad()
    return left


def data_parallel(rank: int) -> dict[str, Any]:
    planned = rematch.remat(net(), batch(rank), loss=mean_square, **OPTIONS)
    (plan,) = rematch.plans_of(planned)
    alone = rematch.remat(net(), batch(rank), loss=mean_square, share=False, **OPTIONS)
    result = {
        "recomputed": len(plan.recomputed),
        "schedule": plan.schedule.steps.tolist(),
        "solve_seconds": plan.figures.solve_seconds,
        "alone": rematch.plans_of(alone)[0].figures.solve_seconds,
        "equal": are_equal(DistributedDataParallel(planned), DistributedDataParallel(net()), batch(rank)),
        "buckets": gradients_before_buckets(planned, batch(rank)),
        "plain_buckets": gradients_before_buckets(net(), batch(rank)),
    }
    try:
        rematch.remat(DistributedDataParallel(net()), batch(rank), **OPTIONS)
    except CaptureError as refused:
        result["refused"] = str(refused)
    return result


class Wide(nn.Module):
    """Fills a bucket of a megabyte with its parameters, and makes 32 times what it is given on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(32, 4096), nn.Linear(4096, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outward(nn.functional.gelu(self.inward(x)))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Wide() for _ in range(3)))


def compiled(rank: int) -> dict[str, Any]:
    """DistributedDataParallel and torch.compile, each inside the other; eager kernels stand in for inductor's."""
    inputs = batch(rank)
    held_bytes = inputs.nbytes + sum(parameter.nbytes for parameter in wide().parameters())
    parallel = partial(DistributedDataParallel, bucket_cap_mb=1)
    theirs = gradients(parallel(wide()), inputs)

    def by_remat(budget: int) -> tuple[nn.Module, CompiledBackend]:
        planned = rematch.remat(wide(), inputs, budget=budget, engine="compiled", time_limit=0.5)
        assert rematch.plans_of(planned), "every rank has its plans"
        return parallel(planned), planned.__dict__["forward"]._backend

    def inside(budget: int) -> tuple[nn.Module, CompiledBackend]:
        backend = backend_within(budget)
        return parallel(torch.compile(wide(), backend=backend, dynamic=False)), backend

    def outside(budget: int) -> tuple[nn.Module, CompiledBackend]:
        backend = backend_within(budget)
        return torch.compile(parallel(wide()), backend=backend, dynamic=False), backend  # type: ignore[return-value]

    def trained(make: Callable[[int], tuple[nn.Module, CompiledBackend]], budget: int) -> dict[str, Any]:
        torch._dynamo.reset()
        module, backend = make(budget)
        for _ in range(3):
            ours = gradients(module, inputs)  # nobody else may measure while rematch does
        return {
            "graphs": len(list(backend.alive())),
            "recomputed": sum(len(plan.recomputed) for plan in backend.planner.plans),
            "peak": min(peaks_of_steps(lambda: mean_square(module(inputs)).backward(), module)) + held_bytes,
            "close": all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(ours, theirs, strict=True)),
            "norms": [float(gradient.norm()) for gradient in ours],
        }

    with pytest.MonkeyPatch.context() as patch:
        use_eager_kernels(patch)
        patch.setattr(planner, "_MINIMUM_SECONDS", 0.5)
        budget = int(0.75 * trained(inside, 2**40)["peak"])
        found = {make.__name__: trained(make, budget) for make in (by_remat, inside, outside)}
        return {"budget": budget, **found}


def backend_within(budget: int) -> CompiledBackend:
    return CompiledBackend(Planner(Settings(budget=budget, time_limit=0.5, progress=False, engine=COMPILED)))


def peaks_of_steps(step: Callable[[], Any], module: nn.Module) -> list[int]:
    """What each of six steps allocates at most, beyond what was there, after three that measure and plan again.

    Buffers of a collective are freed by the thread that ran it, so the same step now and then has one more of them.
    """
    peaks = []
    for _ in range(9):
        module.zero_grad()
        with PeakMemory(torch.device("cpu")) as used:
            step()
        peaks.append(used.peak_bytes)
    return peaks[3:]


def planned_saving(units: Iterable[nn.Module]) -> int:
    """By how many bytes plans lower the peaks of these modules, taken together."""
    plans = [rematch.plans_of(unit)[-1].figures for unit in units]
    return sum(figures.baseline_peak_bytes - (figures.peak_bytes or 0) for figures in plans)


def sharded(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    inputs = batch(rank)
    parameter_bytes = sum(parameter.nbytes for parameter in net().parameters())
    buffers = 3 * parameter_bytes // 2  # what FSDP2 itself has of a unit: its shard, and copies on their way

    def shard(module: Net, *, plan: bool, blocks: bool) -> nn.Module:
        for block in module.blocks if blocks else ():
            if plan:
                rematch.remat(block, share=False, in_place=True, **{**OPTIONS, "budget": "90%"})
            fully_shard(block, mesh=mesh)
        if plan and not blocks:
            rematch.remat(module, inputs, loss=mean_square, in_place=True, reserve=buffers, **OPTIONS)
        return fully_shard(module, mesh=mesh)

    result: dict[str, Any] = {}
    for name, blocks in (("blocks", True), ("whole", False)):
        planned, plain = (shard(net(), plan=plan, blocks=blocks) for plan in (True, False))
        result[name] = are_equal(planned, plain, inputs)
        units = planned.blocks if blocks else [planned]
        result[f"{name}_recomputed"] = [len(rematch.plans_of(unit)[0].recomputed) for unit in units]
        peaks = [peaks_of_steps(lambda m=m: mean_square(m(inputs)).backward(), m) for m in (plain, planned)]
        result[f"{name}_saved"] = min(peaks[0]) - min(peaks[1]), planned_saving(units)
        if blocks:
            try:
                rematch.remat(planned, inputs, **OPTIONS)
            except CaptureError as refused:
                result["refused"] = str(refused)
        else:
            shards = parameter_bytes // 2
            most = max(peaks[1]) + shards + inputs.nbytes
            result["whole_peak"] = most, rematch.plans_of(planned)[0].figures.budget_bytes
    return result


def tensor_parallel(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))

    def split() -> Net:
        module = net()
        for block in module.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return module

    planned = rematch.remat(split(), share=False, **OPTIONS)
    equal = are_equal(planned, split(), batch(0))
    return {"equal": equal}


def stages(rank: int) -> dict[str, Any]:
    """Each rank has its half of the module and a budget of its own."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    inputs, target = batch(0), torch.zeros(256, 4)

    def half(plan: bool) -> nn.Module:
        whole = net()
        made = copy.deepcopy(nn.Sequential(*(whole.blocks[:3] if rank == 0 else [*whole.blocks[3:], whole.head])))
        if plan:
            rematch.remat(made, share=False, in_place=True, **{**OPTIONS, "budget": "90%" if rank == 0 else "85%"})
        return made

    def step_of(module: nn.Module, microbatches: int) -> Callable[[], None]:
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, microbatches, loss_fn=lambda output, target: mean_square(output - target))
        return lambda: schedule.step(*([inputs] if rank == 0 else []), **({} if rank == 0 else {"target": target}))

    result: dict[str, Any] = {}
    for microbatches in (1, 2):
        planned, plain = half(True), half(False)
        found = []
        for module in (planned, plain):
            torch.manual_seed(3)
            step_of(module, microbatches)()
            found.append([parameter.grad for parameter in module.parameters()])
        equal = all(same_bits(one, other) for one, other in zip(*found, strict=True))
        peak_bytes = max(peaks_of_steps(step_of(planned, microbatches), planned))
        plan = rematch.plans_of(planned)[-1]
        parts = {part.role: part.size_bytes for part in plan.parts}
        result[str(microbatches)] = {
            "equal": equal,
            "recomputed": len(plan.recomputed),
            "peak": peak_bytes + parts["parameters"] + parts["inputs"],
            "budget": plan.figures.budget_bytes,
            "in_flight": (plan.figures.peak_bytes or 0) - parts["parameters"],
        }
    return result


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    case.__name__: case for case in (data_parallel, compiled, sharded, tensor_parallel, stages)
}


def main() -> None:
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    for name in sys.argv[2:] or CASES:
        result = CASES[name](rank)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
