"""Named modules, ready to export."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model.attention import MultiHeadAttention
from model.config import AttentionConfig
from model.text import TextAttention, sentence_tokenizer

SENTENCE = "Life is short, eat dessert first"
Module = MultiHeadAttention | TextAttention


@dataclass(frozen=True)
class Preset:
    """A module by name. `build` makes it with fresh weights."""

    name: str
    description: str
    build: Callable[[], Module]


def _attention(name: str, description: str, config: AttentionConfig) -> Preset:
    return Preset(name, description, lambda: MultiHeadAttention(config))


def _sentence() -> TextAttention:
    config = AttentionConfig(d_query=16, num_heads=4)
    return TextAttention(sentence_tokenizer(SENTENCE), config)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "sentence-self-attention",
            f"text in: four heads over the words of {SENTENCE!r}, width 16",
            _sentence,
        ),
        _attention(
            "simple-self-attention",
            "no trainable weights: softmax(x x^T) x, width 16",
            AttentionConfig(d_query=16, projections="none", scale=1.0, out_proj=False),
        ),
        _attention(
            "scaled-dot-product-attention",
            "no projections: queries and keys of width 16, values of width 24",
            AttentionConfig(
                d_query=16, d_value=24, cross=True, separate_value=True, projections="none", out_proj=False
            ),
        ),
        _attention(
            "self-attention",
            "one head, d_k 24 and d_v 28 over width 16, no output projection",
            AttentionConfig(d_query=16, d_k=24, d_v=28, out_proj=False),
        ),
        _attention(
            "fused-self-attention",
            "one head over width 16, biased query, key and value from one fused projection",
            AttentionConfig(d_query=16, projections="fused", qkv_bias=True),
        ),
        _attention(
            "concatenated-multi-head",
            "four heads over width 16, concatenated, no output projection",
            AttentionConfig(d_query=16, num_heads=4, d_k=8, d_v=6, out_proj=False),
        ),
        _attention(
            "stacked-multi-head",
            "four heads over width 16, weights of all heads in one stack",
            AttentionConfig(d_query=16, num_heads=4, projections="stacked", out_proj=False),
        ),
        _attention(
            "multi-head-64x4",
            "self-attention, four heads over width 64",
            AttentionConfig(d_query=64, num_heads=4),
        ),
        _attention(
            "multi-head-768x12",
            "self-attention, twelve heads over width 768",
            AttentionConfig(d_query=768, num_heads=12),
        ),
        _attention(
            "causal-self-attention",
            "causal, one head over width 16, no output projection",
            AttentionConfig(d_query=16, causal=True, out_proj=False),
        ),
        _attention(
            "causal-768x12",
            "causal self-attention, twelve heads over width 768",
            AttentionConfig(d_query=768, num_heads=12, causal=True),
        ),
        _attention(
            "dropout-multi-head",
            "four heads over width 64, trained with dropout on the attention weights",
            AttentionConfig(d_query=64, num_heads=4, dropout=0.5),
        ),
        _attention(
            "rotary-768x12",
            "causal self-attention with rotary positions, twelve heads over width 768, no biases",
            AttentionConfig(d_query=768, num_heads=12, causal=True, rotary_theta=10_000.0, out_bias=False),
        ),
        _attention(
            "grouped-query-768x12x4",
            "as rotary-768x12, four key and value heads for twelve query heads",
            AttentionConfig(
                d_query=768,
                num_heads=12,
                num_kv_heads=4,
                causal=True,
                rotary_theta=10_000.0,
                out_bias=False,
            ),
        ),
        _attention(
            "alibi-768x12",
            "causal self-attention with linear biases (ALiBi), twelve heads over width 768",
            AttentionConfig(d_query=768, num_heads=12, causal=True, alibi=True),
        ),
        _attention(
            "alibi-bidirectional-64x4",
            "self-attention with symmetric linear biases (ALiBi), four heads over width 64",
            AttentionConfig(d_query=64, num_heads=4, alibi=True),
        ),
        _attention(
            "sliding-window-768x12",
            "causal self-attention to the last 128 rows, twelve heads over width 768",
            AttentionConfig(d_query=768, num_heads=12, causal=True, window=128),
        ),
        _attention(
            "sliding-window-bidirectional-64x4",
            "self-attention to rows fewer than 4 away on both sides, four heads over width 64",
            AttentionConfig(d_query=64, num_heads=4, window=4),
        ),
        _attention(
            "cross-attention",
            "one head, queries of width 16 over keys of width 24, no output projection",
            AttentionConfig(d_query=16, d_key=24, d_k=24, d_v=28, cross=True, out_proj=False),
        ),
        _attention(
            "cross-768x12",
            "cross-attention with a value input of its own, twelve heads over width 768",
            AttentionConfig(d_query=768, num_heads=12, cross=True, separate_value=True),
        ),
    )
}


def build_preset(name: str, *, seed: int = 0) -> Module:
    """Builds a preset in evaluation mode; one name and seed always give the same weights.

    Raises:
        KeyError: There is no preset of that name; the message lists them.
    """
    if name not in PRESETS:
        raise KeyError(f"preset {name!r} does not exist; there are: {', '.join(sorted(PRESETS))}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PRESETS[name].build().eval()
