"""Every attention system at a small width: what is proven of a system holds at any width."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from attention_serving.export.artifact import write_artifact
from attention_serving.export.model_id import ModelId
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import PRESETS, build_preset
from attention_serving.model.text import TextAttention
from tests.support.artifacts import ModelSet

# Presets that are wider are tested with a width of four for each head.
MOST_WIDTH, HEAD_WIDTH, WINDOW = 64, 4, 5
WIDTHS = ("d_query", "d_key", "d_value", "d_out")
# The numbers are the rows of the list of systems. Other tests cover rows 11, 12, 16 and 17 as well: dropout,
# masks, intermediate results and cost figures.
SYSTEMS = {
    "1 text to vectors": "sentence-self-attention",
    "2 simple self-attention": "simple-self-attention",
    "3 scaled dot-product attention": "scaled-dot-product-attention",
    "4 single-head self-attention": "self-attention",
    "5 linear layers, fused": "fused-self-attention",
    "6 concatenated multi-head": "concatenated-multi-head",
    "7 stacked multi-head": "stacked-multi-head",
    "8 split multi-head": "multi-head-768x12",
    "9 causal self-attention": "causal-self-attention",
    "10 causal multi-head": "causal-768x12",
    "11 dropout": "dropout-multi-head",
    "12 padding and full masks": "multi-head-64x4",
    "13 rotary multi-head": "rotary-768x12",
    "13 with grouped heads": "grouped-query-768x12x4",
    "ALiBi, causal": "alibi-768x12",
    "ALiBi, bidirectional": "alibi-bidirectional-64x4",
    "sliding window, causal": "sliding-window-768x12",
    "sliding window, bidirectional": "sliding-window-bidirectional-64x4",
    "14 single-head cross-attention": "cross-attention",
    "15 multi-head cross-attention": "cross-768x12",
}


def _narrowed(config: AttentionConfig) -> AttentionConfig:
    width = config.num_heads * HEAD_WIDTH
    sizes: dict[str, Any] = dict.fromkeys(WIDTHS, width) | dict.fromkeys(("d_k", "d_v"), HEAD_WIDTH)
    if config.window:
        sizes["window"] = WINDOW
    return replace(config, **sizes, scale=HEAD_WIDTH**-0.5)


@cache
def build(name: str) -> MultiHeadAttention | TextAttention:
    """A preset, narrowed if it is wide. The same weights each time."""
    config = PRESETS[name].config
    if config.d_query <= MOST_WIDTH:
        return build_preset(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(_narrowed(config)).eval()


def _export(name: str, folder: Path) -> None:
    write_artifact(build(name), ModelId(name), folder)


MODELS = ModelSet("systems", [partial(_export, name) for name in SYSTEMS.values()], [Path(__file__)])
