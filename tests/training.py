"""Train two modules alike and compare them bit by bit.

`assert_same_steps(train(wrapped, step_of(sample, loss)), train(plain, step_of(sample, loss)))`

A step is a function of the module: forward, loss, backward; the tensors it returns are compared too. Everything that
is compared is kept on the CPU, so that it takes no memory of the device whose peak is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rematch.api import as_arguments
from rematch.capture.memory import PeakMemory
from rematch.trial import same_bits as same_bits

TrainingStep = Callable[[nn.Module], Any]
Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """What one training step left behind, before the parameters were changed."""

    returned: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random_states: dict[str, torch.Tensor]
    peak_bytes: int | None  # beyond what was allocated before the step; None for the first


def step_of(sample: Any, loss: Loss) -> TrainingStep:
    """The step that most training loops have."""
    args, kwargs = as_arguments(sample)

    def step(module: nn.Module) -> torch.Tensor:
        output = module(*args, **kwargs)
        value = loss(output)
        value.backward()
        return value

    return step


def train(
    module: nn.Module, step: TrainingStep, *, steps: int = 3, seed: int = 7, learning_rate: float = 0.01
) -> list[Outcome]:
    """Run `step` so often from a fixed random state, each time followed by plain gradient descent.

    The first step is not measured: a wrapped module measures its loss there, by the same profiler.
    """
    device = device_of(module)
    outcomes = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for number in range(steps):
            module.zero_grad(set_to_none=True)
            if number == 0:
                peak_bytes, returned = None, step(module)
            else:
                peak_bytes, returned = measured_peak(device, lambda: step(module))
            outcomes.append(_outcome(module, returned, device, peak_bytes))
            _descend(module, learning_rate)
        module.zero_grad(set_to_none=True)
    return outcomes


def measured_peak(device: torch.device, work: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that `work` had allocated at once, and what it returned."""
    with PeakMemory(device) as used:
        returned = work()
    return used.peak_bytes, returned


def device_of(module: nn.Module) -> torch.device:
    """Where the module's parameters are."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _outcome(module: nn.Module, returned: Any, device: torch.device, peak_bytes: int | None) -> Outcome:
    leaves, _ = pytree.tree_flatten_with_path(returned)
    return Outcome(
        returned={f"returned{pytree.keystr(path)}": noted(leaf) for path, leaf in leaves if torch.is_tensor(leaf)},
        gradients={
            name: None if parameter.grad is None else noted(parameter.grad)
            for name, parameter in module.named_parameters()
        },
        buffers={name: noted(buffer) for name, buffer in module.named_buffers()},
        random_states=random_states(device),
        peak_bytes=peak_bytes,
    )


def noted(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU that nothing else can change."""
    return tensor.detach().to("cpu", copy=True)


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of every generator that training on `device` may draw from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _descend(module: nn.Module, learning_rate: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-learning_rate)


def assert_same_steps(got: list[Outcome], expected: list[Outcome]) -> None:
    """Every tensor that the steps noted is the same, bit by bit; the message names those that are not."""
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        for kind in ("returned", "gradients", "buffers", "random_states"):
            mine, plain = getattr(one, kind), getattr(other, kind)
            assert mine.keys() == plain.keys(), f"step {number}: other {kind}: {mine.keys() ^ plain.keys()}"
            differing = [name for name in plain if not same_bits(mine[name], plain[name])]
            assert not differing, f"step {number}: {kind} differ: {', '.join(differing)}"


def assert_trains_alike(wrapped: nn.Module, plain: nn.Module, sample: Any, loss: Loss, *, steps: int = 3) -> None:
    """`wrapped` trains as `plain` does; `plain` must have parameters of its own, for training changes them."""
    step = step_of(sample, loss)
    with deterministic():
        assert_same_steps(train(wrapped, step, steps=steps), train(plain, step, steps=steps))


@contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that give the same bits whenever they run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
