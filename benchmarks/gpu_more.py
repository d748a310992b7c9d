"""More models for the card, beside the four of `gpu_settings.py`: one budget each.

`more_settings(tiny=False)`: GPT-2 medium and BERT-large (transformers, bf16 autocast), a U-Net as diffusion models have
them (convolutions, group norms, a time and attention at the lowest resolution), and Llama 1B of whose weights only
low-rank adapters are trained (LoRA, Hu et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_settings import Setting, bf16, gpt2, images, llama, tiny_gpt2, tiny_llama, tokens
from torch import nn


def bert(depth: int = 24, width: int = 1024, batch: int = 16, length: int = 512, vocabulary: int = 30522) -> Setting:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary,
        num_hidden_layers=depth,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 64,
        max_position_embeddings=length,
    )
    return Setting(
        f"BERT {depth} x {width}, {batch} x {length}, bf16 autocast",
        lambda: BertForMaskedLM(config),
        lambda: tokens(vocabulary, batch, length),
        lambda output: output.loss,
        lambda model: list(model.bert.encoder.layer),
        bf16,
    )


class Adapted(nn.Module):
    """A linear layer that stays as it is, and a trained product of two thin matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False, dtype=layer.weight.dtype)
        self.up = nn.Linear(rank, layer.out_features, bias=False, dtype=layer.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return made


def adapted(whole: Setting, rank: int = 16) -> Setting:
    """A Llama of which only adapters are trained."""

    def build() -> nn.Module:
        model: Any = whole.build().requires_grad_(False)
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj, attention.v_proj = Adapted(attention.q_proj, rank), Adapted(attention.v_proj, rank)
        return model  # type: ignore[no-any-return]

    return Setting(f"{whole.name}, LoRA", build, whole.sample, whole.loss, whole.blocks)


class Residual(nn.Module):
    """Two convolutions, moved by the time, and attention over all pixels where asked for."""

    def __init__(self, width_in: int, width: int, time_width: int, attends: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(16, width_in), nn.SiLU(), nn.Conv2d(width_in, width, 3, padding=1))
        self.time = nn.Linear(time_width, width)
        self.second = nn.Sequential(nn.GroupNorm(16, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()
        self.attends = attends
        if attends:
            self.mix = nn.Sequential(nn.GroupNorm(16, width), nn.Conv2d(width, 3 * width, 1))
            self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        inner = self.second(self.first(x) + self.time(time)[:, :, None, None])
        x = self.skip(x) + inner
        if not self.attends:
            return x
        batch, width, high, wide = x.shape
        heads = self.mix(x).view(batch, 3, width // 32, 32, high * wide).transpose(-1, -2)
        seen = F.scaled_dot_product_attention(heads[:, 0], heads[:, 1], heads[:, 2])
        made: torch.Tensor = x + self.out(seen.transpose(-1, -2).reshape(batch, width, high, wide))
        return made


class Denoiser(nn.Module):
    """A U-Net that predicts the noise of an image; `widths` go down in resolution."""

    def __init__(self, widths: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        time_width = 4 * widths[0]
        self.frequencies = nn.Parameter(torch.randn(widths[0] // 2), requires_grad=False)
        self.time = nn.Sequential(nn.Linear(widths[0], time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.enter, self.leave = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before = widths[0]
        for level, width in enumerate(widths):
            attends = level == len(widths) - 1
            for block in range(blocks):
                self.down.append(Residual(before if block == 0 else width, width, time_width, attends))
                self.up.insert(0, Residual(2 * width, before if block == 0 else width, time_width, attends))
            before = width
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns = torch.outer(torch.linspace(0, 1, len(x), device=x.device), self.frequencies)
        time = self.time(torch.cat([turns.sin(), turns.cos()], 1))
        x = self.enter(x)
        passed = []
        for place, block in enumerate(self.down):
            if place and place % self.blocks == 0:
                x = F.avg_pool2d(x, 2)
            x = block(x, time)
            passed.append(x)
        for place, block in enumerate(self.up):
            if place and place % self.blocks == 0:
                x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, passed.pop()], 1), time)
        made: torch.Tensor = self.leave(x)
        return made


def denoiser(
    widths: tuple[int, ...] = (128, 256, 384, 512), batch: int = 32, size: int = 64, blocks: int = 2
) -> Setting:
    return Setting(
        f"U-Net of diffusion, {batch} x {size}, bf16 autocast",
        lambda: Denoiser(widths, blocks=2),
        lambda: images(batch, size),
        lambda output: output.float().square().mean(),
        lambda model: [*model.down, *model.up],
        bf16,
    )


def more_settings(tiny: bool) -> Iterator[Setting]:
    if tiny:
        yield from (tiny_gpt2(3), bert(2, 128, 2, 64, vocabulary=1024))
        yield from (denoiser((32, 64), 2, 16), adapted(tiny_llama(), rank=4))
        return
    yield from (gpt2(24, 1024, 8, 1024), bert(), denoiser(), adapted(llama()))
