"""A module is the same after its Python ran on stand-ins, whatever it did to itself meanwhile."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from rematch.capture.stand_ins import stood_in_for


class Frozen(OrderedDict[str, Any]):
    """A configuration that refuses to be written to once it is made."""

    def __setitem__(self, key: str, value: Any) -> None:
        if getattr(self, "made", False):
            raise RuntimeError("frozen")
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        if getattr(self, "made", False):
            raise RuntimeError("frozen")
        super().update(*args, **kwargs)


def test_containers_are_put_back_and_frozen_ones_left_alone() -> None:
    module = nn.Linear(2, 2)
    module.config = Frozen(width=2)  # type: ignore[assignment]
    module.config.made = True  # type: ignore[union-attr]
    module.seen, module.cache, module.names = [1], {"a": 1}, {"x"}  # type: ignore[assignment]
    weight = module.weight
    with stood_in_for(module, {id(weight): torch.zeros(2, 2)}):
        assert module._parameters["weight"] is not weight
        module.seen.append(2)  # type: ignore[operator]
        module.cache["b"] = 2  # type: ignore[index]
        module.names.clear()  # type: ignore[operator]
        module.counter = 1  # type: ignore[assignment]
    assert module.weight is weight
    assert (module.seen, module.cache, module.names) == ([1], {"a": 1}, {"x"})
    assert dict(module.config) == {"width": 2}  # type: ignore[call-overload]
    assert not hasattr(module, "counter")
