"""Causal models as encoders: Llama, Mistral, Qwen2 and Qwen3, whose last row stands for the sequence."""

from typing import Any, Final

from attention_serving.model.config import AttentionConfig
from attention_serving.model.encoder_folder.families.family import (
    Family,
    activation,
    expect_encoder,
    rotary_theta,
)
from attention_serving.model.encoder_folder.fields import Fields

THETA: Final = 10_000.0
SLIDING: Final = "sliding_attention"


def _configure(fields: Fields) -> dict[str, Any]:
    expect_encoder(fields)
    fields.ignore("pretraining_tp")
    model_type = fields.text("model_type")
    positions, count = fields.integer("max_position_embeddings"), fields.integer("num_hidden_layers")
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    epsilon = fields.number("rms_norm_eps", 1e-6)
    bias = fields.flag("attention_bias")
    common: dict[str, Any] = {
        "d_query": width,
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", 8 if model_type == "mistral" else heads),
        "d_k": fields.integer("head_dim", 128 if model_type == "qwen3" else width // heads),
        # Qwen2 always has these biases, and states nothing about them.
        "qkv_bias": bias or model_type == "qwen2",
        "out_bias": bias and model_type != "qwen2",
        "causal": True,
        "rotary_theta": _theta(fields),
        "qk_norm": epsilon if model_type == "qwen3" else 0.0,
    }
    windows = _windows(fields, model_type, count)
    return {
        "vocabulary": fields.integer("vocab_size"),
        "width": width,
        "layers": tuple(AttentionConfig(**common, window=window) for window in windows),
        "feed_forward": fields.integer("intermediate_size"),
        "activation": activation(fields, "hidden_act", "silu"),
        "gated": True,
        "feed_forward_bias": fields.flag("mlp_bias"),
        "norm": "rms",
        "norm_epsilon": epsilon,
        "norm_first": True,
        "embedding_norm": False,
        "final_norm": True,
        "max_positions": positions,
    }


def _theta(fields: Fields) -> float:
    stated = fields.number("rope_theta", THETA)
    for name in ("rope_scaling", "rope_parameters"):
        stated = rotary_theta(fields, fields.mapping(name), stated)
    return stated


def _windows(fields: Fields, model_type: str, count: int) -> list[int]:
    """The sliding window of each layer, in rows before and including its own; 0 for none."""
    window = fields.integer("sliding_window", 0, least=0)
    used = fields.flag("use_sliding_window", default=model_type == "mistral")
    first = fields.integer("max_window_layers", 28, least=0)
    kinds = fields.items("layer_types")
    if not window or not used:
        return [0] * count
    if kinds:
        return [window if kind == SLIDING else 0 for kind in kinds]
    if model_type == "mistral":
        return [window] * count
    return [window if index >= first else 0 for index in range(count)]


DECODER: Final = Family(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    configure=_configure,
    names={
        "embeddings.tokens": "embed_tokens",
        "attention.projections.query": "layers.{}.self_attn.q_proj",
        "attention.projections.key": "layers.{}.self_attn.k_proj",
        "attention.projections.value": "layers.{}.self_attn.v_proj",
        "attention.output": "layers.{}.self_attn.o_proj",
        "attention.query_norm": "layers.{}.self_attn.q_norm",
        "attention.key_norm": "layers.{}.self_attn.k_norm",
        "attention_norm": "layers.{}.input_layernorm",
        "feed_forward.inner": "layers.{}.mlp.gate_proj",
        "feed_forward.gate": "layers.{}.mlp.up_proj",
        "feed_forward.outer": "layers.{}.mlp.down_proj",
        "feed_forward_norm": "layers.{}.post_attention_layernorm",
        "final_norm": "norm",
    },
    prefixes=("", "model."),
    neighbours=("lm_head.*", "layers.*.self_attn.rotary_emb.inv_freq", "score.*"),
    pooling=("last",),
)
