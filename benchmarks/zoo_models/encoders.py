"""Language models that read both ways: masked tokens, classes, and their many kinds of attention."""

from __future__ import annotations

import torch

from .base import Example, Family, bfloat16_autocast, own_loss
from .hugging_face import TEXT, built, language_model, padded_mask, tokens

family = Family("encoders", needs=("transformers",))


def classifier(name: str, *, batch: int = 2, length: int = 64, **settings: object) -> Example:
    """A model that gives each text one of two classes; the texts are padded."""
    model = built(name, "ForSequenceClassification", **{**TEXT, **settings})
    sample = {
        "input_ids": tokens(batch, length),
        "attention_mask": padded_mask(batch, length),
        "labels": torch.arange(batch) % 2,
    }
    return Example(model, sample, own_loss)


family.add("bert", language_model, "Bert", "ForMaskedLM", mask="padded")
family.add("bert-classifier", classifier, "Bert")
family.add(
    "bert-autocast", language_model, "Bert", "ForMaskedLM", mask="padded", example={"context": bfloat16_autocast}
)
family.add("roberta", language_model, "Roberta", "ForMaskedLM")
family.add("xlm-roberta", classifier, "XLMRoberta")
family.add("albert", language_model, "Albert", "ForMaskedLM", embedding_size=32)
family.add("distilbert", language_model, "DistilBert", "ForMaskedLM", dim=64, hidden_dim=128, n_heads=4, n_layers=3)
family.add(
    "deberta",
    language_model,
    "Deberta",
    "ForMaskedLM",
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    max_relative_positions=32,
)
family.add(
    "deberta-v2",
    classifier,
    "DebertaV2",
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    position_buckets=16,
    max_relative_positions=64,
)
family.add("electra", language_model, "Electra", "ForMaskedLM", embedding_size=32)
family.add("electra-classifier", classifier, "Electra", embedding_size=32)
family.add(
    "xlnet",
    classifier,
    "XLNet",
    max_position_embeddings=None,
    hidden_size=None,
    num_hidden_layers=None,
    num_attention_heads=None,
    d_model=64,
    n_layer=3,
    n_head=4,
    d_inner=128,
)
family.add("mpnet", language_model, "MPNet", "ForMaskedLM")
family.add(
    "funnel",
    classifier,
    "Funnel",
    hidden_size=None,
    num_hidden_layers=None,
    num_attention_heads=None,
    max_position_embeddings=None,
    d_model=64,
    n_head=4,
    d_head=16,
    d_inner=128,
    block_sizes=[1, 1, 1],
    num_decoder_layers=1,
)
family.add("longformer", language_model, "Longformer", "ForMaskedLM", attention_window=16)
family.add(
    "big-bird",
    language_model,
    "BigBird",
    "ForMaskedLM",
    attention_type="block_sparse",
    block_size=4,
    num_random_blocks=2,
)
family.add(
    "reformer",
    language_model,
    "Reformer",
    "ModelWithLMHead",
    is_decoder=True,
    num_hidden_layers=2,
    attn_layers=["local", "lsh"],
    attention_head_size=16,
    feed_forward_size=128,
    local_attn_chunk_length=16,
    lsh_attn_chunk_length=16,
    axial_pos_shape=[8, 8],
    axial_pos_embds_dim=[32, 32],
    num_buckets=4,
    num_hashes=1,
    hash_seed=0,
)
family.add("roformer", language_model, "RoFormer", "ForMaskedLM", embedding_size=64)
family.add("convbert", classifier, "ConvBert", embedding_size=64)
family.add("fnet", language_model, "FNet", "ForMaskedLM")
family.add("squeezebert", classifier, "SqueezeBert", embedding_size=64)
family.add(
    "mobilebert",
    language_model,
    "MobileBert",
    "ForMaskedLM",
    embedding_size=32,
    intra_bottleneck_size=32,
    true_hidden_size=32,
)
family.add("nystromformer", language_model, "Nystromformer", "ForMaskedLM", num_landmarks=8, segment_means_seq_len=64)
family.add("yoso", language_model, "Yoso", "ForMaskedLM", use_expectation=True)
family.add("modernbert", language_model, "ModernBert", "ForMaskedLM", local_attention=16, global_attn_every_n_layers=2)
family.add("ibert", classifier, "IBert")
family.add("esm", language_model, "Esm", "ForMaskedLM", position_embedding_type="rotary", mask_token_id=4)
family.add("canine", classifier, "Canine", downsampling_rate=4, local_transformer_stride=32, num_hash_buckets=64)
family.add("rembert", language_model, "RemBert", "ForMaskedLM", input_embedding_size=32, output_embedding_size=32)
family.add("megatron-bert", language_model, "MegatronBert", "ForMaskedLM")
family.add("luke", classifier, "Luke", entity_vocab_size=16, entity_emb_size=32)


@family.model("perceiver")
def perceiver() -> Example:
    """Latents that attend to the bytes, and outputs that attend to the latents."""
    settings = {"d_model": 64, "d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 3, "num_blocks": 1}
    heads = {"num_self_attention_heads": 4, "num_cross_attention_heads": 4}
    qk = {"qk_channels": 32, "v_channels": 64}
    return language_model("Perceiver", "ForMaskedLM", length=128, mask="padded", **settings, **heads, **qk)
