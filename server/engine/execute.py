"""Puts sequences into the padded tensors of one run, and takes their results out again.

Shapes: B sequences of a run; Tq and Tk their largest query and key lengths.
"""

from collections.abc import Sequence

import numpy as np

from artifact.manifest import ATTENTION_MASK, BATCH_AXIS, KEY_LENGTHS, GraphKind, TensorSpec
from server.engine.model import LoadedModel
from server.engine.types import Array, Item


def choose_graph(model: LoadedModel, items: Sequence[Item], *, return_weights: bool) -> GraphKind:
    """The cheapest graph that computes these sequences together."""
    if return_weights:
        return GraphKind.WEIGHTS
    if any(item.mask is not None for item in items):
        return GraphKind.MASK
    if model.sees_padding and any(item.sizes != items[0].sizes for item in items):
        return GraphKind.LENGTHS
    return GraphKind.PLAIN


def run_batch(model: LoadedModel, items: Sequence[Item], *, return_weights: bool) -> list[dict[str, Array]]:
    """Runs some sequences together and returns each one's outputs by name."""
    kind = choose_graph(model, items, return_weights=return_weights)
    graph = model.manifest.graphs[kind]
    outputs = model.run(kind, {spec.name: _input(spec, items) for spec in graph.inputs})
    return [
        {spec.name: outputs[spec.name][_window(spec, item, index)] for spec in graph.outputs}
        for index, item in enumerate(items)
    ]


def _input(spec: TensorSpec, items: Sequence[Item]) -> Array:
    if spec.name == KEY_LENGTHS:
        return np.array([_key_length(item) for item in items], dtype=np.int64)  # (B,)
    if spec.name == ATTENTION_MASK:
        return _stack_masks(spec, items)
    return _stack([item.inputs[spec.name] for item in items])


def _key_length(item: Item) -> int:
    """A cross-attention sequence binds its query axis first, then its key axis; others bind one."""
    return list(item.sizes.values())[-1]


def _stack(arrays: list[Array]) -> Array:
    """(T_i, ...) each to (B, T, ...), zeros after each end. A single sequence is not copied."""
    if len(arrays) == 1:
        return arrays[0][np.newaxis]
    lengths = [len(array) for array in arrays]
    shape = (len(arrays), max(lengths), *arrays[0].shape[1:])
    if min(lengths) == max(lengths):
        return np.concatenate(arrays).reshape(shape)
    stacked = np.zeros(shape, arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked


def _stack_masks(spec: TensorSpec, items: Sequence[Item]) -> Array:
    """(B, 1 or H, Tq, Tk): each sequence's own mask, False for every padded key."""
    _, _, query_axis, key_axis = map(str, spec.axes)
    heads = max(1 if item.mask is None else len(item.mask) for item in items)
    longest = [max(item.sizes[axis] for item in items) for axis in (query_axis, key_axis)]
    stacked = np.zeros((len(items), heads, *longest), np.bool_)
    for row, item in zip(stacked, items, strict=True):
        row[:, : item.sizes[query_axis], : item.sizes[key_axis]] = True if item.mask is None else item.mask
    return stacked


def _window(spec: TensorSpec, item: Item, index: int) -> tuple[int | slice, ...]:
    """Where one sequence's values lie in a batched output."""
    return tuple(
        index if axis == BATCH_AXIS else slice(item.sizes[axis] if isinstance(axis, str) else None)
        for axis in spec.axes
    )
