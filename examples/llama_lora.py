"""Train LoRA adapters of a Llama inside a memory budget, in a training loop of one's own.

    python examples/llama_lora.py                    # a small Llama with random weights
    python examples/llama_lora.py --model meta-llama/Llama-3.2-1B --budget 12GiB --length 1024

With --model, weights come from the Hugging Face hub or a folder.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import rematch


def loss_of(output: Any) -> torch.Tensor:
    return output.loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Train LoRA adapters of a Llama inside a memory budget.")
    parser.add_argument("--model", help="a name on the Hugging Face hub, or a folder; a small random one by default")
    parser.add_argument("--budget", default="60%", help='such as "8GiB" or "60%%" of what plain training needs')
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if asked.model:
        base = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "vocab_size": 256}
        base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, adapters).to(device)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)

    tokens = torch.randint(model.config.vocab_size, (asked.batch, asked.length), device=device)
    batch = {"input_ids": tokens, "labels": tokens}
    model = rematch.remat(model, batch, budget=asked.budget, loss=loss_of, optimizer=optimizer)
    print(rematch.plans_of(model)[0])

    for step in range(asked.steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
