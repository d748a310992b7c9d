"""The networks that Kumar et al. and Feng & Huang name, as cases.

Kumar et al. take TensorFlow's official models with their defaults: ResNets at a batch of 32, Transformers on 2,048
tokens (4,096 for the big one) of at most 256 a sentence with a vocabulary of 33,708. Those sizes are used here. Of
their feed-forward network they give the depth, the activation and the loss; its width of 256 and batch of 4,096 are
ours. Feng & Huang take one image of 224 pixels a side, and of 300 for Inception v3. NASNet, AmoebaNet and DARTS have 20
cells of 36 channels here, which comes nearest to their numbers of vertices; they give no sizes.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .cases import Case, Sample, cross_entropy, normal_sample, squared_error, token_sample
from .cells import GENOTYPES, CellNetwork
from .classifiers import alexnet, densenet, inception_v3, vgg
from .images import basic_body, bottleneck_body, out_of_place, resnet
from .small import FeedForward
from .translation import TranslationModel

FFN_WIDTH, FFN_BATCH = 256, 4096
RESNETS = {  # blocks of each stage
    18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3),
}  # fmt: skip
VOCABULARY, SENTENCE = 33_708, 256
TRANSFORMERS = {"Base": (512, 2048, 8, 2048), "Big": (1024, 4096, 16, 4096)}  # width, hidden, heads, tokens
CELLS, CELL_CHANNELS = 20, 36


def feed_forward(depth: int) -> Case:
    build = partial(FeedForward, FFN_WIDTH, depth)
    return Case(f"FFN {depth}", build, partial(normal_sample, FFN_BATCH, FFN_WIDTH), squared_error)


def residual(depth: int, batch: int, *, in_place: bool) -> Case:
    """A ResNet with 64 channels in its stem, at 224 pixels a side."""
    build = partial(_residual, depth, in_place)
    return Case(f"ResNet{depth}", build, partial(normal_sample, batch, 3, 224, 224), cross_entropy)


def _residual(depth: int, in_place: bool) -> nn.Module:
    model = resnet(bottleneck_body if depth >= 50 else basic_body, 64, RESNETS[depth], 1000)
    return model if in_place else out_of_place(model)


def transformer(size: str, layers: int = 6) -> Case:
    width, hidden, heads, tokens = TRANSFORMERS[size]
    build = partial(TranslationModel, VOCABULARY, width, hidden, heads, layers, 0.1)
    name = f"Transformer {size}" if layers == 6 else f"Transformer {size}, {layers} layers"
    return Case(name, build, partial(sentence_pair, tokens // SENTENCE), smoothed_cross_entropy)


def sentence_pair(batch: int) -> Sample:
    (source,), _ = token_sample(VOCABULARY, batch, SENTENCE)
    return (source, source.flip(1)), {}


def smoothed_cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    rows = logits.flatten(0, -2)
    classes = torch.arange(len(rows), device=rows.device) % rows.shape[-1]
    return F.cross_entropy(rows, classes, label_smoothing=0.1)


def feng_networks() -> dict[str, Case]:
    """The networks of Feng & Huang's Table 1, by the names that it has for them."""
    builds = {"AlexNet": partial(alexnet, 1000)}
    builds |= {f"VGG{depth}": partial(vgg, depth, 1000) for depth in (11, 13, 16, 19)}
    builds |= {f"ResNet{depth}": partial(_residual, depth, True) for depth in (18, 34, 50, 101, 152)}
    builds |= {f"DenseNet{depth}": partial(densenet, depth, 1000) for depth in (121, 161, 169, 201)}
    builds |= {"Inception v3": partial(inception_v3, 1000)}
    builds |= {name: partial(CellNetwork, found, CELL_CHANNELS, CELLS, 1000) for name, found in GENOTYPES.items()}
    return {
        name: Case(
            name, build, partial(normal_sample, 1, 3, *[300 if name == "Inception v3" else 224] * 2), cross_entropy
        )
        for name, build in builds.items()
    }
