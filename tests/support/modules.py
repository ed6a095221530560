"""Modules that the tests serve beside the presets."""

import torch
from torch import nn

from attention_serving.export.precision import Precision
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig

CAUSAL_CROSS = "causal-cross"
ENCODER = "encoder"
# Name, preset and precision.
LOWERED = (
    ("self-attention-fp16", "self-attention", Precision.FP16),
    ("multi-head-64x4-int8", "multi-head-64x4", Precision.INT8),
)


def causal_cross() -> MultiHeadAttention:
    """Cross-attention under a causal rule, where keys may be fewer or more than queries."""
    torch.manual_seed(3)
    return MultiHeadAttention(AttentionConfig(d_query=16, num_heads=2, cross=True, causal=True)).eval()


def encoder() -> nn.TransformerEncoder:
    """A whole transformer encoder of two layers over width 32."""
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def bert() -> nn.Module:
    """A tiny BERT encoder of 64 positions over 50 ids, width 32, with random weights."""
    from transformers import BertConfig, BertModel  # noqa: PLC0415 - slow to import

    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(5)
    module: nn.Module = BertModel(config)
    return module.eval()
