"""Networks of cells that a search found: NASNet-A, AmoebaNet-A and DARTS.

Each cell reads the two before it. It makes both equally wide, then adds two ways through it again and again, and
concatenates some of the sums. The cells are those of the papers (Zoph et al., 2018; Real et al., 2019; Liu et al.,
2019). The network around them is the one that DARTS trains on ImageNet: two stems, three stages with a reducing cell
between them, the mean over the image, a linear classifier; it has no auxiliary classifier and drops no paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from .images import relu

Way = tuple[str, int]  # an operation, and which of the states so far it reads; 0 and 1 are the cells before


@dataclass(frozen=True)
class Genotype:
    """The ways of both kinds of cells, two for each sum, and the sums that are concatenated, as states."""

    normal: tuple[Way, ...]
    normal_concat: tuple[int, ...]
    reduce: tuple[Way, ...]
    reduce_concat: tuple[int, ...]


GENOTYPES = {
    "NASNet": Genotype(
        normal=(
            ("separable 5", 1), ("separable 3", 0), ("separable 5", 0), ("separable 3", 0), ("mean", 1), ("same", 0),
            ("mean", 0), ("mean", 0), ("separable 3", 1), ("same", 1),
        ),
        normal_concat=(2, 3, 4, 5, 6),
        reduce=(
            ("separable 5", 1), ("separable 7", 0), ("max", 1), ("separable 7", 0), ("mean", 1), ("separable 5", 0),
            ("same", 3), ("mean", 2), ("separable 3", 2), ("max", 1),
        ),
        reduce_concat=(4, 5, 6),
    ),
    "AmoebaNet": Genotype(
        normal=(
            ("mean", 0), ("max", 1), ("separable 3", 0), ("separable 5", 2), ("separable 3", 0), ("mean", 3),
            ("separable 3", 1), ("same", 1), ("same", 0), ("mean", 1),
        ),
        normal_concat=(4, 5, 6),
        reduce=(
            ("mean", 0), ("separable 3", 1), ("max", 0), ("separable 7", 2), ("separable 7", 0), ("mean", 1),
            ("max", 0), ("max", 1), ("rows and columns", 0), ("separable 3", 5),
        ),
        reduce_concat=(3, 4, 6),
    ),
    "DARTS": Genotype(
        normal=(
            ("separable 3", 0), ("separable 3", 1), ("separable 3", 0), ("separable 3", 1), ("separable 3", 1),
            ("same", 0), ("same", 0), ("dilated 3", 2),
        ),
        normal_concat=(2, 3, 4, 5),
        reduce=(
            ("max", 0), ("max", 1), ("same", 2), ("max", 1), ("max", 0), ("same", 2), ("same", 2), ("max", 1),
        ),
        reduce_concat=(2, 3, 4, 5),
    ),
}  # fmt: skip


def depthwise(channels: int, kernel: int, stride: int, dilation: int = 1) -> list[nn.Module]:
    """ReLU, a convolution of each channel by itself, one of all channels at each pixel, batch norm."""
    padding = dilation * (kernel // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        nn.BatchNorm2d(channels),
    ]


def separable(channels: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(*depthwise(channels, kernel, stride), *depthwise(channels, kernel, 1))


def rows_and_columns(channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(channels, channels, (1, 7), (1, stride), (0, 3), bias=False),
        nn.Conv2d(channels, channels, (7, 1), (stride, 1), (3, 0), bias=False),
        nn.BatchNorm2d(channels),
    )


class Halved(nn.Module):
    """Half the resolution: every second pixel, and those one further down and to the right, side by side."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inward, outward // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inward, outward // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(x)
        return self.norm(torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], dim=1))


def relu_conv_norm(inward: int, outward: int) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inward, outward, 1, bias=False), nn.BatchNorm2d(outward))


OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {  # by channels and stride
    "same": lambda channels, stride: nn.Identity() if stride == 1 else Halved(channels, channels),
    "mean": lambda channels, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
    "max": lambda channels, stride: nn.MaxPool2d(3, stride, padding=1),
    "separable 3": lambda channels, stride: separable(channels, 3, stride),
    "separable 5": lambda channels, stride: separable(channels, 5, stride),
    "separable 7": lambda channels, stride: separable(channels, 7, stride),
    "dilated 3": lambda channels, stride: nn.Sequential(*depthwise(channels, 3, stride, dilation=2)),
    "rows and columns": rows_and_columns,
}


class Cell(nn.Module):
    """One cell; `shrunk` says that the cell before it halved the resolution, which the one before that has not."""

    def __init__(
        self, genotype: Genotype, inwards: tuple[int, int], channels: int, *, reduces: bool, shrunk: bool
    ) -> None:
        super().__init__()
        ways = genotype.reduce if reduces else genotype.normal
        self.concat = genotype.reduce_concat if reduces else genotype.normal_concat
        self.adapt = nn.ModuleList(
            [(Halved if shrunk else relu_conv_norm)(inwards[0], channels), relu_conv_norm(inwards[1], channels)]
        )
        self.reads = [state for _, state in ways]
        self.ways = nn.ModuleList(OPERATIONS[name](channels, 2 if reduces and state < 2 else 1) for name, state in ways)

    def forward(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        states = [self.adapt[0](before), self.adapt[1](last)]
        for one, other in zip(range(0, len(self.reads), 2), range(1, len(self.reads), 2), strict=True):
            states.append(self.ways[one](states[self.reads[one]]) + self.ways[other](states[self.reads[other]]))
        return torch.cat([states[state] for state in self.concat], dim=1)


class CellNetwork(nn.Module):
    """`depth` cells, of which those at a third and at two thirds halve the resolution and double the channels."""

    def __init__(self, genotype: Genotype, channels: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stems = nn.ModuleList(
            [
                nn.Sequential(*_stem(3, channels // 2), relu(), *_stem(channels // 2, channels)),
                nn.Sequential(nn.ReLU(), *_stem(channels, channels)),
            ]
        )
        reducing = [place in (depth // 3, 2 * depth // 3) for place in range(depth)]
        widths, inwards = channels, (channels, channels)
        self.cells = nn.ModuleList()
        for shrunk, reduces in pairwise([True, *reducing]):
            widths *= 2 if reduces else 1
            cell = Cell(genotype, inwards, widths, reduces=reduces, shrunk=shrunk)
            self.cells.append(cell)
            inwards = inwards[1], widths * len(cell.concat)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inwards[1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        before = self.stems[0](images)
        last = self.stems[1](before)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.head(self.pool(last).flatten(1))


def _stem(inward: int, outward: int) -> list[nn.Module]:
    return [nn.Conv2d(inward, outward, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outward)]
