"""The Transformer for translation (Vaswani et al., 2017) with attention written out, as TensorFlow's models have it.

Norms come before attention and feed-forward, one embedding serves source, target and logits, projections of attention
have no bias. There is no padding: all tokens of a sample are real.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Heads that attend from `x` to `memory`: scores, a mask where it is given, softmax, dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.outward = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projected in (self.query(x), self.key(memory), self.value(memory))
        )
        scores = query / math.sqrt(query.shape[-1]) @ key.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask
        return self.outward((self.drop(scores.softmax(-1)) @ value).transpose(1, 2).flatten(2))


class Sublayer(nn.Module):
    """Adds to a stream what a layer makes of it, normalized before and dropped out after."""

    def __init__(self, width: int, layer: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = layer
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
        normed = self.norm(x)
        if isinstance(self.layer, Attention):
            return x + self.drop(self.layer(normed, normed if memory is None else memory, mask))
        return x + self.drop(self.layer(normed))


class Stack(nn.Module):
    """An encoder, or a decoder, which also attends to the encoder's output."""

    def __init__(self, width: int, hidden: int, heads: int, depth: int, dropout: float, *, decodes: bool) -> None:
        super().__init__()

        def sublayer(layer: nn.Module) -> Sublayer:
            return Sublayer(width, layer, dropout)

        def feed_forward() -> nn.Sequential:
            return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, width))

        self.attention = nn.ModuleList(sublayer(Attention(width, heads, dropout)) for _ in range(depth))
        self.cross = nn.ModuleList(
            sublayer(Attention(width, heads, dropout)) for _ in range(depth if decodes else 0)
        )  # fmt: skip
        self.feed = nn.ModuleList(sublayer(feed_forward()) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        for place, (attention, feed) in enumerate(zip(self.attention, self.feed, strict=True)):
            x = attention(x, None, mask)
            if memory is not None:
                x = self.cross[place](x, memory, None)
            x = feed(x, None, None)
        return self.norm(x)


class TranslationModel(nn.Module):
    """Source and target tokens in, logits of the target out."""

    def __init__(self, vocabulary: int, width: int, hidden: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.drop = nn.Dropout(dropout)
        self.encoder = Stack(width, hidden, heads, depth, dropout, decodes=False)
        self.decoder = Stack(width, hidden, heads, depth, dropout, decodes=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        length = target.shape[1]
        future = torch.full((length, length), -math.inf, device=target.device).triu(1)
        memory = self.encoder(self._embedded(source))
        return F.linear(self.decoder(self._embedded(target), memory, future), self.embedding.weight)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        rates = torch.exp(torch.arange(0, self.width, 2, device=tokens.device) * (-math.log(10_000) / self.width))
        signal = torch.cat([torch.sin(places * rates), torch.cos(places * rates)], dim=-1)
        return self.drop(self.embedding(tokens) * math.sqrt(self.width) + signal)
