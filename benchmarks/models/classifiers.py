"""Image classifiers of Feng and Huang's Table 1 that `images` does not have: AlexNet, VGG, DenseNet, Inception v3.

Layers and widths are those of the networks' papers in the form that PyTorch users know: VGG without batch norm, AlexNet
with 64 channels in its first layer, Inception v3 without its auxiliary classifier. Activations work in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .images import conv_norm, relu

_VGG_LAYERS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_VGG_CHANNELS = (64, 128, 256, 512, 512)
_DENSENETS = {  # growth, channels of the stem, layers of each block
    121: (32, 64, (6, 12, 24, 16)),
    161: (48, 96, (6, 12, 36, 24)),
    169: (32, 64, (6, 12, 32, 32)),
    201: (32, 64, (6, 12, 48, 32)),
}


def conv_relu(inward: int, outward: int, kernel: int, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(inward, outward, kernel, stride, padding), relu()]


def fully_connected(inward: int, classes: int, dropout: bool = True) -> list[nn.Module]:
    """The three linear layers at the end of AlexNet and VGG."""
    layers: list[nn.Module] = []
    for width in (4096, 4096):
        layers += [nn.Linear(inward, width), relu(), *([nn.Dropout()] if dropout else [])]
        inward = width
    return [*layers, nn.Linear(inward, classes)]


def alexnet(classes: int) -> nn.Sequential:
    """AlexNet in the variant with one branch (Krizhevsky, 2014), for images of 224 pixels a side."""
    pool = nn.MaxPool2d(3, stride=2)
    return nn.Sequential(
        *conv_relu(3, 64, 11, stride=4, padding=2),
        pool,
        *conv_relu(64, 192, 5, padding=2),
        pool,
        *conv_relu(192, 384, 3, padding=1),
        *conv_relu(384, 256, 3, padding=1),
        *conv_relu(256, 256, 3, padding=1),
        pool,
        nn.Flatten(),
        *fully_connected(256 * 6 * 6, classes),
    )


def vgg(depth: int, classes: int) -> nn.Sequential:
    """VGG of 11, 13, 16 or 19 layers with weights (Simonyan and Zisserman, 2014), for images of 224 pixels a side."""
    layers: list[nn.Module] = []
    channels = 3
    for count, width in zip(_VGG_LAYERS[depth], _VGG_CHANNELS, strict=True):
        for _ in range(count):
            layers += conv_relu(channels, width, 3, padding=1)
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), *fully_connected(channels * 7 * 7, classes))


class DenseLayer(nn.Module):
    """Concatenates `growth` new channels to its input."""

    def __init__(self, inward: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inward),
            relu(),
            nn.Conv2d(inward, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            relu(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.body(x)], dim=1)


def densenet(depth: int, classes: int) -> nn.Sequential:
    """DenseNet of 121, 161, 169 or 201 layers (Huang et al., 2017), concatenating in each layer."""
    growth, channels, blocks = _DENSENETS[depth]
    layers: list[nn.Module] = [conv_norm(3, channels, 7, stride=2), relu(), nn.MaxPool2d(3, stride=2, padding=1)]
    for stage, count in enumerate(blocks):
        if stage:
            halved = nn.Conv2d(channels, channels // 2, 1, bias=False)
            layers += [nn.BatchNorm2d(channels), relu(), halved, nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(count):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    return nn.Sequential(
        *layers,
        nn.BatchNorm2d(channels),
        relu(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


class Branches(nn.Module):
    """Concatenates what its branches make of the same input."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


Kernel = int | tuple[int, int]


def unit(inward: int, outward: int, kernel: Kernel, stride: int = 1, padding: Kernel = 0) -> nn.Sequential:
    """Inception's convolution with batch norm and ReLU."""
    conv = nn.Conv2d(inward, outward, kernel, stride, padding, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outward), relu())


def units(inward: int, *steps: tuple[int, Kernel, int, Kernel]) -> nn.Sequential:
    """Convolutions one after the other, each with its channels, kernel, stride and padding."""
    layers = []
    for outward, kernel, stride, padding in steps:
        layers.append(unit(inward, outward, kernel, stride, padding))
        inward = outward
    return nn.Sequential(*layers)


def pooled(inward: int, outward: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), unit(inward, outward, 1))


def _square_block(inward: int, pool: int) -> Branches:
    return Branches(
        unit(inward, 64, 1),
        units(inward, (48, 1, 1, 0), (64, 5, 1, 2)),
        units(inward, (64, 1, 1, 0), (96, 3, 1, 1), (96, 3, 1, 1)),
        pooled(inward, pool),
    )


def _long_block(width: int) -> Branches:
    """Convolutions over rows and over columns, 7 pixels long."""
    row, column = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))
    return Branches(
        unit(768, 192, 1),
        units(768, (width, 1, 1, 0), (width, *row), (192, *column)),
        units(768, (width, 1, 1, 0), (width, *column), (width, *row), (width, *column), (192, *row)),
        pooled(768, 192),
    )


def _wide_block(inward: int) -> Branches:
    """Two of the branches fork once more."""

    def fork() -> Branches:
        return Branches(unit(384, 384, (1, 3), 1, (0, 1)), unit(384, 384, (3, 1), 1, (1, 0)))

    return Branches(
        unit(inward, 320, 1),
        nn.Sequential(unit(inward, 384, 1), fork()),
        nn.Sequential(unit(inward, 448, 1), unit(448, 384, 3, 1, 1), fork()),
        pooled(inward, 192),
    )


def inception_v3(classes: int) -> nn.Sequential:
    """Inception v3 (Szegedy et al., 2016) for images of 299 pixels a side."""
    pool = nn.MaxPool2d(3, stride=2)
    stem = [units(3, (32, 3, 2, 0), (32, 3, 1, 0), (64, 3, 1, 1)), pool, units(64, (80, 1, 1, 0), (192, 3, 1, 0)), pool]
    squares: Sequence[nn.Module] = [_square_block(192, 32), _square_block(256, 64), _square_block(288, 64)]
    shrink_first = Branches(unit(288, 384, 3, 2), units(288, (64, 1, 1, 0), (96, 3, 1, 1), (96, 3, 2, 0)), pool)
    shrink_second = Branches(
        units(768, (192, 1, 1, 0), (320, 3, 2, 0)),
        units(768, (192, 1, 1, 0), (192, (1, 7), 1, (0, 3)), (192, (7, 1), 1, (3, 0)), (192, 3, 2, 0)),
        pool,
    )
    return nn.Sequential(
        *stem,
        *squares,
        shrink_first,
        *(_long_block(width) for width in (128, 160, 160, 192)),
        shrink_second,
        _wide_block(1280),
        _wide_block(2048),
        nn.AdaptiveAvgPool2d(1),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(2048, classes),
    )
