"""What only a CUDA card has: streams, cuDNN's recurrent layers, CUDA graphs, and memory that runs out."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rematch
from rematch.execute.tape import tape as tape_module
from rematch.planning.settings import REPLAY, TAPE
from rematch.trial import Trial, same_outcome

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card and a torch built for it")
WIDTH = 128
BOTH = pytest.mark.parametrize("engine", [TAPE, REPLAY])


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Forked(nn.Module):
    """Half of its layers run on a stream of their own, beside the others."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.here, self.beside = (nn.ModuleList(Layer() for _ in range(depth)) for _ in range(2))
        self.stream: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cuda":
            beside = x
            for layer in self.beside:
                beside = layer(beside)
        else:
            self.stream = self.stream or torch.cuda.Stream(x.device)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                beside = x
                for layer in self.beside:
                    beside = layer(beside)
        for layer in self.here:
            x = layer(x)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        return 0.5 * x + 0.5 * beside  # each branch has a gradient of its own, which the other cannot write to


def planned(module: nn.Module, sample: torch.Tensor, **options: Any) -> nn.Module:
    """The module within a budget; it shares the parameters of the other one."""
    gc.collect()  # what other tests have left would count
    given = {"budget": "80%", "time_limit": 2.0, "loss": mean_square, "progress": False, "cache": False, **options}
    return rematch.remat(module, sample, **given)


def assert_trains_alike(wrapped: nn.Module, plain: nn.Module, sample: torch.Tensor, steps: int = 4) -> None:
    for seed in range(steps):
        assert same_outcome(Trial(wrapped, mean_square), Trial(plain, mean_square), sample, seed)


@needs_cuda
@pytest.mark.cuda
@BOTH
def test_a_step_on_a_stream_of_its_own(engine: str) -> None:
    plain, sample = nn.Sequential(*(Layer() for _ in range(6))).cuda(), torch.randn(32768, WIDTH, device="cuda")
    wrapped = planned(plain, sample, engine=engine)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_trains_alike(wrapped, plain, sample)
    torch.cuda.synchronize()


@needs_cuda
@pytest.mark.cuda
def test_a_forward_that_uses_several_streams() -> None:
    plain, sample = Forked().cuda(), torch.randn(65536, WIDTH, device="cuda")
    wrapped = planned(plain, sample, engine=TAPE)
    assert rematch.plans_of(wrapped)[0].recomputed
    trial = Trial(plain, mean_square)
    if not all(same_outcome(trial, trial, sample, seed) for seed in range(4)):
        pytest.skip("plain training on several streams does not repeat itself here; one that does would unskip this")
    assert_trains_alike(wrapped, plain, sample, steps=8)


def test_what_runs_on_another_stream_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no card is, numbers stand for streams."""
    streams = iter([7])  # on which forward begins; then another
    monkeypatch.setattr(tape_module, "current_stream", lambda: next(streams, 8))
    plain, sample = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(1024, WIDTH)
    wrapped = planned(plain, sample, engine=TAPE)
    kept = []
    notes = tape_module.Note.__init__

    def note(self: Any, *args: Any) -> None:
        kept.append(args)
        notes(self, *args)

    monkeypatch.setattr(tape_module.Note, "__init__", note)
    assert_trains_alike(wrapped, plain, sample, steps=1)
    assert not kept


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.before = Layer()
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)
        self.after = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.after(self.recurrent(self.before(x))[0])
        return made


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recurrent_layers_of_cudnn_train(kind: type[nn.RNNBase], dropout: float) -> None:
    plain, sample = Recurrent(kind, dropout=dropout).cuda(), torch.randn(64, 100, WIDTH, device="cuda")
    wrapped = planned(plain, sample)
    assert_trains_alike(wrapped, plain, sample)
    assert Trial(wrapped, mean_square).peak_bytes(sample) < Trial(plain, mean_square).peak_bytes(sample)


@needs_cuda
@pytest.mark.cuda
@BOTH
def test_memory_that_runs_out_leaves_the_module_usable(engine: str) -> None:
    plain, sample = nn.Sequential(*(Layer() for _ in range(6))).cuda(), torch.randn(65536, WIDTH, device="cuda")
    wrapped = planned(plain, sample, engine=engine)
    assert_trains_alike(wrapped, plain, sample, steps=2)
    plain.zero_grad(set_to_none=True)
    wrapped.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    for more in (2**26, 2**25, 2**27):  # out of memory at several places of the step
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                mean_square(wrapped(sample)).backward()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            wrapped.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    assert_trains_alike(wrapped, plain, sample, steps=2)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # make_graphed_callables holds its warm-up's
def test_replayed_steps_can_be_captured_as_cuda_graphs() -> None:
    plain, sample = nn.Sequential(*(Layer() for _ in range(6))).cuda(), torch.randn(32768, WIDTH, device="cuda")
    wrapped = planned(plain, sample, engine=REPLAY)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # as PyTorch asks for before a capture
        for _ in range(3):
            mean_square(wrapped(sample)).backward()
    torch.cuda.current_stream().wait_stream(beside)
    wrapped.zero_grad(set_to_none=True)
    graphed: Any = torch.cuda.make_graphed_callables(wrapped, (sample,))
    assert_trains_alike(graphed, plain, sample)
