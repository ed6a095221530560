"""Named modules, ready to export.

Their names, descriptions and configurations are plain values. PyTorch takes seconds to import, so that only
`build_preset` imports it, when it is called: a list of the presets must not wait for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attention_serving.model.config import AttentionConfig

if TYPE_CHECKING:
    from attention_serving.model.attention import MultiHeadAttention
    from attention_serving.model.text import TextAttention

SENTENCE = "Life is short, eat dessert first"


@dataclass(frozen=True)
class Preset:
    """A module by name.

    Attributes:
        description: One line for lists and manifests.
        sentence: For modules that take text: its words are the vocabulary.
    """

    description: str
    config: AttentionConfig
    sentence: str = ""


PRESETS: Mapping[str, Preset] = {
    "sentence-self-attention": Preset(
        f"takes text: four heads over the words of {SENTENCE!r}, width 16",
        AttentionConfig(d_query=16, num_heads=4),
        sentence=SENTENCE,
    ),
    "simple-self-attention": Preset(
        "without parameters: softmax(x x^T) x, width 16",
        AttentionConfig(d_query=16, projections="none", scale=1.0, out_proj=False),
    ),
    "scaled-dot-product-attention": Preset(
        "without projections: queries and keys of width 16, values of width 24",
        AttentionConfig(
            d_query=16, d_value=24, cross=True, separate_value=True, projections="none", out_proj=False
        ),
    ),
    "self-attention": Preset(
        "one head, d_k 24 and d_v 28 over width 16, no output projection",
        AttentionConfig(d_query=16, d_k=24, d_v=28, out_proj=False),
    ),
    "fused-self-attention": Preset(
        "one head over width 16, biased query, key and value from one fused projection",
        AttentionConfig(d_query=16, projections="fused", qkv_bias=True),
    ),
    "concatenated-multi-head": Preset(
        "four heads over width 16, concatenated, no output projection",
        AttentionConfig(d_query=16, num_heads=4, d_k=8, d_v=6, out_proj=False),
    ),
    "stacked-multi-head": Preset(
        "four heads over width 16, weights of all heads in one stack",
        AttentionConfig(d_query=16, num_heads=4, projections="stacked", out_proj=False),
    ),
    "multi-head-64x4": Preset(
        "self-attention, four heads over width 64", AttentionConfig(d_query=64, num_heads=4)
    ),
    "multi-head-768x12": Preset(
        "self-attention, twelve heads over width 768", AttentionConfig(d_query=768, num_heads=12)
    ),
    "causal-self-attention": Preset(
        "causal, one head over width 16, no output projection",
        AttentionConfig(d_query=16, causal=True, out_proj=False),
    ),
    "causal-768x12": Preset(
        "causal self-attention, twelve heads over width 768",
        AttentionConfig(d_query=768, num_heads=12, causal=True),
    ),
    "dropout-multi-head": Preset(
        "four heads over width 64, trained with dropout on the attention weights",
        AttentionConfig(d_query=64, num_heads=4, dropout=0.5),
    ),
    "rotary-768x12": Preset(
        "causal self-attention with rotary positions, twelve heads over width 768, no biases",
        AttentionConfig(d_query=768, num_heads=12, causal=True, rotary_theta=10_000.0, out_bias=False),
    ),
    "grouped-query-768x12x4": Preset(
        "as rotary-768x12, four key and value heads for twelve query heads",
        AttentionConfig(
            d_query=768, num_heads=12, num_kv_heads=4, causal=True, rotary_theta=10_000.0, out_bias=False
        ),
    ),
    "alibi-768x12": Preset(
        "causal self-attention with linear biases (ALiBi), twelve heads over width 768",
        AttentionConfig(d_query=768, num_heads=12, causal=True, alibi=True),
    ),
    "alibi-bidirectional-64x4": Preset(
        "self-attention with symmetric linear biases (ALiBi), four heads over width 64",
        AttentionConfig(d_query=64, num_heads=4, alibi=True),
    ),
    "sliding-window-768x12": Preset(
        "causal self-attention to the last 128 rows, twelve heads over width 768",
        AttentionConfig(d_query=768, num_heads=12, causal=True, window=128),
    ),
    "sliding-window-bidirectional-64x4": Preset(
        "self-attention to rows fewer than 4 away on both sides, four heads over width 64",
        AttentionConfig(d_query=64, num_heads=4, window=4),
    ),
    "cross-attention": Preset(
        "one head, queries of width 16 over keys of width 24, no output projection",
        AttentionConfig(d_query=16, d_key=24, d_k=24, d_v=28, cross=True, out_proj=False),
    ),
    "cross-768x12": Preset(
        "cross-attention with a separate value input, twelve heads over width 768",
        AttentionConfig(d_query=768, num_heads=12, cross=True, separate_value=True),
    ),
}


def build_preset(name: str, *, seed: int = 0) -> "MultiHeadAttention | TextAttention":
    """Builds a preset in evaluation mode. A name and a seed always give the same weights.

    Raises:
        KeyError: The preset does not exist. The message lists those that do.
    """
    import torch  # noqa: PLC0415 - see the top of this file

    from attention_serving.model.attention import MultiHeadAttention  # noqa: PLC0415
    from attention_serving.model.text import TextAttention, sentence_tokenizer  # noqa: PLC0415

    if name not in PRESETS:
        raise KeyError(f"preset {name!r} does not exist; the presets are: {', '.join(sorted(PRESETS))}")
    preset = PRESETS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if preset.sentence:
            return TextAttention(sentence_tokenizer(preset.sentence), preset.config).eval()
        return MultiHeadAttention(preset.config).eval()
