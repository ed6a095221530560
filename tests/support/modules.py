"""Modules that the tests serve beside the presets."""

from typing import Any

import torch
from torch import nn

from attention_serving.export.precision import Precision

ENCODER = "encoder"
# Name, preset and precision.
LOWERED = (
    ("self-attention-fp16", "self-attention", Precision.FP16),
    ("multi-head-64x4-int8", "multi-head-64x4", Precision.INT8),
)


def encoder() -> nn.TransformerEncoder:
    """A whole transformer encoder of two layers over width 32."""
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def bert() -> nn.Module:
    """A tiny BERT encoder of 64 positions over 50 ids, width 32, with random weights."""
    from transformers import BertConfig, BertModel  # noqa: PLC0415 - slow to import

    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=50, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    torch.manual_seed(5)
    module: nn.Module = BertModel(config)
    return module.eval()
