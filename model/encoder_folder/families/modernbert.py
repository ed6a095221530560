"""ModernBERT: rotary positions, rows normalised first, and layers whose rows attend to their neighbours."""

from typing import Any, Final

from attention_serving.model.config import AttentionConfig
from attention_serving.model.encoder_folder.families.family import (
    Family,
    activation,
    expect_encoder,
    rotary_theta,
)
from attention_serving.model.encoder_folder.fields import Fields

GLOBAL, LOCAL = "full_attention", "sliding_attention"
THETAS: Final = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}


def _configure(fields: Fields) -> dict[str, Any]:
    expect_encoder(fields)
    fields.ignore("reference_compile", "repad_logits_with_grad", "sparse_pred*", "decoder_bias",
                  "deterministic_flash_attn", "embedding_dropout")  # fmt: skip
    width, positions = fields.integer("hidden_size"), fields.integer("max_position_embeddings")
    bias = fields.flag("attention_bias")
    heads, thetas = fields.integer("num_attention_heads"), _thetas(fields)
    # Rows at most half the window away on either side; ours counts the row itself.
    windows = {GLOBAL: 0, LOCAL: fields.integer("local_attention", 128) // 2 + 1}
    layers = {
        kind: AttentionConfig(
            d_query=width,
            num_heads=heads,
            projections="fused",
            qkv_bias=bias,
            out_bias=bias,
            rotary_theta=thetas[kind],
            window=windows[kind],
        )
        for kind in (GLOBAL, LOCAL)
    }
    return {
        "vocabulary": fields.integer("vocab_size"),
        "width": width,
        "layers": tuple(layers[kind] for kind in _kinds(fields)),
        "feed_forward": fields.integer("intermediate_size"),
        "activation": activation(fields, "hidden_activation", "gelu"),
        "gated": True,
        "feed_forward_bias": fields.flag("mlp_bias"),
        "norm_epsilon": fields.number("norm_eps", 1e-5),
        "norm_bias": fields.flag("norm_bias"),
        "norm_first": True,
        "first_attention_norm": False,
        "final_norm": True,
        "max_positions": positions,
    }


def _kinds(fields: Fields) -> list[str]:
    """Whether each layer is global or local: listed, or global in turn."""
    count, every = fields.integer("num_hidden_layers"), fields.integer("global_attn_every_n_layers", 3)
    kinds = fields.items("layer_types") or [LOCAL if index % every else GLOBAL for index in range(count)]
    if len(kinds) != count or not set(kinds) <= {GLOBAL, LOCAL}:
        raise fields.error("layer_types", kinds, f"must be {GLOBAL} or {LOCAL} for each of {count} layers")
    return kinds


def _thetas(fields: Fields) -> dict[str, float]:
    fields.expect("rope_scaling", {})
    parameters = fields.mapping("rope_parameters")
    if unknown := sorted(set(parameters) - set(THETAS)):
        raise fields.error("rope_parameters", unknown, f"must have the members {', '.join(THETAS)}")
    found = {}
    for kind, (name, default) in THETAS.items():
        stated = fields.number(name, default)
        found[kind] = rotary_theta(fields, parameters.get(kind) or {}, stated)
    return found


MODERNBERT: Final = Family(
    model_types=("modernbert",),
    configure=_configure,
    names={
        "embeddings.tokens": "embeddings.tok_embeddings",
        "embeddings.norm": "embeddings.norm",
        "attention.projections.fused": "layers.{}.attn.Wqkv",
        "attention.output": "layers.{}.attn.Wo",
        "attention_norm": "layers.{}.attn_norm",
        "feed_forward.inner": ("layers.{}.mlp.Wi", 0, 2),
        "feed_forward.gate": ("layers.{}.mlp.Wi", 1, 2),
        "feed_forward.outer": "layers.{}.mlp.Wo",
        "feed_forward_norm": "layers.{}.mlp_norm",
        "final_norm": "final_norm",
    },
    prefixes=("", "model."),
    neighbours=("head.*", "decoder.*", "classifier.*"),
)
