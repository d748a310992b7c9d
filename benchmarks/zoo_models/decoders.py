"""Language models that read from left to right, all of whose layers are attention and a dense MLP."""

from __future__ import annotations

import torch

from .base import Example, Family, bfloat16_autocast, own_loss
from .hugging_face import TEXT, built, language_model, tokens

family = Family("decoders", needs=("transformers",))
GROUPED = {"num_key_value_heads": 2}

family.add("llama", language_model, "Llama", **GROUPED)
family.add("llama-mask-of-ones", language_model, "Llama", mask="ones", **GROUPED)
family.add("llama-padded", language_model, "Llama", mask="padded", **GROUPED)
family.add("llama-bf16", language_model, "Llama", dtype=torch.bfloat16, **GROUPED)
family.add("llama-autocast", language_model, "Llama", example={"context": bfloat16_autocast}, **GROUPED)
family.add("llama-checkpointing", language_model, "Llama", checkpointing=True, use_cache=False, **GROUPED)
family.add("llama-eager-attention", language_model, "Llama", attn_implementation="eager", **GROUPED)
family.add("llama-no-cache", language_model, "Llama", use_cache=False, **GROUPED)
family.add("mistral", language_model, "Mistral", sliding_window=16, **GROUPED)
family.add("qwen2", language_model, "Qwen2", **GROUPED)
family.add("qwen2-padded", language_model, "Qwen2", mask="padded", **GROUPED)
family.add("qwen3", language_model, "Qwen3", head_dim=16, **GROUPED)
family.add("gemma", language_model, "Gemma", head_dim=16, **GROUPED)
family.add("gemma2", language_model, "Gemma2", head_dim=16, sliding_window=16, **GROUPED)
family.add("phi", language_model, "Phi", **GROUPED)
family.add("phi3", language_model, "Phi3", **GROUPED)
family.add("olmo", language_model, "Olmo", **GROUPED)
family.add("olmo2", language_model, "Olmo2", **GROUPED)
family.add("olmo3", language_model, "Olmo3", sliding_window=16, **GROUPED)
family.add("falcon", language_model, "Falcon")
family.add("falcon-alibi", language_model, "Falcon", alibi=True)
family.add("bloom", language_model, "Bloom")
family.add("stablelm", language_model, "StableLm", **GROUPED)
family.add("gpt-neox", language_model, "GPTNeoX")
family.add("gpt-j", language_model, "GPTJ", n_embd=64, n_layer=3, n_head=4, n_positions=128, rotary_dim=8, n_inner=128)
family.add("gpt2-dropout", language_model, "GPT2", "LMHeadModel", n_embd=64, n_layer=3, n_head=4, n_inner=128)
family.add(
    "gpt-neo",
    language_model,
    "GPTNeo",
    num_hidden_layers=None,
    num_layers=2,
    attention_types=[[["global", "local"], 1]],
    window_size=16,
)
family.add("gpt-bigcode", language_model, "GPTBigCode")
family.add("codegen", language_model, "CodeGen", n_embd=64, n_layer=3, n_head=4, n_inner=128, rotary_dim=8)
family.add("opt", language_model, "OPT", ffn_dim=128, word_embed_proj_dim=64)
family.add("opt-layerdrop", language_model, "OPT", ffn_dim=128, word_embed_proj_dim=64, layerdrop=0.5)
family.add("mpt", language_model, "Mpt", d_model=64, n_heads=4, n_layers=3)
family.add("starcoder2", language_model, "Starcoder2", **GROUPED)
family.add("cohere", language_model, "Cohere", **GROUPED)
family.add("cohere2", language_model, "Cohere2", sliding_window=16, **GROUPED)
family.add("granite", language_model, "Granite", **GROUPED)
family.add("persimmon", language_model, "Persimmon")
family.add("nemotron", language_model, "Nemotron", **GROUPED)
family.add("glm", language_model, "Glm", head_dim=16, **GROUPED)
family.add("glm4", language_model, "Glm4", head_dim=16, **GROUPED)
family.add("smollm3", language_model, "SmolLM3", **GROUPED)
family.add("helium", language_model, "Helium", head_dim=16, **GROUPED)
family.add("ernie4.5", language_model, "Ernie4_5", head_dim=16, **GROUPED)
family.add("exaone4", language_model, "Exaone4", sliding_window=16, **GROUPED)
family.add("arcee", language_model, "Arcee", **GROUPED)
family.add("diffllama", language_model, "DiffLlama", **GROUPED)
family.add("nanochat", language_model, "NanoChat", **GROUPED)
family.add("doge", language_model, "Doge", **GROUPED)
family.add("xglm", language_model, "XGLM", d_model=64, ffn_dim=128, num_layers=3, attention_heads=4)
family.add("biogpt", language_model, "BioGpt")
family.add("imagegpt", language_model, "ImageGPT", "ForCausalImageModeling", n_embd=64, n_layer=2, n_head=4)


@family.model("gemma3")
def gemma3() -> Example:
    """Its text model has a configuration of its own."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**TEXT, **GROUPED, head_dim=16, sliding_window=16)
    ids = tokens(2, 64)
    return Example(Gemma3ForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}, own_loss)


@family.model("gpt2-autocast")
def gpt2_autocast() -> Example:
    """Dropout under mixed precision."""
    return language_model(
        "GPT2", "LMHeadModel", n_embd=64, n_layer=3, n_head=4, n_inner=128, example={"context": bfloat16_autocast}
    )


@family.model("llama-lora", needs=("peft",))
def llama_lora() -> Example:
    """Adapters by peft: the weights of the model are frozen."""
    import peft

    example = language_model("Llama", **GROUPED)
    adapted = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return Example(peft.get_peft_model(example.module, adapted).train(), example.sample, example.loss)


@family.model("llama-next-token")
def llama_next_token() -> Example:
    """Without labels: the loss is the user's own function of the logits."""
    ids = tokens(2, 64)

    def loss(output: object) -> torch.Tensor:
        logits = output.logits[:, :-1]  # type: ignore[attr-defined]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Example(built("Llama", "ForCausalLM", **TEXT, **GROUPED), (ids,), loss)
