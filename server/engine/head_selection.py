"""Attention weights of some layers and heads, so that results are small.

Shapes: L layers, H heads, Tq and Tk query and key rows.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS
from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array, HeadSelection, SequenceShape

LAYERS: Final = "head_selection.layers"
HEADS: Final = "head_selection.heads"
FLOAT_BYTES: Final = 4


def check_selection(selection: HeadSelection, model: LoadedModel) -> None:
    """Checks that a model, which has attention weights, has the layers and heads.

    Raises:
        InvalidRequestError: It lacks one of them, or one is named twice.
    """
    layers, heads = _counts(model)
    if selection.layers and not layers:
        raise InvalidRequestError(LAYERS, f"must be empty: model {model.name!r} is not a text encoder")
    _check(LAYERS, selection.layers, layers)
    _check(HEADS, selection.heads, heads)


def _check(field: str, chosen: Sequence[int], count: int) -> None:
    if wrong := [index for index in chosen[: count + 1] if index >= count]:
        raise InvalidRequestError(field, f"contains {wrong[0]}; the model has 0 to {count - 1}")
    if len(chosen) > count or len(set(chosen)) < len(chosen):
        raise InvalidRequestError(field, "names one of them twice")


def left_out_bytes(selection: HeadSelection, model: LoadedModel, sequences: Sequence[SequenceShape]) -> int:
    """Size of the weights of all sequences that are not selected, in bytes."""
    layers, heads = _counts(model)
    layers = max(1, layers)
    selected = (len(selection.layers) or layers) * (len(selection.heads) or heads)
    pairs = sum([sequence.lengths[0] * sequence.lengths[1] for sequence in sequences])
    return (layers * heads - selected) * pairs * FLOAT_BYTES


def select(weights: Array, selection: HeadSelection) -> Array:
    """A copy of the selected weights.

    Args:
        weights: (L, H, Tq, Tk), or (H, Tq, Tk) of a model that is not a text encoder.
        selection: Layers and heads, in the order of the result.
    """
    *layers, heads, _, _ = weights.shape
    chosen = [selection.layers or range(count) for count in layers]
    found: Array = weights[np.ix_(*chosen, selection.heads or range(heads))]
    return found


def _counts(model: LoadedModel) -> tuple[int, int]:
    """The numbers of layers and heads of a model's weights; 0 layers if it is not a text encoder."""
    outputs = model.manifest.graphs[GraphKind.WEIGHTS].outputs
    axes = next(spec.axes for spec in outputs if spec.name == ATTENTION_WEIGHTS)
    *layers, heads = [int(axis) for axis in axes[1:-2]]
    return sum(layers), heads
