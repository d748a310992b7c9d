"""Models of images and text together."""

from __future__ import annotations

from typing import Any

import torch

from .base import Example, Family, own_loss
from .hugging_face import built, tokens

family = Family("text and images", needs=("transformers",))
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
READER = {
    **TOWER,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VIEWER = {**TOWER, "image_size": 32, "patch_size": 8}
DECODER = {**READER, "num_key_value_heads": 2, "model_type": "llama"}


def two_towers(name: str, head: str = "Model", *, text: dict[str, Any] = READER, **settings: Any) -> Example:
    """A text and an image tower with a contrastive loss."""
    model = built(name, head, text_config=dict(text), vision_config=dict(VIEWER), **settings)
    sample = {"input_ids": tokens(12, 16), "pixel_values": torch.randn(12, 3, 32, 32), "return_loss": True}
    sample["input_ids"][:, -1] = 2
    return Example(model, sample, own_loss)


family.add("clip", two_towers, "CLIP", projection_dim=32)
family.add("siglip", two_towers, "Siglip")
family.add(
    "blip", two_towers, "Blip", projection_dim=32, image_text_hidden_size=32, text={**READER, "encoder_hidden_size": 64}
)
family.add("altclip", two_towers, "AltCLIP", projection_dim=32, text={**READER, "project_dim": 64})
family.add("chinese-clip", two_towers, "ChineseCLIP", projection_dim=64)
family.add("metaclip2", two_towers, "MetaClip2", projection_dim=32)


@family.model("clipseg")
def clipseg() -> Example:
    """Segmentation of what a text says."""
    model = built(
        "CLIPSeg",
        "ForImageSegmentation",
        text_config=dict(READER),
        vision_config={**VIEWER, "num_hidden_layers": 3},
        projection_dim=32,
        reduce_dim=16,
        extract_layers=[0, 1, 2],
        decoder_num_attention_heads=4,
        decoder_intermediate_size=32,
    )
    sample = {
        "input_ids": tokens(12, 16),
        "pixel_values": torch.randn(12, 3, 32, 32),
        "labels": torch.randint(0, 2, (12, 32, 32)).float(),
    }
    return Example(model, sample, own_loss)


@family.model("blip-caption")
def blip_caption() -> Example:
    """A text decoder that looks at an image."""
    model = built(
        "Blip",
        "ForConditionalGeneration",
        text_config={**READER, "encoder_hidden_size": 64, "is_decoder": True},
        vision_config=dict(VIEWER),
        projection_dim=32,
        image_text_hidden_size=32,
    )
    ids = tokens(6, 16)
    return Example(
        model, {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(6, 3, 32, 32)}, own_loss
    )


@family.model("blip2")
def blip2() -> Example:
    """Queries between an image and OPT."""
    writer = {**READER, "model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64}
    model = built(
        "Blip2",
        "ForConditionalGeneration",
        vision_config=dict(VIEWER),
        qformer_config={**READER, "encoder_hidden_size": 64},
        text_config=writer,
        num_query_tokens=4,
        image_token_index=255,
    )
    ids = tokens(16, 16).clamp(max=254)
    ids[:, :4] = 255
    sample = {
        "input_ids": ids,
        "labels": ids.clone(),
        "pixel_values": torch.randn(16, 3, 32, 32),
        "attention_mask": torch.ones_like(ids),
    }
    return Example(model, sample, own_loss)


def image_in_text(name: str, head: str = "ForConditionalGeneration", *, images: int, **settings: Any) -> Example:
    """A decoder some of whose tokens are patches of an image."""
    model = built(name, head, **settings)
    ids = tokens(6, images + 16).clamp(max=250)
    ids[:, :images] = 255
    sample = {
        "input_ids": ids,
        "labels": ids.clone(),
        "pixel_values": torch.randn(6, 3, 32, 32),
        "attention_mask": torch.ones_like(ids),
    }
    return Example(model, sample, own_loss)


family.add(
    "llava",
    image_in_text,
    "Llava",
    images=16,
    text_config=DECODER,
    vision_config={**VIEWER, "model_type": "clip_vision_model"},
    image_token_id=255,
    vision_feature_layer=-2,
)
family.add(
    "paligemma",
    image_in_text,
    "PaliGemma",
    images=16,
    text_config={**DECODER, "model_type": "gemma", "head_dim": 16},
    vision_config={**VIEWER, "model_type": "siglip_vision_model"},
    image_token_id=255,
    projection_dim=64,
)
family.add(
    "vipllava",
    image_in_text,
    "VipLlava",
    images=16,
    text_config=DECODER,
    vision_config={**VIEWER, "model_type": "clip_vision_model"},
    image_token_id=255,
    vision_feature_layers=[-1, -2],
)


@family.model("git")
def git() -> Example:
    """A decoder that begins with an image."""
    model = built("Git", "ForCausalLM", **READER, vision_config=dict(VIEWER))
    ids = tokens(6, 16)
    return Example(
        model, {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(6, 3, 32, 32)}, own_loss
    )


@family.model("vilt")
def vilt() -> Example:
    """One encoder for both; patches are drawn at random."""
    model = built("Vilt", "ForQuestionAnswering", **{**READER, **VIEWER}, num_labels=4, max_image_length=-1)
    sample = {"input_ids": tokens(6, 16), "pixel_values": torch.randn(6, 3, 32, 32), "labels": torch.rand(6, 4)}
    return Example(model, sample, own_loss)


@family.model("trocr")
def vision_encoder_decoder() -> Example:
    """A vision transformer that GPT-2 writes for."""
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    writer = GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**VIEWER), writer)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = VisionEncoderDecoderModel(config).train()
    return Example(model, {"pixel_values": torch.randn(6, 3, 32, 32), "labels": tokens(6, 32)}, own_loss)


@family.model("layoutlmv3")
def layoutlmv3() -> Example:
    """Text, its places on the page, and the page."""
    model = built(
        "LayoutLMv3",
        "ForTokenClassification",
        **READER,
        input_size=32,
        patch_size=8,
        num_labels=3,
        coordinate_size=11,
        shape_size=10,
        max_2d_position_embeddings=64,
    )
    corner = torch.randint(0, 30, (6, 32, 2))
    sample = {
        "input_ids": tokens(6, 32),
        "bbox": torch.cat([corner, corner + 5], -1),
        "pixel_values": torch.randn(6, 3, 32, 32),
        "labels": torch.randint(0, 3, (6, 32)),
    }
    return Example(model, sample, own_loss)


@family.model("flava")
def flava() -> Example:
    """A text, an image and a joint encoder."""
    model = built(
        "Flava",
        "Model",
        text_config=dict(READER),
        image_config=dict(VIEWER),
        multimodal_config=dict(TOWER),
        hidden_size=64,
        projection_dim=32,
    )
    sample = {"input_ids": tokens(6, 16), "pixel_values": torch.randn(6, 3, 32, 32)}
    return Example(model, sample, lambda output: output.multimodal_embeddings.square().mean())
