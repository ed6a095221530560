"""MPNet: BERT with a bias for the distance of two rows, and positions that count from the padding id."""

from typing import Any, Final

from attention_serving.model.encoder_folder.families.bert import sizes
from attention_serving.model.encoder_folder.families.family import Family
from attention_serving.model.encoder_folder.fields import Fields

# The library does not read it from the configuration.
PADDING_ID: Final = 1
# The library computes rows of the table for this number, whatever the configuration says.
BUCKETS: Final = 32


def _configure(fields: Fields) -> dict[str, Any]:
    fields.expect("relative_attention_num_buckets", BUCKETS)
    found = sizes(fields)
    return {
        **found,
        "padding_id": PADDING_ID,
        "max_positions": found["positions"] - PADDING_ID - 1,
        "relative_buckets": BUCKETS,
    }


MPNET: Final = Family(
    model_types=("mpnet",),
    configure=_configure,
    names={
        "embeddings.tokens": "embeddings.word_embeddings",
        "embeddings.positions": "embeddings.position_embeddings",
        "embeddings.norm": "embeddings.LayerNorm",
        "relative_bias.table": "encoder.relative_attention_bias",
        "attention.projections.query": "encoder.layer.{}.attention.attn.q",
        "attention.projections.key": "encoder.layer.{}.attention.attn.k",
        "attention.projections.value": "encoder.layer.{}.attention.attn.v",
        "attention.output": "encoder.layer.{}.attention.attn.o",
        "attention_norm": "encoder.layer.{}.attention.LayerNorm",
        "feed_forward.inner": "encoder.layer.{}.intermediate.dense",
        "feed_forward.outer": "encoder.layer.{}.output.dense",
        "feed_forward_norm": "encoder.layer.{}.output.LayerNorm",
    },
    prefixes=("", "mpnet."),
    neighbours=("pooler.*", "lm_head.*", "classifier.*", "embeddings.position_ids"),
)
