"""Language models with experts, of which a router picks a few for each token."""

from __future__ import annotations

from typing import Any

from .base import Example, Family
from .hugging_face import language_model

family = Family("experts", needs=("transformers",))
GROUPED = {"num_key_value_heads": 2}


def mixture(name: str, head: str = "ForCausalLM", **settings: Any) -> Example:
    """Experts have many parameters: a larger batch keeps most of the memory in activations."""
    return language_model(name, head, batch=4, **settings)


family.add("mixtral", mixture, "Mixtral", num_local_experts=4, **GROUPED)
family.add("mixtral-eager-experts", mixture, "Mixtral", num_local_experts=4, experts_implementation="eager", **GROUPED)
family.add(
    "qwen2-moe",
    mixture,
    "Qwen2Moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=64,
    **GROUPED,
)
family.add(
    "qwen3-moe",
    mixture,
    "Qwen3Moe",
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    **GROUPED,
)
family.add(
    "deepseek-v2",
    mixture,
    "DeepseekV2",
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    kv_lora_rank=16,
    q_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
family.add(
    "deepseek-v3",
    mixture,
    "DeepseekV3",
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    kv_lora_rank=16,
    q_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
)
family.add(
    "gpt-oss",
    mixture,
    "GptOss",
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=16,
    **GROUPED,
)
family.add("olmoe", mixture, "Olmoe", num_experts=4, num_experts_per_tok=2, **GROUPED)
family.add("granite-moe", mixture, "GraniteMoe", num_local_experts=4, num_experts_per_tok=2, **GROUPED)
family.add("phimoe", mixture, "Phimoe", num_local_experts=4, num_experts_per_tok=2, **GROUPED)
family.add("jetmoe", mixture, "JetMoe", kv_channels=16, num_local_experts=4, num_experts_per_tok=2)
family.add("minimax", mixture, "MiniMax", head_dim=16, num_local_experts=4, **GROUPED)
family.add(
    "glm4-moe",
    mixture,
    "Glm4Moe",
    head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    **GROUPED,
)
family.add(
    "ernie4.5-moe",
    mixture,
    "Ernie4_5_Moe",
    moe_num_experts=4,
    moe_k=2,
    moe_intermediate_size=32,
    **GROUPED,
)
family.add(
    "switch-transformers",
    mixture,
    "SwitchTransformers",
    "ForConditionalGeneration",
    d_model=64,
    d_ff=128,
    d_kv=16,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    num_experts=4,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    decoder_start_token_id=0,
)
family.add(
    "nllb-moe",
    mixture,
    "NllbMoe",
    "ForConditionalGeneration",
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    num_experts=4,
    encoder_sparse_step=2,
    decoder_sparse_step=2,
    decoder_start_token_id=2,
)
family.add(
    "jamba",
    mixture,
    "Jamba",
    num_hidden_layers=4,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=4,
    mamba_d_state=4,
    use_mamba_kernels=False,
    length=32,
    **GROUPED,
)
family.add(
    "qwen3-next",
    mixture,
    "Qwen3Next",
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    **GROUPED,
)
