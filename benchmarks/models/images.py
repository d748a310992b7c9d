"""Convolutional models: ResNet and RegNet share one residual skeleton, U-Net stands alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

Body = Callable[[int, int, int], nn.Module]  # channels in, channels out, stride -> the residual branch


def conv_norm(inward: int, outward: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution that keeps the size (up to its stride) and batch norm in place of its bias."""
    conv = nn.Conv2d(inward, outward, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outward))


def relu() -> nn.ReLU:
    return nn.ReLU(inplace=True)


def basic_body(inward: int, outward: int, stride: int) -> nn.Sequential:
    return nn.Sequential(conv_norm(inward, outward, 3, stride), relu(), conv_norm(outward, outward, 3))


def bottleneck_body(inward: int, outward: int, stride: int) -> nn.Sequential:
    narrow = outward // 4
    return nn.Sequential(
        conv_norm(inward, narrow, 1),
        relu(),
        conv_norm(narrow, narrow, 3, stride),
        relu(),
        conv_norm(narrow, outward, 1),
    )


def inverted_body(inward: int, outward: int, stride: int, *, expansion: int = 4) -> nn.Sequential:
    """MobileNetV2's branch: wide inside, with a convolution for each channel, and ReLU6 in place."""
    wide = expansion * inward
    return nn.Sequential(
        conv_norm(inward, wide, 1),
        nn.ReLU6(inplace=True),
        conv_norm(wide, wide, 3, stride, groups=wide),
        nn.ReLU6(inplace=True),
        conv_norm(wide, outward, 1),
    )


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate computed from the means of all."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            relu(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x)


def grouped_body(inward: int, outward: int, stride: int, *, group_width: int, squeeze: bool) -> nn.Sequential:
    """RegNet's branch: RegNetX, or RegNetY with squeeze-and-excitation."""
    layers = [
        conv_norm(inward, outward, 1),
        relu(),
        conv_norm(outward, outward, 3, stride, groups=outward // group_width),
        relu(),
    ]
    if squeeze:
        layers.append(SqueezeExcite(outward, max(1, inward // 4)))
    return nn.Sequential(*layers, conv_norm(outward, outward, 1))


class Residual(nn.Module):
    """A branch added in place to its shortcut, then ReLU in place."""

    inplace = True

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.relu = relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if self.inplace:
            y += self.shortcut(x)
        else:
            y = y + self.shortcut(x)
        return self.relu(y)


def out_of_place(model: nn.Module) -> nn.Module:
    """The same model with nothing done in place that can be told not to be."""
    for module in model.modules():
        if isinstance(module, Residual | nn.ReLU):
            module.inplace = False
    return model


def residual_stage(body: Body, inward: int, outward: int, stride: int, depth: int) -> nn.Sequential:
    """`depth` residual blocks, of which the first changes resolution and channels."""
    first = Residual(
        body(inward, outward, stride),
        nn.Identity() if stride == 1 and inward == outward else conv_norm(inward, outward, 1, stride),
    )
    return nn.Sequential(first, *(Residual(body(outward, outward, 1), nn.Identity()) for _ in range(depth - 1)))


class ResidualNet(nn.Module):
    """A stem, stages of residual blocks, the mean over the image, a linear classifier."""

    def __init__(
        self,
        stem: nn.Module,
        stem_width: int,
        widths: Sequence[int],
        depths: Sequence[int],
        strides: Sequence[int],
        body: Body,
        classes: int,
    ) -> None:
        super().__init__()
        inwards = [stem_width, *widths[:-1]]
        self.stem = stem
        self.stages = nn.Sequential(
            *(
                residual_stage(body, inward, outward, stride, depth)
                for inward, outward, stride, depth in zip(inwards, widths, strides, depths, strict=True)
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.stages(self.stem(images))).flatten(1))


def resnet(body: Body, width: int, depths: Sequence[int], classes: int) -> ResidualNet:
    """ResNet of `basic_body` or `bottleneck_body`, or another branch; `width` is the stem's, 64 in the paper."""
    expansion = 4 if body is bottleneck_body else 1
    widths = [expansion * width * 2**stage for stage in range(len(depths))]
    strides = [1] + [2] * (len(depths) - 1)
    stem = nn.Sequential(conv_norm(3, width, 7, stride=2), relu(), nn.MaxPool2d(3, stride=2, padding=1))
    return ResidualNet(stem, width, widths, depths, strides, body, classes)


def regnet(
    widths: Sequence[int], depths: Sequence[int], group_width: int, squeeze: bool, classes: int, stem_width: int = 32
) -> ResidualNet:
    """RegNetX, or RegNetY when `squeeze`."""
    stem = nn.Sequential(conv_norm(3, stem_width, 3, stride=2), relu())
    body = partial(grouped_body, group_width=group_width, squeeze=squeeze)
    return ResidualNet(stem, stem_width, widths, depths, [2] * len(depths), body, classes)


def double_conv(inward: int, outward: int) -> nn.Sequential:
    return nn.Sequential(conv_norm(inward, outward, 3), relu(), conv_norm(outward, outward, 3), relu())


class UNet(nn.Module):
    """Encoder and decoder joined at every resolution by concatenation; `levels` halvings, `features` at the top."""

    def __init__(self, inward: int, outward: int, features: int, levels: int) -> None:
        super().__init__()
        widths = [features * 2**level for level in range(levels + 1)]
        self.encoders = nn.ModuleList(
            double_conv(before, after) for before, after in zip([inward, *widths], widths[:-1], strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = double_conv(widths[-2], widths[-1])
        self.raisers = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in widths[-2::-1])
        self.decoders = nn.ModuleList(double_conv(2 * width, width) for width in widths[-2::-1])
        self.head = nn.Conv2d(features, outward, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x, skips = images, []
        for encoder in self.encoders:
            skips.append(encoder(x))
            x = self.pool(skips[-1])
        x = self.bottom(x)
        for raiser, decoder in zip(self.raisers, self.decoders, strict=True):
            x = decoder(torch.cat([raiser(x), skips.pop()], dim=1))
        return torch.sigmoid(self.head(x))
