"""Small models of transformers, by their architecture's name.

`language_model("Llama", "ForCausalLM")` builds `LlamaForCausalLM(LlamaConfig(...))` with random weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import Example, own_loss

VOCABULARY = 256
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
}


def built(name: str, head: str, **settings: Any) -> nn.Module:
    """The model in training mode; a setting of None is left at the architecture's default."""
    import transformers

    transformers.logging.set_verbosity_error()
    chosen = {key: value for key, value in settings.items() if value is not None}
    config = getattr(transformers, f"{name}Config")(**chosen)
    model: nn.Module = getattr(transformers, f"{name}{head}")(config)
    return model.train()


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random tokens, none of them a special one."""
    return torch.randint(5, VOCABULARY, (batch, length))


def padded_mask(batch: int, length: int) -> torch.Tensor:
    """Row `i` has `i` quarters of its length as padding, on the right."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        mask[row, length - row * length // 4 :] = 0
    return mask


def language_model(
    name: str,
    head: str = "ForCausalLM",
    *,
    batch: int = 2,
    length: int = 64,
    mask: str | None = None,
    checkpointing: bool = False,
    dtype: torch.dtype = torch.float32,
    example: dict[str, Any] | None = None,
    **settings: Any,
) -> Example:
    """A model that reads tokens and computes its own loss from labels.

    mask: "ones" or "padded". checkpointing: transformers' gradient checkpointing inside the model. example: further
    fields of the Example.
    """
    model = built(name, head, **{**TEXT, **settings}).to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    ids = tokens(batch, length)
    sample = {"input_ids": ids, "labels": ids.clone()}
    if mask is not None:
        sample["attention_mask"] = padded_mask(batch, length) if mask == "padded" else torch.ones_like(ids)
        sample["labels"][sample["attention_mask"] == 0] = -100
    return Example(model, sample, own_loss, **(example or {}))


def image_model(
    name: str,
    head: str = "ForImageClassification",
    *,
    batch: int = 4,
    size: int = 32,
    labels: bool = True,
    **settings: Any,
) -> Example:
    """A model that classifies images and computes its own loss."""
    model = built(name, head, **settings)
    sample = {"pixel_values": torch.randn(batch, 3, size, size)}
    if labels:
        sample["labels"] = torch.arange(batch) % 2
    return Example(model, sample, own_loss)
