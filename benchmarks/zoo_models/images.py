"""Models that classify, reconstruct, segment or measure images and videos."""

from __future__ import annotations

import torch

from .base import Example, Family, mean_square, own_loss
from .hugging_face import IMAGES, built, image_model

family = Family("images", needs=("transformers",))
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
STAGES = {"hidden_sizes": [16, 32, 64], "depths": [1, 2, 1]}

family.add("vit", image_model, "ViT", **IMAGES)
family.add("deit", image_model, "DeiT", **IMAGES)
family.add("beit", image_model, "Beit", use_relative_position_bias=True, drop_path_rate=0.2, **IMAGES)
family.add("dinov2", image_model, "Dinov2", drop_path_rate=0.2, **IMAGES)
family.add("swin", image_model, "Swin", drop_path_rate=0.2, **SWIN)
family.add("swinv2", image_model, "Swinv2", pretrained_window_sizes=[0, 0], **SWIN)
family.add("convnext", image_model, "ConvNext", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, drop_path_rate=0.2)
family.add("convnextv2", image_model, "ConvNextV2", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)
family.add("resnet", image_model, "ResNet", embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic")
family.add("regnet", image_model, "RegNet", embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], groups_width=8)
family.add("bit", image_model, "Bit", embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], num_groups=4)
family.add("efficientnet", image_model, "EfficientNet", width_coefficient=0.3, depth_coefficient=0.3, hidden_dim=384)
family.add("mobilenet-v1", image_model, "MobileNetV1", depth_multiplier=0.25)
family.add("mobilenet-v2", image_model, "MobileNetV2", depth_multiplier=0.25)
family.add(
    "mobilevit",
    image_model,
    "MobileViT",
    size=64,
    image_size=64,
    hidden_sizes=[16, 24, 32],
    neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    num_attention_heads=4,
)
family.add("poolformer", image_model, "PoolFormer", hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1])
family.add(
    "focalnet",
    image_model,
    "FocalNet",
    image_size=32,
    patch_size=2,
    embed_dim=16,
    depths=[2, 2],
    hidden_sizes=[16, 32],
    focal_levels=[2, 2],
    focal_windows=[3, 3],
)
family.add(
    "pvt",
    image_model,
    "Pvt",
    image_size=32,
    num_attention_heads=[1, 2, 2, 4],
    hidden_sizes=[16, 32, 32, 64],
    depths=[1, 1, 1, 1],
)
family.add("cvt", image_model, "Cvt", embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3])
family.add(
    "levit",
    image_model,
    "Levit",
    size=64,
    image_size=64,
    hidden_sizes=[32, 48, 64],
    num_attention_heads=[2, 3, 4],
    depths=[1, 1, 1],
    key_dim=[8, 8, 8],
)
family.add("ijepa", image_model, "IJepa", **IMAGES)


@family.model("dinov3-vit")
def dinov3() -> Example:
    model = built("DINOv3ViT", "Model", **IMAGES)
    return Example(model, torch.randn(4, 3, 32, 32), lambda output: mean_square(output.last_hidden_state - 1))


@family.model("segformer")
def segformer() -> Example:
    """Semantic segmentation."""
    model = built(
        "Segformer",
        "ForSemanticSegmentation",
        hidden_sizes=[16, 32, 32, 64],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=32,
        num_attention_heads=[1, 2, 2, 4],
        num_labels=5,
    )
    sample = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 5, (2, 64, 64))}
    return Example(model, sample, own_loss)


@family.model("vit-mae")
def vit_mae() -> Example:
    """Masked patches, drawn in forward, are reconstructed."""
    decoder = {
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 64,
    }
    model = built("ViTMAE", "ForPreTraining", **IMAGES, **decoder)
    return Example(model, {"pixel_values": torch.randn(4, 3, 32, 32)}, own_loss)


@family.model("vit-mim")
def vit_masked() -> Example:
    """Masked patches, given by the caller, are reconstructed."""
    model = built("ViT", "ForMaskedImageModeling", encoder_stride=4, **IMAGES)
    sample = {"pixel_values": torch.randn(4, 3, 32, 32), "bool_masked_pos": torch.rand(4, 64) < 0.5}
    return Example(model, sample, own_loss)


@family.model("videomae")
def videomae() -> Example:
    """Masked patches of a video, gathered by a mask: the shapes depend on its data."""
    decoder = {
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 64,
    }
    settings = {**IMAGES, "image_size": 16, "num_frames": 4, "tubelet_size": 2}
    model = built("VideoMAE", "ForPreTraining", **settings, **decoder)
    masked = torch.zeros(4, 32, dtype=torch.bool)
    masked[:, ::2] = True
    return Example(model, {"pixel_values": torch.randn(4, 4, 3, 16, 16), "bool_masked_pos": masked}, own_loss)


@family.model("vivit")
def vivit() -> Example:
    """Video classification."""
    model = built(
        "Vivit",
        "ForVideoClassification",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        num_frames=4,
        tubelet_size=[2, 4, 4],
    )
    return Example(model, {"pixel_values": torch.randn(4, 4, 3, 16, 16), "labels": torch.arange(4) % 2}, own_loss)


@family.model("timesformer")
def timesformer() -> Example:
    """Video classification with attention over time and space in turns."""
    model = built("Timesformer", "ForVideoClassification", **{**IMAGES, "image_size": 16}, num_frames=4)
    return Example(model, {"pixel_values": torch.randn(4, 4, 3, 16, 16), "labels": torch.arange(4) % 2}, own_loss)


@family.model("dpt")
def dpt() -> Example:
    """Depth from a vision transformer's layers."""
    model = built(
        "DPT",
        "ForDepthEstimation",
        **{**IMAGES, "num_hidden_layers": 4, "patch_size": 8},
        is_hybrid=False,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16, 16, 32, 32],
        fusion_hidden_size=16,
    )
    return Example(model, torch.randn(4, 3, 32, 32), lambda output: mean_square(output.predicted_depth))


@family.model("depth-anything")
def depth_anything() -> Example:
    """Depth from Dinov2's layers."""
    from transformers import Dinov2Config

    backbone = Dinov2Config(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
    )
    model = built(
        "DepthAnything",
        "ForDepthEstimation",
        backbone_config=backbone,
        reassemble_hidden_size=64,
        patch_size=14,
        neck_hidden_sizes=[16, 16, 32, 32],
        fusion_hidden_size=16,
        head_hidden_size=16,
    )
    return Example(model, torch.randn(4, 3, 56, 56), lambda output: mean_square(output.predicted_depth))


@family.model("glpn")
def glpn() -> Example:
    """Depth with a loss on logarithms."""
    model = built(
        "GLPN",
        "ForDepthEstimation",
        num_attention_heads=[1, 2, 2, 4],
        hidden_sizes=[16, 32, 32, 64],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=16,
    )
    sample = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.rand(2, 64, 64) + 0.5}
    return Example(model, sample, own_loss)


@family.model("upernet")
def upernet() -> Example:
    """Segmentation on ConvNeXt's stages, with batch norm in the head."""
    from transformers import ConvNextConfig

    backbone = ConvNextConfig(
        hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
    )
    model = built(
        "UperNet",
        "ForSemanticSegmentation",
        backbone_config=backbone,
        hidden_size=16,
        num_labels=5,
        auxiliary_in_channels=32,
        auxiliary_channels=16,
        pool_scales=[1, 2],
    )
    sample = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 5, (2, 64, 64))}
    return Example(model, sample, own_loss)


@family.model("swin2sr")
def swin2sr() -> Example:
    """Super-resolution."""
    model = built(
        "Swin2SR",
        "ForImageSuperResolution",
        image_size=16,
        patch_size=1,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        upscale=2,
    )
    return Example(model, torch.randn(1, 3, 16, 16), lambda output: mean_square(output.reconstruction))


@family.model("vitdet-backbone")
def vitdet() -> Example:
    """A vision transformer with windows and residual convolutions."""
    model = built(
        "VitDet",
        "Backbone",
        **{**IMAGES, "image_size": 32},
        window_size=4,
        window_block_indices=[0, 2],
        residual_block_indices=[1],
        use_relative_position_embeddings=True,
    )
    return Example(model, torch.randn(4, 3, 32, 32), lambda output: mean_square(output.feature_maps))


@family.model("sam")
def sam() -> Example:
    """Masks for points."""
    from transformers import SamConfig, SamMaskDecoderConfig, SamModel, SamPromptEncoderConfig, SamVisionConfig

    vision = SamVisionConfig(
        hidden_size=32,
        output_channels=16,
        num_pos_feats=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=8,
        mlp_dim=64,
        window_size=4,
        global_attn_indexes=[1],
    )
    prompts = SamPromptEncoderConfig(hidden_size=16, image_size=64, patch_size=8, mask_input_channels=8)
    masks = SamMaskDecoderConfig(hidden_size=16, mlp_dim=32, num_attention_heads=2, iou_head_hidden_dim=16)
    config = SamConfig(
        vision_config=vision.to_dict(), prompt_encoder_config=prompts.to_dict(), mask_decoder_config=masks.to_dict()
    )
    sample = {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.rand(1, 1, 2, 2) * 64}
    return Example(SamModel(config).train(), sample, lambda output: mean_square(output.pred_masks))
