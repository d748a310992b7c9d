"""Models of speech and sound."""

from __future__ import annotations

from typing import Any

import torch

from .base import Example, Family, mean_square, own_loss
from .hugging_face import built, tokens

family = Family("audio", needs=("transformers",))
WAVES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 2],
    "conv_kernel": [10, 8, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "num_feat_extract_layers": 3,
    "pad_token_id": 0,
}


def recognizer(name: str, **settings: Any) -> Example:
    """From a waveform to letters, with CTC."""
    model = built(name, "ForCTC", **{**WAVES, **settings})
    return Example(model, {"input_values": torch.randn(2, 3200), "labels": torch.randint(1, 32, (2, 8))}, own_loss)


family.add("wav2vec2", recognizer, "Wav2Vec2")
family.add("wav2vec2-layerdrop", recognizer, "Wav2Vec2", layerdrop=0.5)
family.add("wav2vec2-masked", recognizer, "Wav2Vec2", mask_time_prob=0.2, mask_time_length=2)
family.add("hubert", recognizer, "Hubert")
family.add("wavlm", recognizer, "WavLM", num_buckets=16, max_bucket_distance=32)
family.add("unispeech", recognizer, "UniSpeech")
family.add("data2vec-audio", recognizer, "Data2VecAudio", conv_pos_kernel_size=5, num_conv_pos_embeddings=2)
family.add("sew", recognizer, "SEW", squeeze_factor=2)
family.add("wav2vec2-conformer", recognizer, "Wav2Vec2Conformer", conv_depthwise_kernel_size=5)


@family.model("whisper")
def whisper() -> Example:
    """From a spectrogram to text."""
    settings = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "d_model": 64,
        "num_mel_bins": 16,
        "max_source_positions": 50,
        "max_target_positions": 64,
        "decoder_start_token_id": 1,
    }
    specials = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = built(
        "Whisper", "ForConditionalGeneration", **settings, **specials, suppress_tokens=None, begin_suppress_tokens=[]
    )
    return Example(model, {"input_features": torch.randn(4, 16, 100), "labels": tokens(4, 24)}, own_loss)


@family.model("speech-to-text")
def speech_to_text() -> Example:
    """Convolutions before an encoder-decoder."""
    model = built(
        "Speech2Text",
        "ForConditionalGeneration",
        vocab_size=256,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        input_feat_per_channel=16,
        conv_channels=32,
        max_source_positions=128,
        max_target_positions=64,
    )
    return Example(model, {"input_features": torch.randn(4, 100, 16), "labels": tokens(4, 24)}, own_loss)


@family.model("speecht5")
def speecht5() -> Example:
    """From text to a spectrogram."""
    model = built(
        "SpeechT5",
        "ForTextToSpeech",
        vocab_size=64,
        hidden_size=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_mel_bins=16,
        speech_decoder_prenet_units=32,
        speech_decoder_postnet_units=32,
        speaker_embedding_dim=16,
        speech_decoder_postnet_layers=2,
        reduction_factor=2,
        encoder_layerdrop=0.0,  # a shorter path in one of ten steps: the odd modules have that
        decoder_layerdrop=0.0,
    )
    sample = {
        "input_ids": torch.randint(4, 60, (2, 16)),
        "labels": torch.randn(2, 32, 16),
        "attention_mask": torch.ones(2, 16, dtype=torch.long),
        "speaker_embeddings": torch.randn(2, 16),
    }
    return Example(model, sample, own_loss)


@family.model("audio-spectrogram-transformer")
def ast() -> Example:
    """A vision transformer on a spectrogram."""
    model = built(
        "AST",
        "ForAudioClassification",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=32,
        num_mel_bins=16,
    )
    return Example(model, {"input_values": torch.randn(6, 32, 16), "labels": torch.arange(6) % 2}, own_loss)


@family.model("encodec")
def encodec() -> Example:
    """An audio codec: convolutions, an LSTM, and codes chosen by distance."""
    model = built(
        "Encodec",
        "Model",
        num_filters=4,
        hidden_size=16,
        codebook_dim=16,
        codebook_size=16,
        num_lstm_layers=1,
        upsampling_ratios=[4, 2],
        num_residual_layers=1,
        target_bandwidths=[60.0],
    )
    return Example(
        model,
        {"input_values": torch.randn(2, 1, 640), "bandwidth": 60.0},
        lambda output: mean_square(output.audio_values),
    )


@family.model("musicgen-decoder")
def musicgen() -> Example:
    """A decoder of several streams of audio codes."""
    from transformers import MusicgenForCausalLM
    from transformers.models.musicgen.configuration_musicgen import MusicgenDecoderConfig

    config = MusicgenDecoderConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        num_codebooks=2,
        pad_token_id=63,
        bos_token_id=63,
        max_position_embeddings=64,
    )
    model = MusicgenForCausalLM(config).train()
    codes = torch.randint(0, 60, (2 * 2, 24))
    return Example(model, {"input_ids": codes, "labels": torch.randint(0, 60, (2, 24, 2))}, own_loss)
