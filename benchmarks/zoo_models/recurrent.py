"""Language models whose layers carry a state along: state spaces, linear attention, and mixtures with attention."""

from __future__ import annotations

from .base import Family
from .hugging_face import language_model

family = Family("recurrent", needs=("transformers",))

family.add("mamba", language_model, "Mamba", state_size=4, length=32)
family.add("falcon-mamba", language_model, "FalconMamba", state_size=4, length=32)
family.add(
    "mamba2", language_model, "Mamba2", num_heads=8, head_dim=16, state_size=8, n_groups=1, chunk_size=16, expand=2
)
family.add("rwkv", language_model, "Rwkv", attention_hidden_size=64, context_length=128, length=32)
family.add(
    "xlstm",
    language_model,
    "xLSTM",
    num_heads=4,
    num_blocks=2,
    qk_dim_factor=1.0,
    mode="train",
    use_cache=False,
    num_hidden_layers=2,
    chunk_size=16,
)
family.add(
    "recurrent-gemma",
    language_model,
    "RecurrentGemma",
    lru_width=64,
    attention_window_size=16,
    num_key_value_heads=1,
    length=32,
)
family.add("lfm2", language_model, "Lfm2", num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"])
family.add(
    "bamba",
    language_model,
    "Bamba",
    num_key_value_heads=2,
    attn_layer_indices=[1],
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=16,
)
family.add(
    "falcon-h1",
    language_model,
    "FalconH1",
    num_key_value_heads=2,
    num_hidden_layers=2,
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_ssm=128,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=16,
)
family.add(
    "granite-moe-hybrid",
    language_model,
    "GraniteMoeHybrid",
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    shared_intermediate_size=64,
    layer_types=["mamba", "attention", "mamba"],
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=16,
)
