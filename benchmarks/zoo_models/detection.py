"""Detectors and segmenters that match their queries to objects; the matching runs outside torch."""

from __future__ import annotations

from typing import Any

import torch

from .base import Example, Family, mean_square, own_loss
from .hugging_face import IMAGES, built

family = Family("detection", needs=("transformers",))
QUERIES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_queries": 8,
    "num_labels": 5,
}


def boxes(batch: int) -> list[dict[str, torch.Tensor]]:
    """Two objects in each image."""
    return [
        {"class_labels": torch.tensor([1, 3]), "boxes": torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.6, 0.3, 0.2]])}
        for _ in range(batch)
    ]


def small_backbone() -> Any:
    """A ResNet that detectors read three stages of."""
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )


def detector(name: str, head: str = "ForObjectDetection", *, matched: bool, size: int = 64, **settings: Any) -> Example:
    """With `matched`, the loss is the model's own, which needs scipy's assignment; else a plain one of its outputs."""
    model = built(
        name,
        head,
        backbone_config=small_backbone(),
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        **{**QUERIES, **settings},
    )
    sample: dict[str, Any] = {"pixel_values": torch.randn(8, 3, size, size)}
    if matched:
        sample["labels"] = boxes(8)
        return Example(model, sample, own_loss)
    return Example(model, sample, lambda output: mean_square(output.logits) + mean_square(output.pred_boxes))


family.add("detr", detector, "Detr", matched=False)
family.add("conditional-detr", detector, "ConditionalDetr", matched=False)
family.add("deformable-detr", detector, "DeformableDetr", matched=False, num_feature_levels=3)
family.add("table-transformer", detector, "TableTransformer", matched=False)
family.add("dab-detr", detector, "DabDetr", matched=False, hidden_size=32)
family.add("detr-matched", detector, "Detr", matched=True, needs=("scipy",))
family.add("deformable-detr-matched", detector, "DeformableDetr", matched=True, num_feature_levels=3, needs=("scipy",))


@family.model("rt-detr")
def rt_detr() -> Example:
    """A hybrid encoder, and the queries chosen by score."""
    from transformers import RTDetrResNetConfig

    backbone = RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    model = built(
        "RTDetr",
        "ForObjectDetection",
        backbone_config=backbone,
        encoder_hidden_dim=32,
        encoder_in_channels=[16, 16, 32],
        feat_strides=[8, 16, 32],
        encoder_ffn_dim=64,
        d_model=32,
        num_queries=8,
        decoder_in_channels=[32, 32, 32],
        decoder_ffn_dim=64,
        decoder_layers=2,
        decoder_attention_heads=4,
        encoder_attention_heads=4,
        num_denoising=0,
        num_labels=5,
    )
    return Example(
        model, torch.randn(8, 3, 64, 64), lambda output: mean_square(output.logits) + mean_square(output.pred_boxes)
    )


@family.model("yolos")
def yolos() -> Example:
    """A vision transformer with detection tokens."""
    model = built(
        "Yolos", "ForObjectDetection", **{**IMAGES, "image_size": [32, 32]}, num_detection_tokens=8, num_labels=5
    )
    return Example(
        model, torch.randn(4, 3, 32, 32), lambda output: mean_square(output.logits) + mean_square(output.pred_boxes)
    )


@family.model("owlvit")
def owlvit() -> Example:
    """Detection of what a text says."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 16,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    model = built("OwlViT", "ForObjectDetection", text_config=text, vision_config=vision, projection_dim=32)
    sample = {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "input_ids": torch.randint(3, 60, (8, 8)),
        "attention_mask": torch.ones(8, 8, dtype=torch.long),
    }
    return Example(model, sample, lambda output: mean_square(output.logits) + mean_square(output.pred_boxes))


def mask_outputs(output: Any) -> torch.Tensor:
    """A plain loss of a segmenter that predicts classes and masks."""
    return mean_square(output.class_queries_logits) + mean_square(output.masks_queries_logits)


def small_swin() -> Any:
    """The backbone that mask segmenters read."""
    from transformers import SwinConfig

    return SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


@family.model("maskformer", needs=("scipy",))
def maskformer() -> Example:
    """Masks by queries on Swin; the loss is a plain one."""
    from transformers import DetrConfig

    decoder = DetrConfig(
        **{**QUERIES, "num_labels": 5},
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=small_backbone(),
    )
    model = built(
        "MaskFormer",
        "ForInstanceSegmentation",
        backbone_config=small_swin(),
        decoder_config=decoder,
        fpn_feature_size=32,
        mask_feature_size=32,
    )
    return Example(model, torch.randn(4, 3, 64, 64), mask_outputs)


@family.model("mask2former", needs=("scipy",))
def mask2former() -> Example:
    """Masks by queries and deformable attention on Swin; the loss is a plain one."""
    model = built(
        "Mask2Former",
        "ForUniversalSegmentation",
        backbone_config=small_swin(),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=64,
        encoder_layers=2,
        decoder_layers=2,
        num_attention_heads=4,
        dim_feedforward=64,
        num_queries=8,
        train_num_points=64,
    )
    return Example(model, torch.randn(4, 3, 64, 64), mask_outputs)
