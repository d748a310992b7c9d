"""Small models, each for one trap: dropout, norms behind transposes, fused recurrent layers; and one without traps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn


class MLP(nn.Sequential):
    """Linear layers with GELU and dropout between them."""

    def __init__(self, features: int, width: int, depth: int, classes: int, dropout: float) -> None:
        widths = [features, *[width] * depth]
        hidden = [
            layer
            for before, after in pairwise(widths)
            for layer in (nn.Linear(before, after), nn.GELU(), nn.Dropout(dropout))
        ]
        super().__init__(*hidden, nn.Linear(width, classes))


class FeedForward(nn.Sequential):
    """`depth` hidden layers with ReLU, and one output."""

    def __init__(self, width: int, depth: int) -> None:
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(width, 1))


class OnTransposed(nn.Module):
    """Applies a module with axes 1 and 2 swapped, and swaps them back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class TransposedNorms(nn.Sequential):
    """Linear -> transpose -> norm -> transpose -> Linear on [batch, time, channel]: the norm sees strided input.

    Behind the transpose batch norm finds its `width` channels second, and layer norm normalizes over time.
    """

    def __init__(self, norm: Callable[[], nn.Module], channels: int, width: int, depth: int) -> None:
        layers: list[nn.Module] = [nn.Linear(channels, width)]
        for _ in range(depth):
            layers += [OnTransposed(norm()), nn.GELU(), nn.Linear(width, width)]
        super().__init__(*layers)


class RecurrentModel(nn.Module):
    """A next-token model around `nn.LSTM` or `nn.GRU`, with dropout between its layers."""

    def __init__(self, recurrent: type[nn.RNNBase], vocabulary: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.recurrent = recurrent(width, width, num_layers=depth, dropout=dropout, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embed(tokens))
        return self.head(self.drop(states))
