"""A tape under or around what shards a model, in a group of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from rematch.execute.tape import Budget
from tests.modules import Net, batch, mean_square
from tests.taped import taped
from tests.training import same_bits

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs a torch built with distributed training")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def under_a_tape(module: nn.Module) -> nn.Module:
    return taped(module, None, budget=Budget(0))


def gradients_of(module: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    mean_square(module(batch(8))).backward()
    found = [parameter.grad for parameter in module.parameters()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


def assert_same_gradients(wrapped: nn.Module, plain: nn.Module) -> None:
    assert all(same_bits(a, b) for a, b in zip(gradients_of(wrapped), gradients_of(plain), strict=True))


def _sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in module.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


def _data_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module)


@pytest.mark.parametrize("distribute", [_tensor_parallel, _data_parallel])
def test_around(mesh: DeviceMesh, distribute: Callable[[nn.Module, DeviceMesh], nn.Module]) -> None:
    plain = Net(depth=2)
    wrapped = under_a_tape(distribute(copy.deepcopy(plain), mesh))
    assert_same_gradients(wrapped, distribute(plain, mesh))


def test_inside_units_that_are_sharded(mesh: DeviceMesh) -> None:
    plain = Net(depth=2)
    wrapped = copy.deepcopy(plain)
    for block in wrapped.blocks:
        under_a_tape(block)
    assert_same_gradients(_sharded(wrapped, mesh), _sharded(plain, mesh))


def test_around_units_that_are_sharded_it_refuses_in_words(mesh: DeviceMesh) -> None:
    wrapped = under_a_tape(_sharded(Net(depth=2), mesh))
    with pytest.raises(RuntimeError, match="apply rematch inside the unit that shards them"):
        gradients_of(wrapped)
