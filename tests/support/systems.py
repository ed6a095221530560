"""Every attention system at a small width: what is proven of a system holds at any width."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import PRESETS, build_preset
from attention_serving.model.text import TextAttention
from tests.support.artifacts import ModelSet

# Presets that are wider are tested with a width of four for each head, and with dropout.
MOST_WIDTH, HEAD_WIDTH = 64, 4
# The numbers are the rows of the list of systems. Dropout, row 11, is in the narrowed ones, and all of them
# are exported in training mode. Masks, row 12, and intermediate results, row 16, are asked of all of them.
SYSTEMS = {
    "1 text to vectors": "sentence-self-attention",
    "2 simple self-attention": "simple-self-attention",
    "3 scaled dot-product attention": "scaled-dot-product-attention",
    "4 single-head self-attention": "self-attention",
    "6 and 7 concatenated heads in one stack": "stacked-multi-head",
    "8 split multi-head": "multi-head-64x4",
    "5, 9 and 10 causal multi-head, fused": "causal-768x12",
    "13 rotary multi-head with grouped heads": "grouped-query-768x12x4",
    "14 single-head cross-attention": "cross-attention",
    "15 multi-head cross-attention": "cross-768x12",
    "ALiBi in a sliding window": "alibi-768x12",
}


# What some narrowed presets have beside it, so that one model shows several systems.
ADDED: dict[str, dict[str, Any]] = {
    "causal-768x12": {"projections": "fused", "qkv_bias": True},
    "alibi-768x12": {"window": 5},
}


def _narrowed(name: str) -> AttentionConfig:
    config = PRESETS[name].config
    width = config.num_heads * HEAD_WIDTH
    return replace(
        config,
        d_query=width,
        d_key=width,
        d_value=width,
        d_out=width,
        d_k=HEAD_WIDTH,
        d_v=HEAD_WIDTH,
        scale=HEAD_WIDTH**-0.5,
        dropout=0.5,
        **ADDED.get(name, {}),
    )


@cache
def build(name: str) -> MultiHeadAttention | TextAttention:
    """A preset, narrowed if it is wide. The same weights each time."""
    if PRESETS[name].config.d_query <= MOST_WIDTH:
        return build_preset(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(_narrowed(name)).eval()


def _export(name: str, folder: Path) -> None:
    write_artifact(build(name).train(), ModelId(name), folder)


# The text model is one of tests/server/samples.py.
MODELS = ModelSet(
    "systems",
    [partial(_export, name) for name in SYSTEMS.values() if not PRESETS[name].sentence],
    [Path(__file__)],
    ["repository"],
)
