"""Models over sequences of tokens: GPT, BERT-like, ViT-like, encoder-decoder, MLP-Mixer, Hugging Face's GPT-2."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

_INIT_STD = 0.02  # with tied embeddings, PyTorch's default of 1 would start with logits of the order of the width


class SelfAttention(nn.Module):
    """Projections and heads; subclasses say how values are mixed."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inward(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return self.outward(self.mix(query, key, value, **options).transpose(1, 2).flatten(2))


class FusedAttention(SelfAttention):
    """PyTorch's own attention operator; `mask` is True where a query may attend to a key."""

    causal = False

    def mix(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=self.causal
        )


class FusedCausalAttention(FusedAttention):
    """The same, told that it is causal instead of given a mask."""

    causal = True


class SoftmaxCausalAttention(SelfAttention):
    """Causal attention written out: scores, `-inf` above the diagonal, softmax, dropout."""

    def mix(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return F.dropout(weights, self.dropout, self.training) @ value


def feed_forward(width: int, hidden: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.Dropout(dropout))


class PreNormBlock(nn.Module):
    """Attention and feed-forward, each added to a stream that is normalized where it is read (GPT-2, ViT)."""

    def __init__(self, width: int, attention: SelfAttention, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention
        self.drop = nn.Dropout(dropout)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = feed_forward(width, 4 * width, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.feed(self.feed_norm(x))


class PostNormBlock(nn.Module):
    """Attention and feed-forward, each followed by a norm of the sum (BERT)."""

    def __init__(self, width: int, attention: SelfAttention, dropout: float) -> None:
        super().__init__()
        self.attention = attention
        self.drop = nn.Dropout(dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.feed = feed_forward(width, 4 * width, dropout)
        self.feed_norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.drop(self.attention(x, mask=mask)))
        return self.feed_norm(x + self.feed(x))


class GPT(nn.Module):
    """A decoder whose output layer is its token embedding.

    Dropout of attention weights has a rate of its own, because PyTorch's fused CPU kernel runs only without it.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        heads: int,
        depth: int,
        dropout: float,
        attention: type[SelfAttention],
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            PreNormBlock(width, attention(width, heads, attention_dropout), dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=_INIT_STD)
        nn.init.normal_(self.positions.weight, std=_INIT_STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bert(nn.Module):
    """An encoder with token, position and segment embeddings; predicts every token. `keep` is False at padding."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            PostNormBlock(width, FusedAttention(width, heads, dropout), dropout) for _ in range(depth)
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens: torch.Tensor, *, segments: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.norm(self.tokens(tokens) + self.positions(places) + self.segments(segments)))
        for block in self.blocks:
            x = block(x, keep[:, None, None, :])
        return self.head(x)


class Patches(nn.Module):
    """Cuts an image into patches and embeds each: [batch, channel, height, width] -> [batch, patch, feature]."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.embed(images).flatten(2).transpose(1, 2)


class ViT(nn.Module):
    """An encoder over image patches that classifies by a token of its own."""

    def __init__(
        self, resolution: int, patch: int, width: int, heads: int, depth: int, classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.patches = Patches(3, patch, width)
        self.summary = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(_INIT_STD * torch.randn(1, (resolution // patch) ** 2 + 1, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(PreNormBlock(width, FusedAttention(width, heads), dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images)
        x = torch.cat([self.summary.expand(len(patches), -1, -1), patches], dim=1)
        x = self.blocks(self.drop(x + self.positions))
        return self.head(self.norm(x)[:, 0])


class MixerBlock(nn.Module):
    """Mixes over patches, then over channels."""

    def __init__(self, patches: int, width: int, token_hidden: int, channel_hidden: int, dropout: float) -> None:
        super().__init__()
        self.token_norm = nn.LayerNorm(width)
        self.token_mix = feed_forward(patches, token_hidden, dropout)
        self.channel_norm = nn.LayerNorm(width)
        self.channel_mix = feed_forward(width, channel_hidden, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.token_mix(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.channel_norm(x))


class MLPMixer(nn.Module):
    """Patches, mixer blocks, the mean over patches, a linear classifier."""

    def __init__(self, resolution: int, patch: int, width: int, depth: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        count = (resolution // patch) ** 2
        self.patches = Patches(3, patch, width)
        self.blocks = nn.Sequential(*(MixerBlock(count, width, 4 * count, width // 2, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.patches(images))).mean(1))


class EncoderDecoder(nn.Module):
    """`nn.Transformer` on embedded sequences, causal on the target, with padding in the source where it is given."""

    def __init__(self, width: int, heads: int, encoders: int, decoders: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            width, heads, encoders, decoders, dim_feedforward=hidden, dropout=dropout, batch_first=True
        )

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, source_padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], device=target.device, dtype=target.dtype
        )
        return self.transformer(
            source,
            target,
            tgt_mask=causal,
            src_key_padding_mask=source_padding,
            memory_key_padding_mask=source_padding,
            tgt_is_causal=True,  # told, because finding out would read the mask's values and break the graph
        )


def hugging_face_gpt2(vocabulary: int, context: int, width: int, heads: int, depth: int, dropout: float) -> nn.Module:
    """GPT-2 as Hugging Face has it, with random weights; returns the loss when it is given labels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=width,
        n_head=heads,
        n_layer=depth,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)
