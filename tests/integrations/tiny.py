"""What the tests of trainers share: a tiny GPT-2 with dropout, texts of several lengths, and a comparison of weights.

`gpt2()(**padded([texts()[0], texts()[1]])).loss`
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.training import same_bits

VOCABULARY, LONGEST = 61, 32
BUDGET: dict[str, Any] = {"budget": "80%", "engine": "tape", "solver": "anneal", "time_limit": 0.5}


def gpt2() -> GPT2LMHeadModel:
    """Always with the same random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": LONGEST}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def texts(count: int = 7) -> list[dict[str, torch.Tensor]]:
    """Of 31 to 18 tokens, longest first, so that batches of neighbours have few lengths among them."""
    drawn = torch.Generator().manual_seed(1)
    lengths = [31 - 13 * number // count for number in range(count)]
    tokens = [torch.randint(1, VOCABULARY, (length,), generator=drawn) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in tokens]


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch whose length is the next multiple of 8."""
    longest = max(len(text["input_ids"]) for text in batch)
    width = -(-longest // 8) * 8

    def fill(tokens: torch.Tensor, value: int) -> torch.Tensor:
        return nn.functional.pad(tokens, (0, width - len(tokens)), value=value)

    return {
        "input_ids": torch.stack([fill(text["input_ids"], 0) for text in batch]),
        "attention_mask": torch.stack([fill(torch.ones_like(text["input_ids"]), 0) for text in batch]),
        "labels": torch.stack([fill(text["labels"], -100) for text in batch]),
    }


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    mine, plain = one.state_dict(), other.state_dict()
    assert mine.keys() == plain.keys()
    assert [name for name in plain if not same_bits(mine[name], plain[name])] == []


def forget_accelerate() -> None:
    """Accelerate's state is the process's, and keeps the precision it was first asked for."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
