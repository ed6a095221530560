"""The text tower of CLIP: causal, rows normalised first, the row of the end token stands for the text."""

from typing import Any, Final

from attention_serving.model.config import AttentionConfig
from attention_serving.model.encoder.config import DenseConfig
from attention_serving.model.encoder_folder.families.family import (
    WITHOUT_EFFECT,
    Family,
    activation,
    expect_encoder,
)
from attention_serving.model.encoder_folder.fields import Fields

# Configurations with this id were written when the library took the row of the highest id.
HIGHEST_ID: Final = 2
END_ID: Final = 49407
WITH_PROJECTION: Final = "CLIPTextModelWithProjection"


def _configure(fields: Fields) -> dict[str, Any]:
    if fields.text("model_type") == "clip_text_model":
        return _tower(fields, is_projected=WITH_PROJECTION in fields.items("architectures"))
    tower = Fields(f"{fields.source}, text_config", fields.mapping("text_config"))
    projection = fields.integer("projection_dim", 512)
    fields.ignore("vision_config", "text_config_dict", "vision_config_dict", "logit_scale_*")
    return _tower(tower, is_projected=True, projection=projection)


def _tower(fields: Fields, *, is_projected: bool, projection: int = 0) -> dict[str, Any]:
    expect_encoder(fields)
    width = fields.integer("hidden_size", 512)
    attention = AttentionConfig(
        d_query=width, num_heads=fields.integer("num_attention_heads", 8), qkv_bias=True, causal=True
    )
    end = fields.integer("eos_token_id", END_ID, least=0)
    own = fields.integer("projection_dim", 512)
    found = {
        "vocabulary": fields.integer("vocab_size", 49408),
        "width": width,
        "layers": (attention,) * fields.integer("num_hidden_layers", 12),
        "feed_forward": fields.integer("intermediate_size", 2048),
        "activation": activation(fields, "hidden_act", "quick_gelu"),
        "norm_epsilon": fields.number("layer_norm_eps", 1e-5),
        "norm_first": True,
        "embedding_norm": False,
        "final_norm": True,
        "positions": fields.integer("max_position_embeddings", 77),
        "pooling": ("highest_token",) if end == HIGHEST_ID else ("end_token",),
        "end_id": end,
    }
    if is_projected:
        found["dense"] = (DenseConfig(d_in=width, d_out=projection or own, bias=False),)
    fields.ignore(*WITHOUT_EFFECT)
    fields.finish()
    return found


CLIP: Final = Family(
    model_types=("clip", "clip_text_model"),
    configure=_configure,
    names={
        "embeddings.tokens": "embeddings.token_embedding",
        "embeddings.positions": "embeddings.position_embedding",
        "attention.projections.query": "encoder.layers.{}.self_attn.q_proj",
        "attention.projections.key": "encoder.layers.{}.self_attn.k_proj",
        "attention.projections.value": "encoder.layers.{}.self_attn.v_proj",
        "attention.output": "encoder.layers.{}.self_attn.out_proj",
        "attention_norm": "encoder.layers.{}.layer_norm1",
        "feed_forward.inner": "encoder.layers.{}.mlp.fc1",
        "feed_forward.outer": "encoder.layers.{}.mlp.fc2",
        "feed_forward_norm": "encoder.layers.{}.layer_norm2",
        "final_norm": "final_layer_norm",
        # Without the prefix of the other names.
        "pooling.dense.0.linear": "/text_projection",
    },
    prefixes=("text_model.", ""),
    neighbours=("vision_model.*", "visual_projection.*", "logit_scale", "embeddings.position_ids"),
    pooling=("end_token",),
)
