"""BERT and what is like it: rows normalised last, and a table of positions.

RoBERTa, XLM-RoBERTa and MPNet count positions from the padding id. MPNet adds a bias for the distance of two
rows. DistilBERT is BERT without token types, under names of its own.
"""

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
MPNET_NAMES: Final = {
    **{ours: theirs for ours, theirs in NAMES.items() if ours != "embeddings.token_types"},
    "relative_bias.table": "encoder.relative_attention_bias",
    "attention.projections.query": "encoder.layer.{}.attention.attn.q",
    "attention.projections.key": "encoder.layer.{}.attention.attn.k",
    "attention.projections.value": "encoder.layer.{}.attention.attn.v",
    "attention.output": "encoder.layer.{}.attention.attn.o",
    "attention_norm": "encoder.layer.{}.attention.LayerNorm",
}
EPSILON: Final = 1e-12
# The library does not read the padding id and the rows of the table of biases of MPNet from configurations.
MPNET_PADDING_ID: Final = 1
MPNET_BUCKETS: Final = 32
NEIGHBOURS: Final = ("pooler.*", "cls.*", "lm_head.*", "classifier.*", "embeddings.position_ids")


def _sizes(fields: Fields, **own: str) -> dict[str, Any]:
    """The sizes, by the names of BERT or by the family's own names of these."""
    expect_encoder(fields)

    def integer(name: str) -> int:
        return fields.integer(own.get(name, name))

    width = integer("hidden_size")
    attention = AttentionConfig(d_query=width, num_heads=integer("num_attention_heads"), qkv_bias=True)
    return {
        "vocabulary": integer("vocab_size"),
        "width": width,
        "layers": (attention,) * integer("num_hidden_layers"),
        "feed_forward": integer("intermediate_size"),
        "activation": activation(fields, own.get("hidden_act", "hidden_act"), "gelu"),
        "norm_epsilon": fields.number("layer_norm_eps", EPSILON),
        "positions": integer("max_position_embeddings"),
    }


def _bert(fields: Fields) -> dict[str, Any]:
    return {**_sizes(fields), "token_types": fields.integer("type_vocab_size", 2)}


def _roberta(fields: Fields) -> dict[str, Any]:
    return {**_bert(fields), "padding_id": fields.integer("pad_token_id", 1, least=0)}


def _mpnet(fields: Fields) -> dict[str, Any]:
    fields.expect("relative_attention_num_buckets", MPNET_BUCKETS)
    return {**_sizes(fields), "padding_id": MPNET_PADDING_ID, "relative_buckets": MPNET_BUCKETS}


def _distilbert(fields: Fields) -> dict[str, Any]:
    # How the table of positions was first filled; its values are in the file.
    fields.ignore("sinusoidal_pos_embds")
    # The library does not read it from the configuration.
    fields.expect("layer_norm_eps", EPSILON)
    return _sizes(
        fields,
        hidden_size="dim",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        intermediate_size="hidden_dim",
        hidden_act="activation",
    )


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
MPNET: Final = Family(
    model_types=("mpnet",),
    configure=_mpnet,
    names=MPNET_NAMES,
    prefixes=("", "mpnet."),
    neighbours=NEIGHBOURS,
)
DISTILBERT: Final = Family(
    model_types=("distilbert",),
    configure=_distilbert,
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
