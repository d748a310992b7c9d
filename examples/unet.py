"""Train a U-Net for segmentation inside a memory budget, after looking at what smaller budgets cost.

    python examples/unet.py                                     # small, on random images
    python examples/unet.py --channels 64 --levels 5 --size 512 --budget 12GiB

The skip connections of a U-Net hold large activations from the first layer to the last, and checkpoints around whole
blocks cannot free them. A schedule that is solved for can.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from torch import nn

import rematch


class Block(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Halves the resolution `levels - 1` times and doubles the channels each time, then the way back."""

    def __init__(self, channels: int, levels: int, classes: int = 4) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        self.down = nn.ModuleList(Block(before, after) for before, after in pairwise([3, *widths]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(below, width, 2, stride=2) for width, below in pairwise(widths))
        self.join = nn.ModuleList(Block(2 * width, width) for width in widths[:-1])
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for level in reversed(range(len(self.up))):
            x = self.join[level](torch.cat([skips[level], self.up[level](x)], dim=1))
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a U-Net inside a memory budget.")
    parser.add_argument("--budget", default="60%", help='such as "8GiB" or "60%%" of what plain training needs')
    parser.add_argument("--channels", type=int, default=8, help="of the first level")
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--size", type=int, default=64, help="pixels on a side")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30, help="to search for the schedule, at most")
    asked = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = UNet(asked.channels, asked.levels).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(asked.batch, 3, asked.size, asked.size, device=device)
    masks = torch.randint(4, (asked.batch, asked.size, asked.size), device=device)

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, masks)

    options = {"loss": loss_of, "optimizer": optimizer, "time_limit": asked.seconds}
    curve = rematch.pareto(model, images, budgets=["50%", "70%"], **options)
    print(curve)  # extra time by budget; curve.plot("curve.svg") draws it

    model = rematch.remat(model, images, budget=asked.budget, **options)
    print(rematch.plans_of(model)[0])
    for step in range(asked.steps):
        loss = loss_of(model(images))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
