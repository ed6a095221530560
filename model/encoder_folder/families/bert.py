"""BERT, and RoBERTa with XLM-RoBERTa, which count positions from the padding id."""

from typing import Any, Final

from attention_serving.model.config import AttentionConfig
from attention_serving.model.encoder_folder.families.family import Family, activation, expect_encoder
from attention_serving.model.encoder_folder.fields import Fields

NAMES: Final = {
    "embeddings.tokens": "embeddings.word_embeddings",
    "embeddings.positions": "embeddings.position_embeddings",
    "embeddings.token_types": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "attention.projections.query": "encoder.layer.{}.attention.self.query",
    "attention.projections.key": "encoder.layer.{}.attention.self.key",
    "attention.projections.value": "encoder.layer.{}.attention.self.value",
    "attention.output": "encoder.layer.{}.attention.output.dense",
    "attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "feed_forward.inner": "encoder.layer.{}.intermediate.dense",
    "feed_forward.outer": "encoder.layer.{}.output.dense",
    "feed_forward_norm": "encoder.layer.{}.output.LayerNorm",
}
NEIGHBOURS: Final = ("pooler.*", "cls.*", "lm_head.*", "classifier.*", "embeddings.position_ids")


def sizes(fields: Fields) -> dict[str, Any]:
    """The sizes that this family and others name alike."""
    expect_encoder(fields)
    width = fields.integer("hidden_size")
    attention = AttentionConfig(
        d_query=width, num_heads=fields.integer("num_attention_heads"), qkv_bias=True, out_bias=True
    )
    positions = fields.integer("max_position_embeddings")
    return {
        "vocabulary": fields.integer("vocab_size"),
        "width": width,
        "layers": (attention,) * fields.integer("num_hidden_layers"),
        "feed_forward": fields.integer("intermediate_size"),
        "activation": activation(fields, "hidden_act", "gelu"),
        "norm_epsilon": fields.number("layer_norm_eps", 1e-12),
        "positions": positions,
        "max_positions": positions,
    }


def _bert(fields: Fields) -> dict[str, Any]:
    return {**sizes(fields), "token_types": fields.integer("type_vocab_size", 2)}


def _roberta(fields: Fields) -> dict[str, Any]:
    padding = fields.integer("pad_token_id", 1, least=0)
    found = _bert(fields)
    return {**found, "padding_id": padding, "max_positions": found["positions"] - padding - 1}


BERT: Final = Family(
    model_types=("bert",), configure=_bert, names=NAMES, prefixes=("", "bert."), neighbours=NEIGHBOURS
)
ROBERTA: Final = Family(
    model_types=("roberta", "xlm-roberta", "camembert"),
    configure=_roberta,
    names=NAMES,
    prefixes=("", "roberta."),
    neighbours=NEIGHBOURS,
)
