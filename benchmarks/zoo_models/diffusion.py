"""Models of diffusers: what removes noise, and what turns images into latents."""

from __future__ import annotations

from typing import Any

import torch

from .base import Example, Family, bfloat16_autocast, mean_square

family = Family("diffusion", needs=("diffusers",))
TWO_STAGES = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}


def denoiser(output: Any) -> torch.Tensor:
    """The usual loss, with noise of zeros."""
    return mean_square(output.sample)


@family.model("unet2d")
def unet2d() -> Example:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        **TWO_STAGES,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    return Example(
        model.train(), {"sample": torch.randn(4, 3, 16, 16), "timestep": torch.tensor([3, 7, 1, 9])}, denoiser
    )


def conditional(**more: Any) -> tuple[Any, dict[str, Any]]:
    """A small U-Net of Stable Diffusion, and its inputs."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        **TWO_STAGES,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **more,
    )
    sample = {
        "sample": torch.randn(4, 4, 16, 16),
        "timestep": torch.tensor([3, 7, 1, 9]),
        "encoder_hidden_states": torch.randn(4, 8, 32),
    }
    return model.train(), sample


@family.model("unet2d-condition")
def unet2d_condition() -> Example:
    model, sample = conditional()
    return Example(model, sample, denoiser)


@family.model("unet2d-condition-autocast")
def unet2d_condition_autocast() -> Example:
    model, sample = conditional()
    return Example(model, sample, denoiser, context=bfloat16_autocast)


@family.model("unet2d-condition-checkpointing")
def unet2d_condition_checkpointing() -> Example:
    model, sample = conditional()
    model.enable_gradient_checkpointing()
    return Example(model, sample, denoiser)


@family.model("autoencoder-kl")
def autoencoder_kl() -> Example:
    """The autoencoder of Stable Diffusion, with a sample of its posterior."""
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return Example(model.train(), {"sample": torch.randn(4, 3, 32, 32), "sample_posterior": True}, denoiser)


@family.model("vq-model")
def vq_model() -> Example:
    """Latents replaced by the nearest codes."""
    from diffusers import VQModel

    model = VQModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        num_vq_embeddings=16,
        vq_embed_dim=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return Example(model.train(), torch.randn(4, 3, 32, 32), denoiser)


@family.model("dit")
def dit() -> Example:
    """Class labels, some of them dropped at random."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    )
    sample = {
        "hidden_states": torch.randn(4, 4, 16, 16),
        "timestep": torch.tensor([3, 7, 1, 9]),
        "class_labels": torch.tensor([1, 2, 3, 4]),
    }
    return Example(model.train(), sample, denoiser)


@family.model("pixart")
def pixart() -> Example:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        cross_attention_dim=64,
        caption_channels=32,
        use_additional_conditions=False,
    )
    sample = {
        "hidden_states": torch.randn(4, 4, 16, 16),
        "encoder_hidden_states": torch.randn(4, 8, 32),
        "timestep": torch.tensor([3, 7, 1, 9]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return Example(model.train(), sample, denoiser)


@family.model("sd3")
def sd3() -> Example:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
    )
    sample = {
        "hidden_states": torch.randn(4, 4, 16, 16),
        "encoder_hidden_states": torch.randn(4, 8, 32),
        "pooled_projections": torch.randn(4, 16),
        "timestep": torch.tensor([3.0, 7.0, 1.0, 9.0]),
    }
    return Example(model.train(), sample, denoiser)


@family.model("flux")
def flux() -> Example:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    sample = {
        "hidden_states": torch.randn(4, 64, 16),
        "encoder_hidden_states": torch.randn(4, 8, 32),
        "pooled_projections": torch.randn(4, 16),
        "timestep": torch.tensor([0.3, 0.7, 0.1, 0.9]),
        "img_ids": torch.randn(64, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    return Example(model.train(), sample, denoiser)


@family.model("controlnet")
def controlnet() -> Example:
    from diffusers import ControlNetModel

    model = ControlNetModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        in_channels=4,
        cross_attention_dim=32,
        attention_head_dim=8,
        conditioning_embedding_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    )
    sample = {
        "sample": torch.randn(4, 4, 16, 16),
        "timestep": torch.tensor([3, 7, 1, 9]),
        "encoder_hidden_states": torch.randn(4, 8, 32),
        "controlnet_cond": torch.randn(4, 3, 32, 32),
    }

    def loss(output: Any) -> torch.Tensor:
        parts = [*output.down_block_res_samples, output.mid_block_res_sample]
        return torch.stack([(part - 1).square().mean() for part in parts]).sum()

    return Example(model.train(), sample, loss)
