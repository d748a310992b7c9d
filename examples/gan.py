"""Train a generator and a discriminator, each of their steps inside one memory budget.

    python examples/gan.py                               # small, on random images
    python examples/gan.py --channels 64 --batch 128 --budget 4GiB

A step that runs several networks is made a module that returns its loss. The budget then covers the whole step: both
networks' parameters, what they hold for backward at the same time, and the loss.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import rematch

NOISE = 16


def generator(channels: int) -> nn.Sequential:
    """From noise to images of 32 x 32."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 4 * channels, 4),
        nn.BatchNorm2d(4 * channels),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * channels, 2 * channels, 4, stride=2, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * channels, channels, 4, stride=2, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.ConvTranspose2d(channels, 3, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def discriminator(channels: int) -> nn.Sequential:
    """From images to a number each: how real it looks."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * channels, 4 * channels, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4 * channels, 1, 4),
        nn.Flatten(),
    )


class Step(nn.Module):
    def __init__(self, generates: nn.Module, judges: nn.Module) -> None:
        super().__init__()
        self.generates = generates
        self.judges = judges


class JudgingStep(Step):
    """The discriminator learns to tell real images from made ones."""

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            made = self.generates(noise)
        return nn.functional.softplus(-self.judges(real)).mean() + nn.functional.softplus(self.judges(made)).mean()


class GeneratingStep(Step):
    """The generator learns to make images that the discriminator takes for real."""

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(-self.judges(self.generates(noise))).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN inside a memory budget.")
    parser.add_argument("--budget", default="80%", help='such as "8GiB" or "80%%" of what plain training needs')
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30, help="to search for the schedule, at most")
    asked = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    networks = generator(asked.channels).to(device), discriminator(asked.channels).to(device)
    optimizers = [torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.5, 0.999)) for network in networks]

    def noise() -> torch.Tensor:
        return torch.randn(asked.batch, NOISE, 1, 1, device=device)

    def planned(step: Step) -> nn.Module:
        return rematch.remat(step, budget=asked.budget, loss=lambda loss: loss, time_limit=asked.seconds)

    judging, generating = planned(JudgingStep(*networks)), planned(GeneratingStep(*networks))
    for step in range(asked.steps):
        real = torch.rand(asked.batch, 3, 32, 32, device=device) * 2 - 1
        losses = []
        for module, inputs, optimizer in (
            (judging, (real, noise()), optimizers[1]),
            (generating, (noise(),), optimizers[0]),
        ):
            loss = module(*inputs)
            loss.backward()
            optimizer.step()
            for network in networks:
                network.zero_grad()  # the generator's step leaves gradients in the discriminator too
            losses.append(loss.item())
        print(f"step {step}  loss {losses[0]:.6f} and {losses[1]:.6f}")
    for module in (judging, generating):
        print(rematch.plans_of(module)[-1])


if __name__ == "__main__":
    main()
