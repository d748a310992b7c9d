"""A recording is what eager runs; what cannot be recorded is told apart from errors of the user's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rematch
from rematch.capture.aten import PASS_THROUGH
from rematch.capture.measure import measuring
from rematch.capture.memory import PeakMemory
from rematch.capture.record import record
from rematch.capture.recorded_graph import recorded_graph
from rematch.capture.recorder import CannotRecord
from rematch.capture.recording import Recording
from rematch.graph import baseline, simulate
from tests.captures import recording_of

Kernel = tuple[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]


class Listed(TorchDispatchMode):
    """Operators and the layouts of their arguments, in the order in which eager runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PASS_THROUGH:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.kernels.append((str(func), [(tuple(t.shape), t.stride()) for t in tensors]))
        return func(*args, **(kwargs or {}))


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class SpatialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> Any:
        grid = nn.functional.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), [2, 3, 2, 2], align_corners=False)
        return nn.functional.grid_sample(x, grid, align_corners=False)


class Scores(nn.Module):
    """Attention by hand: its products get 32-bit gradients from the softmax under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.project(x)
        return (y @ y.transpose(1, 2)).softmax(-1) @ y


class Chosen(nn.Module):
    """`one_hot` takes another way for tensors that have no data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return x * nn.functional.one_hot(self.router(x).argmax(-1), 3).sum(-1, keepdim=True) * self.router(x).sum()


def of_recurrent(output: Any) -> torch.Tensor:
    return output[0].square().mean()


def mean_square(output: Any) -> torch.Tensor:
    return output.float().square().mean()


def recorded(module: nn.Module, args: tuple[Any, ...], loss: Callable[[Any], torch.Tensor] = mean_square) -> Recording:
    with measuring(torch.device("cpu")) as profiler:
        return record(module, module.forward, args, {}, loss=loss, profile=profiler.profile)


@pytest.mark.parametrize(
    ("module", "sample", "loss", "context"),
    [
        (nn.GRU(4, 6, batch_first=True), torch.randn(3, 5, 4), of_recurrent, nullcontext),  # transposes in place
        (SpatialTransformer(), torch.randn(2, 3, 2, 2), mean_square, nullcontext),  # adds dimensions in place
        (Scores(), torch.randn(2, 5, 8), mean_square, autocast),  # backward runs without autocast
        (Chosen(), torch.randn(5, 8), mean_square, nullcontext),
    ],
)
def test_a_recording_is_what_eager_runs(module: nn.Module, sample: torch.Tensor, loss: Any, context: Any) -> None:
    listed = Listed()
    with listed:
        with context():
            value = loss(module(sample))
        value.backward()
    module.zero_grad(set_to_none=True)
    with context():
        found = recorded(module, (sample,), loss)
    kernels = [
        (str(call.target), [(tuple(ref.tensor.shape), ref.tensor.stride()) for ref in call.inputs])
        for call in found.calls
    ]
    assert kernels == listed.kernels


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.cell(pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True))[0].data


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(torch.func.vmap(torch.func.grad(lambda row: self.inner(row).square().sum()))(x))


@pytest.mark.parametrize(
    ("module", "sample"),
    [
        (Packed(), torch.randn(2, 3, 4)),
        (Slopes(), torch.randn(2, 4)),
        (nn.Embedding(5, 4, sparse=True), torch.tensor([1, 2, 1])),
    ],
)
def test_what_needs_data_cannot_be_recorded(module: nn.Module, sample: torch.Tensor) -> None:
    with pytest.raises(CannotRecord):
        recorded(module, (sample,))


def test_an_error_of_the_users_own_passes_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        recorded(nn.Linear(4, 4), (torch.randn(2, 3),))


def test_casts_of_weights_live_until_autocast_is_left() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with autocast():
        found = recorded(module, (torch.randn(2, 4),))
    weights = {index for index, storage in enumerate(found.storages) if storage.name.endswith("weight")}
    casts = [call for call in found.calls if "_to_copy" in str(call.target) and weights.intersection(call.reads)]
    assert len(casts) == 2
    for cast in casts:
        (storage,) = cast.makes
        assert found.storages[storage].held[0].until == found.loss_at


def test_what_cannot_be_recorded_trains_all_the_same() -> None:
    plain = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    ids = torch.tensor([1, 2, 1])
    inside = rematch.remat(plain, ids, budget="60%", loss=mean_square, progress=False)
    gradients = []
    for module in (plain, inside):
        module.zero_grad(set_to_none=True)
        mean_square(module(ids)).backward()
        gradients.append([p.grad.to_dense() for p in module.parameters() if p.grad is not None])
    assert len(gradients[0]) == 3 and all(map(torch.equal, *gradients))


class Critic(nn.Module):
    """A derivative inside forward, and a graph that forward drops before it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.maker = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())

    def forward(self, x: torch.Tensor) -> Any:
        fake = self.maker(x)
        point = fake.detach().requires_grad_()
        score = self.score(point)
        (slope,) = torch.autograd.grad(score.sum(), point, create_graph=True)
        return score.mean() + slope.square().mean()


def test_the_graph_of_a_recording_has_the_peak_of_eager() -> None:
    module, x = Critic(), torch.randn(256, 16)
    made = recorded_graph(recorded(module, (x,), lambda output: output))
    held_bytes = x.nbytes + sum(parameter.nbytes for parameter in module.parameters())
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        with PeakMemory(torch.device("cpu")) as used:
            module(x).backward()
    assert simulate(made.graph, baseline(made.graph)).peak_bytes == held_bytes + used.peak_bytes


def test_what_forward_differentiates_by_is_not_run_again() -> None:
    made = recorded_graph(recorded(Critic(), (torch.randn(8, 16),), lambda output: output))
    tanhs = [op for op in made.graph.ops if op.name.startswith("tanh_") and "backward" not in op.name]
    again = [not op.once for op in tanhs]
    assert len(again) == 4 and again[0] and not any(again[2:]), "those of the score, which is differentiated by"


class HooksItself(nn.Module):
    """Registers a hook in its first forward, as transformers does to collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.seen: OrderedDict[str, int] = OrderedDict()
        self.hooked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hooked:
            self.hooked = True
            self.seen["calls"] = 0
            self.inner.register_forward_hook(self._doubled)
        return self.inner(x)

    def _doubled(self, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        self.seen["calls"] += 1
        return 2 * output


def test_hooks_that_forward_registers_are_gone_after_recording() -> None:
    module = HooksItself()
    recording_of(module, torch.randn(4, 12))
    assert not module.hooked and not module.seen and not module.inner._forward_hooks


def test_states_of_generators_that_forward_takes_are_counted() -> None:
    """Reentrant checkpoints keep one each; they are made where no dispatcher sees them."""

    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    recording = recording_of(Checkpointed(nn.Linear(12, 12), nn.Linear(12, 12)), torch.randn(4, 12, requires_grad=True))
    assert recording.unseen_bytes == 3 * torch.get_rng_state().nbytes, "two that are kept, one while backward forks"
