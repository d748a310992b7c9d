"""Train an encoder-decoder on sentences of several lengths inside a memory budget.

    python examples/translation.py                       # a small Transformer that learns to reverse its input
    python examples/translation.py --width 512 --layers 6 --batch 64 --lengths 256 192 128 --budget 6GiB

Batches come in a few lengths, and each length is planned when it first comes. The longest comes first, so that a budget
in percent is of its peak. Mixed precision and dropout change nothing: the bits are those of plain training.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import rematch

VOCABULARY = 64


class Translator(nn.Module):
    """From the tokens of both languages to the loss, so that the plan knows all that a step allocates."""

    def __init__(self, width: int, layers: int, longest: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(longest, width)
        self.transformer = nn.Transformer(width, 4, layers, layers, 4 * width, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, VOCABULARY)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given, expected = target[:, :-1], target[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1], device=given.device)
        hidden = self.transformer(self.embedded(source), self.embedded(given), tgt_mask=mask, tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), expected.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an encoder-decoder inside a memory budget.")
    parser.add_argument("--budget", default="60%", help='such as "8GiB" or "60%%" of what plain training needs')
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1, help="of the encoder, and as many of the decoder")
    parser.add_argument("--lengths", type=int, nargs="+", default=[48, 32], help="tokens, longest first")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30, help="to search for the schedule, at most")
    asked = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Translator(asked.width, asked.layers, max(asked.lengths) + 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model = rematch.remat(
        model, budget=asked.budget, loss=lambda loss: loss, optimizer=optimizer, time_limit=asked.seconds
    )

    for step in range(asked.steps):
        length = asked.lengths[step % len(asked.lengths)]
        source = torch.randint(1, VOCABULARY, (asked.batch, length), device=device)
        target = torch.cat([torch.zeros_like(source[:, :1]), source.flip(1)], dim=1)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(source, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  length {length}  loss {loss.item():.6f}")
    for plan in rematch.plans_of(model):
        print(plan)


if __name__ == "__main__":
    main()
