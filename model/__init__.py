"""What attention is: eager PyTorch modules, their configuration and the named presets.

Imports PyTorch only. The exporter turns these modules into artifacts and the tests hold every
served result against them.
"""

from model.attention import MultiHeadAttention
from model.config import AttentionConfig
from model.presets import PRESETS, Preset, build_preset
from model.text import TextAttention, sentence_tokenizer

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "MultiHeadAttention",
    "Preset",
    "TextAttention",
    "build_preset",
    "sentence_tokenizer",
]
