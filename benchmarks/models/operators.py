"""Neural operators: FNO in any dimension, U-FNO and UNO. Complex FFTs, complex weights, writes into slices.

Data enter and leave as [batch, *grid, channel]; in between channels are second, as convolutions want them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import nn

_CONVOLUTION = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_INTERPOLATION = {1: "linear", 2: "bilinear", 3: "trilinear"}


def pointwise(dimensions: int, inward: int, outward: int) -> nn.Module:
    return _CONVOLUTION[dimensions](inward, outward, 1)


def pointwise_mlp(dimensions: int, inward: int, hidden: int, outward: int) -> nn.Sequential:
    return nn.Sequential(pointwise(dimensions, inward, hidden), nn.GELU(), pointwise(dimensions, hidden, outward))


def with_coordinates(x: torch.Tensor) -> torch.Tensor:
    """Appends to each grid point's channels its coordinates in the unit cube."""
    grid = x.shape[1:-1]
    axes = [torch.linspace(0, 1, size, dtype=x.dtype, device=x.device) for size in grid]
    coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    return torch.cat([x, coordinates.expand(len(x), *coordinates.shape)], dim=-1)


class SpectralConvolution(nn.Module):
    """Multiplies the lowest Fourier modes by learned complex matrices and drops the rest.

    In a real transform the last axis has only frequencies >= 0; on every other axis the lowest modes lie at both ends,
    hence one weight a corner. The result may be on another grid: fewer or more modes are written into its spectrum.
    """

    def __init__(self, inward: int, outward: int, modes: Sequence[int]) -> None:
        super().__init__()
        self.outward = outward
        ends = product(*[(slice(0, count), slice(-count, None)) for count in modes[:-1]])
        self.corners = [(..., *end, slice(0, modes[-1])) for end in ends]
        self.weights = nn.ParameterList(
            torch.randn(inward, outward, *modes, dtype=torch.cfloat) / inward for _ in self.corners
        )

    def forward(self, x: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
        axes = tuple(range(2, x.ndim))
        spectrum = torch.fft.rfftn(x, dim=axes)
        result = spectrum.new_zeros(len(x), self.outward, *grid[:-1], grid[-1] // 2 + 1)
        for corner, weight in zip(self.corners, self.weights, strict=True):
            result[corner] = torch.einsum("bi...,io...->bo...", spectrum[corner], weight)
        return torch.fft.irfftn(result, s=tuple(grid), dim=axes)


class FourierBlock(nn.Module):
    """A spectral convolution with a pointwise network after it, beside a pointwise path."""

    def __init__(self, width: int, modes: Sequence[int], activate: bool) -> None:
        super().__init__()
        self.spectral = SpectralConvolution(width, width, modes)
        self.mix = pointwise_mlp(len(modes), width, width, width)
        self.local = pointwise(len(modes), width, width)
        self.activate = activate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(self.spectral(x, x.shape[2:])) + self.local(x)
        return F.gelu(y) if self.activate else y


class StridedUNet(nn.Module):
    """A small 3d U-Net whose convolutions halve the grid `levels` times: the local path of U-FNO."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv3d(width, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm3d(width),
            nn.LeakyReLU(0.1, inplace=True),
        )
        self.inner = StridedUNet(width, levels - 1) if levels > 1 else nn.Identity()
        self.up = nn.Sequential(
            nn.ConvTranspose3d(width, width, 4, stride=2, padding=1), nn.LeakyReLU(0.1, inplace=True)
        )
        self.merge = nn.Conv3d(2 * width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merge(torch.cat([x, self.up(self.inner(self.down(x)))], dim=1))


class UFourierBlock(nn.Module):
    """A Fourier layer whose local path is pointwise, or pointwise and a U-Net."""

    def __init__(self, width: int, modes: Sequence[int], levels: int) -> None:
        super().__init__()
        self.spectral = SpectralConvolution(width, width, modes)
        self.local = pointwise(len(modes), width, width)
        self.unet = StridedUNet(width, levels) if levels else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.spectral(x, x.shape[2:]) + self.local(x)
        if self.unet is not None:
            y = y + self.unet(x)
        return F.gelu(y)


class GridOperator(nn.Module):
    """Lifts channels and coordinates, pads the last axis (the data are not periodic there), runs blocks, projects."""

    def __init__(self, inward: int, width: int, hidden: int, dimensions: int, padding: int, blocks: nn.Module) -> None:
        super().__init__()
        self.padding = padding
        self.lift = nn.Linear(inward + dimensions, width)
        self.blocks = blocks
        self.project = pointwise_mlp(dimensions, width, hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(with_coordinates(x)).movedim(-1, 1)
        x = self.blocks(F.pad(x, [0, self.padding]))
        x = x[..., : x.shape[-1] - self.padding]
        return self.project(x).movedim(1, -1)


def fno(inward: int, width: int, modes: Sequence[int], depth: int, padding: int = 0) -> GridOperator:
    """The Fourier neural operator; as many dimensions as `modes` has entries."""
    blocks = nn.Sequential(*(FourierBlock(width, modes, activate=place < depth - 1) for place in range(depth)))
    return GridOperator(inward, width, 4 * width, len(modes), padding, blocks)


def ufno(inward: int, width: int, modes: Sequence[int], depth: int, levels: int, padding: int) -> GridOperator:
    """U-FNO: `depth` Fourier layers, then as many with a U-Net. The padded grid must divide by 2**levels."""
    plain = [UFourierBlock(width, modes, levels=0) for _ in range(depth)]
    with_unet = [UFourierBlock(width, modes, levels) for _ in range(depth)]
    return GridOperator(inward, width, 4 * width, len(modes), padding, nn.Sequential(*plain, *with_unet))


@dataclass(frozen=True)
class Level:
    """One operator of a UNO: the multiple of its width, the multiples of the padded grid, the modes it keeps."""

    widening: int
    scale: tuple[float, float, float]
    modes: tuple[int, int, int]


def uno_levels(shrink: int = 1) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """The way down and up of the UNO that maps 10 instants on a 64 x 64 grid to 40; `shrink` divides its modes in
    space, for grids smaller by as much."""

    def level(widening: int, space: float, time: float, space_modes: int, time_modes: int) -> Level:
        modes = max(1, space_modes // shrink)
        return Level(widening, (space, space, time), (modes, modes, time_modes))

    down = (
        level(2, 3 / 4, 1.0, 20, 4),
        level(4, 1 / 2, 1.0, 14, 4),
        level(8, 1 / 4, 1.6, 6, 4),
        level(16, 1 / 8, 1.6, 4, 7),
    )
    up = (level(4, 1 / 2, 2.4, 4, 7), level(2, 3 / 4, 3.2, 14, 10), level(2, 1.0, 4.0, 20, 14))
    return down, up


class ResizingBlock(nn.Module):
    """A spectral and a pointwise path to another grid, added, normalized if asked, GELU."""

    def __init__(self, inward: int, outward: int, modes: Sequence[int], normalize: bool) -> None:
        super().__init__()
        self.spectral = SpectralConvolution(inward, outward, modes)
        self.local = pointwise(len(modes), inward, outward)
        self.norm = nn.InstanceNorm3d(outward, affine=True) if normalize else nn.Identity()

    def forward(self, x: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
        return F.gelu(self.norm(self.spectral(x, grid) + resized(self.local(x), grid)))


def resized(x: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    return F.interpolate(x, size=tuple(grid), mode=_INTERPOLATION[x.ndim - 2], align_corners=True)


class UNO(nn.Module):
    """The U-shaped neural operator: down to a coarse grid and up again, joined by concatenation, in space and time.

    Predicts `4` instants for each given one, when its levels end at that scale.
    """

    def __init__(self, inward: int, width: int, down: Sequence[Level], up: Sequence[Level], padding: int) -> None:
        super().__init__()
        self.padding = padding
        self.down_scales = [level.scale for level in down]
        self.up_scales = [level.scale for level in up]
        self.lift = nn.Sequential(nn.Linear(inward + 3, width // 2), nn.GELU(), nn.Linear(width // 2, width), nn.GELU())
        skip_widths = [width, *(level.widening * width for level in down)]
        self.down = nn.ModuleList(
            ResizingBlock(inward, level.widening * width, level.modes, normalize=place % 3 == 0)
            for place, (inward, level) in enumerate(zip(skip_widths, down, strict=False))
        )
        self.up = nn.ModuleList()
        current = skip_widths[-1]
        for place, (level, skip) in enumerate(zip(up, skip_widths[len(up) - 1 :: -1], strict=True)):
            self.up.append(ResizingBlock(current, level.widening * width, level.modes, normalize=place == 1))
            current = level.widening * width + skip
        self.project = nn.Sequential(nn.Linear(current, 4 * width), nn.GELU(), nn.Linear(4 * width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(self.lift(with_coordinates(x)).movedim(-1, 1), [0, self.padding])
        base = x.shape[2:]
        skips = [x]
        for block, scale in zip(self.down, self.down_scales, strict=True):
            skips.append(block(skips[-1], scaled(base, scale)))
        x = skips.pop()
        joined = reversed(skips[: len(self.up)])
        for block, scale, skip in zip(self.up, self.up_scales, joined, strict=True):
            grid = scaled(base, scale)
            x = torch.cat([block(x, grid), resized(skip, grid)], dim=1)
        padding = int(self.padding * self.up_scales[-1][-1])
        return self.project(x[..., : x.shape[-1] - padding].movedim(1, -1))


def scaled(grid: Sequence[int], scale: Sequence[float]) -> list[int]:
    return [int(size * factor) for size, factor in zip(grid, scale, strict=True)]
