"""Sizes: every model of the zoo with a sample input and a loss, tiny for tests and large for benchmarks.

HiRemate's paper gives depths, and for some models batch and resolution. The other sizes of scale "paper" are those of
its authors' published code, except batches that it lacks, or with which the budgets in the paper's tables would be more
than a tenth away from the paper's shares of the peak: those of GPT 96, the Transformers, FNO 1d, FNO 3d, UNO and
ResNet34 are chosen to come near. FNO 3d keeps 8 modes, as in the code of Li et al.: with more, the gradients of its
weights leave no room for the paper's relative peak. Scale "machine" keeps depth and structure
and shrinks width, batch and resolution until a training step needs less than 4 GiB and 20 s on 2 cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from .images import Body, UNet, basic_body, bottleneck_body, inverted_body, regnet, resnet
from .operators import UNO, fno, ufno, uno_levels
from .small import MLP, RecurrentModel, TransposedNorms
from .tokens import (
    GPT,
    Bert,
    EncoderDecoder,
    FusedCausalAttention,
    MLPMixer,
    SoftmaxCausalAttention,
    ViT,
    hugging_face_gpt2,
)

Sample = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of the module
Scale = Literal["machine", "paper"]


@dataclass(frozen=True)
class Case:
    """A model, its input and its loss. All three can be pickled; only `build` uses the global random state."""

    name: str
    build: Callable[[], nn.Module]
    sample: Callable[[], Sample]
    loss: Callable[[Any], torch.Tensor]


# Losses


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Against classes that count up over the rows."""
    rows = logits.flatten(0, -2)
    return F.cross_entropy(rows, torch.arange(len(rows), device=rows.device) % rows.shape[-1])


def squared_error(values: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(values, torch.ones_like(values))


def own_loss(output: Any) -> torch.Tensor:
    """The loss that a Hugging Face model computed from its labels."""
    return output.loss


# Samples


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def normal_sample(*shape: int) -> Sample:
    return (torch.randn(shape, generator=_generator()),), {}


def token_sample(vocabulary: int, batch: int, length: int) -> Sample:
    return (torch.randint(vocabulary, (batch, length), generator=_generator()),), {}


def labelled_sample(vocabulary: int, batch: int, length: int) -> Sample:
    (tokens,), _ = token_sample(vocabulary, batch, length)
    return (), {"input_ids": tokens, "labels": tokens.clone()}


def padded_sample(vocabulary: int, batch: int, length: int) -> Sample:
    """Tokens in two segments, of which the last quarter is padding in every second row."""
    (tokens,), _ = token_sample(vocabulary, batch, length)
    segments = (torch.arange(length) >= length // 2).long().expand(batch, length).contiguous()
    return (tokens,), {"segments": segments, "keep": ~_padding(batch, length)}


def translation_sample(batch: int, source_length: int, target_length: int, width: int, padded: bool) -> Sample:
    generator = _generator()
    source = torch.randn(batch, source_length, width, generator=generator)
    target = torch.randn(batch, target_length, width, generator=generator)
    return (source, target), {"source_padding": _padding(batch, source_length)} if padded else {}


def _padding(batch: int, length: int) -> torch.Tensor:
    """True at the last quarter of every second row."""
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[1::2, length - length // 4 :] = True
    return padding


# Cases by kind of model


def gpt(
    name: str,
    depth: int,
    width: int,
    heads: int,
    batch: int,
    length: int,
    vocabulary: int,
    fused: bool = False,
) -> Case:
    attention, attention_dropout = (FusedCausalAttention, 0.0) if fused else (SoftmaxCausalAttention, 0.1)
    build = partial(
        GPT,
        vocabulary,
        length,
        width,
        heads,
        depth,
        dropout=0.1,
        attention=attention,
        attention_dropout=attention_dropout,
    )
    return Case(name, build, partial(token_sample, vocabulary, batch, length), cross_entropy)


def encoder_decoder(
    name: str, layers: int, width: int, hidden: int, heads: int, batch: int, length: int, padded: bool = False
) -> Case:
    build = partial(EncoderDecoder, width, heads, layers, layers, hidden, dropout=0.1)
    return Case(name, build, partial(translation_sample, batch, length, length, width, padded), squared_error)


def residual_network(
    name: str, body: Body, depths: Sequence[int], width: int, batch: int, resolution: int, classes: int
) -> Case:
    build = partial(resnet, body, width, tuple(depths), classes)
    return Case(name, build, partial(normal_sample, batch, 3, resolution, resolution), cross_entropy)


def regular_network(
    name: str,
    widths: Sequence[int],
    depths: Sequence[int],
    group_width: int,
    batch: int,
    resolution: int,
    squeeze: bool = False,
    classes: int = 1000,
) -> Case:
    build = partial(regnet, tuple(widths), tuple(depths), group_width, squeeze, classes)
    return Case(name, build, partial(normal_sample, batch, 3, resolution, resolution), cross_entropy)


def unet(name: str, features: int, levels: int, batch: int, resolution: int) -> Case:
    build = partial(UNet, 3, 1, features, levels)
    return Case(name, build, partial(normal_sample, batch, 3, resolution, resolution), squared_error)


def mixer(
    name: str,
    depth: int,
    width: int,
    patch: int,
    batch: int,
    resolution: int,
    dropout: float = 0.0,
    classes: int = 1000,
) -> Case:
    build = partial(MLPMixer, resolution, patch, width, depth, classes, dropout)
    return Case(name, build, partial(normal_sample, batch, 3, resolution, resolution), cross_entropy)


def fourier_operator(
    name: str, inward: int, width: int, modes: Sequence[int], depth: int, padding: int, batch: int, grid: Sequence[int]
) -> Case:
    build = partial(fno, inward, width, tuple(modes), depth, padding)
    return Case(name, build, partial(normal_sample, batch, *grid, inward), squared_error)


def u_fourier_operator(
    name: str,
    inward: int,
    width: int,
    modes: int,
    depth: int,
    levels: int,
    padding: int,
    batch: int,
    grid: Sequence[int],
) -> Case:
    build = partial(ufno, inward, width, (modes,) * 3, depth, levels, padding)
    return Case(name, build, partial(normal_sample, batch, *grid, inward), squared_error)


def u_shaped_operator(name: str, width: int, shrink: int, batch: int) -> Case:
    down, up = uno_levels(shrink)
    build = partial(UNO, 1, width, down, up, padding=2)
    side = 64 // shrink
    return Case(name, build, partial(normal_sample, batch, side, side, 10, 1), squared_error)


# The zoo at tiny sizes


def _tiny_cases() -> list[Case]:
    text = {"vocabulary": 61, "context": 32, "width": 32, "heads": 4, "depth": 2, "dropout": 0.1}
    sentences = (61, 16, 32)  # vocabulary, batch, length
    small_gpt = {"depth": 3, "width": 32, "heads": 4, "batch": 16, "length": 32, "vocabulary": 61}
    series = {"channels": 12, "width": 32, "depth": 3}
    speech = {"vocabulary": 31, "width": 24, "depth": 2, "dropout": 0.2}
    return [
        Case("mlp", partial(MLP, 32, 64, 6, 10, dropout=0.2), partial(normal_sample, 512, 32), cross_entropy),
        Case(
            "batch_norm_transposed",
            partial(TransposedNorms, partial(nn.BatchNorm1d, 32), **series),
            partial(normal_sample, 32, 24, 12),
            squared_error,
        ),
        Case(
            "layer_norm_transposed",
            partial(TransposedNorms, partial(nn.LayerNorm, 24), **series),
            partial(normal_sample, 32, 24, 12),
            squared_error,
        ),
        gpt("gpt", **small_gpt, fused=True),
        gpt("gpt_softmax", **small_gpt),
        Case("hf_gpt2", partial(hugging_face_gpt2, **text), partial(labelled_sample, *sentences), own_loss),
        Case("bert", partial(Bert, **text), partial(padded_sample, *sentences), cross_entropy),
        Case(
            "vit",
            partial(ViT, resolution=32, patch=8, width=32, heads=4, depth=3, classes=10, dropout=0.1),
            partial(normal_sample, 32, 3, 32, 32),
            cross_entropy,
        ),
        residual_network("resnet_basic", basic_body, (1, 1, 1), width=8, batch=48, resolution=32, classes=10),
        residual_network("resnet_bottleneck", bottleneck_body, (2, 1), width=8, batch=16, resolution=32, classes=10),
        unet("unet", features=4, levels=2, batch=8, resolution=32),
        encoder_decoder("transformer", layers=2, width=32, hidden=64, heads=4, batch=16, length=24, padded=True),
        mixer("mlp_mixer", depth=3, width=32, patch=4, batch=16, resolution=24, dropout=0.1, classes=10),
        regular_network("regnet", (16, 32), (1, 2), group_width=8, batch=16, resolution=32, squeeze=True, classes=10),
        Case("lstm", partial(RecurrentModel, nn.LSTM, **speech), partial(token_sample, 31, 32, 24), cross_entropy),
        Case("gru", partial(RecurrentModel, nn.GRU, **speech), partial(token_sample, 31, 32, 24), cross_entropy),
        fourier_operator("fno1d", inward=1, width=16, modes=(8,), depth=3, padding=0, batch=32, grid=(64,)),
        fourier_operator("fno3d", inward=2, width=8, modes=(3, 3, 3), depth=2, padding=2, batch=8, grid=(8, 8, 8)),
        u_fourier_operator("ufno", inward=2, width=8, modes=3, depth=1, levels=2, padding=4, batch=4, grid=(8, 8, 12)),
        u_shaped_operator("uno", width=2, shrink=8, batch=8),
        residual_network("mobilenet", inverted_body, (1, 2), width=8, batch=16, resolution=32, classes=10),
    ]


TINY: dict[str, Case] = {case.name: case for case in _tiny_cases()}


# The models of HiRemate's tables


def _twelve_of_the_paper() -> list[Case]:
    return [
        gpt("gpt24", depth=24, width=1024, heads=16, batch=100, length=20, vocabulary=50257),
        gpt("gpt96", depth=96, width=768, heads=12, batch=76, length=20, vocabulary=50257),
        unet("unet", features=32, levels=4, batch=50, resolution=256),
        mixer("mlp_mixer", depth=12, width=512, patch=16, batch=100, resolution=256),
        regular_network("regnet32", (336, 672, 1344, 2520), (2, 7, 13, 1), 168, batch=23, resolution=256),
        residual_network("resnet101", bottleneck_body, (3, 4, 23, 3), 64, batch=64, resolution=256, classes=1000),
        encoder_decoder("transformer6_6", layers=6, width=512, hidden=2048, heads=16, batch=27, length=200),
        encoder_decoder("transformer36_36", layers=36, width=512, hidden=2048, heads=16, batch=6, length=200),
        fourier_operator("fno1d", inward=1, width=64, modes=(16,), depth=4, padding=0, batch=4000, grid=(256,)),
        fourier_operator("fno3d", inward=10, width=64, modes=(8, 8, 8), depth=4, padding=6, batch=6, grid=(64, 64, 40)),
        u_fourier_operator(
            "ufno", inward=12, width=36, modes=10, depth=3, levels=3, padding=8, batch=3, grid=(96, 200, 24)
        ),
        u_shaped_operator("uno", width=8, shrink=1, batch=57),
    ]


def _twelve_for_this_machine() -> list[Case]:
    return [
        gpt("gpt24", depth=24, width=256, heads=4, batch=16, length=64, vocabulary=5003),
        gpt("gpt96", depth=96, width=192, heads=4, batch=8, length=64, vocabulary=5003),
        unet("unet", features=16, levels=4, batch=8, resolution=128),
        mixer("mlp_mixer", depth=12, width=256, patch=16, batch=24, resolution=128),
        regular_network("regnet32", (84, 168, 336, 630), (2, 7, 13, 1), 42, batch=16, resolution=128),
        residual_network("resnet101", bottleneck_body, (3, 4, 23, 3), 32, batch=16, resolution=128, classes=1000),
        encoder_decoder("transformer6_6", layers=6, width=256, hidden=1024, heads=8, batch=16, length=100),
        encoder_decoder("transformer36_36", layers=36, width=128, hidden=512, heads=8, batch=8, length=100),
        fourier_operator("fno1d", inward=1, width=64, modes=(16,), depth=4, padding=0, batch=256, grid=(256,)),
        fourier_operator("fno3d", inward=10, width=24, modes=(8, 8, 8), depth=4, padding=6, batch=2, grid=(32, 32, 26)),
        u_fourier_operator(
            "ufno", inward=12, width=24, modes=6, depth=3, levels=3, padding=8, batch=2, grid=(32, 48, 24)
        ),
        u_shaped_operator("uno", width=8, shrink=2, batch=12),
    ]


def _five_of_the_paper() -> list[Case]:
    return [
        residual_network("resnet34", basic_body, (3, 4, 6, 3), 64, batch=128, resolution=256, classes=1000),
        unet("unet", features=32, levels=4, batch=50, resolution=256),
        encoder_decoder("transformer2", layers=2, width=512, hidden=2048, heads=16, batch=100, length=200),
        mixer("mlp_mixer", depth=12, width=512, patch=16, batch=100, resolution=256),
        gpt("gpt5", depth=5, width=768, heads=12, batch=100, length=20, vocabulary=50257),
    ]


def _five_for_this_machine() -> list[Case]:
    return [
        residual_network("resnet34", basic_body, (3, 4, 6, 3), 32, batch=16, resolution=128, classes=1000),
        unet("unet", features=16, levels=4, batch=8, resolution=128),
        encoder_decoder("transformer2", layers=2, width=256, hidden=1024, heads=8, batch=16, length=100),
        mixer("mlp_mixer", depth=12, width=256, patch=16, batch=24, resolution=128),
        gpt("gpt5", depth=5, width=256, heads=4, batch=16, length=64, vocabulary=5003),
    ]


def twelve(scale: Scale = "machine") -> dict[str, Case]:
    """The twelve models of HiRemate's table 4."""
    return _at(scale, machine=_twelve_for_this_machine, paper=_twelve_of_the_paper)


def small_five(scale: Scale = "machine") -> dict[str, Case]:
    """The five models of HiRemate's table 3, small enough for exact solvers."""
    return _at(scale, machine=_five_for_this_machine, paper=_five_of_the_paper)


def _at(scale: Scale, **cases: Callable[[], list[Case]]) -> dict[str, Case]:
    if scale not in cases:
        raise ValueError(f"scale is {scale!r}; it is one of {', '.join(cases)}")
    return {case.name: case for case in cases[scale]()}
