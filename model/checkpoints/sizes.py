"""Derives the configuration of a module from the shapes of its weights.

Shapes: those of nn.Linear, (out, in); a fused weight counts as three equal parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mode
from typing import Any

from attention_serving.model.checkpoints.errors import CheckpointError
from attention_serving.model.checkpoints.layouts import FUSED, KEY, OUTPUT, QUERY, VALUE, Layout, Shape
from attention_serving.model.config import AttentionConfig, ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointHints:
    """What the shapes of weights do not determine."""

    heads: int
    """Number of query heads."""
    causal: bool
    """Whether rows must not attend to later rows."""
    cross: bool
    """Whether keys come from a second sequence, even if all widths are equal."""
    rotary_theta: float
    """Base frequency, for layouts with rotary position embedding; 0 for none."""

    def __post_init__(self) -> None:
        if isinstance(self.heads, bool) or not isinstance(self.heads, int) or self.heads <= 0:
            raise CheckpointError(f"heads={self.heads!r}: must be a positive integer")


def derive_config(layout: Layout, shapes: Mapping[str, Shape], hints: CheckpointHints) -> AttentionConfig:
    """The configuration that the parameters fit, or that most of them fit.

    Args:
        layout: What is known without the shapes.
        shapes: By parameter. Every weight is a matrix.
        hints: What the shapes do not determine.

    Raises:
        CheckpointError: No configuration has these sizes.
    """
    weights = _weights(shapes)
    widths = _widths(layout, shapes, weights, cross=hints.cross)
    heads = _heads(layout, weights, hints.heads, widths["d_query"])
    try:
        return AttentionConfig(
            **widths,
            **heads,
            projections="fused" if f"{FUSED}.weight" in shapes else "separate",
            qkv_bias=any(name.startswith("projections.") and name.endswith(".bias") for name in shapes),
            out_proj=OUTPUT in weights,
            out_bias=f"{OUTPUT}.bias" in shapes,
            causal=hints.causal,
            rotary_theta=hints.rotary_theta if layout.rotary else 0.0,
        )
    except ConfigError as error:
        raise CheckpointError(f"the shapes do not fit an attention module: {error}") from error


def parameter_shapes(config: AttentionConfig) -> dict[str, Shape]:
    """Shapes of the parameters of a `MultiHeadAttention` with linear projections, without making one.

    A small file can claim shapes that exceed the memory; they are compared before a module is allocated.
    """
    q, k, v = (
        config.num_heads * config.d_k,
        config.num_kv_heads * config.d_k,
        config.num_kv_heads * config.d_v,
    )
    layers = (
        {FUSED: (q + k + v, config.d_query)}
        if config.projections == "fused"
        else {QUERY: (q, config.d_query), KEY: (k, config.d_key), VALUE: (v, config.d_value)}
    )
    biased = set(layers) if config.qkv_bias else set()
    if config.out_proj:
        layers[OUTPUT] = (config.d_out, config.num_heads * config.d_v)
        biased |= {OUTPUT} if config.out_bias else set()
    weights: dict[str, Shape] = {f"{layer}.weight": shape for layer, shape in layers.items()}
    return weights | {f"{layer}.bias": layers[layer][:1] for layer in biased}


def _weights(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """(out, in) of query, key and value, and of the output projection if it exists."""
    weights = {
        name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")
    }
    if FUSED in weights:
        out, width = weights.pop(FUSED)
        weights |= dict.fromkeys((QUERY, KEY, VALUE), (out // 3, width))
    return weights


def _widths(
    layout: Layout, shapes: Mapping[str, Shape], weights: Mapping[str, Shape], *, cross: bool
) -> dict[str, Any]:
    d_query = _query_width(layout, shapes, weights)
    d_key = weights[KEY][1] if layout.own_widths or cross else d_query
    d_value = weights[VALUE][1] if layout.own_widths else d_key
    widths: dict[str, Any] = {"d_query": d_query, "d_key": d_key, "d_value": d_value}
    if layout.own_widths and OUTPUT in weights and not layout.square:
        widths["d_out"] = weights[OUTPUT][0]
    return widths | {
        "cross": cross or not d_query == d_key == d_value,
        "separate_value": d_key != d_value,
    }


def _query_width(layout: Layout, shapes: Mapping[str, Shape], weights: Mapping[str, Shape]) -> int:
    """The width that most shapes agree on, so that an error names the one tensor that differs."""
    if layout.square:
        return mode(size for shape in shapes.values() for size in shape)
    if layout.own_widths:
        return weights[QUERY][1]
    return mode([*(weights[name][1] for name in (QUERY, KEY, VALUE)), weights[OUTPUT][0]])


def _heads(layout: Layout, weights: Mapping[str, Shape], heads: int, d_query: int) -> dict[str, Any]:
    joined = d_query if layout.square else weights[QUERY][0]
    if not joined or joined % heads:
        raise CheckpointError(f"heads={heads}: must divide {joined}, the total width of the query heads")
    d_k = joined // heads
    if layout.square:
        return {"num_heads": heads, "d_k": d_k}
    # If these do not divide, the derived shapes differ from those of the file, and the caller reports that.
    kv_heads = max(1, weights[KEY][0] // d_k)
    d_v = max(1, weights[VALUE][0] // kv_heads) if layout.own_widths else d_k
    return {"num_heads": heads, "num_kv_heads": kv_heads, "d_k": d_k, "d_v": d_v}
