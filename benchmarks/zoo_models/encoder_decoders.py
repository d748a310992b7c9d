"""Language models that read one text and write another."""

from __future__ import annotations

import torch

from .base import Family
from .hugging_face import language_model

family = Family("encoder-decoders", needs=("transformers",))
T5 = {
    "d_model": 64,
    "d_ff": 128,
    "d_kv": 16,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_start_token_id": 2,
    "num_hidden_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "forced_eos_token_id": None,
}
HEAD = "ForConditionalGeneration"

family.add("t5", language_model, "T5", HEAD, **T5)
family.add("t5-padded", language_model, "T5", HEAD, mask="padded", **T5)
family.add("t5-bf16", language_model, "T5", HEAD, dtype=torch.bfloat16, **T5)
family.add("mt5", language_model, "MT5", HEAD, **T5)
family.add("umt5", language_model, "UMT5", HEAD, **T5)
family.add("longt5", language_model, "LongT5", HEAD, local_radius=8, **T5)
family.add("bart", language_model, "Bart", HEAD, **BART)
family.add("bart-layerdrop", language_model, "Bart", HEAD, encoder_layerdrop=0.5, decoder_layerdrop=0.5, **BART)
family.add("mbart", language_model, "MBart", HEAD, **BART)
family.add("pegasus", language_model, "Pegasus", HEAD, **BART)
family.add("pegasus-x", language_model, "PegasusX", HEAD, num_global_tokens=4, block_size=16, **BART)
family.add(
    "led",
    language_model,
    "LED",
    HEAD,
    attention_window=16,
    max_encoder_position_embeddings=128,
    max_decoder_position_embeddings=128,
    **BART,
)
family.add("blenderbot", language_model, "Blenderbot", HEAD, **BART)
family.add("marian", language_model, "Marian", "MTModel", **BART)
family.add("m2m-100", language_model, "M2M100", HEAD, **BART)
family.add(
    "prophetnet",
    language_model,
    "ProphetNet",
    HEAD,
    num_encoder_layers=2,
    num_decoder_layers=2,
    num_encoder_attention_heads=4,
    num_decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    ngram=2,
    num_buckets=8,
    num_hidden_layers=None,
    decoder_start_token_id=0,
)
family.add("bigbird-pegasus", language_model, "BigBirdPegasus", HEAD, attention_type="original_full", **BART)
