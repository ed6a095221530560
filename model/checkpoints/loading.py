"""Loads the attention module of another project's checkpoint.

Shapes: those of nn.Linear, (out, in); a fused weight counts as three equal parts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.checkpoints import CheckpointError, summarise
from attention_serving.model.checkpoints.files import (
    NamedTensors,
    as_float32,
    check_tensors,
    open_file,
    parameter_shapes,
)
from attention_serving.model.checkpoints.layouts import (
    FUSED,
    KEY,
    LAYOUTS,
    OUTPUT,
    QUERY,
    VALUE,
    Layout,
    Shape,
    StoredTensors,
)
from attention_serving.model.config import AttentionConfig, ConfigError

_OUT_AND_IN = 2  # the axes of a weight


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The attention of a checkpoint."""

    module: MultiHeadAttention
    """In evaluation mode, weights in float32."""
    skipped: tuple[str, ...]
    """Names under the prefix that are not part of attention."""


@dataclass(frozen=True, kw_only=True)
class _Hints:
    """What the shapes of weights do not determine."""

    heads: int
    causal: bool
    cross: bool
    rotary_theta: float


def load_checkpoint(
    path: str | PathLike[str],
    *,
    layout: str,
    prefix: str = "",
    heads: int,
    causal: bool = False,
    cross: bool = False,
    rotary_theta: float = 10_000.0,
) -> Checkpoint:
    """Reads the attention module under a prefix of a .safetensors, .pt, .pth or .bin file.

    Only the tensors of that module are read. Elements of float16, bfloat16 and float64 are converted to
    float32. Scores are scaled by 1 / sqrt(d_k).

    Args:
        path: The file. If it nests a state_dict, as in {"state_dict": {...}}, names begin with that key.
        layout: One of `LAYOUTS`.
        prefix: The part of each name before the layout's own names, such as "encoder.layer.0.attention.".
        heads: Number of query heads. The number of key and value heads follows from the shapes.
        causal: Whether rows must not attend to later rows; gpt2 and llama are always causal.
        cross: Whether keys come from a second sequence. In torch and generic this follows if query, key and
            value differ in width. Values are a third input if their width differs from that of the keys.
        rotary_theta: Base frequency of the layout llama; 0 for none. Scaled frequencies are not supported.

    Raises:
        CheckpointError: The file cannot be read, or does not hold the layout under the prefix: tensors are
            missing, unexpected, or of a wrong shape or type. The message lists them by name.
    """
    hints = _Hints(heads=heads, causal=causal, cross=cross, rotary_theta=rotary_theta)
    if layout not in LAYOUTS:
        layouts = ", ".join(sorted(LAYOUTS))
        raise CheckpointError(f"{path}: layout {layout!r} does not exist; the layouts are: {layouts}")
    try:
        return _read(open_file(Path(path)), LAYOUTS[layout], prefix, hints)
    except CheckpointError as error:
        raise CheckpointError(f"{path}, layout {layout!r}, prefix {prefix!r}: {error}") from error


def _read(tensors: NamedTensors, layout: Layout, prefix: str, hints: _Hints) -> Checkpoint:
    """Reads the tensors under a prefix by the names of a layout."""
    heads = hints.heads
    if isinstance(heads, bool) or not isinstance(heads, int) or heads <= 0:
        raise CheckpointError(f"heads={heads!r}: must be a positive integer")
    if hints.cross and layout.causal:
        raise CheckpointError("cross=True: this layout is self-attention only")
    names = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    sources = layout.choose(names, cross=hints.cross)
    parameters = {source.name for source in sources.values()}
    if not parameters & names:
        raise CheckpointError(_wrong_prefix(layout, tensors))
    skipped = sorted(names - parameters)
    missing: dict[str, Shape] = dict.fromkeys(sorted(prefix + name for name in parameters - names), ())
    check_tensors(tensors, missing, [prefix + name for name in skipped if not layout.is_neighbour(name)])
    config = _config(tensors, layout, prefix, hints, sources)
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random numbers
        module = MultiHeadAttention(config)
    stored = {ours: prefix + source.name for ours, source in sources.items()}
    module.load_state_dict(
        {ours: sources[ours].cut(as_float32(name, tensors[name])) for ours, name in stored.items()}
    )
    return Checkpoint(module=module.eval(), skipped=tuple(prefix + name for name in skipped))


def _config(
    tensors: NamedTensors, layout: Layout, prefix: str, hints: _Hints, sources: StoredTensors
) -> AttentionConfig:
    """The configuration that all tensors of the file fit.

    Raises:
        CheckpointError: No configuration fits. The message lists every tensor of another shape.
    """
    shapes = {}
    for ours, source in sources.items():
        shape = tuple(tensors[prefix + source.name].shape)
        if ours.endswith(".weight") and not (len(shape) == _OUT_AND_IN and all(shape)):
            raise CheckpointError(f"{prefix}{source.name}: expected a matrix, found shape {shape}")
        shapes[ours] = source.shape_here(shape)
    config = _derive_config(layout, shapes, hints)
    expected = {
        prefix + sources[ours].name: sources[ours].shape_in_file(shape)
        for ours, shape in parameter_shapes(lambda: MultiHeadAttention(config)).items()
    }
    check_tensors(tensors, expected)
    return config


def _wrong_prefix(layout: Layout, names: Iterable[str]) -> str:
    """The error for a prefix without tensors of the layout, with the prefixes that have some."""
    anchors = {next(iter(variant.values())).name for variant in layout.variants}
    starts = {name.removesuffix(anchor) for name in names for anchor in anchors if name.endswith(anchor)}
    prefixes = [repr(start) for start in sorted(starts) if not start or start.endswith(".")]
    if prefixes:
        return f"this prefix has no tensor of the layout; these prefixes have: {summarise(prefixes)}"
    return f"the file has no tensor of the layout; it holds {summarise(sorted(names)) or 'nothing'}"


def _derive_config(layout: Layout, shapes: Mapping[str, Shape], hints: _Hints) -> AttentionConfig:
    """The configuration whose sizes the weights of the query and of the output have.

    Raises:
        CheckpointError: No configuration has these sizes.
    """
    weights = {  # (out, in) of query, key and value, and of the output projection if it exists
        name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")
    }
    is_fused = FUSED in weights
    if is_fused:
        out, width = weights.pop(FUSED)
        weights |= dict.fromkeys((QUERY, KEY, VALUE), (out // 3, width))
    widths = _widths(layout, weights, cross=hints.cross)
    heads = _heads(layout, weights, hints.heads, widths["d_query"])
    try:
        return AttentionConfig(
            **widths,
            **heads,
            projections="fused" if is_fused else "separate",
            qkv_bias=any(name.startswith("projections.") and name.endswith(".bias") for name in shapes),
            out_proj=OUTPUT in weights,
            out_bias=f"{OUTPUT}.bias" in shapes,
            causal=hints.causal or layout.causal,
            rotary_theta=hints.rotary_theta if layout.rotary else 0.0,
        )
    except ConfigError as error:
        raise CheckpointError(f"the shapes do not fit an attention module: {error}") from error


def _widths(layout: Layout, weights: Mapping[str, Shape], *, cross: bool) -> dict[str, Any]:
    d_query = weights[QUERY][1] if layout.own_widths else weights[OUTPUT][0]
    d_key = weights[KEY][1] if layout.own_widths or cross else d_query
    d_value = weights[VALUE][1] if layout.own_widths else d_key
    widths: dict[str, Any] = {"d_query": d_query, "d_key": d_key, "d_value": d_value}
    if layout.own_widths and OUTPUT in weights and not layout.square:
        widths["d_out"] = weights[OUTPUT][0]
    return widths | {"cross": cross or not d_query == d_key == d_value, "separate_value": d_key != d_value}


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
