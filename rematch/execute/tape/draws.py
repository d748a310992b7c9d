"""Random numbers drawn again: the state of a generator before a call, and the call replayed from there.

`state = Draw.before(args, kwargs)`, the call, and later `with state.restored(): ...` the same call again

On CUDA a state is a seed and an offset, which cost nothing to read; on the CPU it is the whole state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Draw:
    """The state of the generator that a call draws from."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator, state: Any = None) -> None:
        self.generator = generator
        self.state = _state_of(generator) if state is None else state

    @staticmethod
    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
        """For a call with these arguments; None where we do not know the generator."""
        device = kwargs.get("device")
        for argument in (*kwargs.values(), *args):
            if isinstance(argument, torch.Generator):
                return Draw(argument)
            if device is None and isinstance(argument, torch.Tensor):
                device = argument.device
        generator = _default_generator(torch.device("cpu") if device is None else torch.device(device))
        return None if generator is None else Draw(generator)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The generator as it was, and afterwards as it is now."""
        now = _state_of(self.generator)
        _set_state(self.generator, self.state)
        try:
            yield
        finally:
            _set_state(self.generator, now)


def generator_of(tensors: Iterable[torch.Tensor]) -> torch.Generator | None:
    """The generator of the card that one of the tensors is on, whose state is a seed and an offset."""
    for tensor in tensors:
        if tensor.is_cuda:
            return _default_generator(tensor.device)
    return None


def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None


def _state_of(generator: torch.Generator) -> Any:
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def _set_state(generator: torch.Generator, state: Any) -> None:
    if generator.device.type == "cuda":
        seed, offset = state
        if seed != generator.initial_seed():
            generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        generator.set_state(state)
