"""A small module with something of everything, for tests that are not about models.

`Net()(batch())`
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, BATCH = 32, 128


class Block(nn.Module):
    """Something of everything that needs care: running statistics, random numbers, values worth computing again."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    family = "tests"  # a class attribute

    def __init__(self, depth: int = 3, norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x * scale)
        return self.head(x)


def batch(size: int = BATCH) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(3))


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()
