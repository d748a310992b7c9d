"""Training steps of our own that do more than forward, loss and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import Example, Family, mean_square
from .odd_python import BATCH, WIDTH, Stack, features

family = Family("odd steps")


@family.model("gan")
def gan() -> Example:
    """Discriminator and generator take turns; an argument says whose turn it is."""

    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(Stack(3), nn.Linear(WIDTH, WIDTH))
            self.discriminator = nn.Sequential(Stack(3), nn.Linear(WIDTH, 1))

        def forward(self, noise: torch.Tensor, real: torch.Tensor, turn: str) -> Any:
            fake = self.generator(noise)
            if turn == "generator":
                return nn.functional.softplus(-self.discriminator(fake)).mean()
            wrong = nn.functional.softplus(self.discriminator(fake.detach())).mean()
            return wrong + nn.functional.softplus(-self.discriminator(real)).mean()

    real, noise = features(), features()

    def step(module: nn.Module, number: int) -> Any:
        values = []
        for turn in ("discriminator", "generator"):
            module.zero_grad(set_to_none=True)
            value = module(noise, real, turn)
            value.backward()
            values.append(value.detach())
        return values

    return Example(Gan(), (noise, real, "discriminator"), lambda output: output, step=step)


@family.model("vae")
def vae() -> Example:
    """Samples of a posterior, drawn in forward, and a loss of two parts."""

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(Stack(3), nn.Linear(WIDTH, 32))
            self.decoder = nn.Sequential(nn.Linear(16, WIDTH), Stack(3))

        def forward(self, x: torch.Tensor) -> Any:
            mean, logarithm = self.encoder(x).chunk(2, -1)
            code = mean + torch.randn_like(mean) * (0.5 * logarithm).exp()
            return self.decoder(code), mean, logarithm

    sample = features()

    def loss(output: Any) -> torch.Tensor:
        rebuilt, mean, logarithm = output
        divergence = -0.5 * (1 + logarithm - mean.square() - logarithm.exp()).mean()
        return nn.functional.mse_loss(rebuilt, sample) + 0.1 * divergence

    return Example(Vae(), sample, loss)


@family.model("vae-distributions")
def vae_distributions() -> Example:
    """The same by torch.distributions, whose checks read values."""

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(Stack(3), nn.Linear(WIDTH, 32))
            self.decoder = nn.Sequential(nn.Linear(16, WIDTH), Stack(3))

        def forward(self, x: torch.Tensor) -> Any:
            mean, scale = self.encoder(x).chunk(2, -1)
            posterior = torch.distributions.Normal(mean, nn.functional.softplus(scale) + 1e-3)
            prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
            rebuilt = self.decoder(posterior.rsample())
            return rebuilt.square().mean() + torch.distributions.kl_divergence(posterior, prior).mean()

    return Example(Vae(), features(), lambda output: output)


@family.model("grad-scaler-overflow")
def grad_scaler() -> Example:
    """The first scale is too large: that step is skipped and the scale halved."""
    sample = features()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)

    def step(module: nn.Module, number: int) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        with torch.autocast("cpu", dtype=torch.float16):
            value = mean_square(module(sample))
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update(None if number else 2.0**10)
        return value

    def half() -> Any:
        return torch.autocast("cpu", dtype=torch.float16)

    return Example(Stack(), sample, mean_square, context=half, step=step, updates=True)


@family.model("random-lengths")
def random_lengths() -> Example:
    """200 random lengths: plans and memory must stay bounded."""
    lengths = torch.randint(16, 257, (200,)).tolist()

    def step(module: nn.Module, number: int) -> Any:
        values = []
        for length in lengths[100 * number : 100 * number + 100]:
            module.zero_grad(set_to_none=True)
            value = mean_square(module(torch.randn(length, WIDTH)))
            value.backward()
            values.append(value.detach())
        return torch.stack(values)

    return Example(Stack(), features(256), mean_square, step=step, makes_inputs=True)


@family.model("smaller-last-batch")
def smaller_last_batch() -> Example:
    sizes = (BATCH, BATCH // 3)

    def step(module: nn.Module, number: int) -> Any:
        value = mean_square(module(features(sizes[number])))
        value.backward()
        return value

    return Example(Stack(dropout=0.1), features(), mean_square, step=step, makes_inputs=True)


@family.model("gradient-accumulation")
def gradient_accumulation() -> Example:
    """Three backward passes before an update."""

    def step(module: nn.Module, number: int) -> Any:
        values = []
        for _ in range(3):
            value = mean_square(module(features())) / 3
            value.backward()
            values.append(value.detach())
        return values

    return Example(Stack(dropout=0.1), features(), mean_square, step=step, makes_inputs=True)


@family.model("evaluation-in-between")
def evaluation_in_between() -> Example:
    """Each step is followed by a look at the module without gradients and in evaluation mode."""
    sample = features()

    def step(module: nn.Module, number: int) -> Any:
        value = mean_square(module(sample))
        value.backward()
        module.eval()
        with torch.no_grad():
            seen = module(sample[:7])
        module.train()
        return value, seen

    return Example(Stack(dropout=0.1), sample, mean_square, step=step)


@family.model("adam-and-clipping")
def adam_and_clipping() -> Example:
    """Gradients are clipped and Adam keeps a state, which appears in the first step."""
    module, sample = Stack(dropout=0.1), features()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step(trained: nn.Module, number: int) -> Any:
        value = mean_square(trained(sample))
        value.backward()
        norm = nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        optimizer.step()
        return value, norm

    return Example(module, sample, mean_square, step=step, updates=True)


@family.model("loss-that-draws")
def loss_that_draws() -> Example:
    """The loss draws random numbers after a forward with dropout."""

    def loss(output: torch.Tensor) -> torch.Tensor:
        return (output * torch.rand_like(output)).square().mean()

    return Example(Stack(dropout=0.2), features(), loss)


@family.model("contrastive")
def contrastive() -> Example:
    """Two views of a batch in one forward, noise drawn in it, and a loss over all pairs."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack(3, dropout=0.1)
            self.temperature = nn.Parameter(torch.tensor(0.0))

        def forward(self, x: torch.Tensor) -> Any:
            views = self.stack(torch.cat([x, x + 0.1 * torch.randn_like(x)]))
            first, second = nn.functional.normalize(views, dim=-1).chunk(2)
            return first @ second.T * self.temperature.exp()

    return Example(Module(), features(64), lambda scores: nn.functional.cross_entropy(scores, torch.arange(64)))


@family.model("several-backward-passes")
def several_backward_passes() -> Example:
    """Two losses of one forward, differentiated one after the other."""
    sample = features()

    def step(module: nn.Module, number: int) -> Any:
        output = module(sample)
        first, second = mean_square(output), output.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        return first, second

    return Example(Stack(), sample, mean_square, step=step, bounded=False)
