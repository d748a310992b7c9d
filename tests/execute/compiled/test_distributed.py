"""The compiled engine beneath DDP and FSDP2, in a group of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._guards import TracingContext
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rematch
from rematch.execute.compiled.backend import CompiledBackend
from rematch.planning import planner
from rematch.planning.compiled import GraphPlanner
from rematch.planning.planner import Planner
from rematch.planning.settings import COMPILED, Settings
from rematch.trial import Trial
from tests.inductor_graphs import use_eager_kernels
from tests.modules import mean_square

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own
_MOST_STEPS = 25
SAMPLE = torch.randn(512, 64)


@pytest.fixture(autouse=True)
def _group(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    use_eager_kernels(monkeypatch)
    monkeypatch.setattr(planner, "_MINIMUM_SECONDS", 0.5)
    monkeypatch.setenv("REMATCH_CACHE", str(tmp_path))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    """Has a bucket of parameters, and makes sixteen times what it is given on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(64, 2048), nn.Linear(2048, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outward(nn.functional.gelu(self.inward(x)))


class Stack(nn.Sequential):
    """Has a forward of its own, which Dynamo traces as one graph, for DDP to cut into buckets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack(*(Block() for _ in range(3)))


def backend_within(budget: int) -> CompiledBackend:
    return CompiledBackend(Planner(Settings(budget=budget, time_limit=1.0, progress=False, engine=COMPILED)))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
    return [gradient for gradient in whole if gradient is not None]


def eager_gradients() -> list[torch.Tensor]:
    plain = stack()
    Trial(plain, mean_square).step(SAMPLE)
    return gradients(plain)


def kept_bytes(make: Callable[[CompiledBackend], nn.Module]) -> int:
    """The peak with everything kept."""
    return settled(make, 2**40)[0].peak_bytes(SAMPLE)


def settled(make: Callable[[CompiledBackend], nn.Module], budget: int) -> tuple[Trial, CompiledBackend]:
    """What is made under a budget, after the steps that it takes: one that could not be measured corrects nothing."""
    torch._dynamo.reset()
    backend = backend_within(budget)
    trial = Trial(make(backend), mean_square)
    for step in range(_MOST_STEPS):
        trial.step(SAMPLE)
        if step >= 4 and all(graph._settled for graph in backend.alive()):
            break
    return trial, backend


def parallel(backend: CompiledBackend) -> nn.Module:
    whole = DistributedDataParallel(stack(), bucket_cap_mb=1)
    return torch.compile(whole, backend=backend, dynamic=False)  # type: ignore[return-value]


def blocks(backend: CompiledBackend) -> nn.Module:
    module = stack()
    for block in module:
        block.compile(backend=backend, dynamic=False)
    return module


def sharded(backend: CompiledBackend) -> nn.Module:
    module = blocks(backend)
    for block in module.children():
        fully_shard(block)
    return fully_shard(module)


@pytest.mark.parametrize("make", [parallel, blocks, sharded])
def test_graphs_share_the_budget(make: Callable[[CompiledBackend], nn.Module]) -> None:
    """Buckets of DDP, compiled before any of them has run, and blocks of one class, which have one graph for all."""
    budget = int(0.8 * kept_bytes(make))
    trial, backend = settled(make, budget)
    assert len(list(backend.alive())) > 1
    assert any(plan.recomputed for plan in backend.planner.plans)
    assert trial.peak_bytes(SAMPLE) <= budget
    trial.step(SAMPLE)
    for ours, theirs in zip(gradients(trial.model), eager_gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_bucket_runs_with_fake_tensors_though_the_guard_of_an_earlier_one_dies_while_it_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide = GraphPlanner.decide

    def decide_late(self: GraphPlanner, *args: Any, **kwargs: Any) -> Any:
        decision = decide(self, *args, **kwargs)
        context = TracingContext.try_get()
        assert context is not None and context.fakify_first_call
        context.fakify_first_call = False  # as that guard does
        return decision

    monkeypatch.setattr(GraphPlanner, "decide", decide_late)
    trial, backend = settled(parallel, 2**40)
    assert len(list(backend.alive())) > 1
    for ours, theirs in zip(gradients(trial.model), eager_gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_graphs_that_cannot_share_a_budget_name_the_least_that_was_measured() -> None:
    whole = kept_bytes(blocks)
    with pytest.raises(rematch.BudgetInfeasible, match="2 graphs that a step runs through") as refusal:
        settled(blocks, int(0.4 * whole))[0].step(SAMPLE)
    least = refusal.value.feasible_from_bytes
    assert least is not None and least < whole
    assert settled(blocks, least)[0].peak_bytes(SAMPLE) <= least
