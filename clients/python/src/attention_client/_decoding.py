"""An answer made into arrays of the kind of the query: changes with the response message.

Notation: "..." the leading axes of a batch, Tq query rows, Tk key rows, H heads, d elements of a row.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from attention_client._arrays import WIRE_FLOAT
from attention_client._encoding import Layout
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._sequences import Form
from attention_client._values import AttentionResult, FloatArray
from attention_client.errors import InternalError

_Shape: TypeAlias = tuple[int, ...]


def decode_result(response: pb.AttendResponse, layout: Layout) -> AttentionResult[Any]:
    """Reads an answer; its arrays are copies, writable and free of the response's bytes.

    Raises:
        InternalError: The answer contradicts itself or the request.
    """
    return AttentionResult(
        context_vectors=_context_vectors(response.context_vectors, layout),
        attention_weights=_weights(response.attention_weights, layout)
        if response.HasField("attention_weights")
        else None,
        model_name=response.model_name,
        model_version=response.model_version,
    )


def _context_vectors(message: pb.VectorSequences, layout: Layout) -> FloatArray | list[FloatArray]:
    flat = _floats("context_vectors", message.data_type, message.data)
    shapes = [(length, message.width) for length in message.lengths]  # (Tq_i, d)
    padded = (layout.query_rows, message.width)
    return _in_kind("context_vectors", flat, shapes, layout=layout, padded=padded)


def _weights(message: pb.AttentionWeights, layout: Layout) -> FloatArray | list[FloatArray]:
    field, heads = "attention_weights", message.num_heads
    if len(message.query_lengths) != len(message.key_lengths):
        raise _unreadable(field, "it has more query lengths than key lengths, or fewer")
    flat = _floats(field, message.data_type, message.data)
    lengths = zip(message.query_lengths, message.key_lengths, strict=True)
    shapes = [(heads, queries, keys) for queries, keys in lengths]  # (H, Tq_i, Tk_i)
    padded = (heads, layout.query_rows, layout.key_rows)
    return _in_kind(field, flat, shapes, layout=layout, padded=padded)


def _floats(field: str, data_type: pb.DataType.ValueType, data: bytes) -> FloatArray:
    """A read-only view of the bytes."""
    if data_type != pb.DATA_TYPE_FP32:
        raise _unreadable(field, f"its data type is {data_type}, and this client reads FP32")
    if len(data) % WIRE_FLOAT.itemsize:
        raise _unreadable(field, f"{len(data)} bytes are no whole number of elements")
    return np.frombuffer(data, WIRE_FLOAT)


def _in_kind(
    field: str, flat: FloatArray, shapes: Sequence[_Shape], *, layout: Layout, padded: _Shape
) -> FloatArray | list[FloatArray]:
    """Cuts the elements of all sequences into their shapes, in the kind of the query."""
    ends = list(accumulate((math.prod(shape) for shape in shapes), initial=0))
    asked = math.prod(layout.leading)
    if len(shapes) != asked or ends[-1] != flat.size:
        sizes = f"{len(shapes)} sequences of {ends[-1]} elements in all"
        raise _unreadable(field, f"{sizes} do not fit {asked} asked for and {flat.size} received")
    if layout.form is Form.BATCH:
        return _batch(field, flat, shapes, padded=padded).reshape(*layout.leading, *padded)
    own = flat.astype(np.float32)  # the one copy; what follows are views
    parts = [
        own[start:end].reshape(shape) for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
    ]
    return parts if layout.form is Form.LIST else parts[0]


def _batch(field: str, flat: FloatArray, shapes: Sequence[_Shape], *, padded: _Shape) -> FloatArray:
    """(number of sequences, *padded), with zeros past each sequence's shape."""
    if all(shape == padded for shape in shapes):
        return flat.astype(np.float32).reshape(len(shapes), *padded)
    batch = np.zeros((len(shapes), *padded), np.float32)
    start = 0
    for index, shape in enumerate(shapes):
        if any(size > limit for size, limit in zip(shape, padded, strict=True)):
            raise _unreadable(
                field, f"sequence {index} has shape {shape}, larger than the {padded} asked for"
            )
        end = start + math.prod(shape)
        batch[index][tuple(slice(size) for size in shape)] = flat[start:end].reshape(shape)
        start = end
    return batch


def _unreadable(field: str, why: str) -> InternalError:
    return InternalError(f"the server's answer cannot be read: {field}: {why}", field=field)
