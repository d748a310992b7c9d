"""Functions of torch that look what kind of tensor they have, made to do for a recording what they do in eager.

`with AsEager(): forward()`
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

one_hot = torch.nn.functional.one_hot


class AsEager(TorchFunctionMode):
    """Takes the place of functions that would run other operators on tensors without data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """By writing ones into zeros, where torch compares with all classes if a tensor has no data."""
    if tensor.numel() == 0 or tensor.dtype != torch.int64 or tensor.device.type != "cpu":
        return one_hot(tensor, num_classes)
    least, most = torch.aminmax(tensor)
    if least.item() < 0 or (0 <= num_classes <= most.item()):
        return one_hot(tensor, num_classes)
    classes = int(most.item()) + 1 if num_classes < 0 else num_classes
    made = torch.zeros((*tensor.shape, classes), dtype=torch.int64, layout=torch.strided, device=tensor.device)
    return made.scatter_(-1, tensor.unsqueeze(-1), 1)
