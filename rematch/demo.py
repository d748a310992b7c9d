"""The demo: train a small GPT on rematch's own source, once plainly and once in half the memory, side by side.

`run_demo(print)` prints each step and returns whether both gave equal results and the budget was kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from rematch.api import plans_of, remat
from rematch.trial import Trial, same_bits
from rematch.units import format_bytes, format_extra

_SYMBOLS = 256  # a token is a byte
_WARM_UP_STEPS = 2  # not timed
_LEARNING_RATE = 0.1

Batch = tuple[torch.Tensor, torch.Tensor]  # bytes, and those that follow


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and the training run."""

    layers: int = 6
    width: int = 192
    heads: int = 6
    batch: int = 8
    length: int = 128
    steps: int = 8
    solve_seconds: float = 20.0


class Block(nn.Module):
    """A transformer block: attention and feed-forward, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inward(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outward(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A small decoder whose tokens are bytes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_SYMBOLS, sizes.width)
        self.places = nn.Parameter(torch.zeros(sizes.length, sizes.width))
        self.blocks = nn.Sequential(*(Block(sizes.width, sizes.heads) for _ in range(sizes.layers)))
        self.head = nn.Sequential(nn.LayerNorm(sizes.width), nn.Linear(sizes.width, _SYMBOLS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.places))  # type: ignore[no-any-return]


def run_demo(say: Callable[[str], None], sizes: Sizes | None = None) -> bool:
    """Train both ways and print what happens; returns whether results were equal and the budget was kept."""
    sizes = sizes or Sizes()
    torch.manual_seed(0)
    model, batches = GPT(sizes), _batches(sizes)
    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"A GPT of {sizes.layers} layers and {count / 1e6:.1f} M parameters learns to write rematch's own source,")
    say(f"{sizes.batch} x {sizes.length} bytes a step. Planning it for half the memory that plain training takes ...")
    tokens, following = batches[0]
    loss = _Loss(following)
    plain = Trial(model, loss)
    ours = Trial(remat(deepcopy(model), tokens, budget="50%", loss=loss, time_limit=sizes.solve_seconds), loss)
    (plan,) = plans_of(ours.model)
    say(f"\n{plan}\n")
    equal, extra = _train(plain, ours, batches, say)
    peak_bytes, budget_bytes = ours.peak_bytes(tokens), plan.figures.budget_bytes
    kept = peak_bytes <= budget_bytes
    say(
        f"  peak  {format_bytes(peak_bytes)} measured, {'within' if kept else 'ABOVE'} the budget of "
        f"{format_bytes(budget_bytes)}; plain training takes {format_bytes(plain.peak_bytes(tokens))}"
    )
    say(f"  step  {extra:+.2f} % measured, {format_extra(plan.figures.overhead_pct)} predicted")
    return equal and kept


def _train(plain: Trial, ours: Trial, batches: list[Batch], say: Callable[[str], None]) -> tuple[bool, float]:
    """Return whether both are equal in every step and at the end, and the extra time of ours in percent."""
    trials = (plain, ours)
    optimizers = [torch.optim.SGD(trial.model.parameters(), lr=_LEARNING_RATE) for trial in trials]
    seconds: tuple[list[float], list[float]] = ([], [])
    equal = True
    say("  step  plain loss  in half the memory")
    for step, (tokens, following) in enumerate(batches):
        losses = []
        for trial, optimizer, taken in zip(trials, optimizers, seconds, strict=True):
            torch.manual_seed(step)  # the same dropout in both
            trial.loss.following = following  # type: ignore[attr-defined]
            value, spent = trial.timed_step(tokens)
            optimizer.step()
            losses.append(value)
            taken.append(spent)
        same = same_bits(*losses)
        equal = equal and same
        say(f"  {step + 1:>4}  {losses[0]:>10.6f}  {losses[1]:>10.6f} {'equal' if same else 'DIFFERENT'}")
    equal = equal and all(map(same_bits, plain.model.parameters(), ours.model.parameters()))
    say(f"\nAfter {len(batches)} steps the parameters are {'equal, to the bit' if equal else 'NOT EQUAL'}.")
    before, after = (statistics.median(taken[_WARM_UP_STEPS:]) for taken in seconds)
    return equal, 100 * (after / before - 1)


class _Loss:
    """Cross entropy against the next bytes, which each batch sets."""

    def __init__(self, following: torch.Tensor) -> None:
        self.following = following

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), self.following.flatten())


def _batches(sizes: Sizes) -> list[Batch]:
    """Pieces of the source of this package, and the same pieces shifted by one byte."""
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(sizes.steps):
        starts = torch.randint(len(text) - sizes.length - 1, (sizes.batch, 1), generator=generator)
        places = starts + torch.arange(sizes.length)
        batches.append((text[places], text[places + 1]))
    return batches
