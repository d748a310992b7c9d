"""A recording has the operators that eager dispatches, one by one, and recording changes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import rematch
from rematch.capture.aten import PASS_THROUGH
from rematch.capture.recorder import CannotRecord
from rematch.graph import Phase
from tests.captures import recording_of
from tests.modules import Net, batch, mean_square
from tests.taped import Calls
from tests.training import assert_same_steps, noted, same_bits, step_of, train

aten = torch.ops.aten
IDS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(5, 7, 8, generator=torch.Generator().manual_seed(1))
SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=32, num_key_value_heads=1))


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=16, layerdrop=0.5, dropout=0.0))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SMALL, intermediate_size=32, num_key_value_heads=1, num_local_experts=3)
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.net.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.net.head(x)


class InPlace(nn.Module):
    """Writes through views, by indices and into results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu_(self.norm(self.linear(x)))
        out = torch.zeros(*y.shape[:2], 16)
        out[..., :8] = y * 2
        out[:, ::2].mul_(2.0)
        y = y + 1
        y.mul_(3.0)[:, 0] = 0.5
        return torch.cat([out, y], -1).exp_()


def _logits(output: Any) -> torch.Tensor:
    output = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    return output.float().square().mean()


class Case:
    def __init__(self, build: Callable[[], nn.Module], *args: Any, autocast: bool = False, **kwargs: Any) -> None:
        self.build, self.args, self.kwargs, self.autocast = build, args, kwargs, autocast

    def made(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def context(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


CASES = {
    "net": Case(Net, batch(8)),
    "lstm": Case(lambda: nn.LSTM(8, 8, 2, dropout=0.2, bidirectional=True), ROWS),
    "transformer": Case(lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), ROWS, ROWS[:, :4]),
    "checkpoint": Case(lambda: Checkpointed(False), batch(8)),
    "checkpoint, reentrant": Case(lambda: Checkpointed(True), batch(8).requires_grad_()),
    "autocast": Case(_gpt2, IDS, autocast=True),
    "llama": Case(_llama, IDS),
    "llama, mask of ones": Case(_llama, IDS, attention_mask=torch.ones_like(IDS)),
    "llama, padded": Case(_llama, IDS, attention_mask=(torch.arange(9) > torch.tensor([[0], [3]])).long()),
    "opt, layers dropped": Case(_opt, IDS),
    "mixtral": Case(_mixtral, IDS, attention_mask=torch.ones_like(IDS)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_recording_is_what_eager_dispatches(name: str) -> None:
    case = CASES[name]
    module = case.made()
    torch.manual_seed(7)
    with case.context():
        recording = recording_of(module, (case.args, case.kwargs), loss=_logits)
    torch.manual_seed(7)
    with Calls() as calls:
        with case.context():
            value = _logits(module(*case.args, **case.kwargs))
        value.backward()
    assert [call.target for call in recording.calls] == [func for func in calls.seen if func not in PASS_THROUGH]
    phases = [call.phase for call in recording.calls]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.LOSS, Phase.BACKWARD].index)
    assert set(recording.gradients) == {name for name, p in module.named_parameters() if p.grad is not None}


def test_writes_through_views_are_recorded_with_other_views_at_most() -> None:
    module = InPlace()
    recording = recording_of(module, ROWS, loss=_logits)
    with Calls() as calls:
        _logits(module(ROWS)).backward()
    kernels = [
        [func for func in seen if not func.is_view] for seen in ([c.target for c in recording.calls], calls.seen)
    ]
    assert kernels[0] == kernels[1]


def test_calls_know_their_modules() -> None:
    recording = recording_of(Net(), batch(8), loss=mean_square)
    products = [call for call in recording.calls if call.target in (aten.addmm.default, aten.mm.default)]
    names = [f"blocks.{block}.{layer}" for block in range(3) for layer in ("up", "down")] + ["head"]
    assert [call.module_path for call in products if call.phase is Phase.FORWARD] == names
    in_backward = [call.module_path for call in products if call.phase is Phase.BACKWARD]
    assert in_backward == [name for name in reversed(names) for _ in range(2)]


# Nothing changes


class Leaving(Net):
    """Its forward leaves traces wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[Any] = []
        self.cache: dict[str, Any] = {}
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        self.seen.append(random.random() + numpy.random.rand())
        self.cache["x"] = x
        self.count += torch.rand(())
        self.last = x.mean()
        self.new = F.dropout(x)
        return super().forward(x, scale)


@pytest.mark.parametrize("fails", [False, True])
def test_recording_changes_nothing(fails: bool) -> None:
    module, x = Leaving(), batch(8)
    mean_square(module(x)).backward()
    tensors = [*module.parameters(), *module.buffers(), x, *(p.grad for p in module.parameters() if p.grad is not None)]
    contents, versions = [noted(tensor) for tensor in tensors], [tensor._version for tensor in tensors]
    gradients = [parameter.grad for parameter in module.parameters()]
    attributes = {name: id(value) for part in module.modules() for name, value in part.__dict__.items()}
    calls, seen, cache = module.calls, list(module.seen), dict(module.cache)
    states = (torch.get_rng_state(), random.getstate(), str(numpy.random.get_state()))
    if fails:
        with pytest.raises(KeyError, match="mine"):
            recording_of(module, x, loss=_raising)
    else:
        recording_of(module, x, loss=mean_square)
    assert [tensor._version for tensor in tensors] == versions
    assert all(same_bits(*pair) for pair in zip(tensors, contents, strict=True))
    assert all(p.grad is gradient for p, gradient in zip(module.parameters(), gradients, strict=True))
    assert {name: id(value) for part in module.modules() for name, value in part.__dict__.items()} == attributes
    assert (module.calls, module.seen) == (calls, seen)
    assert module.cache.keys() == cache.keys() and module.cache["x"] is cache["x"]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(numpy.random.get_state())) == states[1:]


def _raising(_: Any) -> torch.Tensor:
    raise KeyError("mine")


# Values that Python reads


class Reading(nn.Module):
    """Takes the path that `read` finds in its data, after batch norm has changed them."""

    def __init__(self, read: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.second = nn.Linear(8, 8)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for _ in range(self.read(y)):
            y = self.second(y).tanh()
        return y


READS: dict[str, Callable[[torch.Tensor], int]] = {
    "item": lambda y: int((y > 0).sum().item()) % 5,
    "bool": lambda y: 3 if y.sum() > -1e9 else 1,
    "tolist": lambda y: sum(value > 0 for value in y[:, 0].tolist()),
    "numpy": lambda y: int((y.detach().numpy() > 1).sum()),
    "array": lambda y: int((numpy.asarray(y.detach()) > 1).sum()),
    "nonzero": lambda y: len((y > 1.5).nonzero()),
    "equal": lambda y: 2 + torch.equal(y, y * 1),
    "text": lambda y: len(f"{y.mean():.1f}"),
    "unique": lambda y: len(torch.unique(y.sign())),
}


@pytest.mark.parametrize("kind", READS)
def test_values_that_are_read_are_those_of_the_sample(kind: str) -> None:
    torch.manual_seed(0)
    module, x = Reading(READS[kind]), ROWS[0]
    before = [noted(buffer) for buffer in module.buffers()]
    recording = recording_of(module, x, loss=mean_square)
    assert all(same_bits(*pair) for pair in zip(before, module.buffers(), strict=True)), "values are read from copies"
    assert recording.reads >= 1
    with Calls() as calls:
        mean_square(module(x)).backward()
    products = [call.target for call in recording.calls].count(aten.addmm.default)
    assert products == calls.seen.count(aten.addmm.default) > 1


class Addressing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).exp().tanh()
            assert x.data_ptr() != 0
        return x


def test_what_cannot_be_recorded_trains_all_the_same() -> None:
    plain = Addressing()
    with pytest.raises(CannotRecord, match="data_ptr"):
        recording_of(plain, batch())
    wrapped = rematch.remat(copy.deepcopy(plain), batch(), budget="60%")
    assert rematch.plans_of(wrapped) == ()
    step = step_of(batch(), mean_square)
    assert_same_steps(train(wrapped, step), train(plain, step))
