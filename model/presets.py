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
            "self-attention",
            "one head, d_k 24 and d_v 28 over width 16, no output projection",
            AttentionConfig(d_query=16, d_k=24, d_v=28, out_proj=False),
        ),
        _attention(
            "cross-attention",
            "one head, queries of width 16 over keys of width 24, no output projection",
            AttentionConfig(d_query=16, d_key=24, d_k=24, d_v=28, cross=True, out_proj=False),
        ),
        _attention(
            "multi-head-768x12",
            "self-attention, twelve heads over width 768",
            AttentionConfig(d_query=768, num_heads=12),
        ),
        _attention(
            "causal-768x12",
            "causal self-attention, twelve heads over width 768",
            AttentionConfig(d_query=768, num_heads=12, causal=True),
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
