"""Fine-tune a GPT-2 with Hugging Face's Trainer inside a memory budget.

    python examples/finetune_gpt2.py                       # a small GPT-2 with random weights, on the README
    python examples/finetune_gpt2.py --model gpt2 --text my.txt --budget 8GiB

With --model, weights and tokenizer come from the Hugging Face hub or a folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rematch
from rematch.integrations.transformers import RematCallback

README = Path(__file__).parent.parent / "README.md"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a GPT-2 inside a memory budget.")
    parser.add_argument("--model", help="a name on the Hugging Face hub, or a folder; a small random one by default")
    parser.add_argument("--text", type=Path, default=README, help="a text file to train on")
    parser.add_argument("--budget", default="60%", help='such as "8GiB" or "60%%" of what plain training needs')
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("finetuned"))
    asked = parser.parse_args()

    text = asked.text.read_text(encoding="utf-8")
    if asked.model:
        model = AutoModelForCausalLM.from_pretrained(asked.model)
        tokens = AutoTokenizer.from_pretrained(asked.model)(text, return_tensors="pt")["input_ids"][0]
    else:  # one token for each byte, so that no tokenizer must be downloaded
        sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": asked.length}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        tokens = torch.tensor(list(text.encode("utf-8")))
    sequences = tokens[: len(tokens) // asked.length * asked.length].view(-1, asked.length)

    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(asked.output),
            per_device_train_batch_size=asked.batch,
            max_steps=asked.steps,
            logging_steps=1,
            report_to=[],
        ),
        train_dataset=[{"input_ids": sequence, "labels": sequence} for sequence in sequences],
        callbacks=[RematCallback(budget=asked.budget)],  # instead of gradient_checkpointing=True
    )
    trainer.train()
    trainer.save_model()

    plan = rematch.plans_of(model)[0]  # that of the first batch; others come with other shapes
    print(plan)
    plan.report(asked.output / "plan.html")  # where memory and extra time go, as a page


if __name__ == "__main__":
    main()
