"""Which keys the rows of a model may attend to by its own rule, as its manifest states it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from attention_serving.artifact.manifest import Manifest

MAX_WINDOW = 2**31 - 1


class AttentionPattern(NamedTuple):
    """The rule of one layer.

    Attributes:
        causal: Whether a query row attends only to keys up to its own position.
        window: A query row attends only to keys fewer than this many rows away; 0 if the distance does not
            matter.
    """

    causal: bool
    window: int


def attention_patterns(manifest: Manifest) -> tuple[AttentionPattern, ...]:
    """The rule of each layer of a text encoder, or that of an attention module; empty for other modules.

    A configuration without a rule, as in earlier manifests, has that of the whole model.
    """
    if not manifest.num_heads:
        return ()
    layers: Any = [manifest.config]
    if manifest.encoder is not None:
        stated = manifest.config.get("layers")
        layers = stated if isinstance(stated, list) else [{}] * manifest.encoder.layers
    return tuple(_pattern(layer, manifest) for layer in layers)


def _pattern(layer: Any, manifest: Manifest) -> AttentionPattern:
    stated: Mapping[str, Any] = layer if isinstance(layer, dict) else {}
    window = stated.get("window", 0)
    return AttentionPattern(
        causal=bool(stated.get("causal", manifest.causal)),
        window=window if isinstance(window, int) and 0 <= window <= MAX_WINDOW else 0,
    )
