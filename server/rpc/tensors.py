"""Converts between bytes and arrays, without copying if NumPy allows it."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.types import Array
from attention_serving.server.rpc.protobuf_bytes import Buffer


def from_bytes(
    field: str,
    data: bytes | memoryview,
    dtype: np.dtype[np.generic],
    shape: Sequence[int],
    type_name: str = "",
) -> Array:
    """Returns a read-only view of little-endian bytes as an array.

    Args:
        field: Name of the field, for errors.
        data: The bytes.
        dtype: Type of the elements.
        shape: Shape of the array. No size is negative.
        type_name: Name of the type, for errors, if NumPy has another.

    Raises:
        InvalidRequestError: The number of bytes does not fit the shape, or a boolean is neither 0 nor 1.
    """
    check_size(field, len(data), dtype, shape, type_name)
    if dtype.kind == "b":
        _check_booleans(field, data)
    return np.frombuffer(data, dtype).reshape(shape)


def check_size(
    field: str, size: int, dtype: np.dtype[np.generic], shape: Sequence[int], type_name: str = ""
) -> None:
    """Checks the number of bytes of a tensor.

    Raises:
        InvalidRequestError: It does not fit the shape.
    """
    expected = dtype.itemsize * math.prod(shape)
    if size != expected:
        shown = " x ".join(map(str, shape))
        raise InvalidRequestError(
            field, f"has {size} bytes; {shown} elements of {type_name or dtype.name} need {expected} bytes"
        )


def _check_booleans(field: str, data: bytes | memoryview) -> None:
    """Checks that all bytes are 0 or 1: the runtime computes with others as if they were numbers."""
    if data and (most := np.frombuffer(data, np.uint8).max()) > 1:
        raise InvalidRequestError(field, f"contains the byte {most}; a boolean must be 0 or 1")


def buffers(arrays: Iterable[Array]) -> list[Buffer]:
    """Returns the memory of arrays in row-major order. Arrays in that order are not copied."""
    return [np.ascontiguousarray(array).data for array in arrays]
