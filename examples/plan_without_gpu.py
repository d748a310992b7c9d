"""Plan the training of a Llama for a GPU that is not there: what it needs, what fits, and what that costs.

    python examples/plan_without_gpu.py                                  # a few layers, for an H100
    python examples/plan_without_gpu.py --device rtx4090 --layers 16 --width 2048 --vocabulary 32000

The model lives on PyTorch's "meta" device: it has shapes and no memory, so any laptop plans for any card. Times come
from the card's data sheet. On the card itself, `rematch.remat` measures instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rematch


def loss_of(output: Any) -> torch.Tensor:
    return output.loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan the training of a Llama for a GPU that is not there.")
    parser.add_argument("--device", default="h100", help='such as "h100" or "rtx4090"')
    parser.add_argument("--budget", default="60%", help='such as "8GiB" or "60%%" of what plain training needs')
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--report", type=Path, default=Path("plan.html"))
    parser.add_argument("--seconds", type=float, default=30, help="to search for the schedule, at most")
    asked = parser.parse_args()

    config = LlamaConfig(
        hidden_size=asked.width,
        intermediate_size=4 * asked.width,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.width // 64,
        num_key_value_heads=asked.width // 64,
        vocab_size=asked.vocabulary,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config)
        tokens = torch.zeros(asked.batch, asked.length, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    step = {"loss": loss_of, "optimizer": torch.optim.AdamW(model.parameters()), "device": asked.device}

    print(rematch.memory(model, batch, **step))  # plain training: its peak, and what that is made of
    plan = rematch.plan(model, batch, budget=asked.budget, time_limit=asked.seconds, **step)
    print(plan)
    plan.report(asked.report)


if __name__ == "__main__":
    main()
