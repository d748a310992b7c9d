"""The compiled engine beneath DDP and FSDP2, in a group of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rematch.execute.compiled.backend import CompiledBackend
from rematch.planning.planner import Planner
from rematch.planning.settings import COMPILED, Settings
from rematch.trial import Trial
from tests.inductor_graphs import use_eager_kernels
from tests.modules import mean_square

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own
SAMPLE = torch.randn(64, 64)


@pytest.fixture(autouse=True)
def _group(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    use_eager_kernels(monkeypatch)
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


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


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


def test_ddp_cuts_the_graph_into_buckets_that_share_the_budget() -> None:
    module = stack()
    parallel = DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=1)  # type: ignore[arg-type]
    backend = backend_within(2**40)
    trial = Trial(torch.compile(parallel, backend=backend, dynamic=False), mean_square)  # type: ignore[arg-type]
    for _ in range(3):
        trial.step(SAMPLE)
    assert len(list(backend.alive())) > 1
    for ours, theirs in zip(gradients(parallel), eager_gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_fsdp2_with_every_block_compiled() -> None:
    module = stack()
    whole = Trial(stack(), mean_square).peak_bytes(SAMPLE)
    backend = backend_within(int(0.8 * whole))
    for block in module:
        block.compile(backend=backend, dynamic=False)
        fully_shard(block)
    fully_shard(module)
    trial = Trial(module, mean_square)
    for _ in range(4):
        trial.step(SAMPLE)
    assert list(backend.alive())
    for ours, theirs in zip(gradients(module), eager_gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
