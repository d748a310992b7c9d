"""Models of time series."""

from __future__ import annotations

from typing import Any

import torch

from .base import Example, Family, own_loss
from .hugging_face import built

family = Family("series", needs=("transformers",))
CONTEXT, AHEAD, LAGS = 16, 8, [1, 2, 3]


def forecaster(name: str, **settings: Any) -> Example:
    """From the past to a distribution of the future."""
    model = built(
        name,
        "ForPrediction",
        prediction_length=AHEAD,
        context_length=CONTEXT,
        lags_sequence=LAGS,
        num_time_features=2,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        **settings,
    )
    past = CONTEXT + max(LAGS)
    sample = {
        "past_values": torch.randn(8, past).abs() + 1,
        "past_time_features": torch.randn(8, past, 2),
        "past_observed_mask": torch.ones(8, past),
        "future_values": torch.randn(8, AHEAD).abs() + 1,
        "future_time_features": torch.randn(8, AHEAD, 2),
    }
    return Example(model, sample, own_loss)


family.add("time-series-transformer", forecaster, "TimeSeriesTransformer")
family.add("informer", forecaster, "Informer", sampling_factor=2)
family.add("autoformer", forecaster, "Autoformer", moving_average=5)


@family.model("patchtst")
def patchtst() -> Example:
    """Patches of each channel."""
    model = built(
        "PatchTST",
        "ForPrediction",
        num_input_channels=3,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        num_hidden_layers=2,
        d_model=32,
        num_attention_heads=4,
        ffn_dim=64,
        prediction_length=AHEAD,
    )
    return Example(model, {"past_values": torch.randn(8, 32, 3), "future_values": torch.randn(8, AHEAD, 3)}, own_loss)


@family.model("patchtst-pretraining")
def patchtst_masked() -> Example:
    """Patches that are masked at random."""
    model = built(
        "PatchTST",
        "ForPretraining",
        num_input_channels=3,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        num_hidden_layers=2,
        d_model=32,
        num_attention_heads=4,
        ffn_dim=64,
        random_mask_ratio=0.4,
    )
    return Example(model, {"past_values": torch.randn(8, 32, 3)}, own_loss)


@family.model("patchtsmixer")
def patchtsmixer() -> Example:
    """Multilayer perceptrons over patches, features and channels."""
    model = built(
        "PatchTSMixer",
        "ForPrediction",
        num_input_channels=3,
        context_length=32,
        patch_length=4,
        patch_stride=4,
        num_layers=3,
        d_model=16,
        prediction_length=AHEAD,
    )
    return Example(model, {"past_values": torch.randn(8, 32, 3), "future_values": torch.randn(8, AHEAD, 3)}, own_loss)


@family.model("decision-transformer")
def decision_transformer() -> Example:
    """Actions from states and returns."""
    model = built(
        "DecisionTransformer",
        "Model",
        state_dim=5,
        act_dim=3,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        n_positions=96,
        max_ep_len=32,
    )
    sample = {
        "states": torch.randn(4, 16, 5),
        "actions": torch.randn(4, 16, 3),
        "rewards": torch.randn(4, 16, 1),
        "returns_to_go": torch.randn(4, 16, 1),
        "timesteps": torch.arange(16).expand(4, 16).contiguous(),
        "attention_mask": torch.ones(4, 16),
    }
    return Example(model, sample, lambda output: output.action_preds.square().mean())
