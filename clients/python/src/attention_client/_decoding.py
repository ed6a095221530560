"""Decodes a response into arrays that have the form of the query.

Notation: "..." the leading axes of a batch, Tq query rows, Tk key rows, H heads, d elements of a row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._sequences import InputForm
from attention_client._values import AttentionResult, FloatArray
from attention_client._wire import unreadable, widen

_Shape: TypeAlias = tuple[int, ...]
Offsets: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """The form and the sizes that the result takes from the query.

    Attributes:
        form: The form of the query.
        leading: Sizes of its leading axes; see Sequences.
        query_rows: Tq of a batch, including padding; otherwise unused.
        key_rows: Tk of a batch, including padding; otherwise unused.
    """

    form: InputForm
    leading: tuple[int, ...]
    query_rows: int = 0
    key_rows: int = 0


def decode_result(response: pb.AttendResponse, response_shape: ResponseShape) -> AttentionResult[Any]:
    """Decodes a response; the arrays are writable copies that do not keep the response in memory.

    Raises:
        InternalError: The response contradicts itself or the request.
    """
    return AttentionResult(
        context_vectors=_context_vectors(response.context_vectors, response_shape),
        attention_weights=_weights(response.attention_weights, response_shape)
        if response.HasField("attention_weights")
        else None,
        model_name=response.model_name,
        model_version=response.model_version,
        offsets=_offsets(response.token_offsets, response_shape)
        if response.HasField("token_offsets")
        else None,
        token_counts=tuple(response.token_counts),
        truncated=tuple(response.truncated),
    )


def _context_vectors(
    message: pb.VectorSequences, response_shape: ResponseShape
) -> FloatArray | list[FloatArray]:
    flat = widen("context_vectors", message.data_type, message.data)
    shapes = [(length, message.width) for length in message.lengths]  # (Tq_i, d)
    padded = (response_shape.query_rows, message.width)
    return _in_form("context_vectors", flat, shapes, response_shape=response_shape, padded=padded)


def _weights(message: pb.AttentionWeights, response_shape: ResponseShape) -> FloatArray | list[FloatArray]:
    field, heads = "attention_weights", message.num_heads
    if len(message.query_lengths) != len(message.key_lengths):
        raise unreadable(
            field,
            f"it has {len(message.query_lengths)} query lengths and {len(message.key_lengths)} key lengths",
        )
    flat = widen(field, message.data_type, message.data)
    lengths = zip(message.query_lengths, message.key_lengths, strict=True)
    # (H, Tq_i, Tk_i), of an encoder (L, H, Tq_i, Tk_i).
    leading = (message.num_layers, heads) if message.num_layers else (heads,)
    shapes = [(*leading, queries, keys) for queries, keys in lengths]
    padded = (*leading, response_shape.query_rows, response_shape.key_rows)
    return _in_form(field, flat, shapes, response_shape=response_shape, padded=padded)


def _offsets(message: pb.Spans, response_shape: ResponseShape) -> Offsets | list[Offsets]:
    """(T, 2) for one text, otherwise a list of (T_i, 2)."""
    field, count = "token_offsets", sum(message.lengths)
    if len(message.starts) != count or len(message.ends) != count:
        raise unreadable(field, f"it does not contain the offsets of {count} tokens")
    if len(message.lengths) != math.prod(response_shape.leading):
        raise unreadable(field, f"it contains the offsets of {len(message.lengths)} texts")
    rows = np.array([message.starts, message.ends], np.int64).T.copy()
    if response_shape.form is InputForm.ONE:
        return rows
    return [rows[start:end] for start, end in pairwise(accumulate(message.lengths, initial=0))]


def _in_form(
    field: str, flat: FloatArray, shapes: Sequence[_Shape], *, response_shape: ResponseShape, padded: _Shape
) -> FloatArray | list[FloatArray]:
    """Splits the elements of all sequences into their shapes, in the form of the query."""
    ends = list(accumulate((math.prod(shape) for shape in shapes), initial=0))
    expected = math.prod(response_shape.leading)
    if len(shapes) != expected or ends[-1] != flat.size:
        sizes = f"{len(shapes)} sequences of {ends[-1]} elements in all"
        raise unreadable(field, f"{sizes} do not match {expected} requested and {flat.size} received")
    if response_shape.form is InputForm.BATCH:
        return _batch(field, flat, shapes, padded=padded).reshape(*response_shape.leading, *padded)
    own = flat.astype(np.float32)  # the only copy; the parts are views of it
    parts = [
        own[start:end].reshape(shape) for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
    ]
    return parts if response_shape.form is InputForm.LIST else parts[0]


def _batch(field: str, flat: FloatArray, shapes: Sequence[_Shape], *, padded: _Shape) -> FloatArray:
    """(number of sequences, *padded), with zeros past each sequence's shape."""
    if all(shape == padded for shape in shapes):
        return flat.astype(np.float32).reshape(len(shapes), *padded)
    batch = np.zeros((len(shapes), *padded), np.float32)
    start = 0
    for index, shape in enumerate(shapes):
        if any(size > limit for size, limit in zip(shape, padded, strict=True)):
            raise unreadable(
                field, f"sequence {index} has shape {shape}, larger than the {padded} of the batch"
            )
        end = start + math.prod(shape)
        batch[index][tuple(slice(size) for size in shape)] = flat[start:end].reshape(shape)
        start = end
    return batch
