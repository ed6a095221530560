"""DistilBERT: BERT without token types, under names of its own."""

from typing import Any, Final

from attention_serving.model.config import AttentionConfig
from attention_serving.model.encoder_folder.families.family import Family, activation, expect_encoder
from attention_serving.model.encoder_folder.fields import Fields

# The library does not read it from the configuration.
EPSILON: Final = 1e-12


def _configure(fields: Fields) -> dict[str, Any]:
    expect_encoder(fields)
    # How the table of positions was first filled; its values are in the file.
    fields.ignore("sinusoidal_pos_embds")
    width, positions = fields.integer("dim"), fields.integer("max_position_embeddings")
    attention = AttentionConfig(d_query=width, num_heads=fields.integer("n_heads"), qkv_bias=True)
    return {
        "vocabulary": fields.integer("vocab_size"),
        "width": width,
        "layers": (attention,) * fields.integer("n_layers"),
        "feed_forward": fields.integer("hidden_dim"),
        "activation": activation(fields, "activation", "gelu"),
        "norm_epsilon": EPSILON,
        "positions": positions,
        "max_positions": positions,
    }


DISTILBERT: Final = Family(
    model_types=("distilbert",),
    configure=_configure,
    names={
        "embeddings.tokens": "embeddings.word_embeddings",
        "embeddings.positions": "embeddings.position_embeddings",
        "embeddings.norm": "embeddings.LayerNorm",
        "attention.projections.query": "transformer.layer.{}.attention.q_lin",
        "attention.projections.key": "transformer.layer.{}.attention.k_lin",
        "attention.projections.value": "transformer.layer.{}.attention.v_lin",
        "attention.output": "transformer.layer.{}.attention.out_lin",
        "attention_norm": "transformer.layer.{}.sa_layer_norm",
        "feed_forward.inner": "transformer.layer.{}.ffn.lin1",
        "feed_forward.outer": "transformer.layer.{}.ffn.lin2",
        "feed_forward_norm": "transformer.layer.{}.output_layer_norm",
    },
    prefixes=("", "distilbert."),
    neighbours=("vocab_*", "pre_classifier.*", "classifier.*", "qa_outputs.*", "embeddings.position_ids"),
)
